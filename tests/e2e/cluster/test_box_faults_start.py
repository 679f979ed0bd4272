"""Jobs that cannot start as they are: the status has their reason to wait at once, and after the time limit they have
failed, with the first cause, the pod and the hint. None of them is tried again.

All of them run at the same time: most of them only wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from box_support.box import SETTINGS, Box
from box_support.team import JOB_SECONDS, Team, stage_of, tiny_spec
from cluster_support.api_access import Object, path_of, wait_until

GPU = "nvidia.com/gpu"
ONE_PROCESS: Object = {"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"}
LIMITS: Object = SETTINGS["limits"]
ABSENT_IMAGE = "nowhere.example.com/team/trainer:1.0"


def gpu_spec(gpus: int) -> Object:
    return tiny_spec(
        parallelism={"strategy": "single" if gpus == 1 else "ddp"},
        resources={"nodes": 1, "gpusPerNode": gpus, "accelerator": {"memory": "80Gi"}},
    )


SPECS: dict[str, Object] = {
    "a column that the data do not have": tiny_spec(
        resources=ONE_PROCESS,
        parallelism={"strategy": "single"},
        dataset={"uri": "pvc://inputs/tiny/data", "columns": {"text": "sentence"}},
    ),
    "an image that cannot be pulled": tiny_spec(image=ABSENT_IMAGE),
    "a Secret that is not there": tiny_spec(secrets={"hubToken": {"name": "hub-tokens", "key": "token"}}),
    "more GPUs than any node has": gpu_spec(2),
    "a GPU that the image does not see": gpu_spec(1),
}


@contextmanager
def pretended_gpu(box: Box, node: str) -> Iterator[None]:
    """Give the node a GPU in its status, with none behind it."""
    box.own("a pretended GPU")
    status = path_of("v1", "nodes", name=node, sub="status")
    resources = {"capacity": {GPU: "1"}, "allocatable": {GPU: "1"}}
    box.api.patch(status, {"status": resources})
    try:
        yield
    finally:
        box.api.patch(status, {"status": {part: {GPU: None} for part in resources}})


@dataclass(frozen=True)
class Ended:
    """A job that has failed."""

    name: str
    waiting: str
    """Message of its condition Running before that."""
    status: Object

    @property
    def failure(self) -> Object:
        found: Object = self.status["failure"]
        return found


def message_of(status: Object, kind: str) -> str:
    """Return the message of a condition that is False."""
    found = (one["message"] for one in status.get("conditions", []) if (one["type"], one["status"]) == (kind, "False"))
    return next(found, "")


@pytest.fixture(scope="module")
def ended(box: Box, team: Team) -> dict[str, Ended]:
    """Run the jobs to their end; return them by row of SPECS."""
    names = {row: team.new_name("starts") for row in SPECS}
    waiting: dict[str, list[str]] = {row: [] for row in SPECS}

    def watched() -> bool:
        phases = []
        for row, name in names.items():
            status = team.status(name)
            if (message := message_of(status, "Running")) and status.get("phase") != "Failed":
                waiting[row].append(message)
            phases.append(status.get("phase"))
        return set(phases) <= {"Failed", "Succeeded"}

    with pretended_gpu(box, box.nodes[0]):
        for row, name in names.items():
            team.apply(name, SPECS[row])
        wait_until(watched, "all jobs have ended", JOB_SECONDS, lambda: "\n".join(map(team.describe, names.values())))
    return {row: Ended(name, "\n".join(waiting[row]), team.status(name)) for row, name in names.items()}


def failure_fields(one: Ended, *fields: str) -> list[object]:
    return [one.failure.get(field) for field in fields]


@pytest.mark.parametrize("row", SPECS)
def test_the_job_has_failed_and_nothing_was_tried_again(ended: dict[str, Ended], row: str) -> None:
    status = ended[row].status
    failed_at = status["failure"]["stage"]
    assert status["phase"] == "Failed"
    assert status.get("restarts", 0) == 0
    assert (stage_of(status, failed_at)["attempt"], stage_of(status, failed_at)["state"]) == (1, "Failed")
    conditions = {one["type"]: one for one in status["conditions"]}
    assert conditions["Failed"]["status"] == "True"
    assert status["failure"]["hint"] in conditions["Failed"]["message"]


def test_missing_column_is_reported_by_prepare_with_existing_columns(ended: dict[str, Ended], team: Team) -> None:
    one = ended["a column that the data do not have"]
    (pod,) = team.pods(one.name, "prepare")
    assert failure_fields(one, "class", "stage", "attempt", "rank", "exitCode", "pod", "node") == [
        "DataError", "prepare", 1, 0, 10, pod["metadata"]["name"], pod["spec"]["nodeName"],
    ]  # fmt: skip
    assert "sentence" in one.failure["message"]
    assert "text" in one.failure["message"] + one.failure["hint"]
    assert "DataError" in one.failure["logTail"]


def test_unpullable_image_is_reported_at_once_and_fails_after_the_limit(ended: dict[str, Ended]) -> None:
    one = ended["an image that cannot be pulled"]
    assert ABSENT_IMAGE in one.waiting
    assert failure_fields(one, "class", "stage", "attempt", "rank", "logTail") == [
        "ImagePull",
        "prepare",
        1,
        None,
        None,
    ]
    assert one.failure["reason"] in ("ErrImagePull", "ImagePullBackOff")
    assert f"could not start for {LIMITS['imagePullSeconds']} s" in one.failure["message"]
    assert ABSENT_IMAGE in one.failure["message"]
    assert "spec.image" in one.failure["hint"]


def test_missing_secret_is_reported_at_once_and_fails_after_the_limit(ended: dict[str, Ended]) -> None:
    one = ended["a Secret that is not there"]
    assert "hub-tokens" in one.waiting
    assert failure_fields(one, "class", "reason", "stage", "attempt", "logTail") == [
        "ContainerConfig", "CreateContainerConfigError", "prepare", 1, None,
    ]  # fmt: skip
    assert f"could not start for {LIMITS['containerConfigSeconds']} s" in one.failure["message"]
    assert "hub-tokens" in one.failure["message"]
    assert "Secret" in one.failure["hint"]


def test_absent_gpus_are_reported_unschedulable_and_fail_after_the_limit(
    ended: dict[str, Ended],
) -> None:
    one = ended["more GPUs than any node has"]
    assert f"Insufficient {GPU}" in one.waiting
    assert failure_fields(one, "class", "reason", "stage", "attempt", "node", "logTail") == [
        "Unschedulable", "Unschedulable", "train", 1, None, None,
    ]  # fmt: skip
    assert f"could not start for {LIMITS['unschedulableSeconds']} s" in one.failure["message"]
    assert f"Insufficient {GPU}" in one.failure["message"]
    assert "resources" in one.failure["hint"]


def test_gpu_invisible_to_the_image_fails_instead_of_training_on_the_cpu(ended: dict[str, Ended], team: Team) -> None:
    one = ended["a GPU that the image does not see"]
    (pod,) = team.pods(one.name, "train")
    assert failure_fields(one, "class", "reason", "stage", "attempt", "rank", "exitCode", "pod", "node") == [
        "StrategyNotInEffect", "DeviceMissing", "train", 1, 0, 13, pod["metadata"]["name"], pod["spec"]["nodeName"],
    ]  # fmt: skip
    assert "sees 0 of them" in one.failure["message"]
    assert "image" in one.failure["hint"]
    assert "DeviceMissing" in one.failure["logTail"]
    assert not (team.results(one.name) / "history.jsonl").exists()
