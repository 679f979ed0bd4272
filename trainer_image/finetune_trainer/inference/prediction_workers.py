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
- for the choice of a rung, unless predict.optimization is none: one claim of each worker, and while another one
  measures, a few short requests at intervals that double up to 10 s.
- worker 0 reads the facts of each part once, for its progress, and lists the parts in at most 5 % of its time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from pydantic import Field, JsonValue, ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import ENV_ATTEMPT, FailureClass, JobPaths, retryable
from finetune_contract.report import FailureReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.data.row_shards import ShardKey
from finetune_trainer.distributed import ProcessWorld
from finetune_trainer.failures import StageError, classify
from finetune_trainer.files import write_atomically
from finetune_trainer.inference.prediction_parts import is_facts

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

POLL_SECONDS = 0.5
"""First wait for other workers; each next one is twice as long."""
MOST_POLL_SECONDS = 10.0
BEAT_SECONDS = 10.0
"""Time between two heartbeats."""
SILENT_SECONDS = 300.0
"""Time without a heartbeat after which a worker's shards are taken over. NFS shows a file up to a minute late."""
STRAGGLER_SECONDS = 30.0
"""Shortest time after which an idle worker takes over another worker's shard, too."""
STRAGGLER_FACTOR = 3.0
"""The same, as a multiple of the idle worker's own longest shard."""
CHOOSING_SECONDS = 1800.0
"""Time that a live worker may take for a task that it does for all, before the others do it too. Measuring all rungs
takes minutes.
"""
WATCHED = 4
"""Shards in progress that an idle worker checks in one poll."""

STATUS_FILE = "state/predict.workers.json"


class CrewStatus(Message):
    """End of an attempt, for workers that still run or start late."""

    attempt: str
    state: Literal["done", "failed"]
    worker: int
    failure: FailureReport | None = None
    result: dict[str, JsonValue] = Field(default_factory=dict)
    """Result of worker 0, with `done`; a worker 0 that replaces one killed before its report returns it."""


class Claim(Message):
    """Worker that answers a shard."""

    worker: int
    incarnation: str


class Beat(Message):
    """A worker's heartbeat."""

    incarnation: str
    beat: int
    ended: bool = False


class SharedFiles(Protocol):
    """Small files in the job's folder, by their path relative to it."""

    def create(self, name: str, text: str) -> bool:
        """Create a file; return False if it exists."""

    def write(self, name: str, text: str) -> None:
        """Write a file that readers see whole or not at all."""

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""


@dataclass(frozen=True)
class FolderFiles:
    """`SharedFiles` in a folder that all workers mount."""

    root: Path

    def create(self, name: str, text: str) -> bool:
        try:
            with (self.root / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def write(self, name: str, text: str) -> None:
        write_atomically(self.root / name, text, folder=False)

    def read(self, name: str) -> str | None:
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        return [path.name for path in (self.root / folder).iterdir()]


@dataclass(frozen=True)
class Worker:
    """This worker among all workers of an attempt."""

    index: int
    count: int
    attempt: str
    """Name shared by all workers of this attempt, and by no other attempt."""

    @classmethod
    def of(cls, job: TrainerJob, world: ProcessWorld, environment: Mapping[str, str]) -> Worker | None:
        """Return the worker that the environment describes; None if one process answers all rows.

        StageError WORLD_SIZE, or CONFIG if the attempt has no name.
        """
        planned = 1 if job.predict is None else job.predict.workers * job.predict.processes
        if world.size != planned:
            raise StageError(
                FailureClass.WORLD_SIZE,
                "WorldSizeMismatch",
                f"{world.size} workers run stage predict, and the plan has {planned} (predict.workers x "
                "processes of a pod).",
                "Run the stage as an Indexed Job with predict.workers completions, or by torchrun with processes.",
            )
        if planned == 1:
            return None
        attempt = environment.get(ENV_ATTEMPT)
        if not attempt:
            raise StageError(
                FailureClass.CONFIG,
                "AttemptMissing",
                f"{planned} workers predict together and {ENV_ATTEMPT} is not set, so they cannot distinguish their "
                "claims from those of an earlier attempt.",
                "Set it to the same value in all workers, and to a new value for each attempt.",
            )
        return cls(world.rank, world.size, attempt)

    @property
    def leads(self) -> bool:
        """True if it joins the parts."""
        return self.index == 0

    def folder(self, parts: str) -> str:
        """Return the folder of this attempt's claims and heartbeats below that of the parts."""
        return f"{parts}/attempt-{hashlib.sha256(self.attempt.encode()).hexdigest()[:16]}"


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


@dataclass(frozen=True)
class Wait:
    """Result of `ShardClaimer.look`: no shard to take now."""

    seconds: float


@dataclass
class _SeenClaim:
    """A claim as this worker has seen it."""

    claim: Claim | None
    since: float
    """Time at which it first saw the claim."""


class ShardClaimer:
    """Decides which shards a worker takes; has no clock and never sleeps, so that a thousand can be simulated."""

    def __init__(self, worker: Worker, parts: str, files: SharedFiles, incarnation: str) -> None:
        self._worker = worker
        self._parts = parts
        self._folder = worker.folder(parts)
        self._files = files
        self._claim = Claim(worker=worker.index, incarnation=incarnation).to_json()
        self._incarnation = incarnation
        self._wanted: dict[str, int] | None = None
        """Generation of the claim to create, by shard; None: the first pass, over the worker's own share."""
        self._done = self.there()
        self._missing: list[str] | None = None
        self._claimed: dict[str, int] = {}
        """Generation of the newest known claim, by shard."""
        self._claims_changed = True
        self._seen: dict[tuple[str, int], _SeenClaim] = {}
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._turns: dict[str, int] = {}
        """Generation of the newest known claim, by task that one worker does for all."""
        self._polls = 0
        self._waited = 0.0
        self.longest = 0.0
        """Seconds of the longest shard that this worker answered."""

    def there(self) -> set[str]:
        """Return the shards with complete parts."""
        return {name.removesuffix(".json") for name in self._files.names(self._parts) if is_facts(name)}

    def takes(self, number: int, key: ShardKey) -> bool:
        """Claim the shard if it is wanted; return False if not, or if another worker was faster."""
        name = str(key)
        if self._wanted is None:
            mine = number % self._worker.count == self._worker.index and name not in self._done
            return mine and self._claims(name, 0)
        generation = self._wanted.pop(name, None)
        return generation is not None and self._claims(name, generation)

    @property
    def through(self) -> bool:
        """True once all wanted shards were offered."""
        return self._wanted is not None and not self._wanted

    def _claims(self, name: str, generation: int) -> bool:
        taken = self._files.create(f"{self._folder}/claims/{name}.{generation}", self._claim)
        self._claims_changed = True
        if taken:
            self._polls, self._waited = 0, 0.0
        return taken

    def first(self, name: str, now: float) -> bool:
        """Claim a task that one worker does for all; False while a live worker has claimed it."""
        generation = self._turns.get(name, 0)
        while not self._files.create(f"{self._folder}/claims/{name}.{generation}", self._claim):
            if not self._left_behind(name, generation, now, CHOOSING_SECONDS):
                return False
            self._turns[name] = generation = generation + 1
        return True

    def look(self, keys: Sequence[ShardKey], now: float) -> Wait | bool:
        """Find missing shards to take. True: there are some; False: this worker ends."""
        if self._missing is None:
            self._missing = [str(key) for key in keys]
        done = self.there()
        self._missing = missing = [name for name in self._missing if name not in done]
        if not missing:
            self._missing = None  # worker 0 may find one of the parts damaged, and ask again
            return False
        if self._claims_changed or any(name not in self._claimed for name in missing):
            self._list_claims()
        claimed = self._claimed
        free = [name for name in missing if name not in claimed]
        if free:
            self._wanted = dict.fromkeys(self._share(free), 0)
            return True
        lost = [name for name in self._watched(missing) if self._left_behind(name, claimed[name], now, self._patience)]
        if lost:
            # A worker may have written its last part and ended since the parts were listed.
            done = self.there()
            if not done.isdisjoint(lost):
                return self.look(keys, now)
            self._wanted = {name: claimed[name] + 1 for name in self._share(lost)}
            return True
        if not self._worker.leads and self._waited > self._patience:
            return False
        seconds = min(MOST_POLL_SECONDS, POLL_SECONDS * 2 ** min(self._polls, 10))
        self._polls += 1
        self._waited += seconds
        return Wait(seconds)

    def _list_claims(self) -> None:
        self._claims_changed = False
        for claim in self._files.names(f"{self._folder}/claims"):
            name, _, generation = claim.rpartition(".")
            self._claimed[name] = max(self._claimed.get(name, 0), int(generation))

    @property
    def _patience(self) -> float:
        """Seconds after which another worker's shard is taken over."""
        return max(STRAGGLER_SECONDS, STRAGGLER_FACTOR * self.longest)

    def _share(self, left: Sequence[str]) -> Sequence[str]:
        """Return a part of `left`, at least one, so that workers that look at the same time rarely want the same."""
        count, index = self._worker.count, self._worker.index
        return left[index::count] if index < len(left) else [left[index % len(left)]]

    def _watched(self, missing: Sequence[str]) -> Sequence[str]:
        """Return the shards to check in this poll; each poll has others."""
        first = (self._worker.index + self._polls * WATCHED) % len(missing)
        return [*missing[first:], *missing[:first]][:WATCHED]

    def _left_behind(self, name: str, generation: int, now: float, patience: float) -> bool:
        """Return whether the worker that claimed it is dead, or takes too long."""
        seen = self._seen.get((name, generation))
        if seen is None or seen.claim is None:
            found = _parsed(Claim, self._files.read(f"{self._folder}/claims/{name}.{generation}"))
            seen = _SeenClaim(found, now if seen is None else seen.since)
            self._seen[name, generation] = seen
        # A claim stays empty if its worker ended while writing it.
        if now - seen.since > (patience if seen.claim is not None else min(patience, SILENT_SECONDS)):
            return True
        if seen.claim is None or seen.claim.incarnation == self._incarnation:
            return False  # this worker's own part may not be listed yet
        if seen.claim.worker == self._worker.index:
            return True  # an earlier incarnation of this worker
        return not self._lives(seen.claim, now)

    def _lives(self, claim: Claim, now: float) -> bool:
        beat = _parsed(Beat, self._files.read(beat_name(self._folder, claim.worker)))
        if beat is None:
            beat = Beat(incarnation=claim.incarnation, beat=-1)
        known = self._beats.get(claim.worker)
        if known is None or known[0] != beat:
            known = self._beats[claim.worker] = (beat, now)
        if beat.incarnation != claim.incarnation or beat.ended:
            return False
        return now - known[1] <= SILENT_SECONDS


def beat_name(folder: str, worker: int) -> str:
    """Return the file of a worker's heartbeat."""
    return f"{folder}/beat-{worker}.json"


def _parsed(kind: type[M], text: str | None) -> M | None:
    """Parse a file; None if it is missing, or still empty."""
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None


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
        (paths.root / worker.folder(place) / "claims").mkdir(parents=True, exist_ok=True)
        paths.state.mkdir(parents=True, exist_ok=True)
        self._incarnation = uuid.uuid4().hex
        self._beats = 0
        self._beat()  # before the first claim, so that its readers find this worker alive
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
        while isinstance(found := self._taker.look(keys, time.monotonic()), Wait):
            self.check()
            idle()
            time.sleep(found.seconds)
        return found

    def first(self, name: str, there: Callable[[], bool]) -> bool:
        seconds = POLL_SECONDS
        while not there():
            if self._taker.first(name, time.monotonic()):
                return not there()
            self.check()
            time.sleep(seconds)
            seconds = min(MOST_POLL_SECONDS, 2 * seconds)
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
        until = time.monotonic() + SILENT_SECONDS
        # Path.exists raises if a folder was removed from a share (ESTALE).
        while not os.path.exists(self._parts) and time.monotonic() < until:  # noqa: PTH110
            if result_of(self._worker, self._paths) is not None:
                return True
            time.sleep(POLL_SECONDS)
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
        self._files.write(
            self._beat_place, Beat(incarnation=self._incarnation, beat=self._beats, ended=ended).to_json()
        )

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
    status = _parsed(CrewStatus, FolderFiles(paths.root).read(STATUS_FILE))
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
