"""Trainings from which pods, objects and nodes are taken away in their middle: the status has the first cause and not
its echo in the other ranks, and a training that can continue does so, from its last checkpoint.

Each job is broken several times in a row: the effect of one fault is the start of the next.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from box_support.box import Box
from box_support.breaking import EVERY, STEPS, Broken, Training, sizes
from box_support.faults import delete_child, delete_pod, hang_rank, node_off, preempt
from box_support.team import Team, stage_of
from cluster_support.api_access import Object
from finetune_operator.spec.quantities import human_seconds
from suite_plugins.patience import patient

HANG_SECONDS = math.ceil(patient(20))


def every_step_once(team: Team, name: str) -> bool:
    """Return whether the history has each step exactly once, repeated ones included."""
    lines = [json.loads(line) for line in (team.results(name) / "history.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


@dataclass(frozen=True)
class Ended:
    """A job that was broken, in the order of its faults, and its status at the end."""

    name: str
    broken: tuple[Broken, ...]
    status: Object


# ------------------------------------------------------------------------------------------ pods taken away, at no cost


@pytest.fixture(scope="module")
def disturbed(team: Team) -> Ended:
    job = Training.start(team, "disturbed", fragile=True)
    broken = (
        job.breaks(lambda: delete_pod(team, job.pod(1))),
        job.breaks(lambda: preempt(team, job.pod(1), "taint")),
        job.breaks(lambda: preempt(team, job.pod(0), "shutdown")),
    )
    return Ended(job.name, broken, team.succeeds(job.name))


def test_deleted_pod_is_the_cause_and_the_attempt_resumes_at_its_step(disturbed: Ended) -> None:
    broken, *_ = disturbed.broken
    assert broken.failure_fields("class", "stage", "attempt", "pod", "node", "exitCode") == [
        "Preempted", "train", 1, broken.name(1), broken.node(1), 143,
    ], f"{broken.failure}\n{broken.pods}"  # fmt: skip
    assert broken.failure["hint"]
    # The Job deletes the other pod a second after the first has ended, and a log is deleted with its pod.
    assert broken.failure.get("logTail") or not broken.left
    assert broken.lost <= 1


@pytest.mark.parametrize(
    ("place", "rank", "reason"), [(1, 1, "DeletionByTaintManager"), (2, 0, "TerminationByKubelet")]
)
def test_preemption_names_the_evicted_pod_and_loses_at_most_one_step(
    disturbed: Ended, place: int, rank: int, reason: str
) -> None:
    broken = disturbed.broken[place]
    assert broken.failure_fields("class", "reason", "stage", "attempt", "pod", "node", "exitCode") == [
        "NodeLost", reason, "train", place + 1, broken.name(rank), broken.node(rank), 143,
    ]  # fmt: skip
    assert broken.node(rank) in broken.failure["message"]
    assert "checkpoint" in broken.failure["hint"]
    assert broken.failure.get("logTail") or not broken.left
    assert broken.lost <= 1


def test_infrastructure_failures_are_not_counted_and_change_no_plan(disturbed: Ended, team: Team) -> None:
    status = disturbed.status
    assert (status["restarts"], status.get("countedRestarts", 0)) == (3, 0)
    assert "failure" not in status
    assert stage_of(status, "train")["attempt"] == 4
    assert {sizes(broken.status) for broken in disturbed.broken} == {sizes(status)}
    assert every_step_once(team, disturbed.name)


# -------------------------------------------------------------------------------------------------- hangs and deletions


@pytest.fixture(scope="module")
def held_up(box: Box, team: Team) -> Ended:
    """The last fault is a node without power, which stays so to the end of the job."""
    job = Training.start(team, "held-up", fragile=True, runPolicy={"progressDeadlineSeconds": HANG_SECONDS})
    broken = [
        job.breaks(lambda: hang_rank(team, job.pod(1))),
        job.breaks(lambda: delete_child(team, job.name, "train")),
    ]
    with ExitStack() as off:
        broken.append(job.breaks(lambda: off.enter_context(node_off(box, job.node(1)))))
        return Ended(job.name, tuple(broken), team.succeeds(job.name))


def test_a_rank_that_hangs_is_found_by_the_progress_that_stops(held_up: Ended) -> None:
    broken = held_up.broken[0]
    assert broken.failure_fields("class", "reason", "stage", "attempt", "rank") == [
        "NoProgress",
        "Hung",
        "train",
        1,
        None,
    ]
    assert f"no progress for {human_seconds(HANG_SECONDS)}" in broken.failure["message"]
    assert "progressDeadlineSeconds" in broken.failure["hint"]
    # Rank 1 is stopped and prints nothing; rank 0 prints where it waits for it.
    assert "rank_0_of_2" in broken.failure["logTail"]
    assert broken.status["countedRestarts"] == 1
    assert 0 <= broken.lost <= EVERY


def test_deleted_child_is_recreated_and_counted(held_up: Ended) -> None:
    broken = held_up.broken[1]
    assert broken.failure_fields("class", "reason", "stage", "attempt", "rank", "pod") == [
        "ChildDeleted", "ChildDeleted", "train", 2, None, None,
    ]  # fmt: skip
    assert f"Job {held_up.name}-train-2" in broken.failure["message"]
    assert "runPolicy.suspend" in broken.failure["hint"]
    assert broken.status["countedRestarts"] == 2
    assert broken.lost <= 1


def test_node_without_power_is_the_cause_and_training_moves_elsewhere(held_up: Ended, team: Team) -> None:
    broken, status = held_up.broken[2], held_up.status
    lost = broken.node(1)
    assert broken.failure_fields("class", "stage", "attempt", "pod", "node") == [
        "NodeLost",
        "train",
        3,
        broken.name(1),
        lost,
    ]
    assert lost in broken.failure["message"]
    assert broken.failure["hint"]
    assert 0 <= broken.lost <= EVERY
    assert (status["restarts"], status["countedRestarts"]) == (3, 2)
    assert lost in stage_of(status, "train")["avoidedNodes"]
    assert lost not in {pod["spec"]["nodeName"] for pod in team.pods(held_up.name, "train", 4)}
    assert sizes(broken.status) == sizes(status)
    assert every_step_once(team, held_up.name)
