"""Rules on two fields that need or exclude each other, and on fields of some tasks: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, get_args

from finetune_contract.choices import (
    BACKEND_TASKS,
    GPU_BACKENDS,
    SMOOTHED_TASKS,
    TEXT_BACKENDS,
    VLLM_TASKS,
    WRITING_TASKS,
    BackendName,
    Task,
)
from finetune_operator.spec.problems import any_of
from finetune_operator.spec.rules.cel import predicate
from finetune_operator.spec.rules.rule import UNREADABLE, Rule, chosen_cel, value_of
from finetune_operator.spec.types import FineTuneJobSpec

Choice: TypeAlias = str | bool
"""Value of a field."""


def excludes(
    path: str, other: str, *values: Choice, of: tuple[str, ...] = (), why: str = "", way: str = "", unless: str = ""
) -> Rule:
    """Return the rule that a field, or its values `of`, excludes another field, or some values of that.

    `why` ends the sentence, and `way` the hint. `unless`: CEL of an exception.
    """
    way = way or (f"change spec.{other}" if values else f"leave out spec.{other}")
    return _rule(
        f"{path}-excludes-{other}",
        path,
        chosen_cel(path, *of),
        f"!({chosen_cel(other, *values)})" + (f" || {unless}" if unless else ""),
        f"cannot be combined with {_named(other, values)}{why}",
        f"leave it out, or {way}",
    )


def needs(path: str, other: str, *values: Choice, of: tuple[str, ...] = (), why: str = "", way: str = "") -> Rule:
    """Return the rule that a field, or its values `of`, needs another field, or one of some values of that."""
    way = way or f"set spec.{other}{f' to {_any_of(values)}' if values else ''}"
    return _rule(
        f"{path}-needs-{other}",
        path,
        chosen_cel(path, *of),
        f"({chosen_cel(other, *values)})",
        f"{' '.join([*of, 'needs'])} {_named(other, values)}{why}",
        f"leave it out, or {way}" if values else f"{way}, or leave it out",
    )


def is_for(
    path: str, tasks: tuple[Task, ...], *values: str, advice: Callable[[FineTuneJobSpec], str] | None = None
) -> Rule:
    """Return the rule that a field, or some values of it, applies to some tasks."""
    return Rule(
        f"{path}-is-for-{tasks[0]}",
        path,
        f"!({chosen_cel(path, *values)}) || {chosen_cel('task', *tasks)}",
        f"{f'{any_of(values)} ' if len(values) in (1, 2) else ''}applies to {', '.join(tasks)} only",
        "leave it out",
        advice=advice,
    )


def _rule(name: str, path: str, condition: str, holds: str, text: str, hint: str) -> Rule:
    """Return the rule that a field is free to be set where `holds`, in Python if CEL cannot read the field."""
    rule = Rule(name, path, f"!({condition}) || {holds}", text, hint)
    if path not in UNREADABLE:
        return rule
    test = predicate(holds)

    def allowed(spec: FineTuneJobSpec) -> bool:
        return value_of(spec, path) in (None, "auto", {}) or test(spec)

    return replace(rule, cel=None, test=allowed, reads=rule.fields_read)


def _named(path: str, values: tuple[Choice, ...]) -> str:
    return f"spec.{path} {_any_of(values)}" if values else f"spec.{path}"


def _any_of(values: tuple[Choice, ...]) -> str:
    return any_of([str(value).lower() if isinstance(value, bool) else value for value in values])


_BACKENDS = tuple(backend for backend in get_args(BackendName) if backend != "none")
_CPU_BACKENDS = tuple(backend for backend in _BACKENDS if backend not in GPU_BACKENDS)
_ADAPTERS = ("lora", "qlora", "dora")
_KSERVE_RUNTIME = "endpoint.kserveRuntime"
_LOOP_ONLY = (
    *("training.epochs", "training.maxSteps", "training.globalBatchSize", "training.microBatchSize"),
    *("training.learningRate", "training.scheduler", "training.warmupSteps", "training.weightDecay"),
    *("training.maxGradNorm", "training.optimizer", "training.seed", "training.labelSmoothing"),
    *("training.earlyStopping", "training.precision", "training.arguments"),
    *("parallelism.strategy", "parallelism.zeroStage", "parallelism.offload.activations", "parallelism.tensor"),
    *("parallelism.pipeline", "parallelism.sequence", "parallelism.activationCheckpointing", "parallelism.placement"),
    *("checkpoints.every", "checkpoints.keep", "checkpoints.onPreemption", "checkpoints.signingKey"),
    *("model.adapter.method", "preference.beta"),
)
"""Fields that only the built-in loop obeys: beside a script they would be accepted and ignored. Fields that need one of
them are refused by rules of their own.
"""
_INFERENCE_ONLY = ("preparation.engine", "preparation.maxLength", "preparation.workers")
"""Fields that, beside a script, only affect the rows of evaluate and predict."""


RULES: tuple[Rule, ...] = (
    # Tasks.
    is_for("generation", WRITING_TASKS),
    is_for("preference", ("preference-tuning",)),
    is_for("preparation.chatTemplate", ("text-generation",)),
    is_for("training.labelSmoothing", SMOOTHED_TASKS),
    is_for("predict.optimization", BACKEND_TASKS, *_BACKENDS),
    is_for("predict.optimization", VLLM_TASKS, *TEXT_BACKENDS),
    is_for("endpoint.optimization", BACKEND_TASKS, *_BACKENDS),
    is_for("endpoint.optimization", VLLM_TASKS, "vllm"),
    # Training.
    needs("model.adapter.method", "training", way="write `training: {}`"),
    needs("model.adapter", "model.adapter.method", *_ADAPTERS),
    needs("model.adapter.targetModules", "model.adapter.method", *_ADAPTERS),
    excludes("training.maxSteps", "training.epochs", why=", which it replaces"),
    excludes(
        "training.warmupSteps", "training.scheduler", "constant",
        why=", which has no warm-up", way="set spec.training.scheduler to constant_with_warmup",
    ),
    *(
        excludes(
            path, "training.script",
            why=", which replaces the built-in loop",
            way="pass it to the program in spec.training.script.hyperparameters" * path.startswith("training."),
        )
        for path in _LOOP_ONLY
    ),
    *(
        excludes(
            path, "training.script",
            why=", which replaces the built-in loop, while nothing is evaluated or predicted",
            unless="has(self.evaluation) || has(self.predict)",
        )
        for path in _INFERENCE_ONLY
    ),
    needs("parallelism.pipeline", "parallelism.pipeline.degree"),
    needs("resources.accelerator", "resources.gpusPerNode"),
    needs("spot", "spot.enabled", True),
    needs("spot.enabled", "training", way="write `training: {}`"),
    excludes(
        "checkpoints.resume", "spot.enabled", True,
        why=": each preemption would restart the training from the beginning", way="leave spec.spot out",
    ),
    # Texts and predictions.
    excludes("generation.numBeams", "generation.temperature", why=", which samples without a search"),
    needs("generation.topP", "generation.temperature", why=", without which nothing is sampled"),
    excludes("generation.numBeams", "predict.optimization", *TEXT_BACKENDS, why=", which have no beam search"),
    excludes("generation.temperature", "predict.optimization", "continuous-batching", why=", which does not sample"),
    excludes("generation.numBeams", "endpoint.optimization", "vllm", why=", which serves no beam search"),
    excludes(
        "predict.optimization", "resources.gpusPerNode", of=_CPU_BACKENDS,
        why=": it is for CPUs", way=f"use {any_of(GPU_BACKENDS)}", unless="type(self.resources.gpusPerNode) != int",
    ),
    needs("predict.server", "predict.optimization", "vllm", "auto"),
    excludes("predict.tolerance", "predict.optimization", "none"),
    excludes("predict.metricTolerance", "predict.optimization", "none"),
    needs("predict.metricTolerance", "dataset", why=", whose rows have labels"),
    # Endpoints.
    excludes(
        "endpoint.optimization", "resources.gpusPerNode", of=_BACKENDS,
        why=" in this version", way="set spec.resources.gpusPerNode to 0",
        unless="type(self.resources.gpusPerNode) != int",
    ),
    needs("endpoint.optimization", "resources.gpusPerNode", of=("vllm",)),
    excludes("endpoint.maxLatencyMilliseconds", "endpoint.optimization", "vllm", why=", which batches by token"),
    excludes("endpoint.tolerance", "endpoint.optimization", "none", "vllm"),
    excludes("endpoint.adapters", "training", why=": adapters belong to the model of spec.model.uri"),
    needs(
        "endpoint.adapters", "endpoint.optimization", "none", "vllm", why=": others convert a model without adapters"
    ),
    needs("endpoint.maxAdapterRank", "endpoint.optimization", "vllm"),
    needs("endpoint.maxAdapterRank", "endpoint.adapters"),
    needs("endpoint.traffic.hostnames", "endpoint.traffic.gateway"),
    excludes(
        "endpoint.traffic", "endpoint.runtime", "kserve",
        why=", to whose servers no HTTPRoute leads in this version", way="set spec.endpoint.runtime to deployment",
    ),
    excludes(
        "endpoint.idle", "endpoint.runtime", "kserve",
        why=", which does not scale to zero in Standard mode, the only one that is supported",
        way="set spec.endpoint.runtime to deployment",
    ),
    excludes("endpoint.idle", "endpoint.traffic", why=", whose requests would reach no server, and start none"),
    excludes(
        "endpoint.replicas", "endpoint.idle",
        why=", which starts with one server after none", way="set spec.endpoint.maxReplicas for more under load",
    ),
    needs(_KSERVE_RUNTIME, "endpoint.runtime", "kserve"),
    needs(_KSERVE_RUNTIME, "endpoint.optimization", "vllm"),
    excludes("endpoint.token", _KSERVE_RUNTIME, why=", whose servers check no token"),
    excludes("endpoint.adapters", _KSERVE_RUNTIME, why=", for which KServe mounts the model alone"),
    excludes("endpoint.maxQueue", _KSERVE_RUNTIME, why=", whose servers have no limit of waiting requests"),
)  # fmt: skip
