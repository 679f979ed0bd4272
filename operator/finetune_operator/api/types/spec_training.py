"""Training of the model: the built-in loop, or a program of the user."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from finetune_contract.choices import OptimizerName, SchedulerName
from finetune_operator.api.types.field_types import (
    GIT_REF_PATTERN,
    MAX_INT,
    RELATIVE_PATTERN,
    Auto,
    Count,
    SpecModel,
    Text,
)


class EarlyStoppingSpec(SpecModel):
    """Stop before the last step."""

    metric: Text = Field(
        default="loss",
        description="Validation metric to watch, named as Hugging Face does without eval_. Default loss.",
    )
    patience: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Evaluations without an improvement after which training stops, a count. Default 3."
    )


class GitSpec(SpecModel):
    """A user's program in a git repository."""

    url: Annotated[str, StringConstraints(pattern=r"^https://.+$", max_length=1024)] = Field(
        description="HTTPS URL of the repository; its host has to be allowed by the administrator. It has to be "
        "readable without a password. Required."
    )
    ref: Annotated[str, StringConstraints(pattern=GIT_REF_PATTERN, max_length=256)] = Field(
        default="main",
        description="Branch, tag or commit (all 40 digits). Default main. Prepare pins it to a commit.",
    )
    path: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] | None = Field(
        default=None, description="Folder inside the repository that the program runs in. Left out: its root."
    )


class ScriptSpec(SpecModel):
    """A user's own training program in place of the built-in loop."""

    git: GitSpec = Field(description="Where the program is. Required.")
    entry_point: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] = Field(
        default="train.py", description="File that Python runs, relative to git.path. Default train.py."
    )
    hyperparameters: Annotated[dict[str, str | int | float | bool], Field(max_length=256)] = Field(
        default={},
        description="Passed as --key value in the order of the names, byte for byte; booleans as true and false. "
        "Left out: none.",
    )


class TrainingSpec(SpecModel):
    """Training of the model. `training: {}` trains with the defaults; without training nothing is trained."""

    epochs: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="Passes over the training split; parts are allowed. Left out: 3, unless maxSteps is given.",
    )
    max_steps: Count | None = Field(
        default=None, description="Optimizer steps, a count, in place of epochs. Left out: epochs decide."
    )
    global_batch_size: Count = Field(
        default=32,
        description="Rows per optimizer step over all processes, kept exactly: micro-batch x "
        "accumulation x data-parallel ranks. "
        "Default 32.",
    )
    micro_batch_size: Auto | Count = Field(
        default="auto",
        description="Rows that one process computes at once. Default auto: the largest that fits and divides, or "
        "a smaller one where rows of a step differ in length and less padding saves more time than more passes take.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        default=2e-5, description="Peak learning rate. Default 2e-5."
    )
    scheduler: SchedulerName = Field(
        default="linear", description="How the learning rate changes. Default linear, down to 0."
    )
    warmup_steps: Annotated[float, Field(ge=0, le=MAX_INT)] = Field(
        default=0, description="Steps over which the learning rate rises; below 1 a share of all steps. Default 0."
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.0, description="Weight decay of the optimizer. Default 0."
    )
    max_grad_norm: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=1.0, description="Norm to which gradients are clipped; 0 clips nothing. Default 1."
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="adamw; sgd, without momentum; or adafactor, with strategies single and ddp. Default adamw.",
    )
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        default=42, description="Seed of weights, order and dropout. Default 42."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of the target spread over all classes, from 0 to below 1. Default 0."
    )
    early_stopping: EarlyStoppingSpec | None = Field(
        default=None, description="Left out: training runs to its last step."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="Arithmetic of the forward and backward pass. fp16, whose loss is scaled, needs a GPU and a "
        "strategy other than fsdp. fp8 is for linear layers of the blocks, with all else in bf16; it needs a GPU with "
        "units for it and strategies single, ddp or fsdp. Default auto: bf16 where the hardware has it, else fp32.",
    )
    arguments: Annotated[dict[str, JsonValue], Field(max_length=128)] = Field(
        default={},
        description="Any other field of transformers.TrainingArguments, checked by name and type. Left out: none.",
    )
    script: ScriptSpec | None = Field(
        default=None,
        description="A program of your own, to which other fields of training say nothing. Left out: the built-in "
        "loop.",
    )
