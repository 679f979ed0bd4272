"""A job that runs through all its stages while the operator's processes are killed in each of them, and while the API
server is away for a minute: nothing is lost, nothing is created twice.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import pytest

from box_support.box import Box
from box_support.breaking import EVERY
from box_support.faults import api_server_away, caught_up, kill_operator, operator_pods, puppet
from box_support.team import JOB_SECONDS, Team, last_step, stage_of, tiny_spec
from cluster_support.api_access import Object, wait_until
from cluster_support.operator_process import USER
from finetune_contract.layout import JobPaths

pytestmark = pytest.mark.alone

AWAY_SECONDS = 60
"""Outage within which the Lease and the nodes' leases expire on any machine."""
STEPS_MEANWHILE = 30
STEP_SECONDS = 0.2
STEPS = 360
"""Enough steps to outlast the API server's absence."""
STAGES = ("prepare", "train", "evaluate", "predict")


@dataclass(frozen=True)
class Survived:
    """Records of the job."""

    name: str
    mark: int
    """Place in the audit log before the job."""
    killed: dict[str, list[str]]
    """Stage -> the operator's pods whose processes were killed in it."""
    before: int
    """Step at which the API server went away."""
    after: int
    """Step at which it came back."""
    status_after: Object
    """The status that had this step, a later one, or the training's end."""
    pods: tuple[list[str], list[str]]
    """Uids of the training's pods before and after."""
    status: Object


def _kill_in(box: Box, team: Team, name: str, stage: str) -> list[str]:
    """Kill all of the operator's processes while a pod of that stage runs."""

    def runs() -> bool:
        return any(pod["status"].get("phase") == "Running" for pod in team.pods(name, stage))

    wait_until(runs, f"{name}: a pod of {stage} runs", JOB_SECONDS, lambda: team.describe(name))
    return wait_until(lambda: kill_operator(box), f"an operator runs while {name} is at {stage}")


def _uids(team: Team, name: str) -> list[str]:
    return [pod["metadata"]["uid"] for pod in team.pods(name, "train")]


@pytest.fixture(scope="module")
def survived(box: Box, team: Team) -> Survived:
    name, mark = team.new_name("survives"), box.cluster.audit_mark()
    team.apply(
        name,
        tiny_spec(
            training={"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"},
            parallelism={"strategy": "single"},
            resources={"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
            checkpoints={"every": {"steps": EVERY}},
            template=puppet(team, STEP_SECONDS),
            predict={"columns": ["text"]},
        ),
    )
    killed = {stage: _kill_in(box, team, name, stage) for stage in STAGES[:2]}
    wait_until(lambda: team.step(name), f"{name}: the first step", JOB_SECONDS, lambda: team.describe(name))
    # Finding the claim's folder needs the API server, which is about to go away.
    history, uids = JobPaths(team.results(name)).history, _uids(team, name)
    before, end = last_step(history), time.monotonic() + AWAY_SECONDS
    with api_server_away(box):
        wait_until(
            lambda: time.monotonic() > end and last_step(history) >= before + STEPS_MEANWHILE,
            f"the minute is over and the training {STEPS_MEANWHILE} steps further",
            3 * AWAY_SECONDS,
        )
        after = last_step(history)

    def reported() -> Object | None:
        status = team.status(name)
        # After the training, the next stage's progress replaces its own.
        there = status.get("progress", {}).get("step", 0) >= after
        return status if there or stage_of(status, "train").get("state") == "Succeeded" else None

    status_after = wait_until(
        reported, f"{name}: the status tells of step {after}", JOB_SECONDS, lambda: team.describe(name)
    )
    uids_after = _uids(team, name)
    killed |= {stage: _kill_in(box, team, name, stage) for stage in STAGES[2:]}
    ended = team.succeeds(name)
    caught_up(team)
    return Survived(name, mark, killed, before, after, status_after, (uids, uids_after), ended)


def test_all_stages_succeed_at_their_first_attempt(survived: Survived) -> None:
    assert [(one["name"], one["state"], one["attempt"]) for one in survived.status["stages"]] == [
        (stage, "Succeeded", 1) for stage in STAGES
    ]
    assert survived.status.get("restarts", 0) == 0
    assert "failure" not in survived.status


def test_the_operator_was_killed_in_each_stage_and_came_back(survived: Survived, box: Box) -> None:
    assert all(survived.killed[stage] for stage in STAGES), survived.killed
    hits = Counter(name for names in survived.killed.values() for name in names)

    def again() -> dict[str, int]:
        statuses = {pod["metadata"]["name"]: pod["status"]["containerStatuses"] for pod in operator_pods(box)}
        return {name: containers[0]["restartCount"] for name, containers in statuses.items()}

    # The kubelet's back-off grows with each restart.
    wait_until(lambda: hits <= Counter(again()), f"started again as often as killed: {hits}", detail=again)


def test_training_continues_during_an_api_server_outage(survived: Survived) -> None:
    assert survived.after - survived.before >= STEPS_MEANWHILE, "the training stood still"
    train = stage_of(survived.status_after, "train")
    assert (train["attempt"], train["state"]) in [(1, "Running"), (1, "Succeeded")]
    assert survived.pods[0] == survived.pods[1]


def test_nothing_was_made_twice(survived: Survived, box: Box, team: Team) -> None:
    made = Counter(
        (entry["objectRef"]["resource"], entry["objectRef"].get("name", ""))
        for entry in box.cluster.audit(survived.mark, USER)
        if entry["verb"] == "create" and entry["responseStatus"].get("code") == 201
    )
    own = {key: count for key, count in made.items() if key[1].startswith(survived.name) and key[0] != "events"}
    assert set(own.values()) == {1}, own
    assert {name for resource, name in own if resource == "jobs"} == {f"{survived.name}-{stage}-1" for stage in STAGES}
    assert len(team.pods(survived.name)) == len(STAGES)
