"""From the job to `transformers.TrainingArguments`: the only place that creates them."""

from __future__ import annotations

import dataclasses
import json
import logging
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.arguments import allows_tf32, check_arguments
from finetune_contract.choices import OptimizerName
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Training
from finetune_trainer.core.distributed import COLLECTIVE_TIMEOUT
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.device_units import has_tf32

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)

_OPTIMIZERS: Mapping[OptimizerName, str] = {"adamw": "adamw_torch_fused", "adafactor": "adafactor", "sgd": "sgd"}
"""Names in transformers. Unfused, AdamW on a CPU passes over each weight a dozen times."""

_OPTIMIZER_CLASSES: Mapping[OptimizerName, tuple[str, ...]] = {
    "adamw": ("AdamW", "DeepSpeedCPUAdam"),
    "adafactor": ("Adafactor",),
    "sgd": ("SGD",),
}

_READ_BY: Mapping[str, OptimizerName] = {
    "adam_beta1": "adamw", "adam_beta2": "adamw", "adam_epsilon": "adamw", "optim_args": "sgd"
}  # fmt: skip
"""Argument -> the only optimizer that reads it."""


def is_optimizer(name: OptimizerName, optimizer: object) -> bool:
    """Return whether the optimizer inside `optimizer` and its wrappers is the one called `name`."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__ in _OPTIMIZER_CLASSES[name]


def refuse_bad_arguments(training: Training) -> None:
    """Raise StageError CONFIG for the first bad field of `training.arguments`, naming all of them."""
    problems = check_arguments(training.arguments)
    if problems:
        raise StageError(
            FailureClass.CONFIG,
            problems[0].reason,
            " ".join(problem.message for problem in problems),
            " ".join(dict.fromkeys(problem.hint for problem in problems)),
        )


def training_arguments(training: Training, output: Path, strategy_arguments: Mapping[str, object]) -> TrainingArguments:
    """Return the arguments of the job's run.

    Checkpoints, evaluation and the data order are the trainer's own, and off here, as experiment trackers record all
    arguments. Raises StageError CONFIG when transformers refuses a value, e.g. a contradicting DeepSpeed configuration.
    """
    from transformers import TrainingArguments

    from finetune_trainer.training.passes.activations import checkpointing_arguments

    refuse_bad_arguments(training)
    batch = training.loop_batch
    fields: dict[str, object] = {
        "output_dir": str(output),
        "max_steps": training.max_steps,
        "per_device_train_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.scheduler,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": _OPTIMIZERS[training.optimizer],
        "seed": training.seed,
        "label_smoothing_factor": training.label_smoothing,
        **checkpointing_arguments(training.strategy.activation_checkpointing),
        "use_cpu": training.world.device == "cpu",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "dataloader_pin_memory": training.world.device == "cuda",
        "ddp_timeout": int(COLLECTIVE_TIMEOUT.total_seconds()),
    }
    # The trackers of report_to are opened by `tracking`, which passes the loop their callbacks.
    free = {name: value for name, value in training.arguments.items() if name != "report_to"}
    merged: dict[str, Any] = {**fields, **strategy_arguments, **free, **tf32_setting(training)}
    try:
        arguments = TrainingArguments(**merged)
        if arguments.dataloader_persistent_workers and not arguments.dataloader_num_workers:
            raise ValueError("dataloader_persistent_workers needs dataloader_num_workers above 0.")
        for name, optimizer in _READ_BY.items():
            if name in training.arguments and training.optimizer != optimizer:
                raise ValueError(f"{name} has no effect with training.optimizer {training.optimizer}.")
        return arguments
    except (ValueError, TypeError) as error:
        raise refused_arguments(error) from error


def tf32_setting(training: Training) -> dict[str, object]:
    """Return the field that has a training in fp32 multiply in TF32 where its GPU does; torch leaves it off."""
    if training.world.device == "cpu" or not allows_tf32(training.precision, training.arguments):
        return {}
    import torch

    if not has_tf32(torch.cuda.get_device_properties(torch.cuda.current_device())):
        return {}
    log.info("Matrix products of fp32 are computed in TF32; training.arguments.tf32: false turns it off.")
    return {"tf32": True}


def refused_arguments(error: Exception) -> StageError:
    """Return the error for arguments that transformers refuses."""
    if "DeepSpeed config values" in str(error):
        mismatches = "; ".join(line.removeprefix("- ") for line in str(error).splitlines() if line.startswith("- "))
        return StageError(
            FailureClass.CONFIG,
            "DeepSpeedConfigMismatch",
            f"deepspeed.json contradicts the job: {mismatches}.",
            "Leave these keys out of parallelism.deepspeedConfig; the plan sets them.",
        )
    return StageError(
        FailureClass.CONFIG,
        "ArgumentsRefused",
        f"transformers refuses the arguments of this run: {error}",
        "Check training.arguments.",
    )


def known_arguments_json() -> str:
    """Return the content of `finetune_contract/training_arguments.json`, from the installed transformers."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    names = sorted(field.name for field in dataclasses.fields(TrainingArguments) if field.init)
    lines = [f"  {json.dumps(name)}: {json.dumps(sorted(_json_types(hints[name])))}" for name in names]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json_types(annotation: Any) -> set[str]:
    """Return the kinds of JSON values that an annotation allows."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_json_types(part) for part in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {_json_name(type(value)) for value in typing.get_args(annotation)}
    return {_json_name(origin or annotation)}


def _json_name(kind: type) -> str:
    if kind is type(None):
        return "null"
    if issubclass(kind, Enum):
        return "str"
    return kind.__name__ if kind in (bool, int, float, str, list, dict) else "dict"
