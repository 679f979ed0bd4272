"""What runs an attempt, seen the same way whatever its kind.

Each kind has its own way to say that it is over, and each way its trap. The modules of the launchers take the traps, so
that nobody above has to know the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.api.objects import Meta, Raw
from finetune_operator.api.types import Capacity
from finetune_operator.launchers.launcher_registry import module_of
from finetune_operator.reconcile.reconcile_types import ChildView, ObjectRef
from finetune_operator.rendering.render_types import ATTEMPT_LABEL, CAPACITY_LABEL, STAGE_LABEL


class _Child(Raw):
    """What is read of every kind that runs a stage."""

    api_version: str
    kind: str
    metadata: Meta


def child_view(value: Mapping[str, JsonValue]) -> ChildView | None:
    """The child, or None for what is none of ours: another kind, or without the labels of an attempt."""
    try:
        raw = _Child.model_validate(value)
        module, attempt = module_of(raw.api_version, raw.kind), attempt_of(raw.metadata)
        if module is None or attempt is None:
            return None
        verdict = module.read(value)
    except ValidationError:
        return None
    said = verdict.said
    return ChildView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        stage=attempt[0],
        attempt=attempt[1],
        created=raw.metadata.creation_timestamp,
        state=verdict.state,
        reason=said.reason if said else "",
        message=said.message if said else "",
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
    """Stage and attempt from our labels; None when they are missing or no words of ours."""
    stage, attempt = metadata.labels.get(STAGE_LABEL, ""), metadata.labels.get(ATTEMPT_LABEL, "")
    if stage not in list(Stage) or not (attempt.isascii() and attempt.isdecimal()):
        return None
    return Stage(stage), int(attempt)
