"""Attempts that have reported progress and then report nothing new: when they are stopped, and when they are not."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.jobs.outcomes.hang_detection import MOST_LOGS
from finetune_operator.jobs.outcomes.remedies import LOG_LIMIT
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FailureStatus, ProgressStatus
from reconcile_world import NOON, SPEC, World, report
from suite_plugins.fuzz import examples

LIMIT = 600
HALF, MINUTE = LIMIT / 2, 60


def at(step: int) -> ProgressStatus:
    return ProgressStatus(step=step, total_steps=20, percent=5 * step, last_update_time=NOON)


def training(nodes: int = 2, launcher: str = "job", **changes: Any) -> World:
    """Return a training job that has reported step 7 of 20; the operator receives every report."""
    world = World(served=("job", launcher), **changes)  # type: ignore[arg-type]
    world.spec = {**SPEC, "resources": {"nodes": nodes}, "runPolicy": {"progressDeadlineSeconds": LIMIT}}
    world.reports_complete_since = NOON
    world.settle()
    world.succeed()
    world.settle()
    world.start()
    world.settle()
    report_step(world, 7)
    return world


def report_step(world: World, step: int) -> None:
    world.progress, world.last_progress_at = at(step), world.now
    world.settle()


def failure_of(world: World) -> FailureStatus:
    found = world.job().status.failure
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------- when it is


def test_gang_without_progress_is_stopped_and_resumes_from_a_checkpoint():
    world = training()
    assert world.decide().requeue_at == NOON + timedelta(seconds=HALF)
    world.wait(LIMIT - 1)
    assert world.stage("train") == ("Running", 1)
    assert world.decide().requeue_at == NOON + timedelta(seconds=LIMIT)
    world.logs = {"reviews-train-1-0": "stack of rank 0\n", "reviews-train-1-1": "stack of rank 1\n"}
    world.now += timedelta(seconds=1)
    world.step()
    assert (world.stage("train"), "reviews-train-1" in world.children) == (("Failed", 1), True)
    assert failure_of(world) == FailureStatus(
        failure_class="NoProgress",
        reason="Hung",
        message="Stage train made no progress for 10 min, since 2026-01-01T12:00:00Z (step 7 of 20), and was "
        "stopped. "
        "The reports do not show which rank hangs.",
        hint=failure_of(world).hint,
        stage="train",
        attempt=1,
        log_tail="==> reviews-train-1-0 <==\nstack of rank 0\n==> reviews-train-1-1 <==\nstack of rank 1",
    )
    assert "runPolicy.progressDeadlineSeconds" in (failure_of(world).hint or "")
    world.settle()
    assert "reviews-train-1" not in world.children
    world.wait(MINUTE)
    assert world.stage("train") == ("Running", 2)
    status = world.job().status
    assert (status.restarts, status.counted_restarts, status.progress) == (1, 1, None)
    assert world.event_reasons()[-4:] == ["ProgressStopped", "StageFailed", "Restarting", "StageStarted"]


def test_of_several_pods_that_prepare_none_is_named_as_the_one_that_hangs():
    world = World()
    world.spec = {
        **SPEC,
        "preparation": {"engine": "job", "workers": 3},
        "runPolicy": {"progressDeadlineSeconds": LIMIT},
    }
    world.reports_complete_since = NOON
    world.settle()
    world.start()
    assert len(world.pods_of("reviews-prepare-1")) == 3
    world.settle()
    report_step(world, 7)
    world.logs = dict.fromkeys(world.pods_of("reviews-prepare-1"), "")
    world.wait(LIMIT)
    found = failure_of(world)
    assert (found.failure_class, found.stage, found.rank, found.pod) == ("NoProgress", "prepare", None, None)
    assert "The reports do not show which rank hangs." in (found.message or "")


def test_missing_progress_is_reported_once_after_half_of_the_limit():
    world = training()
    world.wait(HALF - 1)
    assert world.job_condition("Running")[:2] == ("True", "StageRunning")
    writes = world.writes
    for _ in range(5):
        world.wait(1)
    assert world.job_condition("Running") == (
        "True",
        "NoProgress",
        "Stage train runs as Job reviews-train-1, attempt 1. No progress since 2026-01-01T12:00:00Z (step 7 of 20); "
        "the attempt is stopped at 2026-01-01T12:10:00Z.",
    )
    assert world.job_condition("Stalled")[0] == "False"
    assert (world.event_reasons().count("ProgressStopped"), world.writes) == (1, writes + 1)
    report_step(world, 8)
    assert world.job_condition("Running")[:2] == ("True", "StageRunning")
    world.wait(HALF)
    assert world.event_reasons().count("ProgressStopped") == 2


def test_movement_puts_the_end_off():
    world = training()
    for step in range(8, 20):
        world.wait(LIMIT - 1)
        report_step(world, step)
    assert (world.stage("train"), world.job().status.restarts) == (("Running", 1), 0)


def test_restarts_for_silence_are_bounded():
    world = training()
    world.edit(maxRestarts=1)
    for _ in range(2):
        world.wait(LIMIT)
        world.progress = world.last_progress_at = None
        world.wait(3 * MINUTE)
        if world.phase == "Failed":
            break
        world.start()
        report_step(world, 7)
    assert (world.phase, failure_of(world).failure_class) == ("Failed", "NoProgress")
    assert (failure_of(world).hint or "").startswith("The limit runPolicy.maxRestarts (1) is reached.")


@pytest.mark.parametrize("stage", ["prepare", "evaluate", "predict"])
def test_every_reporting_stage_is_watched_and_its_single_pod_named(stage: str):
    world = World(reports_complete_since=NOON)
    world.settle()
    while world.job().status.stages[[one.name for one in world.job().status.stages].index(stage)].attempt == 0:
        world.succeed()
        world.settle()
    world.start()
    world.settle()
    report_step(world, 7)
    world.logs = {f"reviews-{stage}-1-0": "x" * 2 * LOG_LIMIT}
    world.wait(1799)
    assert world.stage(stage) == ("Running", 1)
    world.wait(1)
    failure = failure_of(world)
    assert (failure.failure_class, failure.pod, failure.node, failure.rank) == (
        "NoProgress", f"reviews-{stage}-1-0", "node-0", 0,
    )  # fmt: skip
    assert failure.log_tail == "x" * LOG_LIMIT
    assert failure.message.endswith("(step 7 of 20), and was stopped.")


def test_launcher_of_an_mpijob_has_the_log_of_all_ranks():
    world = training(launcher="mpijob")
    world.logs = {pod: f"log of {pod}" for pod in world.pods_of("reviews-train-1")}
    world.wait(LIMIT)
    assert (failure_of(world).pod, failure_of(world).log_tail) == (
        None,
        "==> reviews-train-1-launcher <==\nlog of reviews-train-1-launcher",
    )


def test_of_many_pods_a_share_of_the_first_logs_is_kept():
    world = training(nodes=8)
    world.logs = {pod: f"{'y' * LOG_LIMIT}end of {pod}\n" for pod in world.pods_of("reviews-train-1")}
    world.wait(LIMIT)
    tail = failure_of(world).log_tail or ""
    assert len(tail) <= LOG_LIMIT
    assert [line for line in tail.splitlines() if line.startswith("==>")] == [
        f"==> reviews-train-1-{index} <==" for index in range(MOST_LOGS)
    ]
    assert all(f"end of reviews-train-1-{index}" in tail for index in range(MOST_LOGS))


def test_a_pass_that_falls_into_the_very_moment_reads_the_logs_first():
    world = training()
    world.now += timedelta(seconds=LIMIT)
    unread = replace(world.observed(), logs=())
    first = decide(world.job(), unread, world.now, world.settings)
    assert first.status.failure is None
    assert first.requeue_at == world.now + timedelta(seconds=1)
    assert decide(world.job(), world.observed(), world.now, world.settings).status.failure is not None


# ---------------------------------------------------------------------------------------------------- when it is not


def silent_for_ever(world: World) -> None:
    world.progress = world.last_progress_at = None
    world.status["progress"] = None


def deaf(world: World) -> None:
    world.reports_complete_since = None


def restarted_operator(world: World) -> None:
    """Another replica leads since a moment ago: it has no reports, and the status has the earlier ones."""
    world.progress = world.last_progress_at = None
    world.reports_complete_since = NOON + timedelta(seconds=LIMIT - 1)


def away_for_a_while(world: World) -> None:
    world.reports_complete_since = NOON + timedelta(seconds=LIMIT - 1)


def a_pod_waits(world: World) -> None:
    world.pods["reviews-train-1-1"]["status"]["phase"] = "Pending"


NOT_STOPPED = {
    "it has never told anything": silent_for_ever,
    "reports cannot be heard": deaf,
    "the operator has started a moment ago": restarted_operator,
    "the API server was away until a moment ago": away_for_a_while,
    "it waits for a pod, for which there are other limits": a_pod_waits,
    "the job is suspended": lambda world: world.edit(suspend=True),
}


@pytest.mark.parametrize("case", NOT_STOPPED)
def test_an_attempt_is_left_alone(case: str):
    world = training()
    world.now += timedelta(seconds=LIMIT - 1)
    NOT_STOPPED[case](world)
    world.wait(2)
    assert world.job().status.failure is None
    assert world.event_reasons().count("StageFailed") == 0


def test_silence_counts_from_when_reports_are_complete_again():
    world = training()
    world.wait(MINUTE)
    restarted_operator(world)
    again = world.reports_complete_since
    assert again is not None
    world.now = again
    world.settle()
    world.wait(LIMIT - 1)
    assert world.stage("train") == ("Running", 1)
    world.wait(1)
    assert world.job().status.failure is not None
    assert "since 2026-01-01T12:09:59Z (step 7 of 20)" in failure_of(world).message


def test_progress_of_an_earlier_attempt_is_not_kept():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.progress = world.last_progress_at = None
    world.wait(MINUTE)
    assert world.stage("train") == ("Running", 2)
    world.start()
    world.wait(100 * LIMIT)
    assert (world.stage("train"), world.job().status.restarts) == (("Running", 2), 1)


@pytest.mark.parametrize(
    ("policy", "limits", "expected"),
    [
        pytest.param({}, {}, 1800, id="the settings' default"),
        pytest.param({}, {"progressSeconds": 60}, 60, id="the settings"),
        pytest.param({"progressDeadlineSeconds": 5}, {"progressSeconds": 60}, 5, id="the job goes before the settings"),
        pytest.param({"progressDeadlineSeconds": 5}, {"progressSeconds": 0}, 5, id="the job alone"),
        pytest.param({}, {"progressSeconds": 0}, None, id="never"),
    ],
)
def test_the_time_is_the_jobs_or_the_settings(policy: dict[str, int], limits: dict[str, int], expected: int | None):
    world = World(settings=Settings.model_validate({"limits": limits}), reports_complete_since=NOON)
    world.spec["runPolicy"] = policy
    world.settle()
    world.start()
    report_step(world, 7)
    if expected is None:
        world.wait(10**7)
        assert (world.stage("prepare"), world.decide().requeue_at) == (("Running", 1), None)
        return
    world.wait(expected - 1)
    assert world.stage("prepare") == ("Running", 1)
    world.wait(1)
    assert failure_of(world).failure_class == "NoProgress"


# ------------------------------------------------------------------------------------------------------------ walks

WALK = st.lists(
    st.tuples(st.sampled_from(["step", "wait", "restart", "away", "crash"]), st.integers(1, LIMIT)), max_size=30
)


@examples(15, everything=40, suppress_health_check=list(HealthCheck))
@given(walk=WALK)
def test_attempt_with_possible_or_timely_progress_is_not_stopped(walk: list[tuple[str, int]]):
    world = training()
    quiet_since: datetime = NOON
    for act, number in walk:
        match act:
            case "step":
                report_step(world, number % 20)
                quiet_since = world.now
            case "restart":
                world.progress = world.last_progress_at = None
                world.reports_complete_since = quiet_since = world.now
            case "away":
                world.reports_complete_since = None
                world.wait(number)
                world.reports_complete_since = quiet_since = world.now
            case "crash":
                world.step(crash_after=0)
            case _:
                world.wait(number)
        stopped = world.job().status.failure is not None
        assert stopped == (world.now - quiet_since >= timedelta(seconds=LIMIT) and act in ("wait", "crash"))
        if stopped:
            assert failure_of(world).stage == Stage.TRAIN.value
            return


def test_ending_attempt_is_judged_by_its_end_and_not_by_its_silence():
    """One pod is on a node without power: its deletion never ends, and the other has lost its connection."""
    world = training()
    pod = world.pods["reviews-train-1-1"]
    pod["stuck"] = True
    pod["metadata"]["deletionTimestamp"] = world.after(LIMIT)
    world.end_pod("reviews-train-1-0", 150, report("train", (FailureClass.COLLECTIVE, 1.0)))
    world.settle()
    world.wait(LIMIT)
    assert world.stage("train") == ("Running", 1)
    world.wait(MINUTE)
    assert (failure_of(world).failure_class, failure_of(world).pod) == ("NodeLost", "reviews-train-1-1")
    assert world.job().status.counted_restarts == 0
