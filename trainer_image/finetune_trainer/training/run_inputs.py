"""Inputs of a training that all parts of the train stage share, and the files of its plan."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.plan_check import PlannedTraining
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.token_shards import TokenShard
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.strategies.parallel.mesh import MeshShape
from finetune_trainer.strategies.strategy_protocol import Strategy
from finetune_trainer.tasks.task_protocol import TaskParts

log = logging.getLogger(__name__)


def read_deepspeed_config(path: Path | None) -> dict[str, Any] | None:
    """Parse deepspeed.json; raise StageError CONFIG when it cannot be read."""
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(
            FailureClass.CONFIG, "DeepSpeedConfig", f"{path} cannot be read: {error}", "Plan again."
        ) from error
    if not isinstance(config, dict):
        raise StageError(FailureClass.CONFIG, "DeepSpeedConfig", f"{path} holds no JSON object.", "Plan again.")
    return config


def read_estimate(path: Path | None) -> PlannedTraining | None:
    """Parse estimate.json; None without the file, as older operators write none. A file that cannot be read only costs
    the comparison, which a warning reports.
    """
    if path is None or not path.exists():
        return None
    try:
        return PlannedTraining.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        log.warning("The plan is not compared with the training: %s cannot be read: %s", path, error)
        return None


@dataclass(frozen=True)
class TrainingRun:
    """Inputs that all parts of the stage share."""

    job: TrainerJob
    training: Training
    paths: JobPaths
    world: ProcessWorld
    strategy: Strategy
    task: TaskParts
    prepared: PreparedData

    @cached_property
    def data_rank(self) -> int:
        """Data-parallel rank of this process: processes of one rank read the same rows."""
        return self._mesh.data_rank(self.world.rank)

    @cached_property
    def tokens_of_rows(self) -> TokenShard:
        """Slice of its rows' tokens that this process has."""
        return self._mesh.token_shard(self.world.rank)

    @cached_property
    def _mesh(self) -> MeshShape:
        return MeshShape.of(self.training.strategy, self.training.batch.data_parallel)


def training_of(job: TrainerJob) -> Training:
    """Return `job.training`; raise StageError CONFIG when the job trains nothing."""
    if job.training is None:
        raise StageError(
            FailureClass.CONFIG,
            "NothingToTrain",
            f"Job {job.name} has no training section.",
            "Leave the train stage out.",
        )
    return job.training
