"""Content of a running loop's checkpoints, and the times at which they are due."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import MOST_SAVING, CheckpointSchedule
from finetune_trainer.checkpoint.checkpoints import Checkpoint, CheckpointStore, refuse_other_job
from finetune_trainer.checkpoint.sharded_hashing import ShardedHashing, work_of_rank_0
from finetune_trainer.checkpoint.tensor_files import read_pickled
from finetune_trainer.core.distributed import (
    ProcessWorld,
    barrier,
    new_waiting_group,
    patiently_gathered,
    patiently_shared,
    waiting_in,
)
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.strategies.strategy_protocol import Strategy

if TYPE_CHECKING:
    from finetune_trainer.strategies.shard_files import StagedState
    from finetune_trainer.training.loop_parts import RunningLoop

log = logging.getLogger(__name__)

_STATE = "state"
_SCHEDULER = "scheduler.pt"
_STOPPING = "stopping.json"
_SCALING = "scaling.json"
"""State of the loss scaling, only where the loss is scaled; earlier releases wrote none."""
_TRAINER_STATE = "trainer_state.json"
"""File that earlier releases, which trained by transformers' Trainer, read when they resume."""


class HasState(Protocol):
    """A small object with a state to resume from."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""


class RunSaver:
    """Writes checkpoints of one run into the store and restores the loop from one."""

    def __init__(
        self,
        store: CheckpointStore,
        schedule: CheckpointSchedule,
        *,
        hashing: ShardedHashing,
        strategy: Strategy,
        label: str,
        world: ProcessWorld,
        data_rank: int,
        job: dict[str, Any],
        stopper: HasState,
        seed: int,
    ) -> None:
        self._store = store
        self._hashing = hashing
        """Hashing of `store`, which all ranks take part in."""
        self._schedule = schedule
        self._strategy = strategy
        self._label = label
        self._world = world
        self._data_rank = data_rank
        self._job = job
        self._stopper = stopper
        self._seed = seed
        self._source: Checkpoint | None = None
        self._saved_any = False
        self._saved_at = time.monotonic()
        self._saving_seconds = 0.0
        """Time that the training waited for the last checkpoint."""
        self._working_since: float | None = None
        self._writing: BackgroundWork | None = None
        """Checkpoint that a thread writes; None: there is none."""
        self._group = new_waiting_group() if schedule.asynchronous else None
        """Processes of the threads: collectives of the training and theirs come in any order."""

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, the same on every rank; None to start at step 0."""
        mine: tuple[Checkpoint | None, tuple[str, str, str] | None] = None, None
        with work_of_rank_0(self._world.rank, self._hashing) as main:
            if main and self._schedule.resume:
                try:
                    mine = self._store.newest(), None
                except StageError as error:
                    mine = None, (error.reason, error.message, error.hint)
        self._source, failure = patiently_shared(mine)
        if failure is not None:
            raise StageError(FailureClass.CHECKPOINT, *failure)
        if self._source is None:
            return None
        refuse_other_job(self._source, self._job)
        manifest = self._source.manifest
        why_not = self._strategy.why_not_from(manifest.strategy, manifest.world_size, self._world.size)
        if why_not is not None:
            raise StageError(
                FailureClass.CHECKPOINT,
                "CheckpointOfAnotherWorld",
                f"Training cannot resume from {self._source.folder}: {why_not}.",
                f"Run it with strategy {manifest.strategy} on {manifest.world_size} processes, or train from the "
                "beginning (checkpoints.resume: never).",
            )
        log.info("Resuming from %s (step %d).", self._source.folder, manifest.step)
        return self._source.folder

    @property
    def first_step(self) -> int:
        """Return the number of steps already done."""
        return self._source.manifest.step if self._source is not None else 0

    def wants(self) -> bool:
        """Return True by the clock, when the schedule is in minutes, or when more unsaved work could be lost than
        allowed; then checkpoints are so far apart that saving takes at most `MOST_SAVING` of the time, and no training
        waits for the one before. Return True at once where writing failed, as `save` raises the error on all ranks.
        """
        if self._writing is not None and self._writing.failed:
            return True
        now, minutes, within = time.monotonic(), self._schedule.every_minutes, self._schedule.within_minutes
        if minutes is not None:
            return now - self._saved_at >= 60 * minutes
        if within is None or (self._writing is not None and not self._writing.done):
            return False
        if self._working_since is None:  # time before the first step is not lost work
            self._working_since = now
        pause = max(60 * within, self._saving_seconds / MOST_SAVING)
        return now - max(self._working_since, self._saved_at) >= pause

    def due(self, step: int, *, by_clock: bool) -> bool:
        """Return True by steps or by the clock; only by the clock when the schedule is in minutes."""
        return by_clock or (self._schedule.every_minutes is None and step % self._schedule.every_steps == 0)

    def save(self, loop: RunningLoop, *, wait: bool) -> None:
        """Write every rank's part; rank 0 seals the checkpoint. Return on all ranks when it is valid.

        If the schedule is asynchronous, and not to `wait`: return once the state is copied, of which a thread of each
        rank writes its part. First wait for the checkpoint that is still being written, as `finish`.
        """
        self.finish()
        step, started = loop.state.global_step, time.monotonic()
        staged: StagedState | None = None
        with self._errors_of(step):
            self._begin(loop, step)
            if wait or not self._schedule.asynchronous:
                self._seal(step, self._strategy.save(loop.placed, self._store.partial(step) / _STATE))
            else:
                staged = self._strategy.stage(loop.placed)
        self.saved(time.monotonic() - started)
        if staged is None:
            log.info("Checkpoint of step %d written in %.1f s.", step, self._saving_seconds)
        else:
            work = partial(self._write_staged, step, staged, self._saving_seconds)
            self._writing = BackgroundWork(f"checkpoint-{step}", work)

    def saved(self, seconds: float) -> None:
        """Record that the training waited so long for a checkpoint."""
        self._saved_at, self._saving_seconds = time.monotonic(), seconds

    @property
    def writing(self) -> bool:
        """True from `save` to `finish` of a checkpoint that threads write."""
        return self._writing is not None

    def finish(self) -> None:
        """Wait until the checkpoint that threads write is valid; raise their error. Every rank must call it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        started, under_way = time.monotonic(), not writing.done
        writing.wait()
        if under_way:
            log.info("Training waited %.1f s for the checkpoint before this one.", time.monotonic() - started)

    @contextmanager
    def _errors_of(self, step: int) -> Iterator[None]:
        """Name the errors of a full volume, and free the space of a checkpoint that could not be written."""
        try:
            with storage_errors_named(self._store.partial(step), f"the checkpoint of step {step}"):
                yield
        except BaseException:
            if self._world.is_main:
                self._store.abandon(step)
            raise

    def _begin(self, loop: RunningLoop, step: int) -> None:
        """Create the folder, with all but the state of model and optimizer, which is small."""
        folder, main = self._store.partial(step), self._world.is_main
        if main:
            self._store.begin(step)
            (folder / _STATE).mkdir()
        barrier()
        torch.save(random_state(), folder / _random_name(self._world.rank))
        if main:
            torch.save(loop.engine.schedule.state_dict(), folder / _SCHEDULER)
            (folder / _STOPPING).write_text(json.dumps(self._stopper.state()), encoding="utf-8")
            if loop.engine.scaling:
                (folder / _SCALING).write_text(json.dumps(loop.engine.scaling), encoding="utf-8")
            loop.state.save_to_json(str(folder / _TRAINER_STATE))

    def _write_staged(self, step: int, staged: StagedState, paused: float) -> None:
        """Write a copied state and seal the checkpoint, in a thread beside the training."""
        started = time.monotonic()
        with waiting_in(self._group), self._errors_of(step):
            self._seal(step, staged.write(self._store.partial(step) / _STATE))
        text = (
            "Checkpoint of step %d written in %.1f s beside the training, which waited %.1f s for a copy of %.2f GiB."
        )
        log.info(text, step, time.monotonic() - started, paused, staged.size / 2**30)

    def _seal(self, step: int, written: Mapping[str, FileEntry]) -> None:
        """Have rank 0 seal the checkpoint of files `written` by this rank. Return on all ranks when it is valid."""
        self._hashing.wrote(patiently_gathered({f"{_STATE}/{name}": entry for name, entry in written.items()}))
        with work_of_rank_0(self._world.rank, self._hashing) as main:
            if main:
                self._store.commit(
                    step,
                    strategy=self._label,
                    world_size=self._world.size,
                    job=self._job,
                    first_of_run=self._source is None and not self._saved_any,
                )
        barrier()
        self._saved_any = True

    def resume(self, loop: RunningLoop) -> None:
        """Restore the loop and the stopper from the checkpoint that `find` chose, the generators last."""
        folder = self._chosen().folder
        self._strategy.load(loop.placed, self._chosen().part(_STATE))
        schedule = read_pickled(self._chosen().part("."), folder / _SCHEDULER)
        loop.engine.schedule.load_state_dict(schedule_of_groups(schedule, len(loop.placed.optimizer.param_groups)))
        self._stopper.restore(json.loads((folder / _STOPPING).read_text(encoding="utf-8")))
        if (folder / _SCALING).exists():
            loop.engine.restore_scaling(json.loads((folder / _SCALING).read_text(encoding="utf-8")))
        loop.state.global_step = self.first_step
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        """Restore this rank's generators; in a world of another size seed them from the seed and the step, alike for
        all processes of a replica, whose dropout must be the same.
        """
        path = self._chosen().folder / _random_name(self._world.rank)
        if path.exists() and self._chosen().manifest.world_size == self._world.size:
            set_random_state(read_pickled(self._chosen().part("."), path))
        else:
            torch.manual_seed(self._seed + 1_000_003 * self.first_step + self._data_rank)

    def _chosen(self) -> Checkpoint:
        assert self._source is not None
        return self._source


_BY_GROUP = ("lr_lambdas", "base_lrs", "_last_lr")
"""Keys of a scheduler's state: lists with one entry for each parameter group."""


def schedule_of_groups(state: dict[str, Any], groups: int) -> dict[str, Any]:
    """Return a scheduler's state for another number of parameter groups, which all follow one schedule: the number
    depends on the sharding.
    """
    return {name: value[:1] * groups if name in _BY_GROUP else value for name, value in state.items()}


def _random_name(rank: int) -> str:
    return f"random-{rank}.pt"


def random_state() -> dict[str, Any]:
    """Return the state of all generators of this process, in types that load without running code."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# ------------------------------------------------------------------------------------------------------ background work


class BackgroundWork:
    """Work of one thread, begun at once. The thread is a daemon: a process that fails does not wait for it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `wait` raises it
            self._error = error

    @property
    def done(self) -> bool:
        """True once the work has ended, also with an error."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True once the work has ended with an error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the end of the work, and raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
