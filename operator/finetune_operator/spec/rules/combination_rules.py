"""Rules on choices that go together: the contract's table as Python and as CEL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from finetune_contract.arguments import compiles
from finetune_contract.choices import FP8_STRATEGIES
from finetune_contract.combinations import CONSTRAINTS
from finetune_contract.constraints import FIELDS, Choices, Constraint, Term, Value
from finetune_operator.spec.rules.processes import PROCESSES, SPREAD, WORLD_FIELDS, certain_processes
from finetune_operator.spec.rules.rule import Rule, loops
from finetune_operator.spec.types import FineTuneJobSpec


def choices_of(spec: FineTuneJobSpec) -> Choices:
    """Return the choices that the spec makes; those left to the plan or to the node stay open."""
    training, parallelism, resources = spec.training, spec.parallelism, spec.resources
    arguments = training.arguments if training is not None and loops(spec) else {}
    gpus = resources.gpus_per_node
    return Choices(
        task=spec.task if loops(spec) else None,
        packing=_unless_auto(spec.preparation.packing),
        adapter=spec.model.adapter.method,
        precision=None if training is None else _unless_auto(training.precision),
        optimizer=None if training is None else training.optimizer,
        torch_compile=compiles(arguments),
        liger=bool(arguments.get("use_liger_kernel")),
        strategy=_unless_auto(parallelism.strategy),
        zero_stage=_unless_auto(parallelism.zero_stage),
        sharding=parallelism.sharding,
        offload_optimizer=parallelism.offload.optimizer,
        offload_parameters=parallelism.offload.parameters,
        offload_activations=parallelism.offload.activations,
        checkpointing=_unless_auto(parallelism.activation_checkpointing),
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline.degree,
        sequence=parallelism.sequence,
        deepspeed_config=bool(parallelism.deepspeed_config),
        device=None if gpus == "auto" else "cuda" if gpus else "cpu",
        nodes=resources.nodes,
        processes_per_node=certain_processes(spec),
    )


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value


_OPEN = "auto"
_TRAINED = "has(self.training) ? self.training.{} : 'auto'"
_CEL: Mapping[str, tuple[str, Value | None]] = {
    "task": ("has(self.training) && !has(self.training.script) ? self.task : 'auto'", _OPEN),
    "packing": ("self.preparation.packing", _OPEN),
    "adapter": ("self.model.adapter.method", None),
    "precision": (_TRAINED.format("precision"), _OPEN),
    "optimizer": (_TRAINED.format("optimizer"), _OPEN),
    "strategy": ("self.parallelism.strategy", _OPEN),
    "zero_stage": ("type(self.parallelism.zeroStage) == int ? int(self.parallelism.zeroStage) : -1", -1),
    "sharding": ("self.parallelism.sharding", None),
    "offload": ("self.parallelism.offload.optimizer + '+' + self.parallelism.offload.parameters", None),
    "offload_optimizer": ("self.parallelism.offload.optimizer", None),
    "offload_parameters": ("self.parallelism.offload.parameters", None),
    "offload_activations": ("self.parallelism.offload.activations", None),
    "checkpointing": ("self.parallelism.activationCheckpointing", _OPEN),
    "tensor": ("self.parallelism.tensor", None),
    "pipeline": ("self.parallelism.pipeline.degree", None),
    "model_ranks": (SPREAD, None),
    "sequence": ("self.parallelism.sequence", None),
    "device": (
        "type(self.resources.gpusPerNode) != int ? 'auto' : int(self.resources.gpusPerNode) == 0 ? 'cpu' : 'cuda'",
        _OPEN,
    ),
    "nodes": ("self.resources.nodes", None),
    "processes_per_node": (PROCESSES, 0),
}
"""Choice -> CEL of its value, and the value of an open choice (None: it always has one). Keys of objects without
declared fields are beyond CEL.
"""
_SCHEMA_AROUND: Mapping[str, Mapping[str, JsonValue]] = {
    "deepspeed-config-needs-deepspeed": {
        "anyOf": [
            {"properties": {"strategy": {"enum": ["deepspeed"]}}},
            {"properties": {"deepspeedConfig": {"maxProperties": 0}}},
        ]
    },
}
"""Constraint -> schema keywords that express it where CEL cannot."""


def _needs_whole_layers(spec: FineTuneJobSpec) -> bool:
    """Return True if the optimizer or the adapter needs layers that DeepSpeed's stages would flatten."""
    adafactor = spec.training is not None and spec.training.optimizer == "adafactor"
    return adafactor or spec.model.adapter.method == "qlora"


def _adafactor_advice(spec: FineTuneJobSpec) -> str:
    parallelism = spec.parallelism
    if parallelism.strategy in ("auto", "single", "ddp") and parallelism.tensor == 1:
        return "leave spec.parallelism.zeroStage out, or set it to adamw"
    return "set it to adamw or sgd, or spec.parallelism.strategy to ddp without zeroStage and tensor"


def _single_advice(spec: FineTuneJobSpec) -> str:
    staged = spec.parallelism.zero_stage != "auto" and not _needs_whole_layers(spec)
    strategy = "ddp" if _needs_whole_layers(spec) else "deepspeed" if staged else "auto"
    return f"set it to {strategy}, or set spec.resources.nodes and spec.resources.processesPerNode to 1"


def _zero_stage_advice(spec: FineTuneJobSpec) -> str:
    fp8 = spec.training is not None and spec.training.precision == "fp8"
    if spec.parallelism.strategy == "fsdp":
        return "leave it out: fsdp shards parameters, gradients and optimizer state like stage 3"
    if fp8 or _needs_whole_layers(spec):
        return "leave it out"
    return "leave it out, or set spec.parallelism.strategy to deepspeed"


def _qlora_advice(spec: FineTuneJobSpec) -> str:
    parallelism = spec.parallelism
    staged = ["zeroStage"] if parallelism.zero_stage != "auto" else []
    moved = [
        f"offload.{name}"
        for name, where in (
            ("optimizer", parallelism.offload.optimizer),
            ("parameters", parallelism.offload.parameters),
        )
        if where != "none"
    ]
    out = " and ".join(f"spec.parallelism.{each}" for each in (*staged, *(["offload"] if moved else [])))
    rest = f", and leave {out} out" if out else ""
    return f"set it to auto{rest}: qlora holds the weights in 4 bits; or set spec.model.adapter.method to lora"


def _fp8_advice(spec: FineTuneJobSpec) -> str:
    parallelism = spec.parallelism
    if parallelism.strategy in ("auto", *FP8_STRATEGIES) and parallelism.zero_stage != "auto":
        return "leave spec.parallelism.zeroStage out, or set it to bf16"
    return "set it to bf16, or spec.parallelism.strategy to fsdp or auto and leave spec.parallelism.zeroStage out"


_ADVICE: Mapping[str, Callable[[FineTuneJobSpec], str]] = {
    "adafactor-has-whole-matrices": _adafactor_advice,
    "single-is-one-process": _single_advice,
    "zero-stage-needs-deepspeed": _zero_stage_advice,
    "qlora-keeps-packed-weights": _qlora_advice,
    "fp8-has-a-strategy": _fp8_advice,
}
"""Constraint -> its hint for a job, if a general hint would offer a value that another constraint refuses."""


def _table_rule(constraint: Constraint) -> Rule:
    """Return a row of the table as a rule on `spec`."""
    choices = [term.choice for term in (*constraint.when, *constraint.needs)]
    fields = [field for choice in choices for field in FIELDS[choice]]
    if "processes_per_node" in choices:
        fields += WORLD_FIELDS
    cel = _constraint_cel(constraint) if _CEL.keys() >= set(choices) else None
    return Rule(
        name=constraint.name,
        path=constraint.field,
        cel=cel,
        test=None if cel is not None else lambda spec: constraint.holds(choices_of(spec)),
        text=constraint.rule,
        hint=constraint.hint,
        advice=_ADVICE.get(constraint.name),
        reads=tuple(dict.fromkeys(fields)),
        schema_around=_SCHEMA_AROUND.get(constraint.name, {}),
    )


def _constraint_cel(constraint: Constraint) -> str:
    """Return CEL of `Constraint.holds`."""
    when = " && ".join(_term_cel(term, when_open=False) for term in constraint.when)
    needs = " && ".join(_term_cel(term, when_open=not term.chosen) for term in constraint.needs)
    return f"!({when}) || ({needs})"


def _term_cel(term: Term, *, when_open: bool) -> str:
    """Return CEL: the choice has a value that `term` allows; `when_open`: the result for an open choice."""
    value, open_value = _CEL[term.choice]
    values = list(term.values)
    if open_value is not None and when_open != term.excluded:
        values.insert(0, open_value)
    value = f"({value})" if " " in value else value
    if len(values) == 1:
        return f"{value} {'!=' if term.excluded else '=='} {values[0]!r}"
    return f"!({value} in {values})" if term.excluded else f"{value} in {values}"


RULES: tuple[Rule, ...] = (*(_table_rule(constraint) for constraint in CONSTRAINTS),)
