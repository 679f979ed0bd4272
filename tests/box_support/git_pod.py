"""A git host as a pod of the cluster, over HTTPS with an authority of its own, as companies have one.

Its Service listens at 443, so that repositories are named as anywhere: https://HOST/NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from box_support.box import GIT_HOST, trainer_image
from box_support.team import Team
from cluster_support import certificates
from cluster_support.access import Object
from finetune_operator.rendering.types import JOB_LABEL

SERVER = Path(__file__).parents[1] / "script_support" / "git_server.py"
NAME, NAMESPACE = GIT_HOST.split(".")[:2]
PORT = 8443
AUTHORITY = "git-authority"
"""ConfigMap in the team's namespace with the certificate of the host's authority."""
TEMPLATE: Object = {
    "env": [{"name": "GIT_SSL_CAINFO", "value": "/etc/git-authority/ca.crt"}],
    "volumes": [{"name": AUTHORITY, "configMap": {"name": AUTHORITY}}],
    "volumeMounts": [{"name": AUTHORITY, "mountPath": "/etc/git-authority", "readOnly": True}],
}
"""What a job says so that git trusts the host."""


@contextmanager
def git_pod(team: Team, repositories: Mapping[str, Mapping[str, str]], folder: Path) -> Iterator[None]:
    """Serves repositories (name -> file name -> text), each of one commit; `folder` is for its certificate."""
    pair = certificates.for_hosts(folder, "git", names=(GIT_HOST,))
    team.box.kubectl("apply", "-f", "-", stdin=yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace",
                                                               "metadata": {"name": NAMESPACE}}))  # fmt: skip
    where = ("-n", NAMESPACE)
    secret = {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
    team.box.kubectl("apply", *where, "-f", "-", stdin=yaml.safe_dump_all(_server(repositories, secret)))
    authority = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": AUTHORITY}}
    team.apply_manifest({**authority, "data": {"ca.crt": secret["tls.crt"]}}, _way_to())
    team.box.kubectl("wait", "--for=condition=Ready", *where, f"pod/{NAME}", "--timeout=60s", seconds=90)
    try:
        yield
    finally:
        team.box.kubectl("delete", "-n", team.namespace, f"configmap/{AUTHORITY}", f"networkpolicy/{NAME}")
        team.box.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _server(repositories: Mapping[str, Mapping[str, str]], secret: Mapping[str, str]) -> list[Object]:
    meta: Object = {"name": NAME, "labels": {"app": NAME}}
    command = ["python", "/server/git_server.py", "--port", str(PORT)]
    command += ["--certificate", "/tls/tls.crt", "--key", "/tls/tls.key"]
    mounts = [{"name": "server", "mountPath": "/server"}, {"name": "tls", "mountPath": "/tls"}]
    volumes: list[Object] = [
        {"name": "server", "configMap": {"name": NAME}},
        {"name": "tls", "secret": {"secretName": NAME}},
    ]
    objects: list[Object] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"git_server.py": SERVER.read_text()}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": dict(secret)},
    ]
    for name, files in repositories.items():
        volume = f"repository-{name}"
        command += ["--commit", f"{name}=/repositories/{name}"]
        mounts.append({"name": volume, "mountPath": f"/repositories/{name}"})
        volumes.append({"name": volume, "configMap": {"name": volume}})
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": volume}, "data": dict(files)})
    container: Object = {
        "name": "git",
        "image": trainer_image(),
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": mounts,
    }
    spec: Object = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": volumes,
    }
    ports = [{"port": 443, "targetPort": PORT}]
    return [
        *objects,
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": {"app": NAME}, "ports": ports}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
    ]


def _way_to() -> Object:
    """Policies look behind Services: the pod's port is none that every job may reach. They add up."""
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
        "podSelector": {"matchLabels": {"app": NAME}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]},
            "policyTypes": ["Egress"],
            "egress": [{"to": [peer], "ports": [{"port": PORT}]}],
        },
    }
