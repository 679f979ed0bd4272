"""Choice of the strategy for a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Training
from finetune_trainer.core.failures import StageError
from finetune_trainer.strategies.ddp import DataParallel
from finetune_trainer.strategies.deepspeed import DeepSpeed
from finetune_trainer.strategies.fsdp import FullySharded
from finetune_trainer.strategies.parallel import sequence
from finetune_trainer.strategies.parallel.model_parallel import ModelParallel, refuse_broken_passes
from finetune_trainer.strategies.parallel.sharded_optimizer import ShardedOptimizer
from finetune_trainer.strategies.parallel.sharded_replicas import ShardedReplicas
from finetune_trainer.strategies.single import Single
from finetune_trainer.strategies.strategy_protocol import Strategy


def strategy_for(training: Training, deepspeed: Mapping[str, Any] | None, scratch: Path) -> Strategy:
    """Return the strategy of `training`. `deepspeed`: the parsed deepspeed.json, which strategy deepspeed needs and the
    others refuse. `scratch`: folder for state offloaded to files, if deepspeed.json names none.
    """
    settings = training.strategy
    if settings.name == "deepspeed" and settings.zero_stage is None:
        raise StageError(
            FailureClass.CONFIG,
            "ZeroStage",
            "parallelism.strategy is deepspeed, and parallelism.zeroStage is not set.",
            "Plan again.",
        )
    if (deepspeed is not None) != (settings.name == "deepspeed"):
        given = "given" if deepspeed is not None else "missing"
        raise StageError(
            FailureClass.CONFIG,
            "DeepSpeedConfig",
            f"parallelism.strategy is {settings.name} and deepspeed.json is {given}.",
            "Pass --deepspeed with strategy deepspeed, and only then.",
        )
    if settings.sequence > 1:
        return sequence.SequenceParallel(_around_whole_models(training, deepspeed, scratch), training)
    if settings.model_ranks > 1:
        refuse_broken_passes(training)
        return _around_split_models(training)
    return _around_whole_models(training, deepspeed, scratch)


def _around_split_models(training: Training) -> Strategy:
    settings = training.strategy
    if settings.name == "fsdp":
        return ShardedReplicas(training)
    return ModelParallel(training) if settings.zero_stage is None else ShardedOptimizer(training)


def _around_whole_models(training: Training, deepspeed: Mapping[str, Any] | None, scratch: Path) -> Strategy:
    settings, world, precision = training.strategy, training.world, training.precision
    match settings.name:
        case "single":
            return Single(precision)
        case "ddp":
            return DataParallel(precision, world.size)
        case "fsdp":
            return FullySharded(settings, precision, world)
        case "deepspeed":
            return DeepSpeed(settings, precision, world.size, deepspeed or {}, scratch)
        case _:
            assert_never(settings.name)
