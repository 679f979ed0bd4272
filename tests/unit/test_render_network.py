"""The NetworkPolicy of a job: egress and ingress of its pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.manifests import shared
from finetune_operator.jobs.render.network import ALLOWS_ANNOTATION, OPERATOR_LABELS
from finetune_operator.jobs.render.render_types import PROGRESS_PORT, Owner, ProgressEndpoint, RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import FineTuneJob

MANIFESTS = Path(__file__).parents[2] / "manifests" / "operator"
IN_CLUSTER = ProgressEndpoint("https://finetune-operator-progress.ops.svc:8443", "CA", "ops")
OUTSIDE = ProgressEndpoint("https://192.0.2.7:9443", "CA")
OWN = {"matchLabels": {"finetune.dev/job": "reviews", "finetune.dev/job-uid": "uid-1"}}
WORLD = [
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32"]}},
    {
        "ipBlock": {
            "cidr": "::/0",
            "except": ["fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128", "fe80::/10"],
        }
    },
]
DNS_PORTS = [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")]
DNS = {
    "to": [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}},
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ],
    "ports": DNS_PORTS,
}
HTTPS = {"to": WORLD, "ports": [{"port": 443, "protocol": "TCP"}]}
OPERATOR = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
        }
    ],
    "ports": [{"port": 8443, "protocol": "TCP"}],
}


def job(**spec: Any) -> FineTuneJob:
    text = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "reviews"},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "hf://org/model"},
            "dataset": {"uri": "hf://org/data"},
            "training": {},
            "predict": {},
            "resources": {"nodes": 2},
            **spec,
        },
    }
    return FineTuneJob.model_validate_json(json.dumps(text))


def rendered(progress: ProgressEndpoint | None, settings: dict[str, Any] | None = None, **spec: Any) -> Any:
    given, taken = job(**spec), Settings.model_validate_json(json.dumps(settings or {}))
    made = plan(given, Facts(served=("pytorchjob", "mpijob", "job")), taken)
    return render(made, RenderContext("team", given.spec, taken, Owner("reviews", "uid-1"), progress))


def policy(progress: ProgressEndpoint | None, settings: dict[str, Any] | None = None, **spec: Any) -> Any:
    (found,) = [each for each in rendered(progress, settings, **spec) if each["kind"] == "NetworkPolicy"]
    return found


def test_the_policy_of_a_job_is_whole():
    assert policy(IN_CLUSTER) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "reviews-network",
            "namespace": "team",
            "labels": {
                "app.kubernetes.io/managed-by": "finetune-operator",
                "finetune.dev/job": "reviews",
                "finetune.dev/job-uid": "uid-1",
            },
            "annotations": {
                ALLOWS_ANNOTATION: "In: pods of this job. Out: pods of this job; DNS (port 53) of the "
                "resolvers that the operator's settings name; progress reports to the operator in ops (port 8443); TCP "
                "port 443 of any address but the metadata services of clouds (169.254.0.0/16, 100.100.100.200/32, "
                "168.63.129.16/32, fd00:ec2::254/128, fd00:ec2::23/128, fd20:ce::254/128, fe80::/10).",
            },
            "ownerReferences": [
                {
                    "apiVersion": "finetune.dev/v1alpha1",
                    "kind": "FineTuneJob",
                    "name": "reviews",
                    "uid": "uid-1",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "podSelector": OWN,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": OWN}]}],
            "egress": [{"to": [{"podSelector": OWN}]}, DNS, OPERATOR, HTTPS],
        },
    }


EXTRA = {"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "minio"}}}], "ports": [{"port": 9000}]}
EGRESS: dict[str, tuple[ProgressEndpoint | None, dict[str, Any], list[dict[str, Any]]]] = {
    "rendered without a cluster": (None, {}, [DNS, HTTPS]),
    "an operator outside of the cluster": (
        OUTSIDE,
        {"progress": {"url": "https://192.0.2.7:9443"}},
        [DNS, {"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": 9443, "protocol": "TCP"}]}, HTTPS],
    ),
    "an operator in the cluster that is reached by a name": (
        IN_CLUSTER,
        {"progress": {"url": "https://progress.example.com"}},
        [DNS, OPERATOR, HTTPS, HTTPS],
    ),
    "other ports, and a store in the cluster": (
        IN_CLUSTER,
        {"networkPolicy": {"egressPorts": [443, 3128, 443], "extraEgress": [EXTRA]}},
        [DNS, OPERATOR, {"to": WORLD, "ports": [{"port": n, "protocol": "TCP"} for n in (443, 3128)]}, EXTRA],
    ),
    "resolvers of the nodes themselves": (
        None,
        {"networkPolicy": {"dns": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}},
        [{"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": DNS_PORTS}, HTTPS],
    ),
    "no names at all": (None, {"networkPolicy": {"dns": []}}, [HTTPS]),
    "no way into the world": (IN_CLUSTER, {"networkPolicy": {"egressPorts": []}}, [DNS, OPERATOR]),
}


@pytest.mark.parametrize("case", EGRESS)
def test_pods_reach_no_more_than(case: str):
    progress, settings, expected = EGRESS[case]
    assert policy(progress, settings)["spec"]["egress"] == [{"to": [{"podSelector": OWN}]}, *expected]


def on_5000(*to: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"to": list(to), "ports": [{"port": 5000, "protocol": "TCP"}]}]


@pytest.mark.parametrize(
    ("host", "globs", "opened"),
    [
        ("mlflow.example.com", ["*.example.com"], on_5000(*WORLD)),
        ("mlflow.example.com", ["*.example.org"], []),
        ("mlflow.example.com", [], []),
        ("192.0.2.9", ["192.0.2.*"], on_5000({"ipBlock": {"cidr": "192.0.2.9/32"}})),
        (
            "mlflow.tracking.svc",
            ["mlflow.*.svc"],
            on_5000({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracking"}}}),
        ),
        ("169.254.169.254", ["*"], []),
        ("[fd00:ec2::254]", ["*"], []),
    ],
)
def test_pods_reach_the_tracker_where_settings_allow_its_host(
    host: str, globs: list[str], opened: list[dict[str, Any]]
):
    env = [{"name": "MLFLOW_TRACKING_URI", "value": f"http://{host}:5000"}]
    found = policy(None, {"networkPolicy": {"urlHosts": globs}}, template={"env": env})
    assert found["spec"]["egress"] == [{"to": [{"podSelector": OWN}]}, DNS, HTTPS, *opened]
    described = f"TCP port 5000 for {host} of spec.template.env[0].value (MLFLOW_TRACKING_URI)"
    assert (described in found["metadata"]["annotations"][ALLOWS_ANNOTATION]) == bool(opened)


@pytest.mark.parametrize("launcher", ["pytorchjob", "mpijob", "job"])
def test_every_pod_of_the_job_is_under_it(launcher: str):
    manifests = rendered(IN_CLUSTER, launcher=launcher)
    (rules,) = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    pods = [pod for each in manifests for pod in pod_templates(each)]
    assert len(pods) == (5 if launcher == "mpijob" else 4)
    selected = rules["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in pods)


def pod_templates(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value.get("spec", {}) else []
    return [*own, *(pod for inner in value.values() for pod in pod_templates(inner))]


def test_an_administrator_can_do_without():
    assert [each["kind"] for each in rendered(IN_CLUSTER, {"networkPolicy": {"enabled": False}})][:2] == [
        "PersistentVolumeClaim", "ConfigMap",
    ]  # fmt: skip


def test_a_job_with_a_workspace_of_its_own_has_a_policy_too():
    given = job(storage={"workspace": "pvc://ours"})
    made = plan(given, Facts(served=("job",)), CLUSTER_SETTINGS)
    assert [each["kind"] for each in shared(made, RenderContext("team", given.spec))] == ["NetworkPolicy"]


def test_the_operators_pods_are_found_by_their_own_labels_and_port():
    deployment = yaml.safe_load((MANIFESTS / "deployment.yaml").read_text())
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert OPERATOR_LABELS.items() <= template["metadata"]["labels"].items()
    assert {"name": "progress", "containerPort": PROGRESS_PORT} in container["ports"]
