"""The real API server asks the operator whether a job may be stored."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster_support import certificates
from cluster_support.access import wait_until
from cluster_support.control_plane import Cluster, free_port
from cluster_support.operator_process import USER, OperatorProcess, install
from cluster_support.world import BASE, SETTINGS, fresh_namespace, install_kinds, merged
from finetune_operator.api.types import API_VERSION, GROUP, KIND, PLURAL

CONFIGURATION = "finetune-operator-test"
ALLOWED = "registry.example.com/team/*"
GOOD = {"image": "registry.example.com/team/trainer:1"}
CLOSED = {**SETTINGS, "images": [ALLOWED], "defaults": GOOD}
RULES = [{"apiGroups": [GROUP], "apiVersions": ["v1alpha1"], "operations": ["CREATE", "UPDATE"], "resources": [PLURAL]}]
CHECKED = {"finetune.dev/test-webhook": "true"}


@dataclass(frozen=True)
class Guarded:
    """A namespace whose jobs the webhook is asked about."""

    cluster: Cluster
    namespace: str
    operator: OperatorProcess

    def apply(self, name: str, spec: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": merged(BASE, spec)}
        return self.cluster.kubectl("apply", "-n", self.namespace, *options, "-f", "-", stdin=json.dumps(document))


def configuration(url: str, policy: str, bundle: str = "") -> str:
    hook: dict[str, Any] = {
        "name": "jobs.finetune.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": policy,
        "timeoutSeconds": 5,
        "clientConfig": {"url": url, **({"caBundle": bundle} if bundle else {})},
        "namespaceSelector": {"matchLabels": CHECKED},
        "rules": RULES,
    }
    return json.dumps(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": CONFIGURATION},
            "webhooks": [hook],
        }
    )


ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "finetune-operator-webhook"},
    "rules": [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [CONFIGURATION],
            "verbs": ["get", "update"],
        }
    ],
}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "finetune-operator-webhook"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "finetune-operator-webhook"},
    "subjects": [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}],
}


def bundle_of(cluster: Cluster) -> str:
    path = "jsonpath={.webhooks[0].clientConfig.caBundle}"
    return cluster.must("get", "validatingwebhookconfiguration", CONFIGURATION, "-o", path).strip()


@pytest.fixture(scope="module")
def cluster(own_cluster: Cluster) -> Cluster:
    install_kinds(own_cluster)
    install(own_cluster)
    return own_cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with fresh_namespace(cluster) as name:
        cluster.must("label", "namespace", name, *[f"{key}={value}" for key, value in CHECKED.items()])
        yield name
        cluster.kubectl("delete", "validatingwebhookconfiguration", CONFIGURATION, "--ignore-not-found")


@pytest.fixture
def guarded(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Guarded]:
    """The operator with a certificate of its own; fail-closed."""
    port = free_port()
    cluster.must("apply", "-f", "-", stdin=f"{json.dumps(ROLE)}\n---\n{json.dumps(BINDING)}")
    cluster.must("apply", "-f", "-", stdin=configuration(f"https://127.0.0.1:{port}/validate", "Fail"))
    options = ("--webhook-port", str(port), "--webhook-configuration", CONFIGURATION)
    operator = OperatorProcess(cluster, tmp_path, CLOSED, name="operator-webhook", options=options)
    operator.start()
    try:
        wait_until(lambda: bundle_of(cluster), "the configuration trusts the operator", tell=operator.logs)
        yield Guarded(cluster, namespace, operator)
    finally:
        operator.terminate()


def test_kubectl_is_told_at_once_what_only_the_settings_forbid(guarded: Guarded) -> None:
    ran = guarded.apply("reviews", {"image": "elsewhere.example.com/trainer:1"})
    assert ran.returncode != 0
    assert ran.stderr == (
        'The FineTuneJob "reviews" is invalid: spec.image: is not allowed by the administrator '
        f'(value "elsewhere.example.com/trainer:1"); use one of {ALLOWED}.\n'
    )
    assert guarded.apply("reviews", GOOD).returncode == 0


def test_a_server_side_dry_run_asks_too_and_a_stored_job_can_be_suspended_under_new_rules(guarded: Guarded) -> None:
    assert guarded.apply("reviews", {"image": "elsewhere.example.com/t:1"}, "--dry-run=server").returncode != 0
    assert guarded.apply("reviews", {**GOOD, "runPolicy": {"suspend": True}}).returncode == 0
    patch = json.dumps({"spec": {"runPolicy": {"suspend": False}}})
    where = ("-n", guarded.namespace, "--type=merge", "-p", patch)
    assert guarded.cluster.kubectl("patch", PLURAL, "reviews", *where).returncode == 0


def test_without_an_operator_a_closed_door_stays_closed_and_an_open_one_open(guarded: Guarded) -> None:
    guarded.operator.terminate()
    refused = guarded.apply("reviews", GOOD)
    assert refused.returncode != 0
    assert "failed calling webhook" in refused.stderr
    patch = json.dumps([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Ignore"}])
    guarded.cluster.must("patch", "validatingwebhookconfiguration", CONFIGURATION, "--type=json", "-p", patch)
    wait_until(lambda: guarded.apply("reviews", GOOD).returncode == 0, "jobs are stored without being asked about")


def certificate_ends(operator: OperatorProcess) -> dict[str, float]:
    """Server -> Unix time, from the operator's metrics."""
    name = "finetune_certificate_expiration_timestamp_seconds"
    families = text_string_to_metric_families(operator.metrics())
    return {one.labels["server"]: one.value for family in families for one in family.samples if one.name == name}


def test_a_certificate_that_somebody_else_keeps_is_served_and_its_end_is_told(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    pair = certificates.for_loopback(tmp_path, "webhook")
    folder = tmp_path / "certificate"
    folder.mkdir()
    (folder / "tls.crt").write_text(pair.certificate.read_text())
    (folder / "tls.key").write_text(pair.key.read_text())
    port = free_port()
    bundle = base64.b64encode(pair.certificate.read_bytes()).decode()
    cluster.must("apply", "-f", "-", stdin=configuration(f"https://127.0.0.1:{port}/validate", "Fail", bundle))
    options = ("--webhook-port", str(port), "--webhook-certificate", str(folder))
    operator = OperatorProcess(cluster, tmp_path, CLOSED, name="operator-webhook", options=options)
    operator.start()
    try:
        guarded = Guarded(cluster, namespace, operator)
        wait_until(
            lambda: "not allowed by the admin" in guarded.apply("x", {"image": "e.example.com/t:1"}).stderr, "asked"
        )
        assert bundle_of(cluster) == bundle, "who keeps the certificate tells of its authority"
        # What is told of it is when it ends: two days from now, and a year for that of the operator's own.
        ends = certificate_ends(operator)
        assert [round((ends[server] - time.time()) / 86400) for server in ("webhook", "progress")] == [2, 365]
    finally:
        operator.terminate()
