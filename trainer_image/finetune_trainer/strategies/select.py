"""From the job to its strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from finetune_contract.job import Training
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.strategies.ddp import DataParallel
from finetune_trainer.strategies.deepspeed import DeepSpeed
from finetune_trainer.strategies.fsdp import FullySharded
from finetune_trainer.strategies.single import Single


def strategy_for(training: Training, deepspeed: Mapping[str, Any] | None) -> Strategy:
    """The strategy of `training`; `deepspeed` is the parsed deepspeed.json, which that strategy needs and the others
    refuse.
    """
    settings, world, precision = training.strategy, training.world, training.precision
    if precision not in ("fp32", "bf16"):
        raise _unsupported("training.precision", precision, "fp32 and bf16")
    if settings.activation_checkpointing == "selective":
        raise _unsupported("parallelism.activationCheckpointing", "selective", "none and full")
    if settings.offload_optimizer != "none" and (settings.name != "deepspeed" or settings.offload_optimizer == "nvme"):
        raise _unsupported(
            "parallelism.offload.optimizer", settings.offload_optimizer, "none, and cpu with strategy deepspeed"
        )
    if settings.name == "single" and world.size != 1:
        # Each process would train a model of its own.
        raise StageError(
            FailureClass.CONFIG,
            "SingleInSeveralProcesses",
            f"parallelism.strategy is single, and the plan starts {world.size} processes.",
            "Plan one process, or choose ddp, fsdp or deepspeed.",
        )
    if (settings.zero_stage is not None) != (settings.name == "deepspeed"):
        raise StageError(
            FailureClass.CONFIG,
            "ZeroStage",
            f"parallelism.strategy is {settings.name} and parallelism.zeroStage is {settings.zero_stage}.",
            "ZeRO stages belong to strategy deepspeed, which needs one.",
        )
    if (deepspeed is not None) != (settings.name == "deepspeed"):
        given = "given" if deepspeed is not None else "missing"
        raise StageError(
            FailureClass.CONFIG,
            "DeepSpeedConfig",
            f"parallelism.strategy is {settings.name} and deepspeed.json is {given}.",
            "Pass --deepspeed with strategy deepspeed, and only then.",
        )
    match settings.name:
        case "single":
            return Single(precision)
        case "ddp":
            return DataParallel(precision, world.size)
        case "fsdp":
            return FullySharded(precision, world.device, world.size)
        case "deepspeed":
            return DeepSpeed(settings, precision, world.size, deepspeed or {})
        case _:
            assert_never(settings.name)


def _unsupported(field: str, value: str, supported: str) -> StageError:
    return StageError(
        FailureClass.CONFIG,
        "NotYetSupported",
        f"{field} is {value}; this trainer supports {supported}.",
        f"Choose one of {supported}.",
    )
