"""Training of the model: the built-in loop, or a program of the user."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from finetune_contract.choices import OptimizerName, SchedulerName
from finetune_operator.spec.types.field_types import (
    GIT_REF_PATTERN,
    MAX_INT,
    RELATIVE_PATTERN,
    Auto,
    Count,
    SpecModel,
    Text,
)


class EarlyStoppingSpec(SpecModel):
    """Early stopping of the training."""

    metric: Text = Field(
        default="loss",
        description="Validation metric to monitor, as Hugging Face names it, without eval_. Defaults to loss.",
    )
    patience: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Number of evaluations without improvement after which training stops. Defaults to 3."
    )


class GitSpec(SpecModel):
    """A user's program in a git repository."""

    url: Annotated[str, StringConstraints(pattern=r"^https://.+$", max_length=1024)] = Field(
        description="HTTPS URL of the repository. The administrator must allow its host, and it must be readable "
        "without a password. Required."
    )
    ref: Annotated[str, StringConstraints(pattern=GIT_REF_PATTERN, max_length=256)] = Field(
        default="main",
        description="Branch, tag or commit (all 40 digits). The prepare stage pins it to a commit. Defaults to main.",
    )
    path: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] | None = Field(
        default=None, description="Folder in the repository that the program runs in. Defaults to the root."
    )


class ScriptSpec(SpecModel):
    """A user's own training program in place of the built-in loop."""

    git: GitSpec = Field(description="Repository of the program. Required.")
    entry_point: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] = Field(
        default="train.py", description="File that Python runs, relative to git.path. Defaults to train.py."
    )
    hyperparameters: Annotated[dict[str, str | int | float | bool], Field(max_length=256)] = Field(
        default={},
        description="Arguments of the program, passed as --key value, sorted by key. Values are unchanged, byte for "
        "byte; booleans are true and false. Defaults to none.",
    )


class TrainingSpec(SpecModel):
    """Training of the model. `training: {}` trains with the defaults; without training nothing is trained."""

    epochs: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="Passes over the training split; fractions are allowed. Defaults to 3, unless maxSteps is set.",
    )
    max_steps: Count | None = Field(
        default=None, description="Number of optimizer steps, instead of epochs. If unset, epochs decide."
    )
    global_batch_size: Count = Field(
        default=32,
        description="Rows per optimizer step over all processes, kept exactly: micro-batch x accumulation x data-"
        "parallel ranks. Defaults to 32.",
    )
    micro_batch_size: Auto | Count = Field(
        default="auto",
        description="Rows per process and forward pass. Defaults to auto: the largest that fits and divides the global"
        " batch, or a smaller one if the lengths of a step's rows differ and less padding saves more time "
        "than the extra passes take.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        default=2e-5, description="Peak learning rate. Defaults to 2e-5."
    )
    scheduler: SchedulerName = Field(
        default="linear", description="Learning rate schedule. Defaults to linear, down to 0."
    )
    warmup_steps: Annotated[float, Field(ge=0, le=MAX_INT)] = Field(
        default=0,
        description="Warm-up steps of the learning rate; a value below 1 is a share of all steps. Defaults to 0.",
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.0, description="Weight decay of the optimizer. Defaults to 0."
    )
    max_grad_norm: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=1.0, description="Maximum norm that gradients are clipped to; 0 disables clipping. Defaults to 1."
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="Optimizer: adamw; sgd, without momentum; or adafactor, with strategies single and ddp. Defaults "
        "to adamw.",
    )
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        default=42, description="Random seed of weights, row order and dropout. Defaults to 42."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Share of the target that is spread over all classes, from 0 to below 1. Defaults to 0.",
    )
    early_stopping: EarlyStoppingSpec | None = Field(
        default=None, description="Early stopping. If unset, training runs to its last step."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="Numeric precision of the forward and backward pass. fp16, with loss scaling, needs a GPU. fp8 "
        "applies to the linear layers of the blocks, with bf16 elsewhere; it needs a GPU with fp8 units and strategy "
        "single, ddp or fsdp. Defaults to auto: bf16 if the hardware supports it, fp16 on GPUs that have units for it "
        "only, else fp32.",
    )
    arguments: Annotated[dict[str, JsonValue], Field(max_length=128)] = Field(
        default={},
        description="Other fields of transformers.TrainingArguments, checked by name and type. Defaults to none.",
    )
    script: ScriptSpec | None = Field(
        default=None,
        description="Your own training program. The other fields of training do not apply to it. If unset, the built-"
        "in loop trains.",
    )
