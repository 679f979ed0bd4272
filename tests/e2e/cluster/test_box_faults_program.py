"""Trainings whose own processes break them: they want memory or space that there is not, or raise."""

from __future__ import annotations

import pytest

from box_support.breaking import EVERY, STEPS, Broken, Training, sizes
from box_support.faults import RAISED, exhaust_memory, puppet, raise_in_rank, small_claim
from box_support.team import Team, tiny_spec

MEGABYTES = 64


# ------------------------------------------------------------------------------------------------ faults of the program


@pytest.fixture(scope="module")
def failing(team: Team) -> tuple[Broken, Broken]:
    job = Training.start(team, "failing")
    return (
        job.breaks(lambda: exhaust_memory(team, job.pod(1))),
        job.breaks(lambda: raise_in_rank(team, job.pod(1)), over=True),
    )


def test_a_rank_that_has_no_memory_left_goes_on_with_half_the_micro_batch(failing: tuple[Broken, Broken]) -> None:
    broken, after = failing
    assert broken.failure_fields("class", "reason", "stage", "attempt", "rank", "pod", "node", "exitCode") == [
        "OutOfMemory", "OOMKilled", "train", 1, 1, broken.name(1), broken.node(1), 137,
    ]  # fmt: skip
    assert "memory" in broken.failure["hint"]
    assert broken.failure["logTail"]
    assert (broken.status["restarts"], broken.status.get("countedRestarts", 0)) == (1, 0)
    assert broken.status["adaptation"]["microBatchLimit"] == 4
    # As planned from prepare's measurements, and with the same global batch.
    assert (sizes(after.status), 2 * 4 * 2) == ((2, 4, 2), 16)


def test_rank_out_of_memory_costs_the_steps_since_the_last_checkpoint(
    failing: tuple[Broken, Broken],
) -> None:
    broken, _ = failing
    assert broken.resumed % EVERY == 0
    assert 0 <= broken.lost <= EVERY


def test_error_in_one_rank_is_reported_with_traceback_and_ends_the_job(failing: tuple[Broken, Broken]) -> None:
    _, broken = failing
    assert broken.failure_fields("class", "reason", "stage", "attempt", "rank", "pod", "node", "exitCode") == [
        "ProgramError", "UnexpectedError", "train", 2, 1, broken.name(1), broken.node(1), 1,
    ]  # fmt: skip
    assert broken.failure["message"] == f"ValueError: {RAISED}"
    assert "logTail" in broken.failure["hint"]
    assert "Traceback" in broken.failure["logTail"]
    assert broken.status["phase"] == "Failed"
    assert (broken.status["restarts"], broken.status.get("countedRestarts", 0)) == (1, 0)


# ------------------------------------------------------------------------------------------------------------- storage


def test_full_storage_ends_the_job_with_a_hint_to_free_space(team: Team) -> None:
    name, claim = team.new_name("full"), team.new_name("small")
    with small_claim(team, claim, MEGABYTES) as storage:
        team.apply(
            name,
            tiny_spec(
                training={"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"},
                parallelism={"strategy": "single"},
                resources={"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
                checkpoints={"every": {"steps": EVERY}},
                storage={"workspace": f"pvc://{claim}"},
                template=puppet(team, 0.1),
            ),
        )
        team.wait_step(name, 1)
        (pod,) = team.pods(name, "train")
        storage.fill()
        failure = team.fails(name)
    found = [failure.get(field) for field in ("class", "stage", "attempt", "rank", "pod", "node", "exitCode")]
    assert found == ["StorageFull", "train", 1, 0, pod["metadata"]["name"], pod["spec"]["nodeName"], 16]
    assert "space" in failure["message"].lower()
    assert "checkpoints.keep" in failure["hint"]
    assert "StorageFull" in failure["logTail"]
    assert team.status(name).get("restarts", 0) == 0
