"""Shards written by the pods of an Indexed Job, which share only the job's folder.

Pod 0 leads: it reads, checks and cuts as the built-in engine does, writes an order for each of the others, writes a
share itself, and moves the result into place when it is complete. The others write the shards of their orders and end.
The result does not depend on which pod has written a shard.

They communicate by files, each written to a temporary name and renamed: nodes that share a claim have names and renames
in common, and often no locks. Messages carry the attempt's id, so that a message of an earlier attempt is never taken
for a new one; results are in a folder of the attempt. A node may see another's files a minute late (NFS caches names
for so long), and the time limits are longer than that.

No wait is unlimited. The others give up on a pod 0 that does not start or falls silent, and end with it when it fails.
Pod 0 itself writes the rest of a silent pod's share: two pods may write the same shard, as both write the same bytes.

Others may write to the folder, too. So orders and messages are JSON, and a pod takes from them which rows it encodes,
but never the code that it runs: the job is its own.
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
from finetune_trainer.core.distributed import START_SECONDS, ProcessWorld
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.files import EntryName, write_atomically
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.data.prepared import shard_name
from finetune_trainer.models.loading import pinned
from finetune_trainer.prepare.orders import PodOrder, RowFolder, broken_order, pod_order, read_pod_order, read_shards
from finetune_trainer.prepare.shards import Encoder, Recipe, Shard, ShardFacts

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
BEAT_SECONDS = 10.0
"""Interval between two heartbeats."""
SILENT_SECONDS = 300.0
"""Time without a heartbeat after which a pod is no longer waited for. A node sees a heartbeat up to a minute late, and
loading a tokenizer, or encoding 4 MB of text, takes less than another.
"""
_FACTS = TypeAdapter(ShardFacts)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class LeaderStatus(Message):
    """Message of pod 0 to the others."""

    attempt: str
    state: Literal["reading", "ordered", "done", "failed"]
    beat: int = 0
    """Heartbeat counter of pod 0."""
    orders: EntryName | None = None
    """Folder of the orders, from the job's folder; None: there are none (yet)."""
    failure: FailureReport | None = None


class FollowerStatus(Message):
    """Message of another pod to pod 0, beside the facts of its shards."""

    rows: int
    """Number of rows written so far."""
    failure: FailureReport | None = None


@dataclass(frozen=True)
class Pod:
    """This pod and the others that prepare with it."""

    index: int
    count: int
    attempt: str
    """Id that is the same in all pods of this attempt, and differs from other attempts."""
    root: Path
    """Folder of the job."""

    @classmethod
    def of(cls, job: TrainerJob, world: ProcessWorld, paths: JobPaths, environment: Mapping[str, str]) -> Pod:
        """Read the environment. Raise StageError WORLD_SIZE, or CONFIG when the attempt has no name."""
        if world.size != job.preparation.pods:
            raise StageError(
                FailureClass.WORLD_SIZE,
                "WorldSizeMismatch",
                f"{world.size} pods run stage prepare, and the plan has {job.preparation.pods}.",
                "Run the stage as an Indexed Job with preparation.workers completions, or set preparation.engine to "
                "auto.",
            )
        attempt = environment.get(ENV_ATTEMPT)
        if not attempt:
            raise StageError(
                FailureClass.CONFIG,
                "AttemptMissing",
                f"{world.size} pods prepare together and {ENV_ATTEMPT} is not set, so they cannot distinguish their "
                "files from those of an earlier attempt.",
                "Set it to the same value in all pods, and to a new value for each attempt.",
            )
        return cls(world.rank, world.size, attempt, paths.root)

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def place(self) -> Path:
        """Path of pod 0's message."""
        return self.root / "state" / "prepare.pods.json"

    def leader_status(self) -> LeaderStatus | None:
        """Return the message of pod 0 of this attempt; None: nothing yet."""
        try:
            leader_status = LeaderStatus.model_validate_json(self.place.read_bytes())
        except (OSError, ValidationError):
            return None
        return leader_status if leader_status.attempt == self.attempt else None

    def lost(self, index: int, failure: FailureReport) -> StageError:
        """Return the error of a pod that ends because another one has failed; it is never taken for the cause."""
        return StageError(
            FailureClass.COLLECTIVE,
            "PodFailed",
            f"Pod {index} of {self.count} of stage prepare failed ({failure.reason}): {failure.message}",
            f"See the report of pod {index} for the first cause.",
        )


def _order_name(index: int) -> str:
    return f"order-{index}.json"


def _follower_status_name(index: int) -> str:
    return f"pod-{index}.json"


def _facts_name(number: int) -> str:
    return f"facts-{number}.json"


def _write(folder: Path, number: int, shard: Shard, encoder: Encoder, progressed: Callable[[int], None]) -> ShardFacts:
    """Write the shard, and then its facts, which mark it as complete."""
    facts = encoder.write(folder, shard, progressed)
    write_atomically(folder / _facts_name(number), _FACTS.dump_json(facts).decode(), folder=False)
    return facts


# --------------------------------------------------------------------------------------------------------------- pod 0


class Leader:
    """Pod 0: while entered, it sends heartbeats to the others, and at the end the outcome."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._status = LeaderStatus(attempt=pod.attempt, state="reading")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)

    def __enter__(self) -> Leader:
        self._publish()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._publish(state="done", orders=None)
        else:
            with suppress(OSError):  # the error itself has the details, and the others will miss the heartbeat
                self._publish(state="failed", orders=None, failure=classify(error))

    def _publish(self, **changes: object) -> None:
        with self._lock:
            self._status = self._status.model_copy(update={"beat": self._status.beat + 1, **changes})
            write_atomically(self._pod.place, self._status.to_json())

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._publish()
            except OSError as error:
                log.warning("The heartbeat for the other pods cannot be written: %s", error)

    def write(
        self,
        folder: Path,
        scratch: Path,
        shards: Sequence[Shard],
        recipe: Recipe,
        encoder: Encoder,
        progressed: Callable[[int], None],
    ) -> Iterator[ShardFacts]:
        """Have all pods write the shards, through `scratch`, and yield their facts in order when all are complete.
        Raise StageError of a pod that has failed.
        """
        place, count = scratch / "exchange", self._pod.count
        place.mkdir()
        kept = RowFolder(scratch)
        for index in range(1, count):
            pod_shards = {number: shards[number] for number in range(index, len(shards), count)}
            write_atomically(place / _order_name(index), pod_order(recipe, pod_shards, kept), folder=False)
        self._publish(state="ordered", orders=str(place.relative_to(self._pod.root)))
        collection = _Collection(self._pod, place, shards, progressed)
        for number in range(0, len(shards), count):
            collection.add(number, _write(place, number, shards[number], encoder, collection.while_writing))
        while (missing := collection.missing()) is not None:
            number, silent = missing
            if not silent:
                time.sleep(POLL_SECONDS)
                continue
            log.warning("Pod %d of %d sends no heartbeat; pod 0 writes shard %d itself.", number % count, count, number)
            collection.add(number, _write(place, number, shards[number], encoder, lambda _rows: None))
            progressed(len(shards[number].rows.index))
        for number, shard in enumerate(shards):
            # A pod that was given up may still write to its own place, but no longer to the result.
            name = shard_name(shard.role, shard.number, shard.of)
            (place / name).replace(folder / name)
            yield collection.facts[number]


class _Collection:
    """Facts of the shards received so far, and the time of each pod's last heartbeat."""

    def __init__(self, pod: Pod, place: Path, shards: Sequence[Shard], progressed: Callable[[int], None]) -> None:
        self.facts: dict[int, ShardFacts] = {}
        self._pod = pod
        self._place = place
        self._shards = shards
        self._progressed = progressed
        self._statuses: dict[int, FollowerStatus] = {}
        self._looked = time.monotonic()
        self._last_seen = dict.fromkeys(range(1, pod.count), self._looked)

    def add(self, number: int, facts: ShardFacts) -> None:
        """Add a shard that this pod has written."""
        self.facts[number] = facts

    def while_writing(self, rows: int) -> None:
        """Report rows that this pod has written, and check the others, which may have failed."""
        self._progressed(rows)
        self._look()

    def missing(self) -> tuple[int, bool] | None:
        """Return a missing shard and True if its pod is silent, silent pods first; None: all are there."""
        self._look()
        count, silent = self._pod.count, time.monotonic() - SILENT_SECONDS
        missing = [
            (number, self._last_seen.get(number % count, 0.0) < silent)
            for number in range(len(self._shards))
            if number not in self.facts
        ]
        return max(missing, key=lambda shard: shard[1], default=None)

    def _look(self) -> None:
        """Read the others' messages. Raise StageError when one of them has failed."""
        if time.monotonic() - self._looked < POLL_SECONDS:
            return
        self._looked = time.monotonic()
        names = {path.name for path in self._place.iterdir()}
        for index in self._last_seen:
            if _follower_status_name(index) in names:
                self._read_status(index)
        for number, shard in enumerate(self._shards):
            if number not in self.facts and _facts_name(number) in names:
                path = self._place / _facts_name(number)
                try:
                    self.facts[number] = _FACTS.validate_json(path.read_bytes())
                except ValidationError as error:
                    raise broken_order(path, error) from error
                self._last_seen[number % self._pod.count] = self._looked
                self._progressed(len(shard.rows.index))

    def _read_status(self, index: int) -> None:
        path = self._place / _follower_status_name(index)
        try:
            status = FollowerStatus.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise broken_order(path, error) from error
        if status.failure is not None:
            raise self._pod.lost(index, status.failure)
        if status != self._statuses.get(index):
            self._statuses[index], self._last_seen[index] = status, self._looked


# ---------------------------------------------------------------------------------------------------------- the others


def follow(pod: Pod, job: TrainerJob, finished: Callable[[], bool], progress: ProgressSink) -> int:
    """Run a pod that does not lead; return the number of rows that it has written.

    `job`: this pod's own. `finished`: True if the stage was done before this attempt, which pod 0 does not report.
    Raise StageError COLLECTIVE when pod 0 is lost or has failed; the task's own errors are reported to pod 0.
    """
    place = _orders(pod, finished)
    if place is None:
        return 0
    reporter = _FollowerReporter(place / _follower_status_name(pod.index), progress)
    try:
        return _obey(pod, job, place, reporter)
    except BaseException as error:
        # Path.exists raises where a folder was deleted from a share (ESTALE).
        if isinstance(error, OSError) and not os.path.exists(place) and _led_to_an_end(pod):  # noqa: PTH110
            return reporter.rows
        with suppress(OSError):
            reporter.failed(classify(error))
        raise


def _orders(pod: Pod, finished: Callable[[], bool]) -> Path | None:
    """Wait for the folder of the orders; None: there is nothing left to do."""
    last_seen, beat = time.monotonic(), None
    while True:
        status = pod.leader_status()
        if status is None and finished():
            return None
        if status is not None:
            if status.failure is not None:
                raise pod.lost(0, status.failure)
            if status.state == "done":
                return None
            if status.orders is not None:
                return pod.root / status.orders
            if status.beat != beat:
                last_seen, beat = time.monotonic(), status.beat
        patience = START_SECONDS if beat is None else SILENT_SECONDS
        if time.monotonic() - last_seen > patience:
            raise _silent(pod, patience)
        time.sleep(POLL_SECONDS)


def _silent(pod: Pod, seconds: float) -> StageError:
    return StageError(
        FailureClass.COLLECTIVE,
        "LeaderSilent",
        f"Pod 0 of {pod.count}, which reads the data, wrote no heartbeat to {pod.place} for {seconds:g} s.",
        "Check why that pod does not run; all pods must run at the same time and share their files.",
    )


def _obey(pod: Pod, job: TrainerJob, place: Path, reporter: _FollowerReporter) -> int:
    """Write the ordered shards that do not exist yet."""
    path = place / _order_name(pod.index)
    order = read_pod_order(path)
    job = _of_revision(job, order, path)
    job = job.model_copy(update={"preparation": job.preparation.model_copy(update={"packing": order.packing})})
    recipe = Recipe(job, order.max_length, order.stride, order.model_type)
    shards = read_shards(path, order, RowFolder(place.parent))
    reporter.total = sum(len(shard.rows.index) for shard in shards.values())
    encoder: Encoder | None = None
    for number, shard in shards.items():
        if (place / _facts_name(number)).exists():
            continue  # pod 0 has given up on this pod
        reporter.living()
        encoder = encoder or recipe.encoder()
        _write(place, number, shard, encoder, reporter.written)
    return reporter.rows


def _of_revision(job: TrainerJob, order: PodOrder, path: Path) -> TrainerJob:
    """Return the job at the commit pinned by pod 0. Where the repository's code runs, this pod asks the Hub itself: on
    the Hub anybody can add a commit to anybody's repository, by a pull request. Raise StageError STORAGE_LOST
    `BrokenOrder` for another commit.
    """
    if job.model.trust_remote_code:
        job, _ = pinned(job)
    revision = order.revision
    if revision == job.model.revision:
        return job
    if job.model.trust_remote_code or not _COMMIT.fullmatch(revision):
        raise broken_order(path, f"the model's revision is {revision!r}, here it is {job.model.revision!r}")
    return job.model_copy(update={"model": job.model.model_copy(update={"revision": revision})})


class _FollowerReporter:
    """Reports the number of written rows to pod 0 at intervals; these reports are the pod's only heartbeat."""

    def __init__(self, path: Path, progress: ProgressSink) -> None:
        self.rows = self.total = 0
        self._path = path
        self._progress = progress
        self._next = time.monotonic()

    def living(self) -> None:
        """Send a report if it is due."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_SECONDS
            self._publish(FollowerStatus(rows=self.rows))

    def written(self, rows: int) -> None:
        """Count further written rows."""
        self.rows += rows
        self._progress.update(self.rows, self.total)
        self.living()

    def failed(self, failure: FailureReport) -> None:
        """Report a failure."""
        self._publish(FollowerStatus(rows=self.rows, failure=failure))

    def _publish(self, status: FollowerStatus) -> None:
        write_atomically(self._path, status.to_json(), folder=False)


def _led_to_an_end(pod: Pod) -> bool:
    """Return True if pod 0, which has deleted the orders, ends well; False when it sends nothing more. Raise StageError
    COLLECTIVE when it has failed.
    """
    until = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < until:
        status = pod.leader_status()
        if status is not None and status.failure is not None:
            raise pod.lost(0, status.failure)
        if status is not None and status.state == "done":
            return True
        time.sleep(POLL_SECONDS)
    return False
