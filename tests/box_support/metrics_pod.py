"""A custom metrics API as a pod of the cluster, registered with the API server as adapters are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from box_support.metrics_adapter import GROUP_VERSION
from box_support.servers import server
from box_support.team import Team
from cluster_support import self_signed
from cluster_support.api_access import Object, path_of, wait_until
from finetune_contract.layout import SERVE_PORT
from suite_plugins.patience import patient

SCRIPT = Path(__file__).parent / "metrics_adapter.py"
NAME = "metrics-adapter"
PORT = 8443
GROUP, VERSION = GROUP_VERSION.split("/")
REGISTRATION = f"{VERSION}.{GROUP}"


@contextmanager
def custom_metrics(team: Team, metric: str, folder: Path) -> Iterator[None]:
    """Serve a metric of the team's servers while the block runs; `folder` is for the certificate."""
    pair = self_signed.for_hosts(folder, NAME, names=(f"{NAME}.{team.namespace}.svc",))
    secret = {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
    options = ["--certificate", "/tls/tls.crt", "--key", "/tls/tls.key", "--metric", metric]
    options += ["--pod-port", str(SERVE_PORT), "--timeout-seconds", str(patient(5))]
    volumes: dict[str, Object] = {"tls": {"secret": {"secretName": NAME}}}
    objects = server(NAME, SCRIPT, options, secret, port=PORT, service_port=443, volumes=volumes)
    for pod in (each for each in objects if each["kind"] == "Pod"):
        pod["spec"] |= {"serviceAccountName": NAME, "automountServiceAccountToken": True}
    team.apply_manifest(*_rights(), *objects)
    where = ("-n", team.namespace)
    team.box.kubectl("wait", "--for=condition=Ready", *where, f"pod/{NAME}", "--timeout=120s", seconds=150)
    team.box.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(_registration(team.namespace)))
    try:
        wait_until(lambda: _available(team), f"the API server reaches {NAME}", 120)
        yield
    finally:
        # First: while a registered server is down, no namespace can be deleted.
        team.box.kubectl("delete", "apiservice", REGISTRATION)
        for thing in (f"pod/{NAME}", f"service/{NAME}", f"configmap/{NAME}", f"secret/{NAME}"):
            team.box.kubectl("delete", *where, thing, "--grace-period=1")


def _available(team: Team) -> bool:
    found = team.box.api.get(path_of("apiregistration.k8s.io/v1", "apiservices", name=REGISTRATION)) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return ("Available", "True") in {(one["type"], one["status"]) for one in conditions}


def _registration(namespace: str) -> Object:
    spec: Object = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": namespace, "name": NAME, "port": 443},
    }
    metadata = {"name": REGISTRATION}
    return {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata, "spec": spec}


def _rights() -> list[Object]:
    """Return a service account that may list pods."""
    metadata, group = {"name": NAME}, "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME}],
        },
    ]
