"""Servers of ours as pods of the cluster: a script from a ConfigMap, run by the trainer's image, behind a Service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from box_support.box import trainer_image
from cluster_support.api_access import Object
from finetune_operator.jobs.render.render_types import JOB_LABEL


def server(
    name: str,
    script: Path,
    options: Sequence[str],
    secret: Mapping[str, str],
    *,
    port: int,
    service_port: int,
    env: Sequence[Object] = (),
    volumes: Mapping[str, Object] | None = None,
) -> list[Object]:
    """Return all objects of a server called `name` whose container listens at `port`.

    `secret`: data of its Secret; each of `volumes` (name -> source) is mounted at /NAME, read-only.
    """
    meta: Object = {"name": name, "labels": {"app": name}}
    sources: dict[str, Object] = {"server": {"configMap": {"name": name}}, **(volumes or {})}
    container: Object = {
        "name": "server",
        "image": trainer_image(),
        "command": ["python", f"/server/{script.name}", "--port", str(port), *options],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}, *env],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "volumeMounts": [{"name": each, "mountPath": f"/{each}", "readOnly": True} for each in sources],
    }
    pod: Object = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": each, **source} for each, source in sources.items()],
    }
    service = {"selector": {"app": name}, "ports": [{"port": service_port, "targetPort": port}]}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {script.name: script.read_text()}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": dict(secret)},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod},
    ]


def way_to(name: str, server_namespace: str, port: int, namespace: str) -> Object:
    """Return a NetworkPolicy that lets the pods of jobs in `namespace` reach the server.

    Policies apply to the pod's own port behind the Service, which jobs may not reach by default. Policies add up.
    """
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": server_namespace}},
        "podSelector": {"matchLabels": {"app": name}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]},
            "policyTypes": ["Egress"],
            "egress": [{"to": [peer], "ports": [{"port": port}]}],
        },
    }
