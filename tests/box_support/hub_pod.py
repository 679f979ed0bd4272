"""The Hub's stand-in as a pod of the cluster, for jobs whose model is `hf://`.

Jobs are applied unchanged: an admission policy sets HF_ENDPOINT in the pods of labelled namespaces, as administrators
with a mirror of the Hub do.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from box_support.box import Box
from box_support.servers import server, way_to
from box_support.team import INPUTS, Team
from cluster_support.api_access import Object

SERVER = Path(__file__).parents[1] / "hub_stand_in" / "hub_server.py"
NAME = "hub-stand-in"
PORT = 8080
REDIRECTED = "finetune.dev/test-hub"
"""Label of the namespaces whose pods use the stand-in."""


@dataclass(frozen=True)
class Hub:
    """The running stand-in."""

    box: Box
    namespace: str
    """Namespace in which it runs."""
    token: str
    """Token for the private repositories."""

    @contextmanager
    def answers(self, namespace: str) -> Iterator[None]:
        """Let the pods of this namespace reach the Hub while the block runs."""
        self.box.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(way_to(NAME, self.namespace, PORT, namespace)))
        self.box.kubectl("label", "namespace", namespace, f"{REDIRECTED}=true")
        try:
            yield
        finally:
            self.box.kubectl("label", "namespace", namespace, f"{REDIRECTED}-")
            self.box.kubectl("delete", "networkpolicy", NAME, "-n", namespace)


@contextmanager
def hub_stand_in(team: Team, *, public: Mapping[str, str], private: Mapping[str, str]) -> Iterator[Hub]:
    """Serve repositories, `org/name` -> folder on the claim `inputs`, from the team's namespace."""
    token = f"hf_{secrets.token_hex(16)}"
    folders = [("--public", public), ("--private", private)]
    options = [
        part for option, served in folders for name, path in served.items() for part in (option, f"{name}=/in/{path}")
    ]
    team.apply_manifest(*_server(options, token))
    team.box.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(_policy(team.namespace)))
    where = ("-n", team.namespace)
    team.box.kubectl("wait", "--for=condition=Ready", *where, f"pod/{NAME}", "--timeout=120s", seconds=150)
    try:
        yield Hub(team.box, team.namespace, token)
    finally:
        for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
            team.box.kubectl("delete", kind, NAME)
        for thing in (f"pod/{NAME}", f"service/{NAME}", f"configmap/{NAME}", f"secret/{NAME}"):
            team.box.kubectl("delete", *where, thing, "--grace-period=1")


def _server(options: list[str], token: str) -> list[Object]:
    env = [{"name": "HUB_TOKEN", "valueFrom": {"secretKeyRef": {"name": NAME, "key": "token"}}}]
    volumes: dict[str, Object] = {"in": {"persistentVolumeClaim": {"claimName": INPUTS}}}
    return server(NAME, SERVER, options, {"token": token}, port=PORT, service_port=PORT, env=env, volumes=volumes)


def _policy(namespace: str) -> list[Object]:
    endpoint = f"http://{NAME}.{namespace}.svc:{PORT}"
    variable = f'Object.spec.containers.env{{name: "HF_ENDPOINT", value: "{endpoint}"}}'
    containers = f"object.spec.containers.map(c, Object.spec.containers{{name: c.name, env: [{variable}]}})"
    frame = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": NAME}}
    policy: Object = {
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
            ]
        },
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [
            {
                "patchType": "ApplyConfiguration",
                "applyConfiguration": {"expression": f"Object{{spec: Object.spec{{containers: {containers}}}}}"},
            }
        ],
    }
    selector = {"matchLabels": {REDIRECTED: "true"}}
    return [
        {**frame, "kind": "MutatingAdmissionPolicy", "spec": policy},
        {
            **frame,
            "kind": "MutatingAdmissionPolicyBinding",
            "spec": {"policyName": NAME, "matchResources": {"namespaceSelector": selector}},
        },
    ]
