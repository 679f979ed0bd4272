"""The objects of an endpoint: servers in a Deployment, or in an InferenceService of KServe, and beside it a Service,
rules for the network and, where there are several servers, what scales them and keeps them from being evicted together.

All have one name and belong to the job. What runs the servers comes last and has the digest of all of them, so that one
look at it tells whether the endpoint is as it should be. Servers of both kinds have the same labels: Service, rules and
budget hold for both, and so the URL stays where one takes the place of the other.
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
from finetune_operator.rendering.render_types import ENDPOINT_ANNOTATION, Attempt, Manifest, RenderContext
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
"""For a server to load its model and to warm up, and for a new revision to become available."""
STARTUP_PERIOD_SECONDS = 2
BUSY_PERCENT = 70
"""Of the CPU request, on average: above, servers are added."""
OPTIONAL_KINDS = (("autoscaling/v2", "HorizontalPodAutoscaler"), ("policy/v1", "PodDisruptionBudget"))
RUNTIMES: Mapping[EndpointRuntime, tuple[str, str]] = {
    "deployment": ("apps/v1", "Deployment"),
    "kserve": (KSERVE_API, KSERVE_KIND),
}
BESIDE_KINDS = (
    *OPTIONAL_KINDS,
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "Service"),
    ("v1", "ConfigMap"),
)
"""What stands beside servers, in the order in which it is taken away."""
KINDS = (*BESIDE_KINDS, RUNTIMES["deployment"])
"""All that an endpoint can have where there is no KServe."""


@dataclass(frozen=True)
class EndpointObjects:
    """Objects of an endpoint."""

    manifests: tuple[Manifest, ...]
    """In the order in which they are applied."""
    runtime: EndpointRuntime
    digest: str
    replicas: int
    """Servers that are asked for."""
    most: int
    """Servers that an autoscaler may ask for."""

    @property
    def scales(self) -> bool:
        """Return whether an autoscaler may change the number of servers."""
        return self.most > self.replicas


def endpoint_url(job: str, namespace: str) -> str:
    """Return where the cluster's own clients reach the endpoint."""
    return f"http://{JobNames.of(job).endpoint}.{namespace}.svc"


def endpoint_objects(plan: JobPlan, context: RenderContext, running: int | None = None) -> EndpointObjects:
    """Return the objects of the endpoint of `plan`. `running`: servers that an autoscaler has asked for last."""
    servers = plan.servers
    assert servers is not None, "a plan with the stage serve has servers"
    pods = StagePods(plan, context, Attempt(Stage.SERVE))
    selector: JsonValue = dict(pods.identity)
    scales, by_kserve = servers.most > servers.replicas, servers.runtime == "kserve"
    target = pods.names.predictor if by_kserve else pods.name
    beside = [config_map(pods), _service(pods, selector)]
    if context.settings.network_policy.enabled:
        beside.insert(0, document("server_network", metadata=metadata(pods), pods=selector, port=SERVE_PORT))
    if servers.most > 1:
        beside.append(document("server_disruption", metadata=metadata(pods), selector=selector))
    if scales:
        beside.append(_scaling(pods, servers, target))
    if by_kserve:
        # KServe passes annotations on to pods: a digest that the number of servers changes would replace them all.
        kept = [one for one in beside if (one["apiVersion"], one["kind"]) not in OPTIONAL_KINDS]
        fixed = servers.model_copy(update={"replicas": 1, "most": 1})
        digest = _digest([*kept, BUSY_PERCENT, _inference_service(pods, fixed, None)])
        made = (*beside, _inference_service(pods, servers, digest))
        return EndpointObjects(made, "kserve", digest, servers.replicas, servers.most)
    # A number that an autoscaler changes is no part of the digest.
    replicas = servers.replicas if running is None or not scales else min(max(running, servers.replicas), servers.most)
    digest = _digest([*beside, _deployment(pods, selector, servers.replicas, None)])
    made = (*beside, _deployment(pods, selector, replicas, digest))
    return EndpointObjects(made, "deployment", digest, servers.replicas, servers.most)


def _digest(parts: list[Manifest | int]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _service(pods: StagePods, selector: JsonValue) -> Manifest:
    return document("server_service", metadata=metadata(pods), selector=selector, port=SERVICE_PORT, target=SERVE_PORT)


def _scaling(pods: StagePods, servers: Servers, target: str) -> Manifest:
    return document(
        "server_scaling",
        metadata=metadata(pods),
        target=target,
        least=servers.replicas,
        most=servers.most,
        busy_percent=BUSY_PERCENT,
    )


def _deployment(pods: StagePods, selector: JsonValue, replicas: int, digest: str | None) -> Manifest:
    annotations: Manifest = {} if digest is None else {"annotations": {ENDPOINT_ANNOTATION: digest}}
    return document(
        "server_deployment",
        metadata={**metadata(pods), **annotations},
        replicas=replicas,
        selector=selector,
        start_seconds=START_SECONDS,
        pod=_server_pod(pods).manifest(),
    )


def _inference_service(pods: StagePods, servers: Servers, digest: str | None) -> Manifest:
    """A custom predictor in Standard mode. KServe reads the pod beside its own fields."""
    pod = _server_pod(pods, SERVED_CONTAINER_NAME).manifest()
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
    own: Manifest = {} if digest is None else {ENDPOINT_ANNOTATION: digest}
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


def _server_pod(pods: StagePods, container_name: str = CONTAINER_NAME) -> Pod:
    pod = stage_pod(pods, Role(env={ENV_GRACE_SECONDS: str(DRAIN_SECONDS + MARGIN_SECONDS)}))
    container = replace(pod.container, name=container_name, ports={"http": SERVE_PORT}, health=_health())
    return replace(pod, container=container, restart_policy="Always", termination_grace_seconds=GRACE_SECONDS)


def _health() -> Manifest:
    """Ready only after its warm-up, started over when it hangs, and left alone while it loads the model."""
    ready: JsonValue = {"path": "/v2/health/ready", "port": SERVE_PORT}
    live: JsonValue = {"path": "/v2/health/live", "port": SERVE_PORT}
    return {
        "startupProbe": {
            "httpGet": ready,
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": START_SECONDS // STARTUP_PERIOD_SECONDS,
        },
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVING_SECONDS}}},
    }
