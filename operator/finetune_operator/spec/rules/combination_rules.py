"""Rules on choices that go together: the contract's table as Python and as CEL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from finetune_contract.arguments import compiles
from finetune_contract.combinations import CONSTRAINTS
from finetune_contract.constraints import FIELDS, Choices, Constraint, Term, Value
from finetune_operator.spec.rules.process_counts import PROCESSES, SPREAD, WORLD_FIELDS, certain_processes
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
