"""A preparation by several pods: real processes that meet in one folder, one of which may be slow, fail, be killed or
never start.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.causes import Cause, first_cause
from finetune_contract.layout import COMPLETION_MARKER, EXIT_CODES, FailureClass, JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare import prepare_pods
from finetune_trainer.prepare.prepare import prepare
from process_support.preparing import Pod, small_shards
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.tasks import training_of

ROWS = 250
COLLECTIVE = EXIT_CODES[FailureClass.COLLECTIVE]
DATA = EXIT_CODES[FailureClass.DATA]
TIMEOUT_SECONDS = patient(240)
PATIENCE_SECONDS = patient(4.0)
"""Patience of a pod that shall give up on pod 0, but not while pod 0 lives: 20 heartbeats."""


class Gang:
    """The pods of one job's preparation."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self._data = folder / "rows.jsonl"
        rows = [{"text": f"row {i} " + "lovely " * (i % 7), "label": i % 2} for i in range(ROWS)]
        self._data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.processes: list[BaseProcess] = []

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.folder / "w", "job")

    def job(self, workers: int, text: str = "text", **changes: Any) -> TrainerJob:
        body = {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{self._model}"},
            "dataset": {"uri": f"file://{self._data}", "columns": {"text": text, "label": "label"}},
            "training": training_of(steps=1),
            "preparation": {"engine": "job", "workers": workers},
        }
        return TrainerJob.model_validate({**body, **changes})

    def pods(self, count: int, *, job: TrainerJob | None = None, **settings: Any) -> list[Pod]:
        file = self.folder / f"job-{len(self.processes)}.json"
        file.write_text((job or self.job(count)).to_json(), encoding="utf-8")
        arguments = ["prepare", "--job", str(file), "--workspace", str(self.folder / "w")]
        return [Pod(index, count, arguments, self.folder, **settings) for index in range(count)]

    def start(self, pods: Sequence[Pod]) -> list[BaseProcess]:
        started = [pod.start() for pod in pods]
        self.processes += started
        return started

    def built_in(self) -> dict[str, bytes]:
        """Return the files that the built-in engine writes for the same rows."""
        paths = JobPaths(self.folder / "alone")
        prepare(self.job(1, preparation={}), paths, NoProgress())
        return files_of(paths)

    @property
    def nothing_looks_done(self) -> bool:
        return (
            not (self.paths.prepared / COMPLETION_MARKER).exists() and not (self.paths.state / "prepare.json").exists()
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.paths.root.iterdir())


@pytest.fixture
def gang(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    from finetune_trainer.prepare import prepare as module

    monkeypatch.setattr(module, "cut", module.cut)
    small_shards()
    made = Gang(tmp_path, tiny_model)
    yield made
    for process in made.processes:
        process.kill()
        process.join()


def files_of(paths: JobPaths) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths.prepared.iterdir()}


def ends(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for the processes and return their exit codes."""
    until = time.monotonic() + TIMEOUT_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return [process.exitcode for process in processes]


def logs_of(pods: Sequence[Pod]) -> str:
    return "\n".join(f"--- {pod.name}\n{pod.log.read_text(errors='replace')}" for pod in pods if pod.log.exists())


def reports_of(pods: Sequence[Pod]) -> list[TrainerReport]:
    return [TrainerReport.model_validate_json(pod.report.read_bytes()) for pod in pods]


def cause_of(pods: Sequence[Pod]) -> Cause:
    found = first_cause(reports_of(pods), {})
    assert found is not None
    return found


def ordered(gang: Gang) -> bool:
    return any(gang.paths.root.glob("prepared.tmp-*/raw/exchange/order-*.json"))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_pods_leave_the_bytes_that_one_process_leaves(gang: Gang, count: int):
    """The data make 4 shards to train and 1 to validate."""
    progress = gang.folder / "progress.jsonl"
    all_pods = gang.pods(count, environment={"FINETUNE_PROGRESS": str(progress)})
    assert ends(gang.start(all_pods)) == [0] * count, logs_of(all_pods)
    assert files_of(gang.paths) == gang.built_in()
    assert gang.names() == [".prepare.lock", "prepared", "state"]
    reports = reports_of(all_pods)
    assert [(each.rank, each.world_size, each.outcome) for each in reports] == [
        (index, count, "succeeded") for index in range(count)
    ]
    assert reports[0].fingerprint == PreparedData.open(gang.paths).facts.fingerprint
    lines = [Progress.model_validate_json(line) for line in progress.read_text().splitlines()]
    assert (lines[-1].step, lines[-1].total_steps) == (ROWS, ROWS)
    if count == 2:  # the second and the last shard of train; 12 of its 250 rows went to validation
        assert reports[1].metrics == {"rows": 60 + 58}


def test_finished_preparation_is_not_repeated_and_all_pods_end(gang: Gang):
    job = gang.job(2, run="run-1")
    assert ends(gang.start(gang.pods(2, job=job))) == [0, 0]
    made = (gang.paths.prepared / COMPLETION_MARKER).stat().st_ino
    again = gang.pods(2, job=job, attempt="attempt-2")
    assert ends(gang.start(again)) == [0, 0], logs_of(again)
    # The folder is whole, but the pod that would have reported it was killed before that.
    (gang.paths.state / "prepare.json").unlink()
    third = gang.pods(2, job=job, attempt="attempt-3")
    assert ends(gang.start(third)) == [0, 0], logs_of(third)
    assert (gang.paths.prepared / COMPLETION_MARKER).stat().st_ino == made
    assert (gang.paths.state / "prepare.json").is_file()


def test_only_pod_0_renames_results_of_another_run(gang: Gang):
    assert ends(gang.start(gang.pods(2, job=gang.job(2, run="run-1")))) == [0, 0]
    second_run = gang.pods(2, job=gang.job(2, run="run-2"))
    assert ends(gang.start(second_run)) == [0, 0], logs_of(second_run)
    found = sorted(path.name for path in gang.paths.root.parent.iterdir())
    assert found == [".cache", ".job.lock", "job", "job.previous-1"]
    assert files_of(gang.paths) == gang.built_in()


def test_bad_data_refused_by_pod_0_is_the_cause_and_ends_all_pods(gang: Gang):
    all_pods = gang.pods(3, job=gang.job(3, text="no_such_column"))
    assert ends(gang.start(all_pods)) == [DATA, COLLECTIVE, COLLECTIVE], logs_of(all_pods)
    assert (cause_of(all_pods).rank, cause_of(all_pods).failure.reason) == (0, "MissingColumn")
    assert "no_such_column" in reports_of(all_pods)[2].failure.message  # type: ignore[union-attr]
    assert gang.nothing_looks_done
    assert gang.names() == [".prepare.lock", "state"]


def test_the_failure_of_another_pod_ends_pod_0_and_is_the_cause(gang: Gang):
    all_pods = gang.pods(3)
    all_pods[2] = all_pods[2].other(trouble="refuses a shard")
    codes = ends(gang.start(all_pods))
    assert (codes[0], codes[2]) == (COLLECTIVE, DATA), logs_of(all_pods)
    assert codes[1] in (0, COLLECTIVE)  # done with its share, or in the middle of it
    assert (cause_of(all_pods).rank, cause_of(all_pods).failure.reason) == (2, "BadRow")
    leader = reports_of(all_pods)[0].failure
    assert leader is not None
    assert (leader.reason, leader.message) == (
        "PodFailed",
        "Pod 2 of 3 of stage prepare failed (BadRow): Row 77 cannot be encoded.",
    )
    assert gang.nothing_looks_done
    assert gang.names() == [".prepare.lock", "state"]


@pytest.mark.parametrize("when", ["hangs before it orders", "hangs in a shard"])
def test_next_attempt_prepares_after_pod_0_was_killed(gang: Gang, when):
    all_pods = gang.pods(2)
    all_pods[0] = all_pods[0].other(trouble=when)
    if when == "hangs before it orders":
        all_pods[1] = all_pods[1].other(silent_seconds=PATIENCE_SECONDS)
    processes = gang.start(all_pods)
    wait_until(all_pods[0].hangs.exists, "pod 0 has come so far")
    wait_until(lambda: when != "hangs in a shard" or ordered(gang), "the order is there")
    wait_until((gang.paths.state / "prepare.pods.json").exists, "pod 0 has said that it lives")
    if when == "hangs before it orders":
        # Pod 0 lives, however long it reads, so the other pod waits.
        processes[1].join(1.5 * PATIENCE_SECONDS)
        assert processes[1].exitcode is None, logs_of(all_pods)
    processes[0].kill()
    codes = ends(processes)
    if when == "hangs before it orders":
        assert codes[1] == COLLECTIVE, logs_of(all_pods)
        assert reports_of(all_pods[1:])[0].failure.reason == "LeaderSilent"  # type: ignore[union-attr]
    else:
        assert codes[1] == 0, logs_of(all_pods)  # its share is done, in vain
    assert gang.nothing_looks_done
    assert any(name.startswith("prepared.tmp-") for name in gang.names())

    second_attempt = gang.pods(2, attempt="attempt-2")
    assert ends(gang.start(second_attempt)) == [0, 0], logs_of(second_attempt)
    assert files_of(gang.paths) == gang.built_in()
    assert gang.names() == [".prepare.lock", "prepared", "state"]


def test_pod_0_prepares_the_share_of_a_missing_pod(gang: Gang):
    all_pods = gang.pods(3)
    all_pods[0] = all_pods[0].other(silent_seconds=0.5)
    assert ends(gang.start(all_pods[:2])) == [0, 0], logs_of(all_pods)
    assert "Pod 2 of 3 sends no heartbeat; pod 0 writes shard 2 itself." in logs_of(all_pods[:1])
    assert files_of(gang.paths) == gang.built_in()
    assert ends(gang.start(all_pods[2:])) == [0], logs_of(all_pods)
    assert reports_of(all_pods[2:])[0].metrics == {"rows": 0}
    assert files_of(gang.paths) == gang.built_in()


def test_a_pod_that_was_taken_for_dead_cannot_touch_the_result(gang: Gang):
    all_pods = [pod.other(trouble="hangs in a shard") for pod in gang.pods(2)]
    all_pods[0] = all_pods[0].other(silent_seconds=0.5)
    processes = gang.start(all_pods)
    wait_until(lambda: all(pod.hangs.exists() for pod in all_pods), "both are in the midst of a shard")
    all_pods[0].hangs.unlink()
    assert ends(processes[:1]) == [0], logs_of(all_pods)
    assert files_of(gang.paths) == gang.built_in()
    all_pods[1].hangs.unlink()
    assert ends(processes[1:]) == [0], logs_of(all_pods)
    assert files_of(gang.paths) == gang.built_in()
    assert gang.names() == [".prepare.lock", "prepared", "state"]


def test_stopped_pod_ends_the_preparation_as_preempted(gang: Gang):
    all_pods = gang.pods(2)
    all_pods[1] = all_pods[1].other(trouble="hangs in a shard")
    processes = gang.start(all_pods)
    wait_until(all_pods[1].hangs.exists, "pod 1 is in a shard")
    processes[1].terminate()
    assert ends(processes) == [COLLECTIVE, EXIT_CODES[FailureClass.PREEMPTED]], logs_of(all_pods)
    assert (cause_of(all_pods).rank, cause_of(all_pods).failure.failure_class) == (1, FailureClass.PREEMPTED)
    assert gang.nothing_looks_done


def test_files_of_an_earlier_attempt_are_ignored(gang: Gang):
    """The earlier pod 0 has reported the end, and the new one does not start."""
    assert ends(gang.start(gang.pods(2))) == [0, 0]
    late = gang.pods(2, attempt="attempt-2", start_seconds=1.0)[1:]
    assert ends(gang.start(late)) == [COLLECTIVE], logs_of(late)
    (report,) = reports_of(late)
    assert report.failure is not None
    assert report.failure.reason == "LeaderSilent"
    assert "prepare.pods.json for 1 s" in report.failure.message


@pytest.mark.parametrize(
    ("why", "size", "environment", "expected"),
    [
        ("one pod of three", 1, {"FINETUNE_ATTEMPT": "a"}, (FailureClass.WORLD_SIZE, "WorldSizeMismatch")),
        ("no attempt", 3, {}, (FailureClass.CONFIG, "AttemptMissing")),
    ],
)
def test_pods_that_are_not_those_of_the_plan_are_refused(gang: Gang, why, size, environment, expected):
    with pytest.raises(StageError) as caught:
        prepare_pods.Pod.of(gang.job(3), ProcessWorld(0, size), gang.paths, environment)
    assert (caught.value.failure_class, caught.value.reason) == expected


def test_the_engine_needs_its_pods(gang: Gang):
    with pytest.raises(StageError) as caught:
        prepare(gang.job(3), gang.paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "PodsMissing")


class Marks:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pod_does_not_execute_a_forged_order(gang: Gang, tmp_path: Path):
    marker, place = tmp_path / "it ran", gang.paths.root / "prepared.tmp-forged" / "raw" / "exchange"
    place.mkdir(parents=True)
    (place / "order-1.json").write_bytes(pickle.dumps(Marks(marker)))
    status = prepare_pods.LeaderStatus(
        attempt="attempt-1", state="ordered", orders=str(place.relative_to(gang.paths.root))
    )
    gang.paths.state.mkdir()
    (gang.paths.state / "prepare.pods.json").write_text(status.to_json(), encoding="utf-8")
    obeying = gang.pods(2)[1:]
    assert ends(gang.start(obeying)) == [EXIT_CODES[FailureClass.STORAGE_LOST]], logs_of(obeying)
    (report,) = reports_of(obeying)
    assert report.failure is not None
    assert report.failure.reason == "BrokenOrder"
    assert not marker.exists()


@pytest.mark.parametrize("orders", ["../../elsewhere", "/elsewhere"])
def test_order_outside_of_the_job_folder_is_ignored(orders: str, gang: Gang):
    pod = prepare_pods.Pod(1, 2, "attempt-1", gang.paths.root)
    gang.paths.state.mkdir(parents=True)
    forged = {"attempt": "attempt-1", "state": "ordered", "orders": orders}
    pod.place.write_text(json.dumps(forged), encoding="utf-8")
    assert pod.leader_status() is None


def test_orders_do_not_grow_with_the_rows(gang: Gang):
    """The other pods map the rows that pod 0 has written."""
    all_pods = gang.pods(2)
    all_pods[0] = all_pods[0].other(trouble="hangs in a shard")
    gang.start(all_pods[:1])
    wait_until(lambda: ordered(gang), "the order is there")
    (order,) = gang.paths.root.glob("prepared.tmp-*/raw/exchange/order-1.json")
    labels_and_places = 16 * ROWS
    assert os.path.getsize(order) < 8_000 + labels_and_places  # noqa: PTH202
