"""Validation's rules for a job whose node, precision and degrees are decided.

The plan decides the spec's open choices; contradictions that follow are refused with validation's messages.
"""

from __future__ import annotations

from finetune_contract.constraints import Choices
from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.fields.field_values import value_at
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.combination_rules import choices_of
from finetune_operator.spec.types import AcceleratorSpec, FineTuneJobSpec, ParallelismSpec


def check_rules(draft: Draft) -> Draft:
    """Refuse broken rules, as far as the draft is decided."""
    spec = _decided_spec(draft)
    for rule in RULES:
        if not rule.holds(spec):
            path = tuple(rule.path.split("."))
            value = value_at(draft.spec.model_dump(mode="json", by_alias=True), path)
            hint = rule.advice(spec) if rule.advice else rule.hint
            draft = draft.refusing(path, value, rule.text, hint, "Required" if value is None else "Invalid")
    return draft


def decided_choices(draft: Draft) -> Choices:
    """Return the choices of the job, as far as the draft is decided."""
    return choices_of(_decided_spec(draft))


def _decided_spec(draft: Draft) -> FineTuneJobSpec:
    """Return the spec with the decisions of the node and the plan in place of `auto`."""
    spec, world = draft.spec, draft.world
    if world is None:
        return spec
    training = spec.training
    resources = spec.resources.model_copy(
        update={"gpus_per_node": draft.gpus_per_node, "processes_per_node": world.processes_per_node}
    )
    if world.device == "cpu":  # without a GPU, the requested kind has no effect
        resources = resources.model_copy(update={"accelerator": AcceleratorSpec()})
    if training is not None and draft.precision is not None:
        training = training.model_copy(update={"precision": draft.precision})
    return spec.model_copy(update={"resources": resources, "training": training})


def with_spec(draft: Draft, spec: FineTuneJobSpec) -> Draft:
    """Return the draft of a job with another spec, with its broken rules as problems."""
    return check_rules(draft.with_inputs(job=draft.job.model_copy(update={"spec": spec})))


def with_parallelism(draft: Draft, parallelism: ParallelismSpec) -> Draft:
    """Return the draft of a job that differs in this alone, as `with_spec`."""
    return with_spec(draft, draft.spec.model_copy(update={"parallelism": parallelism}))
