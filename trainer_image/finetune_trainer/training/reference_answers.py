"""Answers of the model before training, for tasks whose objective compares the model with them.

They are computed once, by the sharded model and before a checkpoint is read, so that training holds no second model and
any strategy with a plain forward pass works. They are kept beside the checkpoints, where a resumed run reads them, and
belong to the prepared data and to the weights with which the run began. Of the train split only features that some step
reads are answered.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from finetune_trainer.core.distributed import ProcessWorld, gathered
from finetune_trainer.core.files import replaced
from finetune_trainer.tasks.task_protocol import REFERENCE, Answer
from finetune_trainer.training.rank_shards import ShardedSplit

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)


@dataclass
class ReferenceAnswers:
    """Answers of the reference, without the objects that compute them: processes that read rows receive it."""

    names: Sequence[str] = ()
    """Names of the compared values; empty for most tasks."""
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """By role, shape (features, names); NaN for features without an answer."""

    def of(self, role: str, feature: int) -> Answer:
        """Return the answers on one feature, under `REFERENCE` names."""
        if not self.names:
            return {}
        values = zip(self.names, self.values[role][feature], strict=True)
        return {f"{REFERENCE}{name}": np.asarray(value) for name, value in values}


class Reference(Protocol):
    """Reference that the model is compared with."""

    answers: ReferenceAnswers

    def measure(self, model: torch.nn.Module, device: torch.device) -> None:
        """Compute the answers by `model`, which still is the reference, where none are known. Every rank calls it."""


@dataclass
class NoReference:
    """Reference of tasks without a comparison."""

    answers: ReferenceAnswers = field(default_factory=ReferenceAnswers)

    def measure(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing."""


@dataclass
class KeptReference:
    """Reference with answers on some splits, kept in a file."""

    answers: ReferenceAnswers
    splits: Mapping[str, ShardedSplit]
    """Splits by role, distributed over the ranks."""
    folder: Path
    basis: Mapping[str, str]
    """Inputs of the answers, besides the features."""
    world: ProcessWorld
    on_batch: Callable[[int], None]
    """Called with the number of each finished batch."""

    @property
    def path(self) -> Path:
        """Return the path of the file, which differs for another basis."""
        digest = hashlib.sha256(json.dumps(self.basis, sort_keys=True).encode()).hexdigest()
        return self.folder / f"reference-{digest[:16]}.npz"

    def measure(self, model: torch.nn.Module, device: torch.device) -> None:
        """Read the answers from the file if it is complete; else compute and write them."""
        kept: list[Any] = [self._read() if self.world.is_main else None]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(kept, src=0)
        if kept[0] is not None:
            self.answers.values = kept[0]
            return
        names, done = self.answers.names, 0
        for role, split in self.splits.items():
            mine = []
            for wanted, answers in split.fitted(model, device).answers(model, device):
                mine.append((wanted, np.array([[answer[name] for name in names] for answer in answers], np.float32)))
                done += 1
                self.on_batch(done)
            values = np.full((split.features, len(names)), np.nan, np.float32)
            for wanted, rows in (batch for rank in gathered(mine) for batch in rank):
                values[wanted] = rows
            self.answers.values[role] = values
        if self.world.is_main:
            self._write()
        log.info("The reference model has computed %d batches of features.", done)

    def _read(self) -> dict[str, NDArray[np.float32]] | None:
        if not self.path.is_file():
            return None
        with np.load(self.path, allow_pickle=False) as file:
            values = dict(file.items())
        shapes = {role: (split.features, len(self.answers.names)) for role, split in self.splits.items()}
        if {role: array.shape for role, array in values.items()} != shapes:
            return None
        known = (np.isfinite(values[role][split.wanted]).all() for role, split in self.splits.items())
        return values if all(known) else None

    def _write(self) -> None:
        for former in self.folder.glob("reference-*.npz"):
            former.unlink()
        with replaced(self.path) as partial, partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **self.answers.values)
