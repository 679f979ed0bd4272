"""Jobs that cannot start as they are, on a real API server with its scheduler: the status has their reason to wait at
once, and after the time limit they have failed, with the first cause, the pod and the hint. And the launcher of a job
that has not begun, while training operators come and go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from cluster_support.api_access import Object, wait_until
from cluster_support.plays import SUCCEEDS, Play, fails
from cluster_support.world import SETTINGS, World, condition, install_kinds
from finetune_contract.layout import FailureClass
from suite_plugins.patience import patient
from suite_plugins.shared_folder import CRDS, missing

GPU = "nvidia.com/gpu"
PROGRAM: Object = {"git": {"url": "https://github.com/team/programs"}, "entryPoint": "trian.py"}
ABSENT_IMAGE = "nowhere.example.com/team/trainer:1.0"
LIMITS: Object = {**SETTINGS["limits"], "unschedulableSeconds": math.ceil(patient(8))}
"""Without a limit for pods that cannot be scheduled, as in other tests, a job waits for ever."""


@dataclass(frozen=True)
class Start:
    """A job that cannot start, and what its status has to say."""

    stage: str
    failure: Object
    """Fields of the failure; `logTail` is None where no container ran."""
    message: tuple[str, ...]
    hint: str
    spec: Object
    play: Play = SUCCEEDS
    """Play of the stage's pods."""
    waiting: str = ""
    """Part of the condition Running before the failure."""


def never_ran(cause: str, reason: str) -> Object:
    return {"class": cause, "reason": reason, "rank": None, "exitCode": None, "logTail": None}


def reported(cause: str, reason: str, exit_code: int) -> Object:
    return {"class": cause, "reason": reason, "rank": 0, "exitCode": exit_code, "logTail": reason}


def reports(failure_class: FailureClass, reason: str, message: str, hint: str) -> Play:
    return fails(failure_class, reason, message, hint, log=reason)


STARTS: dict[str, Start] = {
    "an image that cannot be pulled": Start(
        "prepare",
        never_ran("ImagePull", "ImagePullBackOff"),
        (f"could not start for {LIMITS['imagePullSeconds']} s", ABSENT_IMAGE),
        "spec.image",
        {"image": ABSENT_IMAGE},
        Play(waiting=("ImagePullBackOff", f'Back-off pulling image "{ABSENT_IMAGE}"')),
        waiting=ABSENT_IMAGE,
    ),
    "a Secret that is not there": Start(
        "prepare",
        never_ran("ContainerConfig", "CreateContainerConfigError"),
        (f"could not start for {LIMITS['containerConfigSeconds']} s", "hub-tokens"),
        "Secret",
        {"secrets": {"hubToken": {"name": "hub-tokens", "key": "token"}}},
        waiting="hub-tokens",
    ),
    "more GPUs than any node has": Start(
        "train",
        {**never_ran("Unschedulable", "Unschedulable"), "node": None},
        (f"could not start for {LIMITS['unschedulableSeconds']} s", f"Insufficient {GPU}"),
        "resources",
        {"resources": {"gpusPerNode": 16, "accelerator": {"memory": "80Gi"}}},
        waiting=f"Insufficient {GPU}",
    ),
    "a GPU that the image does not see": Start(
        "train",
        reported("StrategyNotInEffect", "DeviceMissing", 13),
        ("sees 0 of them",),
        "image",
        {"resources": {"gpusPerNode": 1, "accelerator": {"memory": "80Gi"}}},
        reports(FailureClass.STRATEGY_NOT_IN_EFFECT, "DeviceMissing", "It sees 0 of them.", "Use another image."),
    ),
    "a column that the data do not have": Start(
        "prepare",
        reported("DataError", "MissingColumn", 10),
        ("'sentence'", "columns text, label"),
        "dataset.columns",
        {"dataset": {"columns": {"text": "sentence"}}},
        reports(FailureClass.DATA, "MissingColumn", "No 'sentence': columns text, label.", "Set dataset.columns."),
    ),
    "a program that its repository does not have": Start(
        "prepare",
        reported("ConfigError", "EntryPointNotFound", 11),
        ("It has broken.py, train.py.",),
        "Did you mean train.py?",
        {"training": {"epochs": None, "globalBatchSize": None, "script": PROGRAM}},
        reports(
            FailureClass.CONFIG, "EntryPointNotFound", "It has broken.py, train.py.", "Did you mean train.py?"
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def operator_settings() -> Object:
    return {**SETTINGS, "limits": LIMITS}


Ended = Callable[[str], tuple[World, str, list[Object]]]


@pytest.fixture(scope="module")
def ended(new_world: Callable[[], AbstractContextManager[World]]) -> Iterator[Ended]:
    """Run all jobs at once, as most only wait; return by row of STARTS the world, the job and its statuses."""
    with new_world() as world:
        names = {row: f"starts-{number}" for number, row in enumerate(STARTS)}
        histories = {row: world.record(name) for row, name in names.items()}
        for row, name in names.items():
            world.kubelet.playbook.set(name, STARTS[row].stage, STARTS[row].play)
            world.apply(name, {"predict": None, **STARTS[row].spec})

        def end(row: str) -> tuple[World, str, list[Object]]:
            world.wait_phase(names[row], "Failed")
            return world, names[row], histories[row].statuses()

        yield end


@pytest.mark.parametrize("row", STARTS)
def test_job_that_cannot_start_fails_once_with_its_cause_and_hint(ended: Ended, row: str) -> None:
    start, (world, name, statuses) = STARTS[row], ended(row)
    status = statuses[-1]
    failure = status["failure"]
    assert {field: failure.get(field) for field in start.failure} == start.failure
    assert (failure["stage"], failure["attempt"], status.get("restarts", 0)) == (start.stage, 1, 0)
    assert failure["pod"].startswith(f"{name}-{start.stage}-1")
    assert [part for part in start.message if part not in failure["message"]] == []
    assert start.hint in failure["hint"]
    failed = condition(status, "Failed")
    assert (failed["status"], failure["hint"] in failed["message"]) == ("True", True)
    stages = [(stage["name"], stage["state"], stage["attempt"]) for stage in status["stages"]]
    assert (start.stage, "Failed", 1) in stages
    later = stages[stages.index((start.stage, "Failed", 1)) + 1 :]
    assert {(state, attempt) for _, state, attempt in later} == {("Pending", 0)}
    waits = [condition(seen, "Running").get("message", "") for seen in statuses if seen.get("phase") != "Failed"]
    assert any(start.waiting in message for message in waits), waits
    if start.failure["logTail"] is None:
        wait_until(lambda: world.phases(name, start.stage) == [], "nothing of it runs")


def planned(launcher: str) -> Callable[[Object], bool]:
    return lambda status: status.get("plan", {}).get("launcher") == launcher


def test_auto_follows_the_served_launchers_and_refusal_names_the_missing(world: World) -> None:
    """The jobs are suspended: their plan is made again whenever other launchers are served."""
    cluster = world.cluster
    cluster.own("removing kinds")
    mpi, torch = CRDS / "kubeflow.org_mpijobs.yaml", CRDS / "kubeflow.org_pytorchjobs.yaml"
    if not (mpi.is_file() and torch.is_file()):
        pytest.skip(missing(CRDS))
    held = {"runPolicy": {"suspend": True}, "resources": {"nodes": 2}}
    world.apply("auto", {**held, "launcher": "auto"})
    world.wait("auto", "planned for PyTorchJob", planned("pytorchjob"))
    try:
        cluster.must("delete", "crd", "pytorchjobs.kubeflow.org", "mpijobs.kubeflow.org", "--timeout=120s")
        world.wait("auto", "planned for the Indexed Job after both have gone", planned("job"))
        world.apply("wants-mpi", {**held, "launcher": "mpijob"})
        refused = world.wait(
            "wants-mpi", "its launcher is refused", lambda found: condition(found, "Planned").get("status") == "False"
        )
        message = condition(refused, "Planned")["message"]
        assert "spec.launcher" in message
        assert "install the MPI Operator, which serves MPIJob (kubeflow.org/v2beta1)" in message
        cluster.must("apply", "--server-side", "-f", str(mpi))
        world.wait("auto", "planned for MPIJob after its operator came", planned("mpijob"))
        world.wait("wants-mpi", "its launcher is served now", planned("mpijob"))
    finally:
        install_kinds(cluster)
    world.wait("auto", "planned for PyTorchJob after its operator came", planned("pytorchjob"))
    assert [world.pods(name) for name in ("auto", "wants-mpi")] == [[], []]
