"""Shards written by the pods of an Indexed Job, which share nothing but the job's folder.

Pod 0 leads: it reads, checks and cuts as the built-in engine does, leaves an order for each of the others, writes a
share itself, and moves the result into its place when all is there. The others write the shards of their orders and
end. Which pod has written a shard cannot be told from the result.

They speak by files, each written beside its place and moved there: nodes that share a claim have names and renames in
common, and often no locks. What is said is of one attempt, by its id, so that what an earlier one has left is never
taken for news; what is written lies in a folder that no other attempt has. One node may see a minute later what another
has written (NFS keeps names for so long), and patience is longer than that.

Nobody waits for ever. The others give up on a pod 0 that does not come or falls silent, and end with it when it fails.
Pod 0 writes itself what is left of the share of a silent pod: that two write the same shard does no harm, as both write
the same.

Others may write to the folder, too. So orders and words are JSON, and a pod takes from them which rows it encodes, and
never what it runs: the job is its own.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import ENV_ATTEMPT, FailureClass, JobPaths
from finetune_contract.report import FailureReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.data.orders import PodOrder, RowFolder, broken_order, pod_order, read_pod_order, read_shards
from finetune_trainer.data.prepared import shard_name
from finetune_trainer.data.shards import Encoder, Recipe, Shard, ShardFacts
from finetune_trainer.distributed import START_SECONDS, ProcessWorld
from finetune_trainer.failures import StageError, classify
from finetune_trainer.files import EntryName, write_atomically
from finetune_trainer.models import pinned
from finetune_trainer.progress import ProgressSink

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
BEAT_SECONDS = 10.0
"""Between two signs of life."""
SILENT_SECONDS = 300.0
"""After so long without a sign of life a pod is not waited for any more. A node sees a sign up to a minute late, and a
tokenizer is loaded, or 4 MB of text encoded, in less than another.
"""
_FACTS = TypeAdapter(ShardFacts)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Word(Message):
    """What pod 0 says to the others."""

    attempt: str
    state: Literal["reading", "ordered", "done", "failed"]
    beat: int = 0
    """Counts up as long as pod 0 lives."""
    orders: EntryName | None = None
    """Folder of the orders, from the job's folder; None: there are none (yet)."""
    failure: FailureReport | None = None


class Told(Message):
    """What another pod says to pod 0, beside the facts of its shards."""

    rows: int
    """Written so far."""
    failure: FailureReport | None = None


@dataclass(frozen=True)
class Pod:
    """This pod among those that prepare together."""

    index: int
    count: int
    attempt: str
    """The same in all pods of this attempt, and in none of another."""
    root: Path
    """The job's folder."""

    @classmethod
    def of(cls, job: TrainerJob, world: ProcessWorld, paths: JobPaths, environment: Mapping[str, str]) -> Pod:
        """As the environment has it. StageError WORLD_SIZE, or CONFIG when the attempt has no name."""
        if world.size != job.preparation.pods:
            raise StageError(
                FailureClass.WORLD_SIZE,
                "WorldSizeMismatch",
                f"{world.size} pods prepare, the plan counts on {job.preparation.pods}.",
                "Run the stage as an Indexed Job with preparation.workers completions, or set preparation.engine to "
                "auto.",
            )
        attempt = environment.get(ENV_ATTEMPT)
        if not attempt:
            raise StageError(
                FailureClass.CONFIG,
                "AttemptMissing",
                f"{world.size} pods prepare together and {ENV_ATTEMPT} is not set, so they cannot tell each other's "
                "word from that of an earlier attempt.",
                "Set it to the same text in all of them, and to another one in each attempt.",
            )
        return cls(world.rank, world.size, attempt, paths.root)

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def place(self) -> Path:
        """Of pod 0's word."""
        return self.root / "state" / "prepare.pods.json"

    def word(self) -> Word | None:
        """What pod 0 of this attempt says; None: nothing yet."""
        try:
            word = Word.model_validate_json(self.place.read_bytes())
        except (OSError, ValidationError):
            return None
        return word if word.attempt == self.attempt else None

    def lost(self, index: int, failure: FailureReport) -> StageError:
        """The error of a pod that ends as another one has failed; it is never taken for the cause."""
        return StageError(
            FailureClass.COLLECTIVE,
            "PodFailed",
            f"Pod {index} of the {self.count} that prepare has failed ({failure.reason}): {failure.message}",
            f"The first cause is in the report of pod {index}.",
        )


def _order_name(index: int) -> str:
    return f"order-{index}.json"


def _told_name(index: int) -> str:
    return f"pod-{index}.json"


def _facts_name(number: int) -> str:
    return f"facts-{number}.json"


def _write(folder: Path, number: int, shard: Shard, encoder: Encoder, progressed: Callable[[int], None]) -> ShardFacts:
    """Writes the shard, and then its facts: where these are, that is whole."""
    facts = encoder.write(folder, shard, progressed)
    write_atomically(folder / _facts_name(number), _FACTS.dump_json(facts).decode(), folder=False)
    return facts


# --------------------------------------------------------------------------------------------------------------- pod 0


class Leader:
    """Pod 0: as long as it is entered the others hear that it lives, and at the end how it ended."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._word = Word(attempt=pod.attempt, state="reading")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)

    def __enter__(self) -> Leader:
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._tell(state="done", orders=None)
        else:
            with suppress(OSError):  # the error itself says more, and the others will miss the signs of life
                self._tell(state="failed", orders=None, failure=classify(error))

    def _tell(self, **changes: object) -> None:
        with self._lock:
            self._word = self._word.model_copy(update={"beat": self._word.beat + 1, **changes})
            write_atomically(self._pod.place, self._word.to_json())

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._tell()
            except OSError as error:
                log.warning("The other pods cannot be told that this one lives: %s", error)

    def write(
        self,
        folder: Path,
        scratch: Path,
        shards: Sequence[Shard],
        recipe: Recipe,
        encoder: Encoder,
        progressed: Callable[[int], None],
    ) -> Iterator[ShardFacts]:
        """Has all pods write the shards, by way of `scratch`, and tells of them in their order when all are there.
        StageError of a pod that has failed.
        """
        place, count = scratch / "exchange", self._pod.count
        place.mkdir()
        kept = RowFolder(scratch)
        for index in range(1, count):
            own = {number: shards[number] for number in range(index, len(shards), count)}
            write_atomically(place / _order_name(index), pod_order(recipe, own, kept), folder=False)
        self._tell(state="ordered", orders=str(place.relative_to(self._pod.root)))
        found = _Collection(self._pod, place, shards, progressed)
        for number in range(0, len(shards), count):
            found.add(number, _write(place, number, shards[number], encoder, found.while_writing))
        while (missing := found.missing()) is not None:
            number, silent = missing
            if not silent:
                time.sleep(POLL_SECONDS)
                continue
            log.warning("Pod %d of %d is silent; pod 0 writes shard %d itself.", number % count, count, number)
            found.add(number, _write(place, number, shards[number], encoder, lambda _rows: None))
            progressed(len(shards[number].rows.index))
        for number, shard in enumerate(shards):
            # A pod that was taken for dead may still write to its own place, and no longer to the result.
            name = shard_name(shard.role, shard.number, shard.of)
            (place / name).replace(folder / name)
            yield found.facts[number]


class _Collection:
    """What is there of all shards, and when the other pods were heard of last."""

    def __init__(self, pod: Pod, place: Path, shards: Sequence[Shard], progressed: Callable[[int], None]) -> None:
        self.facts: dict[int, ShardFacts] = {}
        self._pod = pod
        self._place = place
        self._shards = shards
        self._progressed = progressed
        self._said: dict[int, Told] = {}
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(range(1, pod.count), self._looked)

    def add(self, number: int, facts: ShardFacts) -> None:
        """A shard that this pod has written."""
        self.facts[number] = facts

    def while_writing(self, rows: int) -> None:
        """Rows that this pod has written; a look at the others, who may have failed."""
        self._progressed(rows)
        self._look()

    def missing(self) -> tuple[int, bool] | None:
        """A shard that is not there and whether its pod is silent, one of a silent pod first; None: all are there."""
        self._look()
        count, silent = self._pod.count, time.monotonic() - SILENT_SECONDS
        missing = [
            (number, self._heard.get(number % count, 0.0) < silent)
            for number in range(len(self._shards))
            if number not in self.facts
        ]
        return max(missing, key=lambda each: each[1], default=None)

    def _look(self) -> None:
        """Takes in what the others have told. StageError when one of them has failed."""
        if time.monotonic() - self._looked < POLL_SECONDS:
            return
        self._looked = time.monotonic()
        names = {path.name for path in self._place.iterdir()}
        for index in self._heard:
            if _told_name(index) in names:
                self._hear(index)
        for number, shard in enumerate(self._shards):
            if number not in self.facts and _facts_name(number) in names:
                path = self._place / _facts_name(number)
                try:
                    self.facts[number] = _FACTS.validate_json(path.read_bytes())
                except ValidationError as error:
                    raise broken_order(path, error) from error
                self._heard[number % self._pod.count] = self._looked
                self._progressed(len(shard.rows.index))

    def _hear(self, index: int) -> None:
        path = self._place / _told_name(index)
        try:
            told = Told.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise broken_order(path, error) from error
        if told.failure is not None:
            raise self._pod.lost(index, told.failure)
        if told != self._said.get(index):
            self._said[index], self._heard[index] = told, self._looked


# ---------------------------------------------------------------------------------------------------------- the others


def follow(pod: Pod, job: TrainerJob, finished: Callable[[], bool], progress: ProgressSink) -> int:
    """What a pod that does not lead does; gives the number of rows that it has written.

    `job`: this pod's own. `finished`: whether the stage was done before this attempt, of which pod 0 says nothing.
    StageError COLLECTIVE when pod 0 is lost or has failed; the task's own are told to pod 0.
    """
    place = _orders(pod, finished)
    if place is None:
        return 0
    told = _Telling(place / _told_name(pod.index), progress)
    try:
        return _obey(pod, job, place, told)
    except BaseException as error:
        # Path.exists raises where a folder is gone from a share (ESTALE).
        if isinstance(error, OSError) and not os.path.exists(place) and _led_to_an_end(pod):  # noqa: PTH110
            return told.rows
        with suppress(OSError):
            told.failed(classify(error))
        raise


def _orders(pod: Pod, finished: Callable[[], bool]) -> Path | None:
    """Waits for the folder of the orders; None: nothing is left to be done."""
    heard, beat = time.monotonic(), None
    while True:
        word = pod.word()
        if word is None and finished():
            return None
        if word is not None:
            if word.failure is not None:
                raise pod.lost(0, word.failure)
            if word.state == "done":
                return None
            if word.orders is not None:
                return pod.root / word.orders
            if word.beat != beat:
                heard, beat = time.monotonic(), word.beat
        patience = START_SECONDS if beat is None else SILENT_SECONDS
        if time.monotonic() - heard > patience:
            raise _silent(pod, patience)
        time.sleep(POLL_SECONDS)


def _silent(pod: Pod, seconds: float) -> StageError:
    return StageError(
        FailureClass.COLLECTIVE,
        "LeaderSilent",
        f"Pod 0 of the {pod.count} that prepare, which reads the data, gave no sign of life in {pod.place} for "
        f"{seconds:g} s.",
        "Look at why that pod does not run; all pods have to run at the same time, and to see the same files.",
    )


def _obey(pod: Pod, job: TrainerJob, place: Path, told: _Telling) -> int:
    """Writes what is ordered and not there yet."""
    path = place / _order_name(pod.index)
    order = read_pod_order(path)
    recipe = Recipe(_of_revision(job, order, path), order.max_length, order.stride, order.model_type)
    shards = read_shards(path, order, RowFolder(place.parent))
    told.total = sum(len(shard.rows.index) for shard in shards.values())
    encoder: Encoder | None = None
    for number, shard in shards.items():
        if (place / _facts_name(number)).exists():
            continue  # pod 0 was tired of waiting
        told.living()
        encoder = encoder or recipe.encoder()
        _write(place, number, shard, encoder, told.written)
    return told.rows


def _of_revision(job: TrainerJob, order: PodOrder, path: Path) -> TrainerJob:
    """The job at the commit that pod 0 has pinned. Where the repository's code runs, this pod asks the Hub itself: on
    the Hub anybody can add a commit to anybody's repository, by a pull request. StageError STORAGE_LOST `BrokenOrder`
    when it finds another one.
    """
    if job.model.trust_remote_code:
        job, _ = pinned(job)
    revision = order.revision
    if revision == job.model.revision:
        return job
    if job.model.trust_remote_code or not _COMMIT.fullmatch(revision):
        raise broken_order(path, f"the model's revision is {revision!r}, here it is {job.model.revision!r}")
    return job.model_copy(update={"model": job.model.model_copy(update={"revision": revision})})


class _Telling:
    """Tells pod 0 how many rows are written: now and then, as that is all the sign of life it gets."""

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self.rows = self.total = 0
        self._path = path
        self._progress = progress
        self._next = time.monotonic()

    def living(self) -> None:
        """Tells it if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_SECONDS
            self._tell(Told(rows=self.rows))

    def written(self, rows: int) -> None:
        """So many more are written."""
        self.rows += rows
        self._progress.update(self.rows, self.total)
        self.living()

    def failed(self, failure: FailureReport) -> None:
        """Why there will be no more."""
        self._tell(Told(rows=self.rows, failure=failure))

    def _tell(self, told: Told) -> None:
        write_atomically(self._path, told.to_json(), folder=False)


def _led_to_an_end(pod: Pod) -> bool:
    """Whether pod 0, which has taken the orders away, ends well. StageError COLLECTIVE when it has failed; False when
    it says nothing more.
    """
    until = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < until:
        word = pod.word()
        if word is not None and word.failure is not None:
            raise pod.lost(0, word.failure)
        if word is not None and word.state == "done":
            return True
        time.sleep(POLL_SECONDS)
    return False
