"""The objects of an endpoint: servers of each revision, in a Deployment or in an InferenceService of KServe, and beside
them a Service, rules for the network and, where there are several servers, what scales them and keeps them from being
evicted together.

A revision is what servers are told and made of; their attempt label has its number. The Service leads to one revision,
and what scales them belongs to that one. The rest is for servers of all revisions. What runs the servers comes last
and has the digest of all objects, so that one look at it tells whether the endpoint is as it should be. Servers
of KServe have the same labels: the rest holds for them, and the URL stays where they take the place of a Deployment's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_GRACE_SECONDS, SERVE_PORT
from finetune_operator.launchers.kserve_kind import AUTOSCALER_CLASS, DEPLOYMENT_MODE, KSERVE_API, KSERVE_KIND
from finetune_operator.planning.endpoint_plan import DRAIN_SECONDS
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.plan_types import EndpointRuntime, JobPlan, Servers
from finetune_operator.rendering.manifests import config_map, metadata
from finetune_operator.rendering.pod_parts import CONTAINER_NAME, SERVED_CONTAINER_NAME, Pod
from finetune_operator.rendering.render_types import (
    ATTEMPT_LABEL,
    ENDPOINT_ANNOTATION,
    REVISION_ANNOTATION,
    Attempt,
    Manifest,
    RenderContext,
)
from finetune_operator.rendering.templates import document
from finetune_operator.rendering.trainer_pod import Role, StagePods, stage_pod

SERVICE_PORT = 80
LEAVING_SECONDS = 5
"""Between the decision to stop a server and its SIGTERM: until proxies on all nodes have heard that it goes, some send
it requests.
"""
MARGIN_SECONDS = 10
GRACE_SECONDS = LEAVING_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS
START_SECONDS = 900
"""For a new revision to become available; then the job says so, and the servers go on loading."""
IMPORT_SECONDS = 300
"""For a server to listen, which it does before it loads its model: most of it goes into imports from a cold disk."""
PROBE_PERIOD_SECONDS = 2
BUSY_PERCENT = 70
"""Of the CPU request, on average: above, servers are added."""
OPTIONAL_KINDS = (("autoscaling/v2", "HorizontalPodAutoscaler"), ("policy/v1", "PodDisruptionBudget"))
SHARED_KINDS = (*OPTIONAL_KINDS, ("networking.k8s.io/v1", "NetworkPolicy"), ("v1", "Service"))
"""What all revisions share."""
RUNTIMES: Mapping[EndpointRuntime, tuple[str, str]] = {
    "deployment": ("apps/v1", "Deployment"),
    "kserve": (KSERVE_API, KSERVE_KIND),
}
REVISION_KINDS = (("v1", "ConfigMap"), RUNTIMES["deployment"])
"""What each revision has of its own; in place of the Deployment it may have an InferenceService."""
KINDS = (*SHARED_KINDS, *REVISION_KINDS)
"""All that an endpoint can have where there is no KServe, in the order in which it is taken away."""


@dataclass(frozen=True)
class EndpointObjects:
    """Objects of an endpoint."""

    beside: tuple[Manifest, ...]
    """What all revisions share; the Service leads to this one."""
    servers: tuple[Manifest, ...]
    """What the revision has of its own, in the order in which it is applied."""
    digest: str
    """Of all objects, but for a number of servers that an autoscaler may change."""
    replicas: int
    """Servers that are asked for."""
    most: int
    """Servers that an autoscaler may ask for."""
    runtime: EndpointRuntime

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All, in the order in which they are applied."""
        return (*self.beside, *self.servers)


def endpoint_url(job: str, namespace: str) -> str:
    """Return where the cluster's own clients reach the endpoint."""
    return f"http://{JobNames.of(job).endpoint}.{namespace}.svc"


def revision_digest(plan: JobPlan, context: RenderContext) -> str:
    """Return the digest of what servers are told and made of, whatever the number of their revision is."""
    assert plan.servers is not None, "a plan with the stage serve has servers"
    return _sha256(_server_pod(StagePods(plan, context, Attempt(Stage.SERVE)), plan.servers.runtime).manifest())


def endpoint_objects(
    plan: JobPlan, context: RenderContext, running: int | None = None, revision: int = 1
) -> EndpointObjects:
    """Return the objects of the endpoint of `plan`, whose Service leads to `revision`. `running`: servers that an
    autoscaler has asked for last.
    """
    servers = plan.servers
    assert servers is not None, "a plan with the stage serve has servers"
    pods = StagePods(plan, context, Attempt(Stage.SERVE, revision))
    scales = servers.most > servers.replicas
    told, beside = config_map(pods), _beside(pods, servers)
    # A number that an autoscaler changes is no part of the digest.
    replicas = servers.replicas if running is None or not scales else min(max(running, servers.replicas), servers.most)
    made = revision_digest(plan, context)
    if servers.runtime == "kserve":
        return _by_kserve(pods, servers, beside, made)
    digest = _sha256([*beside, told, _deployment(pods, servers.replicas, {})])
    annotations: Manifest = {ENDPOINT_ANNOTATION: digest, REVISION_ANNOTATION: made}
    own = (told, _deployment(pods, replicas, annotations))
    return EndpointObjects(beside, own, digest, replicas, servers.most, "deployment")


def _by_kserve(pods: StagePods, servers: Servers, beside: tuple[Manifest, ...], made: str) -> EndpointObjects:
    """Return the objects of an endpoint that KServe runs. It passes annotations on to pods, so that a digest which the
    number of servers changes would replace them all.
    """
    kept = [one for one in beside if (one["apiVersion"], one["kind"]) not in OPTIONAL_KINDS]
    fixed = servers.model_copy(update={"replicas": 1, "most": 1})
    told = config_map(pods)
    busy: Manifest = {"busyPercent": BUSY_PERCENT}
    digest = _sha256([*kept, told, busy, _inference_service(pods, fixed, {})])
    annotations: Manifest = {ENDPOINT_ANNOTATION: digest, REVISION_ANNOTATION: made}
    own = (told, _inference_service(pods, servers, annotations))
    return EndpointObjects(beside, own, digest, servers.replicas, servers.most, "kserve")


def _sha256(value: JsonValue | list[Manifest]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _beside(pods: StagePods, servers: Servers) -> tuple[Manifest, ...]:
    """Return what all revisions share, the Service with the labels of this one's pods."""
    context, everyone = pods.context, {**pods.identity}
    del everyone[ATTEMPT_LABEL]
    labels: JsonValue = {name: text for name, text in pods.labels.items() if name != ATTEMPT_LABEL}
    own: Manifest = {**metadata(pods, pods.names.endpoint), "labels": labels}
    selector: JsonValue = dict(everyone)
    made = []
    if context.settings.network_policy.enabled:
        made.append(document("server_network", metadata=own, pods=selector, port=SERVE_PORT))
    one: JsonValue = dict(pods.identity)
    made.append(document("server_service", metadata=own, selector=one, port=SERVICE_PORT, target=SERVE_PORT))
    if servers.most > 1:
        made.append(document("server_disruption", metadata=own, selector=selector))
    if servers.most > servers.replicas:
        made.append(_scaling(pods, servers, own))
    return tuple(made)


def _scaling(pods: StagePods, servers: Servers, own: Manifest) -> Manifest:
    return document(
        "server_scaling",
        metadata=own,
        target=pods.names.predictor(pods.attempt.number) if servers.runtime == "kserve" else pods.name,
        least=servers.replicas,
        most=servers.most,
        busy_percent=BUSY_PERCENT,
    )


def _deployment(pods: StagePods, replicas: int, annotations: Manifest) -> Manifest:
    selector: JsonValue = dict(pods.identity)
    return document(
        "server_deployment",
        metadata={**metadata(pods), **({"annotations": annotations} if annotations else {})},
        replicas=replicas,
        selector=selector,
        start_seconds=START_SECONDS,
        pod=_server_pod(pods, "deployment").manifest(),
    )


def _inference_service(pods: StagePods, servers: Servers, own: Manifest) -> Manifest:
    """A custom predictor in Standard mode. KServe reads the pod beside its own fields."""
    pod = _server_pod(pods, "kserve").manifest()
    about, spec = pod["metadata"], pod["spec"]
    assert isinstance(about, dict), "a pod template has metadata"
    assert isinstance(spec, dict), "a pod template has a spec"
    surge: JsonValue = {"maxUnavailable": 0, "maxSurge": 1}
    predictor: Manifest = {
        "minReplicas": servers.replicas,
        "maxReplicas": servers.most,
        "deploymentStrategy": {"type": "RollingUpdate", "rollingUpdate": surge},
        "labels": about["labels"],
        "annotations": about["annotations"],
        **spec,
    }
    # Left out, KServe would make an autoscaler of its own, also for one server.
    scaler = "external" if servers.most > servers.replicas else "none"
    annotations: JsonValue = {DEPLOYMENT_MODE: "Standard", AUTOSCALER_CLASS: scaler, **own}
    return document(
        "server_inferenceservice",
        version=KSERVE_API,
        kind=KSERVE_KIND,
        metadata={**metadata(pods), "annotations": annotations},
        predictor=predictor,
    )


def _server_pod(pods: StagePods, runtime: EndpointRuntime) -> Pod:
    name = SERVED_CONTAINER_NAME if runtime == "kserve" else CONTAINER_NAME
    pod = stage_pod(pods, Role(env={ENV_GRACE_SECONDS: str(DRAIN_SECONDS + MARGIN_SECONDS)}))
    container = replace(pod.container, name=name, ports={"http": SERVE_PORT}, health=_health())
    return replace(pod, container=container, restart_policy="Always", termination_grace_seconds=GRACE_SECONDS)


def _health() -> Manifest:
    """Ready only after its warm-up, started over when it hangs, and left alone while it loads the model, which may take
    any time: a large one comes from a bucket.
    """
    ready: JsonValue = {"path": "/v2/health/ready", "port": SERVE_PORT}
    live: JsonValue = {"path": "/v2/health/live", "port": SERVE_PORT}
    return {
        "startupProbe": {
            "httpGet": live,
            "periodSeconds": PROBE_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": IMPORT_SECONDS // PROBE_PERIOD_SECONDS,
        },
        "readinessProbe": {
            "httpGet": ready,
            "periodSeconds": PROBE_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": 5,
        },
        "livenessProbe": {"httpGet": live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVING_SECONDS}}},
    }
