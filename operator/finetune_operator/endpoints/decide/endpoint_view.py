"""Parse the servers of a revision: a Deployment, or an InferenceService with KServe's Deployment.

The number of servers that answer comes from the Deployment in both cases: conditions of an InferenceService lag behind
it, and its `Ready` also waits for an ingress, which our Service does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.endpoints.kinds import KSERVE_KIND, KSERVE_LABEL
from finetune_operator.jobs.render.render_types import ENDPOINT_ANNOTATION, REVISION_ANNOTATION
from finetune_operator.jobs.state.children import attempt_of
from finetune_operator.jobs.state.decision_types import EndpointView, ObjectRef
from finetune_operator.spec.kubernetes_objects import Conditions, Meta, Raw, RawCondition

_REPORTED_CONDITIONS = ("PredictorReady", "IngressReady", "Ready")
"""Conditions in the order in which KServe reaches them (pkg/apis/serving/v1beta1/inference_service_status.go)."""


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


class _Predictor(Raw):
    min_replicas: int | None = None
    max_replicas: int | None = None


class _ServiceSpec(Raw):
    predictor: _Predictor = _Predictor()


class _ServiceStatus(Raw):
    url: str | None = None
    conditions: Conditions = ()


class _InferenceService(Raw):
    api_version: str
    kind: Literal["InferenceService"]
    metadata: Meta
    spec: _ServiceSpec = _ServiceSpec()
    status: _ServiceStatus = _ServiceStatus()


def _revision(metadata: Meta) -> int | None:
    """Return the revision that the labels of an object name; None if it is not of an endpoint."""
    attempt = attempt_of(metadata)
    return attempt[1] if attempt is not None and attempt[0] is Stage.SERVE else None


def endpoint_view(value: Mapping[str, JsonValue]) -> EndpointView | None:
    """Return the endpoint; None for a Deployment without the labels of one, or that cannot be read. A Deployment of
    KServe's has the runtime `kserve`.
    """
    try:
        raw = _Deployment.model_validate(value)
    except ValidationError:
        return None
    revision = _revision(raw.metadata)
    if revision is None:
        return None
    status = raw.status
    # The controller's status for an earlier generation says nothing about this one.
    current = (status.observed_generation or 0) >= raw.metadata.generation
    stuck = next((one for one in status.conditions if one.type == "Progressing" and one.status == "False"), None)
    return EndpointView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        revision=revision,
        created=raw.metadata.creation_timestamp,
        # Kubernetes' own default.
        replicas=1 if raw.spec.replicas is None else raw.spec.replicas,
        runtime="kserve" if KSERVE_LABEL in raw.metadata.labels else "deployment",
        available=status.available_replicas or 0,
        updated=(status.updated_replicas or 0) if current else 0,
        digest=raw.metadata.annotations.get(ENDPOINT_ANNOTATION),
        revision_digest=raw.metadata.annotations.get(REVISION_ANNOTATION),
        stuck=stuck.message or stuck.reason if stuck is not None and current else None,
        deleting=raw.metadata.deletion_timestamp is not None,
    )


def inference_service_view(value: Mapping[str, JsonValue]) -> EndpointView | None:
    """Return the endpoint of an InferenceService, without fields that only KServe's Deployment has; None as above."""
    try:
        raw = _InferenceService.model_validate(value)
    except ValidationError:
        return None
    revision = _revision(raw.metadata)
    if revision is None:
        return None
    predictor, annotations = raw.spec.predictor, raw.metadata.annotations
    bad = {one.type: one for one in raw.status.conditions if _is_problem(one)}
    condition = next((bad[name] for name in _REPORTED_CONDITIONS if name in bad), None)
    return EndpointView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        revision=revision,
        created=raw.metadata.creation_timestamp,
        replicas=1 if predictor.min_replicas is None else predictor.min_replicas,
        runtime="kserve",
        most=predictor.max_replicas,
        digest=annotations.get(ENDPOINT_ANNOTATION),
        revision_digest=annotations.get(REVISION_ANNOTATION),
        deleting=raw.metadata.deletion_timestamp is not None,
        has_deployment=False,
        problem=None if condition is None else (condition.reason or condition.type, condition.message),
        url=raw.status.url,
    )


def _is_problem(condition: RawCondition) -> bool:
    """Return whether KServe reports that something cannot be done, and not only that servers are on their way."""
    return condition.status == "False" and bool(condition.message) and condition.reason != "MinimumReplicasUnavailable"


def joined(views: Iterable[EndpointView]) -> tuple[EndpointView, ...]:
    """Return the applied endpoints by revision: each InferenceService with the servers of its Deployment."""
    ours, deployments = [], {}
    for view in views:
        if view.runtime == "kserve" and view.ref.kind != KSERVE_KIND:
            deployments[view.revision] = view
        else:
            ours.append(view)
    endpoints = (_with_servers(one, deployments.get(one.revision)) if one.runtime == "kserve" else one for one in ours)
    return tuple(sorted(endpoints, key=lambda view: (view.revision, view.ref.name)))


def _with_servers(service: EndpointView, deployment: EndpointView | None) -> EndpointView:
    """Return the InferenceService with the servers of its Deployment. Before KServe has followed a change, the count of
    new servers and a verdict on them are of the state before.
    """
    if deployment is None or deployment.deleting:
        return service
    followed = deployment.digest == service.digest
    return replace(
        service,
        has_deployment=True,
        available=deployment.available,
        updated=deployment.updated if followed else 0,
        stuck=deployment.stuck if followed else None,
    )
