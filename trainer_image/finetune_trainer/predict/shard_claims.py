"""Claims of shards by workers that share a prediction: which shard is next, and whose is taken over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message
from finetune_contract.layout import ENV_ATTEMPT, FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.row_shards import ShardKey
from finetune_trainer.predict.prediction_parts import is_facts

M = TypeVar("M", bound=Message)
POLL_SECONDS = 0.5
"""First wait for other workers; each next one is twice as long."""
MOST_POLL_SECONDS = 10.0
SILENT_SECONDS = 300.0
"""Time without a heartbeat after which a worker's shards are taken over. NFS shows a file up to a minute late."""
STRAGGLER_SECONDS = 30.0
"""Shortest time after which an idle worker takes over another worker's shard, too."""
STRAGGLER_FACTOR = 3.0
"""The same, as a multiple of the idle worker's own longest shard."""
CHOOSING_SECONDS = 1800.0
"""Time that a live worker may take for a task that it does for all, before the others do it too. Measuring all backends
takes minutes.
"""
WATCHED = 4
"""Shards in progress that an idle worker checks in one poll."""


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
class Worker:
    """This worker among all workers of an attempt."""

    index: int
    count: int
    attempt: str
    """Name shared by all workers of this attempt, and by no other attempt."""

    @classmethod
    def of(cls, job: TrainerJob, world: ProcessWorld, environment: Mapping[str, str]) -> Worker | None:
        """Return the worker that the environment describes, one for each model; None if one model answers all rows.

        StageError WORLD_SIZE, or CONFIG if the attempt has no name.
        """
        pod = job.inference(Stage.PREDICT)
        planned = 1 if job.predict is None else job.predict.workers * pod.processes
        if world.size != planned:
            raise StageError(
                FailureClass.WORLD_SIZE,
                "WorldSizeMismatch",
                f"{world.size} workers run stage predict, and the plan has {planned} (predict.workers x "
                "processes of a pod).",
                "Run the stage as an Indexed Job with predict.workers completions, or by torchrun with processes.",
            )
        if planned == pod.tensor:
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
        return cls(world.rank // pod.tensor, world.size // pod.tensor, attempt)

    @property
    def leads(self) -> bool:
        """True if it joins the parts."""
        return self.index == 0

    def folder(self, parts: str) -> str:
        """Return the folder of this attempt's claims and heartbeats below that of the parts."""
        return f"{parts}/attempt-{hashlib.sha256(self.attempt.encode()).hexdigest()[:16]}"


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
            claim = parsed(Claim, self._files.read(f"{self._folder}/claims/{name}.{generation}"))
            seen = _SeenClaim(claim, now if seen is None else seen.since)
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
        beat = parsed(Beat, self._files.read(beat_name(self._folder, claim.worker)))
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


def parsed(kind: type[M], text: str | None) -> M | None:
    """Parse a file; None if it is missing, or still empty."""
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None
