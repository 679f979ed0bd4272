"""Objects of an endpoint: a Deployment or a KServe InferenceService for each revision, beside them a Service, a
NetworkPolicy and, with several servers, a HorizontalPodAutoscaler and a PodDisruptionBudget; an HTTPRoute if a Gateway
leads to it, and an HTTPScaledObject in place of the autoscaler if it scales to zero.

A revision is a configuration of the servers (files and pod template); its number is their attempt label. The Service
selects one revision; a canary has a Service of its own. The autoscaler scales the revision that serves. The other
objects cover all revisions. The servers' object comes last and has the digest of all objects, so that reading it alone
shows whether the endpoint is up to date. Servers of KServe have the same labels: the shared objects select them too,
and the URL stays if they replace a Deployment's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_GRACE_SECONDS, SERVE_PORT
from finetune_operator.endpoints.endpoint_plan import DRAIN_SECONDS
from finetune_operator.endpoints.kinds import (
    AUTOSCALER_CLASS,
    DEPLOYMENT_MODE,
    GATEWAY_GROUP,
    GATEWAY_KIND,
    GATEWAY_LABEL,
    IDLE_API,
    IDLE_KIND,
    KSERVE_API,
    KSERVE_KIND,
    ROUTE_API,
    ROUTE_KIND,
    RUNTIME_HEALTH_PATH,
    VLLM_IN_FLIGHT,
)
from finetune_operator.endpoints.render.kserve_runtime import runtime_pod, runtime_template
from finetune_operator.endpoints.render.vllm_server import vllm_pod, vllm_probes
from finetune_operator.jobs.render.manifests import config_map, metadata
from finetune_operator.jobs.render.network import dumped
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME, SERVED_CONTAINER_NAME, Pod
from finetune_operator.jobs.render.render_types import (
    ATTEMPT_LABEL,
    ENDPOINT_ANNOTATION,
    REVISION_ANNOTATION,
    Attempt,
    Manifest,
    RenderContext,
)
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import Role, StagePods, stage_pod
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import EndpointRuntime, JobPlan, Servers
from finetune_operator.spec.types import TrafficSpec

SERVICE_PORT = 80
LEAVING_SECONDS = 5
"""preStop delay before a server's SIGTERM: proxies send it requests until the change of endpoints reaches all nodes."""
MARGIN_SECONDS = 10
GRACE_SECONDS = LEAVING_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS
START_SECONDS = 900
"""Progress deadline of a rollout; past it the job's status reports the delay, and the servers go on loading."""
IMPORT_SECONDS = 300
"""Time for a server to listen, which it does before it loads its model; mostly imports from a cold disk."""
PROBE_PERIOD_SECONDS = 2
BUSY_PERCENT = 70
"""Target average CPU use, in percent of the request; above it, servers are added."""
REQUESTS_IN_FLIGHT = "finetune_serving_requests_in_flight"
"""Metric of servers that the autoscaler reads if spec.endpoint has targetRequestsInFlight."""
OPTIONAL_KINDS = (("autoscaling/v2", "HorizontalPodAutoscaler"), ("policy/v1", "PodDisruptionBudget"))
SERVICE_KIND = ("v1", "Service")
SHARED_KINDS = (*OPTIONAL_KINDS, ("networking.k8s.io/v1", "NetworkPolicy"), SERVICE_KIND)
"""Kinds of objects that all revisions share, beside an HTTPRoute and an HTTPScaledObject."""
ROUTE = (ROUTE_API, ROUTE_KIND)
IDLE_SCALING = (IDLE_API, IDLE_KIND)
RUNTIMES: Mapping[EndpointRuntime, tuple[str, str]] = {
    "deployment": ("apps/v1", "Deployment"),
    "kserve": (KSERVE_API, KSERVE_KIND),
}


@dataclass(frozen=True)
class EndpointObjects:
    """Objects of an endpoint."""

    beside: tuple[Manifest, ...]
    """Objects that all revisions share; the Service selects this revision."""
    servers: tuple[Manifest, ...]
    """Objects of the revision, in the order in which they are applied."""
    digest: str
    """sha256 of all objects, without a number of servers that an autoscaler may change."""
    replicas: int
    """Requested servers."""
    most: int
    """Most servers that an autoscaler may request."""
    runtime: EndpointRuntime

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Return all objects, in the order in which they are applied."""
        return (*self.beside, *self.servers)


def endpoint_url(job: str, namespace: str, name: str | None = None) -> str:
    """Return the endpoint's URL for clients in the cluster. `name`: name of the endpoint, if not the job's."""
    return f"http://{endpoint_host(job, namespace, name)}"


def endpoint_host(job: str, namespace: str, name: str | None = None) -> str:
    """Return the host of that URL, also for requests to the interceptor of an endpoint that scales to zero."""
    return idle_host(JobNames.of(job).endpoint_service(name), namespace)


def revision_digest(plan: JobPlan, context: RenderContext) -> str:
    """Return the digest of the servers' files and pod template; it does not depend on the revision's number."""
    assert plan.servers is not None, "a plan with the stage serve has servers"
    return _sha256(_server_template(StagePods(plan, context, Attempt(Stage.SERVE)), plan.servers))


def server_count(servers: Servers, running: int | None) -> int:
    """Return the number of servers to request. `running`: number that an autoscaler requested last."""
    if running is not None and servers.idle_seconds is not None:
        return min(running, servers.most)
    if running is None or servers.most <= servers.replicas:
        return servers.replicas
    return min(max(running, servers.replicas), servers.most)


def canary_objects(
    plan: JobPlan, context: RenderContext, serving: int, canary: int | None = None, weight: int | None = None
) -> tuple[Manifest, ...]:
    """Return the shared objects that a canary changes: the NetworkPolicy, which admits the Gateway, the Service, which
    selects the revision `serving`, and the HTTPRoute, which with a `weight` in percent also leads to the canary's own
    Service.
    """
    assert plan.servers is not None, "a plan with the stage serve has servers"
    pods = StagePods(plan, context, Attempt(Stage.SERVE, serving))
    changed = ("NetworkPolicy", "Service", ROUTE_KIND)
    by_kind = {str(one["kind"]): one for one in _shared_objects(pods, plan.servers) if one["kind"] in changed}
    traffic = context.spec.routed_traffic
    if canary is None or weight is None or traffic is None:
        return tuple(by_kind.values())
    beside = StagePods(plan, context, Attempt(Stage.SERVE, canary))
    about = metadata(beside)
    weights = {_service_name(pods): WHOLE - weight, str(about["name"]): weight}
    by_kind[ROUTE_KIND] = route(_shared_metadata(pods), traffic, weights, SERVICE_PORT)
    return (_service(about, beside), *by_kind.values())


def endpoint_objects(
    plan: JobPlan, context: RenderContext, running: int | None = None, revision: int = 1, canary: int | None = None
) -> EndpointObjects:
    """Return the objects of the endpoint of `plan`, whose Service selects `revision`. `running`: servers that an
    autoscaler requested last; `canary`: servers of the revision while it is a canary.
    """
    servers = plan.servers
    assert servers is not None, "a plan with the stage serve has servers"
    pods = StagePods(plan, context, Attempt(Stage.SERVE, revision))
    config, beside = config_map(pods), _shared_objects(pods, servers)
    # The digest leaves out a number that an autoscaler changes.
    replicas = server_count(servers, running) if canary is None else canary
    pod_digest = revision_digest(plan, context)
    if servers.runtime == "kserve":
        return _by_kserve(pods, servers, beside, pod_digest)
    digest = _sha256([*beside, config, _deployment(pods, servers, servers.replicas, {})])
    annotations: Manifest = {ENDPOINT_ANNOTATION: digest, REVISION_ANNOTATION: pod_digest}
    server_objects = (config, _deployment(pods, servers, replicas, annotations))
    return EndpointObjects(beside, server_objects, digest, replicas, servers.most, "deployment")


def _by_kserve(pods: StagePods, servers: Servers, beside: tuple[Manifest, ...], pod_digest: str) -> EndpointObjects:
    """Return the objects of an endpoint that KServe runs. It copies annotations to pods, so that a digest that depends
    on the number of servers would replace all pods.
    """
    shared = [one for one in beside if (one["apiVersion"], one["kind"]) not in OPTIONAL_KINDS]
    fixed = servers.model_copy(update={"replicas": 1, "most": 1})
    config = config_map(pods)
    busy: Manifest = {"busyPercent": BUSY_PERCENT}
    if servers.target_requests is not None:
        busy = {"targetRequests": servers.target_requests}
    digest = _sha256([*shared, config, busy, _inference_service(pods, fixed, {})])
    annotations: Manifest = {ENDPOINT_ANNOTATION: digest, REVISION_ANNOTATION: pod_digest}
    server_objects = (config, _inference_service(pods, servers, annotations))
    return EndpointObjects(beside, server_objects, digest, servers.replicas, servers.most, "kserve")


def _sha256(value: JsonValue | list[Manifest]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shared_objects(pods: StagePods, servers: Servers) -> tuple[Manifest, ...]:
    """Return the objects that all revisions share; the Service selects this revision's pods."""
    context, everyone = pods.context, {**pods.identity}
    del everyone[ATTEMPT_LABEL]
    shared_metadata = _shared_metadata(pods)
    selector: JsonValue = dict(everyone)
    objects = []
    if context.settings.network_policy.enabled:
        clients = dumped(context.settings.network_policy.endpoint_clients)
        clients += [] if (peer := gateway_peer(context)) is None else [peer]
        objects.append(
            document("server_network", metadata=shared_metadata, pods=selector, clients=clients, port=SERVE_PORT)
        )
    service = _service_name(pods)
    objects.append(_service({**shared_metadata, "name": service}, pods))
    if (traffic := context.spec.routed_traffic) is not None:
        objects.append(route(shared_metadata, traffic, {service: WHOLE}, SERVICE_PORT))
    if servers.most > 1:
        objects.append(document("server_disruption", metadata=shared_metadata, selector=selector))
    if servers.idle_seconds is not None:
        about = (service, context.namespace, SERVICE_PORT)
        objects.append(idle_scaling(shared_metadata, servers, pods.name, about, START_SECONDS))
    elif servers.most > servers.replicas:
        objects.append(_scaling(pods, servers, shared_metadata))
    return tuple(objects)


def _shared_metadata(pods: StagePods) -> Manifest:
    """Return `metadata` of the objects that all revisions share."""
    labels: JsonValue = {name: text for name, text in pods.labels.items() if name != ATTEMPT_LABEL}
    return {**metadata(pods, pods.names.endpoint), "labels": labels}


def _service_name(pods: StagePods) -> str:
    endpoint = pods.context.spec.endpoint
    return pods.names.endpoint_service(None if endpoint is None else endpoint.name)


def _service(about: Manifest, pods: StagePods) -> Manifest:
    """Return a Service that selects the servers of one revision."""
    selector: JsonValue = dict(pods.identity)
    return document("server_service", metadata=about, selector=selector, port=SERVICE_PORT, target=SERVE_PORT)


def _scaling(pods: StagePods, servers: Servers, shared_metadata: Manifest) -> Manifest:
    return document(
        "server_scaling",
        metadata=shared_metadata,
        target=pods.names.predictor(pods.attempt.number) if servers.runtime == "kserve" else pods.name,
        least=servers.replicas,
        most=servers.most,
        metric=_scaling_metric(servers),
    )


def _scaling_metric(servers: Servers) -> Manifest:
    """Return the metric that the autoscaler averages over servers, with its target."""
    if servers.target_requests is None:
        target: JsonValue = {"type": "Utilization", "averageUtilization": BUSY_PERCENT}
        return {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    average: JsonValue = {"type": "AverageValue", "averageValue": str(servers.target_requests)}
    gauge = REQUESTS_IN_FLIGHT if servers.vllm is None else VLLM_IN_FLIGHT
    return {"type": "Pods", "pods": {"metric": {"name": gauge}, "target": average}}


def _deployment(pods: StagePods, servers: Servers, replicas: int, annotations: Manifest) -> Manifest:
    """Return the Deployment. With 0 replicas it has no number: the one who scaled to zero owns that field, and may
    start a server at the same moment.
    """
    selector: JsonValue = dict(pods.identity)
    return document(
        "server_deployment",
        metadata={**metadata(pods), **({"annotations": annotations} if annotations else {})},
        replicas=replicas,
        selector=selector,
        start_seconds=START_SECONDS,
        pod=_server_template(pods, servers),
    )


def _inference_service(pods: StagePods, servers: Servers, digests: Manifest) -> Manifest:
    """Return a predictor in Standard mode: a custom one, or with a runtime of the cluster. KServe reads the pod spec
    beside its own fields.
    """
    pod = _server_template(pods, servers)
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
    # Without this, KServe would create an autoscaler of its own, also for one server.
    scaler = "external" if servers.most > servers.replicas else "none"
    annotations: JsonValue = {DEPLOYMENT_MODE: "Standard", AUTOSCALER_CLASS: scaler, **digests}
    return document(
        "server_inferenceservice",
        version=KSERVE_API,
        kind=KSERVE_KIND,
        metadata={**metadata(pods), "annotations": annotations},
        predictor=predictor,
    )


def _server_template(pods: StagePods, servers: Servers) -> Manifest:
    """Return the manifest of the servers' pod template, for a runtime of KServe as its predictor has it."""
    template = _server_pod(pods, servers).manifest()
    if servers.vllm is None or servers.vllm.kserve_runtime is None:
        return template
    return runtime_template(template, pods, servers.vllm.kserve_runtime)


def _server_pod(pods: StagePods, servers: Servers) -> Pod:
    name = SERVED_CONTAINER_NAME if servers.runtime == "kserve" else CONTAINER_NAME
    if servers.vllm is None:
        pod = stage_pod(pods, Role(env={ENV_GRACE_SECONDS: str(DRAIN_SECONDS + MARGIN_SECONDS)}))
        probes = _probes()
    elif servers.vllm.kserve_runtime is not None:
        pod, probes = runtime_pod(pods, servers.vllm, DRAIN_SECONDS), vllm_probes(RUNTIME_HEALTH_PATH)
    else:
        pod, probes = vllm_pod(pods, servers.vllm, DRAIN_SECONDS), vllm_probes()
    health: Manifest = {**probes, "lifecycle": {"preStop": {"sleep": {"seconds": LEAVING_SECONDS}}}}
    container = replace(pod.container, name=name, ports={"http": SERVE_PORT}, health=health)
    return replace(pod, container=container, restart_policy="Always", termination_grace_seconds=GRACE_SECONDS)


def _probes() -> Manifest:
    """Return probes: a server is ready only after warm-up and restarted when it hangs, but not while it loads
    the model, which may take any time if a large one comes from a bucket.
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
    }


# ------------------------------------------------------------------------------------------------------ scaling to zero
# KEDA creates an autoscaler of its own for the Deployment, so the endpoint has none beside it. It scales the revision
# that serves; the next one starts with at least one server, and is scaled once it has taken over.

REQUESTS_PER_SERVER = 100
"""Average number of requests in flight per server above which servers are added, by default; the add-on's own."""


def idle_host(service: str, namespace: str) -> str:
    """Return the host of requests to the interceptor. It names Service and namespace, so that no endpoint can get the
    requests of another one.
    """
    return f"{service}.{namespace}.svc"


def idle_scaling(
    metadata: Manifest, servers: Servers, target: str, service: tuple[str, str, int], start_seconds: int
) -> Manifest:
    """Return the HTTPScaledObject. `target`: Deployment to scale; `service`: name, namespace and port of the Service
    that selects its pods; `start_seconds`: longest start of a server, for which requests are held.
    """
    name, namespace, port = service
    return document(
        "server_idle",
        version=IDLE_API,
        kind=IDLE_KIND,
        metadata=metadata,
        host=idle_host(name, namespace),
        target=target,
        service=name,
        port=port,
        most=servers.most,
        idle_seconds=servers.idle_seconds,
        start_seconds=start_seconds,
        requests=servers.target_requests or REQUESTS_PER_SERVER,
        wait=f"{start_seconds}s",
    )


# ---------------------------------------------------------------------------------------------------------------- route
# The route stays through rollouts: its rule leads to the endpoint's Service, and during a canary to the canary's own
# Service as well, with weights. Whoever asks the endpoint's Service itself gets the serving revision.

WHOLE = 100
"""Sum of the weights: they are percentages."""


def route(metadata: Manifest, traffic: TrafficSpec, weights: dict[str, int], port: int) -> Manifest:
    """Return the HTTPRoute. `weights`: share of the requests in percent, by Service."""
    namespace, name = _gateway(traffic)
    parent: Manifest = {"group": GATEWAY_GROUP, "kind": GATEWAY_KIND, "name": name}
    backends: list[JsonValue] = [[service, weight] for service, weight in weights.items()]
    return document(
        "server_route",
        version=ROUTE_API,
        kind=ROUTE_KIND,
        metadata=metadata,
        parent=parent if namespace is None else {**parent, "namespace": namespace},
        hostnames=list(traffic.hostnames),
        backends=backends,
        port=port,
    )


def gateway_peer(context: RenderContext) -> Manifest | None:
    """Return the peer that selects the pods of a Gateway of another namespace; those of the job's own may ask anyway.
    None without one.
    """
    traffic = context.spec.routed_traffic
    namespace, name = (None, "") if traffic is None else _gateway(traffic)
    if namespace is None or namespace == context.namespace:
        return None
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {GATEWAY_LABEL: name}},
    }


def _gateway(traffic: TrafficSpec) -> tuple[str | None, str]:
    """Return namespace and name of the Gateway; None: that of the job."""
    namespace, _, name = (traffic.gateway or "").rpartition("/")
    return namespace or None, name
