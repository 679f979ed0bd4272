"""Fields of `transformers.TrainingArguments` that a job may set under `training.arguments`.

Three kinds: free ones; ones that a spec field decides (a second way to set the same could only contradict); and ones
that the trainer fixes because the contract rests on them. `training_arguments.json` lists all names with their types,
generated from the trainer's transformers, so that a job is checked where transformers is not installed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, TypeAlias, get_args

from pydantic import JsonValue

from finetune_contract.choices import LENGTH_GROUPED_TASKS, Precision, Task

ArgumentType: TypeAlias = Literal["bool", "int", "float", "str", "list", "dict", "null"]
ArgumentReason: TypeAlias = Literal[
    "UnknownArgument", "OwnedByPlan", "FixedByTrainer", "WrongType", "UnknownTracker", "UnknownSampling"
]
Tracker: TypeAlias = Literal["tensorboard", "mlflow", "wandb"]
"""Values that `report_to` may have."""
Sampling: TypeAlias = Literal["random", "group_by_length"]
"""Values that `train_sampling_strategy` may have; transformers has others."""

OWNED_BY_PLAN: Mapping[str, str] = {
    "accelerator_config": "parallelism",
    "activation_checkpointing": "parallelism.activationCheckpointing",
    "activation_checkpointing_kwargs": "parallelism.activationCheckpointing",
    "auto_find_batch_size": "runPolicy.onOutOfMemory",
    "bf16": "training.precision",
    "bf16_full_eval": "training.precision",
    "data_seed": "training.seed",
    "deepspeed": "parallelism.deepspeedConfig",
    "fp16": "training.precision",
    "fp16_full_eval": "training.precision",
    "fsdp": "parallelism.strategy",
    "fsdp_config": "parallelism.strategy",
    "gradient_accumulation_steps": "training.globalBatchSize",
    "gradient_checkpointing": "parallelism.activationCheckpointing",
    "gradient_checkpointing_kwargs": "parallelism.activationCheckpointing",
    "greater_is_better": "training.earlyStopping.metric",
    "label_smoothing_factor": "training.labelSmoothing",
    "learning_rate": "training.learningRate",
    "load_best_model_at_end": "training.earlyStopping",
    "lr_scheduler_type": "training.scheduler",
    "max_grad_norm": "training.maxGradNorm",
    "max_steps": "training.maxSteps",
    "metric_for_best_model": "training.earlyStopping.metric",
    "num_train_epochs": "training.epochs",
    "optim": "training.optimizer",
    "parallelism_config": "parallelism",
    "per_device_eval_batch_size": "resources.memory",
    "per_device_train_batch_size": "training.microBatchSize",
    "resume_from_checkpoint": "checkpoints.resume",
    "save_steps": "checkpoints.every",
    "save_strategy": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "seed": "training.seed",
    "use_cpu": "resources.gpusPerNode",
    "warmup_steps": "training.warmupSteps",
    "weight_decay": "training.weightDecay",
}
"""TrainingArguments name -> path of the spec field that decides it."""

FREE: frozenset[str] = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "ddp_broadcast_buffers",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "full_determinism",
        "liger_kernel_config",
        "lr_scheduler_kwargs",
        "neftune_noise_alpha",
        "optim_args",
        "report_to",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "train_sampling_strategy",
        "use_liger_kernel",
    }
)
"""Fields that a job may set and that have an effect in the trainer's loop."""

COMPILATION = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Fields each of which switches torch.compile on (transformers 5.23, `TrainingArguments.__post_init__`)."""


def compiles(arguments: Mapping[str, object]) -> bool:
    """Return whether `training.arguments` switch torch.compile on."""
    return any(arguments.get(name) for name in COMPILATION)


def allows_tf32(precision: Precision, arguments: Mapping[str, object]) -> bool:
    """Return whether a training in `precision` multiplies in TF32 on GPUs that have it: one in fp32, unless
    `training.arguments.tf32` is false. The sums stay in fp32, and factors keep 10 bits of their mantissa.
    """
    return precision == "fp32" and arguments.get("tf32") is not False


def needs_whole_logits(arguments: Mapping[str, object]) -> bool:
    """Return whether `training.arguments` keep a decoder from computing its loss in chunks."""
    return bool(arguments.get("use_liger_kernel"))


@dataclass(frozen=True)
class ArgumentProblem:
    """A field under `training.arguments` that cannot be accepted."""

    name: str
    reason: ArgumentReason
    message: str
    hint: str


@cache
def known_arguments() -> Mapping[str, tuple[ArgumentType, ...]]:
    """Return every field of TrainingArguments with the JSON types it accepts."""
    text = resources.files("finetune_contract").joinpath("training_arguments.json").read_text(encoding="utf-8")
    return {name: tuple(types) for name, types in json.loads(text).items()}


def check_arguments(arguments: Mapping[str, JsonValue]) -> tuple[ArgumentProblem, ...]:
    """Return all problems of `training.arguments`, in the order in which the fields were written."""
    problems = (_problem(name, value) for name, value in arguments.items())
    return tuple(problem for problem in problems if problem is not None)


def _problem(name: str, value: JsonValue) -> ArgumentProblem | None:
    path = f"training.arguments.{name}"
    known = known_arguments()
    if name not in known:
        near = difflib.get_close_matches(name, sorted(FREE), n=1) or difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"Did you mean {near[0]}?" if near else f"The fields are: {', '.join(sorted(FREE))}."
        return ArgumentProblem(
            name, "UnknownArgument", f"{path}: transformers.TrainingArguments has no such field.", hint
        )
    if name in OWNED_BY_PLAN:
        message = f"{path} is decided by {OWNED_BY_PLAN[name]}."
        return ArgumentProblem(name, "OwnedByPlan", message, f"Set {OWNED_BY_PLAN[name]} instead.")
    if name not in FREE:
        message = f"{path} has no effect here: the trainer has its own implementation."
        return ArgumentProblem(name, "FixedByTrainer", message, "Leave it out.")
    if not _fits(value, known[name]):
        message = f"{path} is {value!r}; it must be {' or '.join(known[name])}."
        return ArgumentProblem(name, "WrongType", message, "Write numbers and booleans without quotes.")
    if name == "report_to":
        return _tracker_problem(value)
    if name == "train_sampling_strategy" and value not in get_args(Sampling):
        message = f"{path} is {value!r}; it must be {' or '.join(get_args(Sampling))}."
        return ArgumentProblem(name, "UnknownSampling", message, "Leave it out for the default of the task.")
    return None


def _tracker_problem(value: JsonValue) -> ArgumentProblem | None:
    known = get_args(Tracker)
    unknown = [name for name in _named(value) if name not in known]
    if not unknown:
        return None
    message = f"training.arguments.report_to names {unknown[0]!r}; the trainer supports {', '.join(known)}."
    near = difflib.get_close_matches(str(unknown[0]), known, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Set a list of these names."
    return ArgumentProblem("report_to", "UnknownTracker", message, hint)


def trackers(arguments: Mapping[str, JsonValue]) -> tuple[Tracker, ...]:
    """Return the trackers named by `report_to` of checked arguments, each once; none without it."""
    named = _named(arguments.get("report_to"))
    return tuple(tracker for tracker in get_args(Tracker) if tracker in named)


def sampling(arguments: Mapping[str, JsonValue]) -> Sampling | None:
    """Return the sampling set by `train_sampling_strategy` of checked arguments; None without it."""
    requested = arguments.get("train_sampling_strategy")
    return next((arg for arg in get_args(Sampling) if arg == requested), None)


def groups_by_length(task: Task, arguments: Mapping[str, JsonValue]) -> bool:
    """Return True if all rows of a step have similar length, by checked arguments or else by the task's default."""
    requested = sampling(arguments)
    return task in LENGTH_GROUPED_TASKS if requested is None else requested == "group_by_length"


def _named(value: JsonValue) -> list[JsonValue]:
    """Return a name or a list of names as a list; transformers writes an empty list as `none`."""
    if isinstance(value, list):
        return value
    return [] if value in (None, "none") else [value]


def _fits(value: JsonValue, types: tuple[ArgumentType, ...]) -> bool:
    kinds: dict[type, ArgumentType] = {
        bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", type(None): "null"
    }  # fmt: skip
    kind = kinds[type(value)]
    return kind in types or (kind == "int" and "float" in types)
