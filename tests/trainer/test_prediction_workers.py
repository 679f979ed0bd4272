"""A prediction by several workers: real processes that meet in one folder, one of which may be slow, fail, be killed or
never start.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.causes import first_cause
from finetune_contract.layout import EXIT_CODES, FailureClass, JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core import files as files_module
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import through_outage
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.predict import predict
from finetune_trainer.predict.prediction_parts import Parts, PartsManifest
from finetune_trainer.predict.prediction_workers import STATUS_FILE, CrewStatus, FolderFiles
from process_support.predicting import Predictor, Trouble
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.tasks import write_lines

ROWS = 300
COLLECTIVE = EXIT_CODES[FailureClass.COLLECTIVE]
DATA = EXIT_CODES[FailureClass.DATA]
PREEMPTED = EXIT_CODES[FailureClass.PREEMPTED]
TIMEOUT_SECONDS = patient(240)
TEXTS = [" ".join(["word"] * (1 + 7 * i % 23)) + f" {i % 41}" for i in range(ROWS)]


class Crew:
    """The workers of one job's prediction."""

    def __init__(self, folder: Path, model: Path, texts: Sequence[str]) -> None:
        self.folder = folder
        self.undisturbed = b""
        """Output of one process for the same rows."""
        self._model = model
        rows = [{"text": text, "key": f"k{number // 2}"} for number, text in enumerate(texts)]
        self._data = write_lines(folder / "rows.jsonl", rows)
        self.processes: list[BaseProcess] = []

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.folder / "w", "job")

    @property
    def claimed(self) -> Counter[str]:
        """Number of claims of each shard."""
        return Counter(line.split()[1] for line in (self.folder / "claims.txt").read_text().splitlines())

    def job(self, workers: int, **changes: Any) -> TrainerJob:
        body: dict[str, Any] = {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{self._model}"},
            "predict": {
                "dataset": {"uri": f"file://{self._data}", "columns": {"text": "text"}},
                "device": "cpu",
                "batch_tokens": 256,
                "id_column": "key",
                "workers": workers,
                **changes,
            },
        }
        return TrainerJob.model_validate(body)

    def workers(self, count: int, **settings: Any) -> list[Predictor]:
        file = self.folder / f"job-{count}.json"
        file.write_text(self.job(count).to_json(), encoding="utf-8")
        arguments = ["predict", "--job", str(file), "--workspace", str(self.folder / "w")]
        return [Predictor(index, count, arguments, self.folder, **settings) for index in range(count)]

    def start(self, workers: Sequence[Predictor]) -> list[BaseProcess]:
        started = [worker.start() for worker in workers]
        self.processes += started
        return started

    @property
    def output(self) -> bytes:
        return self.paths.predictions_jsonl.read_bytes()

    def is_left_clean(self) -> bool:
        return not list(self.paths.root.glob("predictions.parts*")) and not list(self.paths.root.glob(".pred*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    words = (word for text in TEXTS for word in text.split())
    labels = ("bad", "so-so", "good")
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=words, labels=labels, initializer_range=0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> bytes:
    alone = Crew(tmp_path_factory.mktemp("alone"), model, TEXTS)
    workers = alone.workers(1)
    assert ends(alone.start(workers)) == [0], logs_of(workers)
    return alone.output


@pytest.fixture
def crew(tmp_path: Path, model: Path, undisturbed: bytes) -> Iterator[Crew]:
    made = Crew(tmp_path, model, TEXTS)
    made.undisturbed = undisturbed
    yield made
    for process in made.processes:
        process.kill()
        process.join()


def ends(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for the processes and return their exit codes."""
    until = time.monotonic() + TIMEOUT_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return [process.exitcode for process in processes]


def logs_of(workers: Sequence[Predictor]) -> str:
    return "\n".join(
        f"--- {each.name}\n{each.log.read_text(errors='replace')}" for each in workers if each.log.exists()
    )


def report_of(worker: Predictor) -> TrainerReport:
    return TrainerReport.model_validate_json(worker.report.read_bytes())


def test_short_outage_of_the_storage_costs_no_worker_and_no_shard(crew: Crew):
    """All file operations of three workers fail twice for a while, at work and while worker 0 joins the parts."""
    workers = crew.workers(3, storage=crew.paths.root)
    workers[0] = workers[0].other(trouble="hangs while joining")
    mark = workers[0].away
    processes = crew.start(workers)

    def written() -> int:
        return len(list(crew.paths.root.glob("predictions.parts/*/*.arrow")))

    def all_missed(more: int, those: Sequence[Predictor]) -> bool:
        assert all(process.is_alive() for process in processes[: len(those)]), logs_of(workers)
        return all(missed_by(each) >= more for each in those)

    wait_until(lambda: written() >= 3, lambda: logs_of(workers))
    mark.touch()
    wait_until(lambda: all_missed(3, workers), lambda: logs_of(workers))
    mark.unlink()
    wait_until(workers[0].hangs.exists, lambda: logs_of(workers))
    more = missed_by(workers[0]) + 3
    mark.touch()
    workers[0].hangs.unlink()
    wait_until(lambda: all_missed(more, workers[:1]), lambda: logs_of(workers))
    mark.unlink()
    assert ends(processes) == [0, 0, 0], logs_of(workers)
    assert set(crew.claimed.values()) == {1}
    assert crew.output == crew.undisturbed
    assert crew.is_left_clean()


def missed_by(worker: Predictor) -> int:
    """Return the number of operations that an outage failed."""
    return len(worker.missed.read_text().splitlines()) if worker.missed.exists() else 0


def test_workers_write_the_bytes_that_one_process_writes(crew: Crew):
    progress = crew.folder / "progress.jsonl"
    workers = crew.workers(3, environment={"FINETUNE_PROGRESS": str(progress)})
    assert ends(crew.start(workers)) == [0, 0, 0], logs_of(workers)
    assert set(crew.claimed.values()) == {1}
    assert len(crew.claimed) > 6
    assert crew.output == crew.undisturbed
    rows = [json.loads(line) for line in crew.output.splitlines()]
    assert [(row["row"], row["id"]) for row in rows] == [(number, f"k{number // 2}") for number in range(ROWS)]
    assert crew.is_left_clean()
    answered = [report_of(worker).metrics["rows"] for worker in workers]
    assert answered[0] == ROWS
    updates = [Progress.model_validate_json(line) for line in progress.read_text().splitlines()]
    assert (updates[-1].step, updates[-1].total_steps) == (ROWS, ROWS)
    rates = [one.metrics["rows_per_second"] for one in updates if "rows_per_second" in one.metrics]
    assert all(rate > 0 for rate in rates)
    # Worker 0 measures from its first look on, when the others may have answered everything.
    assert rates or updates[0].step == ROWS


def test_replaced_workers_repeat_only_the_shards_in_progress(crew: Crew):
    """Each worker is killed twice, in the middle of its first or second shard, while no other continues."""
    draw = random.Random(20)
    troubles: tuple[Trouble, ...] = ("hangs in a shard", "hangs before the facts")
    workers = crew.workers(3)
    everyone: list[Predictor] = []

    def logs() -> str:
        return logs_of(everyone)

    for incarnation in range(2):
        round_ = [
            worker.other(trouble=draw.choice(troubles), after=draw.randrange(2), incarnation=incarnation)
            for worker in workers
        ]
        everyone += round_
        for worker, process in zip(round_, crew.start(round_), strict=True):
            wait_until(worker.hangs.exists, logs)
            process.kill()
            process.join()
    last = [worker.other(incarnation=2) for worker in workers]
    assert ends(crew.start(last)) == [0, 0, 0], logs_of([*everyone, *last])
    assert 0 < sum(crew.claimed.values()) - len(crew.claimed) <= 6
    assert crew.output == crew.undisturbed
    assert crew.is_left_clean()


def test_shard_of_a_paused_worker_is_taken_over_and_it_ends_cleanly(crew: Crew):
    workers = crew.workers(3, straggler_seconds=0.3)
    workers[1] = workers[1].other(trouble="hangs in a shard", after=1)
    stopped = crew.start(workers[1:2])
    wait_until(workers[1].hangs.exists, lambda: logs_of(workers))
    pid = stopped[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert ends(crew.start([workers[0], workers[2]])) == [0, 0], logs_of(workers)
    # A shard that takes a slow machine long is taken over, too: both write the same bytes.
    assert sum(crew.claimed.values()) - len(crew.claimed) >= 1
    assert crew.output == crew.undisturbed
    written = crew.paths.predictions_jsonl.stat().st_ino
    workers[1].hangs.unlink()
    os.kill(pid, signal.SIGCONT)
    assert ends(stopped) == [0], logs_of(workers)
    assert crew.paths.predictions_jsonl.stat().st_ino == written
    assert crew.is_left_clean()


def test_killed_worker_0_is_replaced_and_no_shard_is_answered_again(crew: Crew):
    workers = crew.workers(2)
    workers[0] = workers[0].other(trouble="hangs while joining")
    processes = crew.start(workers)
    wait_until(workers[0].hangs.exists, lambda: logs_of(workers))
    assert ends([processes[1]]) == [0], logs_of(workers)
    processes[0].kill()
    processes[0].join()
    assert not crew.paths.predictions_jsonl.exists()
    again = workers[0].other(trouble=None, incarnation=1)
    assert ends(crew.start([again])) == [0], logs_of([again])
    assert set(crew.claimed.values()) == {1}
    assert crew.output == crew.undisturbed
    assert crew.is_left_clean()


def test_a_worker_that_fails_ends_all_and_is_the_cause(crew: Crew):
    workers = crew.workers(3)
    workers[0] = workers[0].other(trouble="hangs in a shard", after=1)
    workers[2] = workers[2].other(trouble="refuses a shard", after=1)
    leader = crew.start(workers[:1])
    wait_until(workers[0].hangs.exists, lambda: logs_of(workers))
    assert ends(crew.start(workers[2:])) == [DATA], logs_of(workers)
    workers[0].hangs.unlink()
    assert ends(leader) == [COLLECTIVE], logs_of(workers)
    assert ends(crew.start(workers[1:2])) == [COLLECTIVE], logs_of(workers)
    cause = first_cause([report_of(worker) for worker in workers], {})
    assert cause is not None
    assert (cause.rank, cause.failure.reason) == (2, "BadRow")
    failure = report_of(workers[0]).failure
    assert failure is not None
    assert failure.message == "Worker 2 of 3 of stage predict failed (BadRow): Row 77 cannot be encoded."
    assert not crew.paths.predictions_jsonl.exists()
    second_attempt = crew.workers(3, attempt="attempt-2")
    assert ends(crew.start(second_attempt)) == [0, 0, 0], logs_of(second_attempt)
    assert crew.output == crew.undisturbed


def test_preempted_worker_ends_alone_and_others_answer_its_shards(crew: Crew):
    workers = crew.workers(2)
    workers[1] = workers[1].other(trouble="hangs in a shard", after=1)
    preempted = crew.start(workers[1:])
    wait_until(workers[1].hangs.exists, lambda: logs_of(workers))
    preempted[0].terminate()
    assert ends(preempted) == [PREEMPTED], logs_of(workers)
    assert ends(crew.start(workers[:1])) == [0], logs_of(workers)
    assert crew.output == crew.undisturbed
    late = workers[1].other(trouble=None, incarnation=1)
    assert ends(crew.start([late])) == [0], logs_of([late])
    assert report_of(late).metrics == {"rows": 0}
    assert crew.is_left_clean()


def test_a_worker_that_comes_after_the_end_of_its_attempt_answers_nothing(crew: Crew):
    """Worker 0 may be killed after the parts are joined and before its report is written."""
    status = CrewStatus(attempt="a", state="done", worker=0, result={"rows": 300, "path": "predictions.jsonl"})
    crew.paths.state.mkdir(parents=True)
    (crew.paths.root / STATUS_FILE).write_text(status.to_json())
    parts = crew.paths.root / "predictions.parts" / "key"
    parts.mkdir(parents=True)
    results = [
        predict(crew.job(2), crew.paths, NoProgress(), ProcessWorld(rank, 2, 0, 1), {"FINETUNE_ATTEMPT": "a"})
        for rank in (1, 0)
    ]
    assert results == [{"rows": 0}, {"rows": 300, "path": "predictions.jsonl"}]
    assert crew.is_left_clean()


def test_a_worker_without_an_attempt_or_with_another_count_is_refused(crew: Crew):
    for count, attempt, reason in ((2, "", "AttemptMissing"), (3, "a", "WorldSizeMismatch")):
        worker = crew.workers(2, attempt=attempt)[1].other(count=count)
        assert ends(crew.start([worker])) != [0]
        failure = report_of(worker).failure
        assert failure is not None
        assert failure.reason == reason


def test_claim_that_an_outage_left_behind_belongs_to_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of a share may create a file and not answer: the next try finds it, whole or empty."""
    files, opened = FolderFiles(tmp_path), Path.open

    def failing(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        file = opened(self, mode, *given, **named)
        if mode == "x" and self.name not in there:
            there.append(self.name)
            if self.name == "whole":
                file.write("mine")
            file.close()
            raise OSError(errno.EIO, "the storage does not respond")
        return file

    there: list[str] = []
    (tmp_path / "taken").write_text("theirs")
    monkeypatch.setattr(Path, "open", failing)
    assert [files.create(name, "mine") for name in ("whole", "empty", "taken")] == [True, True, False]
    monkeypatch.undo()
    assert [(tmp_path / name).read_text() for name in ("whole", "empty", "taken")] == ["mine", "mine", "theirs"]


def test_storage_that_stays_away_or_is_full_is_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([errno.EIO, errno.EIO, errno.ENOSPC])

    def operation() -> None:
        raise OSError(next(errors), "no")

    with pytest.raises(OSError, match="no") as caught:
        through_outage(operation)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(files_module, "OUTAGE_SECONDS", -1.0)
    errors = iter([errno.EIO])
    with pytest.raises(OSError, match="no"):
        through_outage(operation)


def test_workers_compute_as_the_first_one_has_chosen_or_refuse(tmp_path: Path):
    parts = Parts(tmp_path / "parts").open()
    mine = PartsManifest(version=2, means={"precision": "fp32"}, threads=3, optimization={"rung": "plain"})
    assert parts.agreed(2, mine.means, lambda: mine, lambda there: not there()) == mine
    assert parts.agreed(2, mine.means, pytest.fail, lambda there: not there()) == mine
    with pytest.raises(StageError, match="precision is 'bf16', there 'fp32'") as caught:
        parts.agreed(2, {"precision": "bf16"}, lambda: mine, lambda there: not there())
    assert caught.value.reason == "WorkersDiffer"
