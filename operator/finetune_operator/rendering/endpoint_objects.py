"""The objects of an endpoint: servers in a Deployment, and beside it a Service, rules for the network and, where there
are several servers, what scales them and keeps them from being evicted together.

All have one name and belong to the job. The Deployment comes last and has the digest of all of them, so that one look
at it tells whether the endpoint is as it should be.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_GRACE_SECONDS, SERVE_PORT
from finetune_operator.planning.endpoint_plan import DRAIN_SECONDS
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.plan_types import JobPlan, Servers
from finetune_operator.rendering.manifests import config_map, metadata
from finetune_operator.rendering.pod_parts import Pod
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
"""For a new revision to become available; then the job says so, and the servers go on loading."""
IMPORT_SECONDS = 300
"""For a server to listen, which it does before it loads its model: most of it goes into imports from a cold disk."""
PROBE_PERIOD_SECONDS = 2
BUSY_PERCENT = 70
"""Of the CPU request, on average: above, servers are added."""
OPTIONAL_KINDS = (("autoscaling/v2", "HorizontalPodAutoscaler"), ("policy/v1", "PodDisruptionBudget"))
KINDS = (
    *OPTIONAL_KINDS,
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "Service"),
    ("v1", "ConfigMap"),
    ("apps/v1", "Deployment"),
)
"""All that an endpoint can have, in the order in which it is taken away."""


@dataclass(frozen=True)
class EndpointObjects:
    """Objects of an endpoint."""

    manifests: tuple[Manifest, ...]
    """In the order in which they are applied."""
    digest: str
    replicas: int
    """Servers that the Deployment asks for."""
    scales: bool
    """Whether an autoscaler may change that number."""

    @property
    def deployment(self) -> Manifest:
        """What runs the servers."""
        return self.manifests[-1]


def endpoint_url(job: str, namespace: str) -> str:
    """Return where the cluster's own clients reach the endpoint."""
    return f"http://{JobNames.of(job).endpoint}.{namespace}.svc"


def endpoint_objects(plan: JobPlan, context: RenderContext, running: int | None = None) -> EndpointObjects:
    """Return the objects of the endpoint of `plan`. `running`: servers that an autoscaler has asked for last."""
    servers = plan.servers
    assert servers is not None, "a plan with the stage serve has servers"
    pods = StagePods(plan, context, Attempt(Stage.SERVE))
    selector: JsonValue = dict(pods.identity)
    scales = servers.most > servers.replicas
    beside = [config_map(pods), _service(pods, selector)]
    if context.settings.network_policy.enabled:
        beside.insert(0, document("server_network", metadata=metadata(pods), pods=selector, port=SERVE_PORT))
    if servers.most > 1:
        beside.append(document("server_disruption", metadata=metadata(pods), selector=selector))
    if scales:
        beside.append(_scaling(pods, servers))
    # A number that an autoscaler changes is no part of the digest.
    replicas = servers.replicas if running is None or not scales else min(max(running, servers.replicas), servers.most)
    plain = _deployment(pods, selector, servers.replicas, None)
    digest = hashlib.sha256(json.dumps([*beside, plain], sort_keys=True).encode()).hexdigest()
    return EndpointObjects((*beside, _deployment(pods, selector, replicas, digest)), digest, replicas, scales)


def _service(pods: StagePods, selector: JsonValue) -> Manifest:
    return document("server_service", metadata=metadata(pods), selector=selector, port=SERVICE_PORT, target=SERVE_PORT)


def _scaling(pods: StagePods, servers: Servers) -> Manifest:
    return document(
        "server_scaling",
        metadata=metadata(pods),
        target=pods.name,
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


def _server_pod(pods: StagePods) -> Pod:
    pod = stage_pod(pods, Role(env={ENV_GRACE_SECONDS: str(DRAIN_SECONDS + MARGIN_SECONDS)}))
    container = replace(pod.container, ports={"http": SERVE_PORT}, health=_health())
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
