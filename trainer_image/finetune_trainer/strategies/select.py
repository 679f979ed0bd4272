"""From the job to its strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

from finetune_contract.choices import FP8_STRATEGIES, WHOLE_STRATEGIES
from finetune_contract.job import Strategy as StrategySettings
from finetune_contract.job import Training
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError
from finetune_trainer.strategies import sequence
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.strategies.ddp import DataParallel
from finetune_trainer.strategies.deepspeed import DeepSpeed
from finetune_trainer.strategies.fsdp import FullySharded
from finetune_trainer.strategies.model_parallel import ModelParallel, refuse_combinations
from finetune_trainer.strategies.single import Single


def strategy_for(training: Training, deepspeed: Mapping[str, Any] | None, scratch: Path) -> Strategy:
    """The strategy of `training`; `deepspeed` is the parsed deepspeed.json, which that strategy needs and the others
    refuse, and `scratch` the folder for what is offloaded to files where it names none.
    """
    settings, world, precision = training.strategy, training.world, training.precision
    if precision == "fp8":
        _refuse_fp8(training)
    if precision == "fp16" and (world.device == "cpu" or settings.name == "fsdp"):
        # accelerate scales no loss on a CPU and computes in fp32 there without a word.
        raise _unsupported("training.precision", precision, "fp32 and bf16 on a CPU and with strategy fsdp")
    if settings.offload_activations == "cpu" and training.arguments.get("torch_compile"):
        # What is compiled as one saves nothing that could be moved.
        raise _unsupported("parallelism.offload.activations", "cpu", "none with training.arguments.torch_compile")
    if training.optimizer == "adafactor" and settings.name not in WHOLE_STRATEGIES:
        raise _unsupported("training.optimizer", "adafactor", f"adamw and sgd with strategy {settings.name}")
    if training.in_four_bits:
        _refuse_qlora(training)
    _refuse_offload(settings)
    if settings.fsdp_sharding != "full" and settings.name != "fsdp":
        raise _unsupported("parallelism.sharding", settings.fsdp_sharding, f"full with strategy {settings.name}")
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
    if settings.sequence > 1:
        sequence.refuse_combinations(training)
        return sequence.SequenceParallel(_around_whole_models(training, deepspeed, scratch), training)
    if settings.model_ranks > 1:
        refuse_combinations(training)
        return ModelParallel(training)
    return _around_whole_models(training, deepspeed, scratch)


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


def _refuse_fp8(training: Training) -> None:
    """StageError for ways to train in which nothing has been seen to multiply in fp8."""
    settings, others = training.strategy, ""
    if settings.name not in FP8_STRATEGIES:
        others = f"strategy {settings.name}"
    elif settings.model_ranks > 1:
        others = "parallelism.tensor or pipeline"
    elif settings.sequence > 1:
        others = "parallelism.sequence"
    elif training.adapter is not None:
        others = f"model.adapter.method {training.adapter.method}"
    if others:
        raise _unsupported("training.precision", "fp8", f"fp32 and bf16 with {others}")


def _refuse_qlora(training: Training) -> None:
    """StageError for what does not go together with weights in 4 bits, which are packed as their whole layer."""
    if training.strategy.name not in WHOLE_STRATEGIES:
        others = f"lora and dora with strategy {training.strategy.name}"
        raise _unsupported("model.adapter.method", "qlora", others)
    if training.arguments.get("torch_compile"):
        raise _unsupported("model.adapter.method", "qlora", "lora and dora with training.arguments.torch_compile")


def _refuse_offload(settings: StrategySettings) -> None:
    """StageError for an offload that the strategy has not."""
    stage = settings.zero_stage or 0
    where = (settings.offload_optimizer, settings.offload_parameters)
    optimizer: tuple[str, ...] = ("none",)
    parameters: tuple[str, ...] = ("none",)
    words = f"strategy {settings.name}"
    if settings.name == "deepspeed":
        optimizer = ("none", "cpu", "nvme") if stage == 3 else ("none", "cpu") if stage else ("none",)
        parameters, words = ("none", "cpu", "nvme") if stage == 3 else ("none",), f"ZeRO stage {stage}"
    elif settings.name == "fsdp":
        # One policy moves parameters, gradients and optimizer state.
        optimizer = parameters = ("none", "cpu") if where[0] == where[1] else ("none",)
        words += ", which offloads both or none"
    for field, value, allowed in (("optimizer", where[0], optimizer), ("parameters", where[1], parameters)):
        if value not in allowed:
            raise _unsupported(f"parallelism.offload.{field}", value, f"{' or '.join(allowed)} with {words}")


def _unsupported(field: str, value: str, supported: str) -> StageError:
    return StageError(
        FailureClass.CONFIG,
        "NotYetSupported",
        f"{field} is {value}; this trainer supports {supported}.",
        f"Choose one of {supported}.",
    )
