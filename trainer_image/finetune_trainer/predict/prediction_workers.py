"""Workers that answer the shards of one set of rows together: the pods of an Indexed Job, which share only the job's
folder, or the processes of one pod.

Each worker lists the shards by itself and takes every `count`-th of them. It claims a shard by a file that only one
worker can create, so there is no central list. A worker without shards of its own takes those that others have not
begun, then those of dead or silent workers, then those that take much longer than its own did. Two workers may safely
answer the same shard: both write the same bytes, and a part is replaced in one step. A replaced pod has the same index
and another incarnation, so its predecessor's claims are known to be dead.

Worker 0 joins the parts and never waits for ever: it answers the shards that others leave. Any other worker ends when
no shard is left to take. A worker whose failure would recur ends all; the others report it. One that is preempted, or
has lost its storage, ends alone.

File system requests are bounded, so that a thousand workers do not stall each other:
- for each shard that a worker answers: one claim, and one check for a failed worker; never a look at others' claims.
- for each worker: a heartbeat every 10 s; a listing of the parts at the start, one of parts and one of claims each time
  that its shards are done; while it waits, one listing and at most 8 short reads at intervals that double up to 10 s.
- for the choice of a backend, unless predict.optimization is none: one claim of each worker, and while another one
  measures, a few short requests at intervals that double up to 10 s.
- worker 0 reads the facts of each part once, for its progress, and lists the parts in at most 5 % of its time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from pydantic import Field, JsonValue

from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass, JobPaths, retryable
from finetune_contract.report import FailureReport
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.files import through_outage, write_atomically
from finetune_trainer.data.row_shards import ShardKey
from finetune_trainer.predict import shard_claims
from finetune_trainer.predict.shard_claims import (
    Beat,
    ShardClaimer,
    Wait,
    Worker,
    beat_name,
    parsed,
)

log = logging.getLogger(__name__)


BEAT_SECONDS = 10.0
"""Time between two heartbeats."""

STATUS_FILE = "state/predict.workers.json"


class CrewStatus(Message):
    """End of an attempt, for workers that still run or start late."""

    attempt: str
    state: Literal["done", "failed"]
    worker: int
    failure: FailureReport | None = None
    result: dict[str, JsonValue] = Field(default_factory=dict)
    """Result of worker 0, with `done`; a worker 0 that replaces one killed before its report returns it."""


@dataclass(frozen=True)
class FolderFiles:
    """`SharedFiles` in a folder that all workers mount; each operation waits for a storage that does not respond."""

    root: Path

    def create(self, name: str, text: str) -> bool:
        tries = 0

        def created() -> bool:
            nonlocal tries
            tries += 1
            try:
                with (self.root / name).open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                # A try that failed may have created the file, whole or empty.
                return tries > 1 and self._completed(name, text)
            return True

        return through_outage(created)

    def _completed(self, name: str, text: str) -> bool:
        """Return whether a file is this worker's; fill it if it is empty."""
        content = (self.root / name).read_text(encoding="utf-8")
        if not content:
            (self.root / name).write_text(text, encoding="utf-8")
        return content in ("", text)

    def write(self, name: str, text: str) -> None:
        through_outage(lambda: write_atomically(self.root / name, text, folder=False))

    def read(self, name: str) -> str | None:
        def found() -> str | None:
            try:
                return (self.root / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None

        return through_outage(found)

    def names(self, folder: str) -> list[str]:
        return through_outage(lambda: [path.name for path in (self.root / folder).iterdir()])


class Sharing(Protocol):
    """Division of the shards among workers."""

    leads: bool

    def takes(self, number: int, key: ShardKey) -> bool:
        """Return whether this process answers the shard, the `number`-th of all, now. StageError COLLECTIVE if another
        worker has failed.
        """

    @property
    def through(self) -> bool:
        """True if no later shard will be taken before `again` is called."""

    def again(self, keys: Sequence[ShardKey], idle: Callable[[], None]) -> bool:
        """Return, after all shards `keys` were offered, True to offer them once more, False if none is left to take.
        Waits for other workers, with calls of `idle`; worker 0 gets False once all parts exist.
        """

    def first(self, name: str, there: Callable[[], bool]) -> bool:
        """Return whether this worker does the task `name`, which one does for all. False: another worker did, as
        `there` shows; waits for that while the other one is alive. StageError COLLECTIVE if another worker has failed.
        """

    def check(self) -> None:
        """Raise StageError COLLECTIVE if another worker has failed; checks at most every few seconds."""


class SingleWorker:
    """`Sharing` of one process, which answers all missing shards."""

    leads = True
    through = False

    def __init__(self, there: Callable[[], Iterable[str]]) -> None:
        self._there = there
        self._done = set(there())

    def takes(self, number: int, key: ShardKey) -> bool:
        return str(key) not in self._done

    def again(self, keys: Sequence[ShardKey], idle: Callable[[], None]) -> bool:
        self._done = set(self._there())
        return any(str(key) not in self._done for key in keys)

    def first(self, name: str, there: Callable[[], bool]) -> bool:
        return not there()

    def check(self) -> None:
        """Do nothing: there is no other worker."""


# ---------------------------------------------------------------------------------------------------------- decisions


# -------------------------------------------------------------------------------------------------------------- worker


class Crew:
    """`Sharing` with the other workers; sends heartbeats while entered, and reports its end on exit."""

    def __init__(self, worker: Worker, paths: JobPaths, parts: Path, watch: Callable[[], None] = lambda: None) -> None:
        """`watch` is called with each effective `check`, to raise other errors that end the attempt."""
        self.leads = worker.leads
        self._watch = watch
        self._worker = worker
        self._paths = paths
        self._parts = parts
        self._files = FolderFiles(paths.root)
        place = str(parts.relative_to(paths.root))
        self._beat_place = beat_name(worker.folder(place), worker.index)
        for folder in (paths.root / worker.folder(place) / "claims", paths.state):
            through_outage(partial(folder.mkdir, parents=True, exist_ok=True))
        self._incarnation = uuid.uuid4().hex
        self._beats = 0
        through_outage(self._beat)  # before the first claim, so that its readers find this worker alive
        self._taker = ShardClaimer(worker, place, self._files, self._incarnation)
        self._began: float | None = None
        self._checked = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="beat", daemon=True)

    def __enter__(self) -> Crew:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        # A removed folder needs no last heartbeat; without one the others miss the next ones.
        with suppress(OSError):
            self._beat(ended=True)
        if error is None or isinstance(error, OtherFailedError):
            return
        failure = classify(error)
        if not would_help(failure):
            with suppress(OSError):
                publish_failure(self._worker, self._paths, failure)

    def takes(self, number: int, key: ShardKey) -> bool:
        self._measure()
        taken = self._taker.takes(number, key)
        if taken:
            self._checked = 0.0
            self.check()
            self._began = time.monotonic()
        return taken

    @property
    def through(self) -> bool:
        return self._taker.through

    def again(self, keys: Sequence[ShardKey], idle: Callable[[], None]) -> bool:
        self._measure()
        while isinstance(outcome := self._taker.look(keys, time.monotonic()), Wait):
            self.check()
            idle()
            time.sleep(outcome.seconds)
        return outcome

    def first(self, name: str, there: Callable[[], bool]) -> bool:
        seconds = shard_claims.POLL_SECONDS
        while not there():
            if self._taker.first(name, time.monotonic()):
                return not there()
            self.check()
            time.sleep(seconds)
            seconds = min(shard_claims.MOST_POLL_SECONDS, 2 * seconds)
        if self._began is not None:
            self._began = time.monotonic()  # the taken shard begins now
        return False

    def check(self) -> None:
        if time.monotonic() - self._checked < BEAT_SECONDS:
            return
        self._checked = time.monotonic()
        result_of(self._worker, self._paths)
        self._watch()

    def ended_by_leader(self) -> bool:
        """Return whether the folder of the parts was removed because worker 0 has joined them. StageError COLLECTIVE if
        a worker has failed.
        """
        until = time.monotonic() + shard_claims.SILENT_SECONDS
        # Path.exists raises if a folder was removed from a share (ESTALE).
        while not os.path.exists(self._parts) and time.monotonic() < until:  # noqa: PTH110
            if result_of(self._worker, self._paths) is not None:
                return True
            time.sleep(shard_claims.POLL_SECONDS)
        return False

    def publish_result(self, result: Mapping[str, JsonValue]) -> None:
        """Report to the others that the parts are joined and will be removed."""
        status = CrewStatus(attempt=self._worker.attempt, state="done", worker=self._worker.index, result=dict(result))
        self._files.write(STATUS_FILE, status.to_json())

    def _measure(self) -> None:
        """Record the time of the shard that was taken before, if any."""
        if self._began is not None:
            self._taker.longest = max(self._taker.longest, time.monotonic() - self._began)
        self._began = None

    def _beat(self, *, ended: bool = False) -> None:
        self._beats += 1
        beat = Beat(incarnation=self._incarnation, beat=self._beats, ended=ended).to_json()
        write_atomically(self._paths.root / self._beat_place, beat, folder=False)

    def _live(self) -> None:
        warned = False
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._beat()
            except OSError as error:
                if not warned and os.path.exists(self._parts):  # noqa: PTH110
                    log.warning("The heartbeat for the other workers cannot be written: %s", error)
                    warned = True


def publish_failure(worker: Worker, paths: JobPaths, failure: FailureReport) -> None:
    """Have all workers of the attempt end, as any of them would fail in the same way."""
    status = CrewStatus(attempt=worker.attempt, state="failed", worker=worker.index, failure=failure)
    FolderFiles(paths.root).write(STATUS_FILE, status.to_json())


def result_of(worker: Worker, paths: JobPaths) -> Mapping[str, JsonValue] | None:
    """Return the result of worker 0 of this attempt; None until the output is written. StageError COLLECTIVE if a
    worker has failed.
    """
    status = parsed(CrewStatus, FolderFiles(paths.root).read(STATUS_FILE))
    if status is None or status.attempt != worker.attempt:
        return None
    if status.failure is not None:
        raise OtherFailedError(worker, status.worker, status.failure)
    return status.result


class OtherFailedError(StageError):
    """Error of a worker that ends because another one failed; never taken for the cause."""

    def __init__(self, worker: Worker, index: int, failure: FailureReport) -> None:
        super().__init__(
            FailureClass.COLLECTIVE,
            "PodFailed",
            f"Worker {index} of {worker.count} of stage predict failed ({failure.reason}): {failure.message}",
            f"See the report of worker {index} for the first cause.",
        )
        self.failure = failure


def would_help(failure: FailureReport) -> bool:
    """Return whether another worker may succeed after this failure. A row too large for memory fits none of them."""
    return retryable(failure.exit_code) and failure.failure_class is not FailureClass.OUT_OF_MEMORY
