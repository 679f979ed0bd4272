"""Workers that answer the shards of one set of rows together: the pods of an Indexed Job, which share nothing but the
job's folder.

Each worker lists the shards by itself and takes every `count`-th of them. It claims a shard by a file that only one of
them can create, so nobody keeps a list. A worker without shards of its own takes those that others have not begun, then
those of workers that are dead or silent, and then those that take much longer than its own did. Two workers that answer
the same shard do no harm: both write the same bytes, and a part is replaced in one step. A pod that is replaced has the
same index and another incarnation, so the claims of the one before it are known to be dead.

Worker 0 joins the parts and waits for nobody for ever: it answers what the others leave. Any other worker ends when
nothing is left to take. A worker that fails in a way that would happen again ends all; the others say so. One that is
preempted, or has lost its storage, ends alone.

Requests to the file system, so that a thousand workers do not stop each other:
- for each shard that a worker answers: one claim, and one look at whether another worker has failed; never a look at
  the claims of others.
- for each worker: a beat every 10 s; a listing of the parts when it begins, one of parts and one of claims each time
  that its shards are done; while it waits, one listing and at most 8 short reads at intervals that double up to 10 s.
- for the choice of a way to compute, unless predict.optimization is none: one claim of each worker, and while another
  one measures, a few short requests at intervals that double up to 10 s.
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
"""Between two signs of life."""
SILENT_SECONDS = 300.0
"""After so long without a sign of life a worker's shards are taken over. NFS shows a file up to a minute late."""
STRAGGLER_SECONDS = 30.0
"""Time that another worker's shard may take at least before an idle worker takes it over, too."""
STRAGGLER_FACTOR = 3.0
"""The same in times of the longest shard of the idle worker itself."""
CHOOSING_SECONDS = 1800.0
"""Time that a worker which lives may take for what one does for all, before the others do it, too. Measuring all ways
to compute takes minutes.
"""
WATCHED = 4
"""Shards under way that an idle worker looks at in one poll."""

WORD = "state/predict.workers.json"


class Word(Message):
    """How an attempt has ended, for workers that still run or start late."""

    attempt: str
    state: Literal["done", "failed"]
    worker: int
    failure: FailureReport | None = None
    result: dict[str, JsonValue] = Field(default_factory=dict)
    """What worker 0 reports, with `done`: one that is killed before its report is out is replaced."""


class Claim(Message):
    """Who answers a shard."""

    worker: int
    incarnation: str


class Beat(Message):
    """A worker's sign of life."""

    incarnation: str
    beat: int
    ended: bool = False


class SharedFiles(Protocol):
    """Small files in the job's folder, by their path from there."""

    def create(self, name: str, text: str) -> bool:
        """Write a file that was not there; return False where one is."""

    def write(self, name: str, text: str) -> None:
        """Write a file that readers see whole or not at all."""

    def read(self, name: str) -> str | None:
        """Return the text of a file; None where there is none."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""


@dataclass(frozen=True)
class FolderFiles:
    """`SharedFiles` of a folder that all workers mount."""

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
    """This worker among all of an attempt."""

    index: int
    count: int
    attempt: str
    """The same in all workers of this attempt, and in none of another."""

    @classmethod
    def of(cls, job: TrainerJob, world: ProcessWorld, environment: Mapping[str, str]) -> Worker | None:
        """Return the worker that the environment describes; None when one process answers all rows.

        StageError WORLD_SIZE, or CONFIG when the attempt has no name.
        """
        planned = 1 if job.predict is None else job.predict.workers
        if world.size != planned:
            raise StageError(
                FailureClass.WORLD_SIZE,
                "WorldSizeMismatch",
                f"{world.size} workers predict, the plan counts on {planned} (predict.workers).",
                "Run the stage as an Indexed Job with predict.workers completions, or leave predict.workers out.",
            )
        if planned == 1:
            return None
        attempt = environment.get(ENV_ATTEMPT)
        if not attempt:
            raise StageError(
                FailureClass.CONFIG,
                "AttemptMissing",
                f"{planned} workers predict together and {ENV_ATTEMPT} is not set, so they cannot tell each other's "
                "claims from those of an earlier attempt.",
                "Set it to the same text in all of them, and to another one in each attempt.",
            )
        return cls(world.rank, world.size, attempt)

    @property
    def leads(self) -> bool:
        """Whether it joins the parts."""
        return self.index == 0

    def folder(self, parts: str) -> str:
        """Return the folder of this attempt's claims and beats below that of the parts."""
        return f"{parts}/attempt-{hashlib.sha256(self.attempt.encode()).hexdigest()[:16]}"


class Sharing(Protocol):
    """Which shards this process answers."""

    leads: bool

    def takes(self, number: int, key: ShardKey) -> bool:
        """Return whether this process answers the shard, the `number`-th of all, now. StageError COLLECTIVE when
        another worker has failed.
        """

    @property
    def through(self) -> bool:
        """Whether no later shard will be taken before `again` is called."""

    def again(self, keys: Sequence[ShardKey], idle: Callable[[], None]) -> bool:
        """After all shards `keys` were passed: return True to pass them once more, False when nothing is left to take.
        Waits for other workers, with calls of `idle`; worker 0 gets False when all parts are there.
        """

    def first(self, name: str, there: Callable[[], bool]) -> bool:
        """Return whether this worker does what one does for all. False: it is `there`, and another one has made it;
        waits for that while the other one lives. StageError COLLECTIVE when another worker has failed.
        """

    def check(self) -> None:
        """StageError COLLECTIVE when another worker has failed; looks at most every few seconds."""


class Alone:
    """One process answers all shards that are not there yet."""

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
        """Do nothing: there is no other."""


# ---------------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Wait:
    """Nothing to take now."""

    seconds: float


@dataclass
class _Seen:
    """What a worker knows of a claim."""

    claim: Claim | None
    since: float
    """When it saw the claim first."""


class Taker:
    """Decides which shards a worker takes; knows no clock and sleeps never, so that a thousand can be simulated."""

    def __init__(self, worker: Worker, parts: str, files: SharedFiles, incarnation: str) -> None:
        self._worker = worker
        self._parts = parts
        self._folder = worker.folder(parts)
        self._files = files
        self._claim = Claim(worker=worker.index, incarnation=incarnation).to_json()
        self._incarnation = incarnation
        self._wanted: dict[str, int] | None = None
        """Generation of the claim to make, by shard; None: the first pass, over the worker's own share."""
        self._done = self.there()
        self._missing: list[str] | None = None
        self._claimed: dict[str, int] = {}
        """Generation of the newest claim that is known, by shard."""
        self._claims_changed = True
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._turns: dict[str, int] = {}
        """Generation of the newest claim that is known, by what one worker does for all."""
        self._polls = 0
        self._waited = 0.0
        self.longest = 0.0
        """Seconds of the longest shard that this worker has answered."""

    def there(self) -> set[str]:
        """Return the shards whose parts are whole."""
        return {name.removesuffix(".json") for name in self._files.names(self._parts) if is_facts(name)}

    def takes(self, number: int, key: ShardKey) -> bool:
        """Claim the shard if it is to be taken; return False when another worker was faster."""
        name = str(key)
        if self._wanted is None:
            mine = number % self._worker.count == self._worker.index and name not in self._done
            return mine and self._claims(name, 0)
        generation = self._wanted.pop(name, None)
        return generation is not None and self._claims(name, generation)

    @property
    def through(self) -> bool:
        """Whether all wanted shards were passed."""
        return self._wanted is not None and not self._wanted

    def _claims(self, name: str, generation: int) -> bool:
        taken = self._files.create(f"{self._folder}/claims/{name}.{generation}", self._claim)
        self._claims_changed = True
        if taken:
            self._polls, self._waited = 0, 0.0
        return taken

    def first(self, name: str, now: float) -> bool:
        """Claim what one worker does for all; False while another one that lives has claimed it."""
        generation = self._turns.get(name, 0)
        while not self._files.create(f"{self._folder}/claims/{name}.{generation}", self._claim):
            if not self._left_behind(name, generation, now, CHOOSING_SECONDS):
                return False
            self._turns[name] = generation = generation + 1
        return True

    def look(self, keys: Sequence[ShardKey], now: float) -> Wait | bool:
        """Find shards to take of those that others have not answered. True: there are some; False: this worker ends."""
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
        """Part of these for this worker, at least one: workers that look at the same time rarely want the same."""
        count, index = self._worker.count, self._worker.index
        return left[index::count] if index < len(left) else [left[index % len(left)]]

    def _watched(self, missing: Sequence[str]) -> Sequence[str]:
        """Another part of these at each poll."""
        first = (self._worker.index + self._polls * WATCHED) % len(missing)
        return [*missing[first:], *missing[:first]][:WATCHED]

    def _left_behind(self, name: str, generation: int, now: float, patience: float) -> bool:
        """Whether the worker that has claimed it is gone, or takes too long."""
        seen = self._seen.get((name, generation))
        if seen is None or seen.claim is None:
            found = _parsed(Claim, self._files.read(f"{self._folder}/claims/{name}.{generation}"))
            seen = _Seen(found, now if seen is None else seen.since)
            self._seen[name, generation] = seen
        # A claim that stays empty is of a worker that ended while it wrote it.
        if now - seen.since > (patience if seen.claim is not None else min(patience, SILENT_SECONDS)):
            return True
        if seen.claim is None or seen.claim.incarnation == self._incarnation:
            return False  # what this worker has written may not be listed yet
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
    """Return where a worker gives signs of life."""
    return f"{folder}/beat-{worker}.json"


def _parsed(kind: type[M], text: str | None) -> M | None:
    """None for a file that is missing, or still empty."""
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None


# -------------------------------------------------------------------------------------------------------------- worker


class Crew:
    """`Sharing` with the other workers; gives signs of life while it is entered, and at its end tells how it ended."""

    def __init__(self, worker: Worker, paths: JobPaths, parts: Path, watch: Callable[[], None] = lambda: None) -> None:
        """`watch` is called now and then, as `check` is, to raise what else ends the attempt."""
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
        self._beat()  # before the first claim: who finds that knows that this worker lives
        self._taker = Taker(worker, place, self._files, self._incarnation)
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
        # A folder that is gone needs no word, and without a word the others miss the signs of life.
        with suppress(OSError):
            self._beat(ended=True)
        if error is None or isinstance(error, OtherFailedError):
            return
        failure = classify(error)
        if not would_help(failure):
            with suppress(OSError):
                tell_failure(self._worker, self._paths, failure)

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
            self._began = time.monotonic()  # the shard that was taken begins now
        return False

    def check(self) -> None:
        if time.monotonic() - self._checked < BEAT_SECONDS:
            return
        self._checked = time.monotonic()
        result_of(self._worker, self._paths)
        self._watch()

    def ended_by_leader(self) -> bool:
        """Return whether the folder of the parts is gone since worker 0 has joined them. StageError COLLECTIVE when it
        has failed.
        """
        until = time.monotonic() + SILENT_SECONDS
        # Path.exists raises where a folder is gone from a share (ESTALE).
        while not os.path.exists(self._parts) and time.monotonic() < until:  # noqa: PTH110
            if result_of(self._worker, self._paths) is not None:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def tell_done(self, result: Mapping[str, JsonValue]) -> None:
        """Tell the others that the parts are joined and will be gone."""
        word = Word(attempt=self._worker.attempt, state="done", worker=self._worker.index, result=dict(result))
        self._files.write(WORD, word.to_json())

    def _measure(self) -> None:
        """The shard that was taken before, if any, is answered."""
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
                    log.warning("The other workers cannot be told that this one lives: %s", error)
                    warned = True


def tell_failure(worker: Worker, paths: JobPaths, failure: FailureReport) -> None:
    """Have all workers of the attempt end, as another one would fail in the same way."""
    word = Word(attempt=worker.attempt, state="failed", worker=worker.index, failure=failure)
    FolderFiles(paths.root).write(WORD, word.to_json())


def result_of(worker: Worker, paths: JobPaths) -> Mapping[str, JsonValue] | None:
    """Return what worker 0 of this attempt reports; None while it has not made the output. StageError COLLECTIVE when a
    worker has failed.
    """
    word = _parsed(Word, FolderFiles(paths.root).read(WORD))
    if word is None or word.attempt != worker.attempt:
        return None
    if word.failure is not None:
        raise OtherFailedError(worker, word.worker, word.failure)
    return word.result


class OtherFailedError(StageError):
    """The error of a worker that ends as another one has failed; it is never taken for the cause."""

    def __init__(self, worker: Worker, index: int, failure: FailureReport) -> None:
        super().__init__(
            FailureClass.COLLECTIVE,
            "PodFailed",
            f"Pod {index} of the {worker.count} that predict has failed ({failure.reason}): {failure.message}",
            f"The first cause is in the report of pod {index}.",
        )
        self.failure = failure


def would_help(failure: FailureReport) -> bool:
    """Whether another worker can do what this one could not. A row that does not fit the memory fits none of them."""
    return retryable(failure.exit_code) and failure.failure_class is not FailureClass.OUT_OF_MEMORY
