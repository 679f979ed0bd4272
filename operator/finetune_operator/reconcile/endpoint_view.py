"""The Deployment of the servers of a revision, read once at the door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.api.objects import Conditions, Meta, Raw
from finetune_operator.reconcile.children import attempt_of
from finetune_operator.reconcile.reconcile_types import EndpointView, ObjectRef
from finetune_operator.rendering.render_types import ENDPOINT_ANNOTATION, REVISION_ANNOTATION


class _Spec(Raw):
    replicas: int | None = None


class _Status(Raw):
    available_replicas: int | None = None
    updated_replicas: int | None = None
    observed_generation: int | None = None
    conditions: Conditions = ()


class _Deployment(Raw):
    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def endpoint_view(value: Mapping[str, JsonValue]) -> EndpointView | None:
    """Return the endpoint; None for a Deployment without the labels of one, or that cannot be read."""
    try:
        raw = _Deployment.model_validate(value)
    except ValidationError:
        return None
    attempt = attempt_of(raw.metadata)
    if attempt is None or attempt[0] is not Stage.SERVE:
        return None
    status = raw.status
    # What the controller said of an earlier generation is no word on this one.
    current = (status.observed_generation or 0) >= raw.metadata.generation
    stuck = next((one for one in status.conditions if one.type == "Progressing" and one.status == "False"), None)
    return EndpointView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        revision=attempt[1],
        created=raw.metadata.creation_timestamp,
        # Kubernetes' own default.
        replicas=1 if raw.spec.replicas is None else raw.spec.replicas,
        available=status.available_replicas or 0,
        updated=(status.updated_replicas or 0) if current else 0,
        digest=raw.metadata.annotations.get(ENDPOINT_ANNOTATION),
        made_of=raw.metadata.annotations.get(REVISION_ANNOTATION),
        stuck=stuck.message or stuck.reason if stuck is not None and current else None,
        deleting=raw.metadata.deletion_timestamp is not None,
    )
