"""Rules on training: adapters, steps, checkpoints, scripts."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

from finetune_contract.choices import SMOOTHED_TASKS
from finetune_operator.spec.rules.rule import NO_LOOP, Rule, is_one_of
from finetune_operator.spec.types import (
    AdapterSpec,
    CheckpointEverySpec,
    FineTuneJobSpec,
    ModelSpec,
    PreferenceSpec,
    TrainingSpec,
)


def _every_is_one(spec: FineTuneJobSpec) -> bool:
    every = spec.checkpoints.every
    return not isinstance(every, CheckpointEverySpec) or (every.steps is None) != (every.minutes is None)


_LOOP_ONLY = (
    *("training.epochs", "training.maxSteps", "training.globalBatchSize", "training.microBatchSize"),
    *("training.learningRate", "training.scheduler", "training.warmupSteps", "training.weightDecay"),
    *("training.maxGradNorm", "training.optimizer", "training.seed", "training.labelSmoothing"),
    *("training.earlyStopping", "training.precision", "training.arguments"),
    *("parallelism.strategy", "parallelism.zeroStage", "parallelism.offload.activations", "parallelism.tensor"),
    *("parallelism.pipeline.degree", "parallelism.pipeline.microBatches", "parallelism.pipeline.schedule"),
    *("parallelism.sequence", "parallelism.activationCheckpointing", "parallelism.placement"),
    *("checkpoints.every", "checkpoints.keep", "checkpoints.onPreemption", "checkpoints.signingKey"),
    *("model.adapter.method", "preference.beta"),
)
"""Fields that only the built-in loop obeys: beside a script they would be accepted and ignored. Fields that need one of
them are refused by rules of their own.
"""
_DEFAULTS: Any = FineTuneJobSpec.model_construct(
    task="text-classification",
    model=ModelSpec.model_construct(uri="hf://some/model"),
    training=TrainingSpec.model_construct(),
)
"""Spec whose optional fields have their defaults."""
_INFERENCE_ONLY = ("preparation.engine", "preparation.maxLength", "preparation.workers")
"""Fields that, beside a script, only affect the rows of evaluate and predict."""


def _script_rule(path: str, *, inference: bool = False) -> Rule:
    """Return the rule that a script needs a field's default (`inference`: unless rows are evaluated or predicted)."""
    parts = [to_snake(part) for part in path.split(".")]
    block = reduce(getattr, parts[:-1], _DEFAULTS)
    default = getattr(block, parts[-1])
    # CEL cannot read objects without declared fields, and fields of no fixed type.
    readable = path not in ("training.arguments", "checkpoints.every")
    free = "!has(self.training) || !has(self.training.script)"
    free += " || has(self.evaluation) || has(self.predict)" if inference else ""
    kept = (
        f"!has(self.{path})"
        if default is None
        else f"self.{path} == {_cel(default, type(block).model_fields[parts[-1]])}"
    )
    passed_on = path.startswith("training.")
    text = "configures the built-in loop, which spec.training.script replaces"
    return Rule(
        name=f"script-ignores-{path}",
        path=path,
        cel=f"{free} || {kept}" if readable else None,
        test=None if readable else lambda spec: spec.script is None or reduce(getattr, parts, spec) == default,
        text=f"{text}, and nothing is evaluated or predicted" if inference else text,
        hint="leave it out" + (", or pass it to the program in spec.training.script.hyperparameters" * passed_on),
        reads=(path, "training.script", *(("evaluation", "predict") if inference else ())),
    )


def _cel(value: Any, field: FieldInfo) -> str:
    """Return a field's default as CEL writes it: 0 is no value of a number that may have a fraction."""
    if field.annotation is float:
        value = float(value)
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def _stays_inside(path: str) -> Rule:
    """Return the rule that a path stays below the repository."""
    given = "".join(
        f" && has(self.{each})" for each in ("training.script", *((path,) if path.endswith("path") else ()))
    )
    return Rule(
        name=f"{path}-stays-inside",
        path=path,
        cel=f"!(has(self.training){given}) || !self.{path}.matches('(^|/)[.][.](/|$)')",
        text="must stay inside the repository",
        hint="write it without ..",
    )


_NO_ADAPTER = AdapterSpec.model_construct()


RULES: tuple[Rule, ...] = (
    Rule(
        "adapter-is-trained",
        "model.adapter.method",
        "self.model.adapter.method == 'none' || has(self.training)",
        "applies to training, and spec.training is not set",
        "leave spec.model.adapter out, or write `training: {}`",
    ),
    Rule(
        "adapter-settings-need-a-method",
        "model.adapter",
        f"self.model.adapter.method != 'none' || (self.model.adapter.rank == {_NO_ADAPTER.rank}"
        f" && self.model.adapter.alpha == {_NO_ADAPTER.alpha} && self.model.adapter.dropout == {_NO_ADAPTER.dropout})",
        "has a rank, an alpha or a dropout, which have no effect while its method is none",
        "set spec.model.adapter.method to lora, qlora or dora, or leave spec.model.adapter out",
    ),
    Rule(
        "adapter-targets-need-a-method",
        "model.adapter.targetModules",
        None,
        "has no effect while spec.model.adapter.method is none",
        "set spec.model.adapter.method to lora, qlora or dora, or leave it out",
        test=lambda spec: spec.model.adapter.method != "none" or spec.model.adapter.target_modules == "auto",
        reads=("model.adapter.method", "model.adapter.targetModules"),
    ),
    Rule(
        "epochs-or-steps",
        "training.maxSteps",
        "!has(self.training) || !has(self.training.epochs) || !has(self.training.maxSteps)",
        "replaces spec.training.epochs: only one of the two can be set",
        "remove one of the two",
    ),
    Rule(
        "warmup-needs-scheduler",
        "training.warmupSteps",
        "!has(self.training) || self.training.warmupSteps == 0.0 || self.training.scheduler != 'constant'",
        "has no effect with the scheduler constant",
        "set spec.training.scheduler to constant_with_warmup, or leave spec.training.warmupSteps out",
    ),
    Rule(
        "smoothing-needs-classes",
        "training.labelSmoothing",
        f"{NO_LOOP} || self.training.labelSmoothing == 0.0 || {is_one_of(SMOOTHED_TASKS)}",
        f"applies to {', '.join(SMOOTHED_TASKS)} only",
        "leave it out",
    ),
    *(_script_rule(path) for path in _LOOP_ONLY),
    *(_script_rule(path, inference=True) for path in _INFERENCE_ONLY),
    _stays_inside("training.script.git.path"),
    _stays_inside("training.script.entryPoint"),
    Rule(
        "preference-is-of-preference-tuning",
        "preference",
        f"self.task == 'preference-tuning' || self.preference.beta == {PreferenceSpec.model_construct().beta}",
        "applies to preference-tuning only",
        "leave spec.preference out",
    ),
    Rule(
        "checkpoint-interval-is-one",
        "checkpoints.every",
        None,
        "takes exactly one of steps and minutes",
        "remove one of the two, or write auto",
        test=_every_is_one,
        reads=("checkpoints.every",),
        schema={"maxProperties": 1},
    ),
    Rule(
        "warmup-counts-whole-steps",
        "training.warmupSteps",
        "!has(self.training) || self.training.warmupSteps < 1.0"
        " || self.training.warmupSteps == double(int(self.training.warmupSteps))",
        "must be a fraction below 1, or a whole number of steps",
        "write a whole number, or a fraction of all steps below 1",
        advice=lambda spec: f"write {spec.training.warmup_steps:.0f}" if spec.training else "",
    ),
)
