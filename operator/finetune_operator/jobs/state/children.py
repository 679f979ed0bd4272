"""Common view of the objects that run attempts, whatever their kind.

Each kind reports its end in its own way, with its own pitfalls. The modules of the launchers handle these, so that no
code above has to know the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.jobs.launchers.launcher_registry import module_of
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, CAPACITY_LABEL, STAGE_LABEL
from finetune_operator.jobs.state.decision_types import ChildView, ObjectRef
from finetune_operator.spec.kubernetes_objects import Meta, Raw
from finetune_operator.spec.types import Capacity


class _Child(Raw):
    """Fields that are read from every kind that runs a stage."""

    api_version: str
    kind: str
    metadata: Meta


def child_view(value: Mapping[str, JsonValue]) -> ChildView | None:
    """Return the child; None for an object that is not ours: another kind, or without the labels of an attempt."""
    try:
        raw = _Child.model_validate(value)
        module, attempt = module_of(raw.api_version, raw.kind), attempt_of(raw.metadata)
        if module is None or attempt is None:
            return None
        verdict = module.read(value)
    except ValidationError:
        return None
    condition = verdict.condition
    return ChildView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        stage=attempt[0],
        attempt=attempt[1],
        created=raw.metadata.creation_timestamp,
        state=verdict.state,
        reason=condition.reason if condition else "",
        message=condition.message if condition else "",
        started=verdict.started,
        finished=verdict.finished,
        deleting=raw.metadata.deletion_timestamp is not None,
        configuration=verdict.configuration,
        capacity=_capacity(raw.metadata),
        replaces_pods=verdict.replaces_pods,
    )


def _capacity(metadata: Meta) -> Capacity | None:
    known: tuple[Capacity, ...] = get_args(Capacity)
    return next((one for one in known if one == metadata.labels.get(CAPACITY_LABEL)), None)


def attempt_of(metadata: Meta) -> tuple[Stage, int] | None:
    """Return stage and attempt from our labels; None if they are missing or have other values."""
    stage, attempt = metadata.labels.get(STAGE_LABEL, ""), metadata.labels.get(ATTEMPT_LABEL, "")
    if stage not in list(Stage) or not (attempt.isascii() and attempt.isdecimal()):
        return None
    return Stage(stage), int(attempt)
