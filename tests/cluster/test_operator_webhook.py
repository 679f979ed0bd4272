"""The real API server asks the operator's webhook whether a job may be stored."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from cluster_support import self_signed
from cluster_support.api_access import new_session, wait_until
from cluster_support.control_plane import ROOT, Cluster, free_port, running_cluster
from cluster_support.operator_process import NAMESPACE, USER, OperatorProcess, install
from cluster_support.world import BASE, SETTINGS, fresh_namespace, install_kinds, merged
from finetune_operator.controller.servers.certificates import SERVICE_NAME
from finetune_operator.spec.types import API_VERSION, GROUP, KIND, PLURAL
from suite_plugins.patience import patient

CONFIGURATION = "finetune-operator-test"
ALLOWED = "registry.example.com/team/*"
GOOD = {"image": "registry.example.com/team/trainer:1"}
CLOSED = {**SETTINGS, "images": [ALLOWED], "defaults": GOOD}
RULES = [{"apiGroups": [GROUP], "apiVersions": ["v1alpha1"], "operations": ["CREATE", "UPDATE"], "resources": [PLURAL]}]
CHECKED = {"finetune.dev/test-webhook": "true"}


@dataclass(frozen=True)
class Guarded:
    """A namespace whose jobs the webhook reviews."""

    cluster: Cluster
    namespace: str
    operator: OperatorProcess

    def apply(self, name: str, spec: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": merged(BASE, spec)}
        return self.cluster.kubectl("apply", "-n", self.namespace, *options, "-f", "-", stdin=json.dumps(document))


def configuration(policy: str, *, bundle: str = "", **client: Any) -> str:
    hook: dict[str, Any] = {
        "name": "jobs.finetune.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": policy,
        "timeoutSeconds": 5,
        "clientConfig": {**client, **({"caBundle": bundle} if bundle else {})},
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


@dataclass(frozen=True)
class Identity:
    """The certificate that the API server shows to one webhook, made by the commands of docs/install.md."""

    folder: Path
    """ca.crt, client.crt and client.key, and the API server's admission.yaml."""
    port: int
    """Port of the operator's Service, the only webhook to which it is shown."""

    def options(self) -> tuple[str, ...]:
        return "--webhook-client-authorities", str(self.folder / "ca.crt"), "--webhook-client-name", "kube-apiserver"


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    made = Identity(tmp_path_factory.mktemp("identity"), free_port())
    section = (ROOT / "docs" / "install.md").read_text().partition("### Answer the API server alone")[2]
    commands = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ openssl")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(shlex.split(command), cwd=made.folder, check=True, capture_output=True)
    files = re.findall(r"`(\w+\.yaml)`.*?```yaml\n(.*?)```", section, re.DOTALL)
    assert [name for name, _ in files] == ["admission.yaml", "webhooks.yaml"]
    for name, text in files:
        text = text.replace("/etc/kubernetes/pki/finetune", str(made.folder))
        (made.folder / name).write_text(text.replace(":9443", f":{made.port}"))
    return made


@pytest.fixture(scope="module")
def cluster(identity: Identity, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = f"--admission-control-config-file={identity.folder / 'admission.yaml'}"
    with running_cluster(tmp_path_factory.mktemp("own-control-plane"), flags) as found:
        found.own("an API server with an admission configuration")
        install_kinds(found)
        install(found)
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with fresh_namespace(cluster) as name:
        cluster.must("label", "namespace", name, *[f"{key}={value}" for key, value in CHECKED.items()])
        yield name
        cluster.kubectl("delete", "validatingwebhookconfiguration", CONFIGURATION, "--ignore-not-found")


@contextmanager
def guarding(cluster: Cluster, namespace: str, folder: Path, port: int, *more: str, **client: Any) -> Iterator[Guarded]:
    """Run the operator with a certificate of its own; fail-closed. `client`: how the API server finds it."""
    cluster.must("apply", "-f", "-", stdin=f"{json.dumps(ROLE)}\n---\n{json.dumps(BINDING)}")
    cluster.must("apply", "-f", "-", stdin=configuration("Fail", **client))
    options = ("--webhook-port", str(port), "--webhook-configuration", CONFIGURATION, *more)
    operator = OperatorProcess(cluster, folder, CLOSED, name="operator-webhook", options=options)
    operator.start()
    try:
        wait_until(lambda: bundle_of(cluster), "the configuration trusts the operator", detail=operator.logs)
        yield Guarded(cluster, namespace, operator)
    finally:
        operator.terminate()


@pytest.fixture
def guarded(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Guarded]:
    port = free_port()
    with guarding(cluster, namespace, tmp_path, port, url=f"https://127.0.0.1:{port}/validate") as made:
        yield made


def test_webhook_refuses_a_violation_of_the_settings_at_admission(guarded: Guarded) -> None:
    ran = guarded.apply("reviews", {"image": "elsewhere.example.com/trainer:1"})
    assert ran.returncode != 0
    assert ran.stderr == (
        'The FineTuneJob "reviews" is invalid: spec.image: is not allowed by the administrator '
        f'(value "elsewhere.example.com/trainer:1"); use one of {ALLOWED}.\n'
    )
    assert guarded.apply("reviews", GOOD).returncode == 0


def test_webhook_checks_dry_runs_and_lets_a_stored_job_be_suspended(guarded: Guarded) -> None:
    assert guarded.apply("reviews", {"image": "elsewhere.example.com/t:1"}, "--dry-run=server").returncode != 0
    assert guarded.apply("reviews", {**GOOD, "runPolicy": {"suspend": True}}).returncode == 0
    patch = json.dumps({"spec": {"runPolicy": {"suspend": False}}})
    where = ("-n", guarded.namespace, "--type=merge", "-p", patch)
    assert guarded.cluster.kubectl("patch", PLURAL, "reviews", *where).returncode == 0


def test_failure_policy_decides_while_no_operator_runs(guarded: Guarded) -> None:
    guarded.operator.terminate()
    refused = guarded.apply("reviews", GOOD)
    assert refused.returncode != 0
    assert "failed calling webhook" in refused.stderr
    patch = json.dumps([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Ignore"}])
    guarded.cluster.must("patch", "validatingwebhookconfiguration", CONFIGURATION, "--type=json", "-p", patch)
    wait_until(lambda: guarded.apply("reviews", GOOD).returncode == 0, "jobs are stored without being asked about")


def test_webhook_warns_of_what_a_job_names_and_never_refuses_it(guarded: Guarded) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    document = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "work"}, "spec": claim}
    guarded.cluster.must("create", "-n", guarded.namespace, "-f", "-", stdin=json.dumps(document))
    spec = {**GOOD, "model": {"uri": "pvc://models"}, "storage": {"workspace": "pvc://work"}, "resources": {"nodes": 2}}
    # The operator has no right to read Secrets, and here none on service accounts: it says nothing of them.
    named = {"secrets": {"hubToken": {"name": "hub"}}, "template": {"serviceAccountName": "trainer"}}
    ran = guarded.apply("reviews", {**spec, **named})
    assert ran.returncode == 0
    missing = (
        f'spec.model.uri (value "models"): namespace {guarded.namespace} has no PersistentVolumeClaim of this name'
    )
    assert sorted(line.partition(";")[0] for line in ran.stderr.splitlines()) == [
        f"Warning: {missing}",
        'Warning: spec.storage.workspace (value "work"): 2 pods mount the claim (spec.resources.nodes), which is '
        "ReadWriteOnce: for one node only",
    ]
    guarded.cluster.must("create", "clusterrole", "reader", "--verb=get", "--resource=serviceaccounts")
    guarded.cluster.must("create", "clusterrolebinding", "reader", "--clusterrole=reader", f"--user={USER}")
    try:
        warned = guarded.apply("others", {**GOOD, **named}).stderr
    finally:
        guarded.cluster.must("delete", "clusterrole,clusterrolebinding", "reader")
    assert "has no ServiceAccount of this name" in warned


BAD = {"image": "elsewhere.example.com/trainer:1"}


def reviews(operator: OperatorProcess) -> Counter[str]:
    """Return outcome -> number, from the operator's metrics, without outcomes that never happened."""
    families = text_string_to_metric_families(operator.metrics())
    samples = [one for family in families for one in family.samples if one.name == "finetune_webhook_reviews_total"]
    return Counter({one.labels["outcome"]: int(one.value) for one in samples})


def answer_to(port: int, certificate: tuple[Path, Path] | None) -> int | str:
    """Return the status of the webhook's answer to a program that is not the API server, or `no answer`."""
    session = new_session()
    session.verify = False
    session.cert = None if certificate is None else (str(certificate[0]), str(certificate[1]))
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u"}}
    try:
        return session.post(f"https://127.0.0.1:{port}/validate", json=review, timeout=patient(30)).status_code
    except requests.ConnectionError:
        return "no answer"


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_webhook_answers_only_the_api_server_with_client_certificates(
    cluster: Cluster, namespace: str, identity: Identity, tmp_path: Path
) -> None:
    service = {"name": SERVICE_NAME, "namespace": NAMESPACE, "port": identity.port}
    # The nodes of this control plane have no network for Services: the name resolves to this machine.
    outside = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": identity.port}]}
    metadata = {"name": SERVICE_NAME, "namespace": NAMESPACE}
    document = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": outside}
    cluster.must("apply", "-f", "-", stdin=json.dumps(document))
    where = {**service, "path": "/validate"}
    with guarding(cluster, namespace, tmp_path, identity.port, *identity.options(), service=where) as guarded:
        refused = guarded.apply("bad", BAD)
        assert "is not allowed by the administrator" in refused.stderr
        assert guarded.apply("good", GOOD).returncode == 0
        # A page of metrics may be some moments old.
        answered = {"allowed": 1, "refused": 1}
        wait_until(lambda: reviews(guarded.operator) == answered, "the API server's questions are counted")

        other = self_signed.for_loopback(tmp_path, "kube-apiserver")
        ours = [str(identity.folder / name) for name in ("ca.crt", "ca.key")]
        command = f"openssl req -x509 -noenc -newkey rsa:2048 -subj /CN=pod -CA {ours[0]} -CAkey {ours[1]}"
        named = tmp_path / "named.crt", tmp_path / "named.key"
        more = ["-out", str(named[0]), "-keyout", str(named[1])]
        subprocess.run([*shlex.split(command), *more], check=True, capture_output=True)
        assert answer_to(identity.port, None) == "no answer"
        assert answer_to(identity.port, (other.certificate, other.key)) == "no answer"
        assert answer_to(identity.port, named) == 403
        assert answer_to(identity.port, (identity.folder / "client.crt", identity.folder / "client.key")) == 400
        wait_until(lambda: reviews(guarded.operator) == {**answered, "failed": 4}, "all others are counted")
        # One message stands for all of them.
        assert guarded.operator.logs().count("a client was refused") == 1


def test_api_server_without_a_certificate_is_refused_and_logged(
    cluster: Cluster, namespace: str, identity: Identity, tmp_path: Path
) -> None:
    port = free_port()
    address = f"https://127.0.0.1:{port}/validate"
    with guarding(cluster, namespace, tmp_path, port, *identity.options(), url=address) as guarded:
        closed = guarded.apply("good", GOOD)
        assert closed.returncode != 0
        assert "failed calling webhook" in closed.stderr
        assert "a client was refused: it presented no certificate" in guarded.operator.logs()
        patch = json.dumps([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Ignore"}])
        cluster.must("patch", "validatingwebhookconfiguration", CONFIGURATION, "--type=json", "-p", patch)
        wait_until(lambda: guarded.apply("bad", BAD).returncode == 0, "the job is stored without being asked about")
        accepted = 'jsonpath={.status.conditions[?(@.type=="Accepted")].status}'
        where = ("-n", namespace, "-o", accepted)
        wait_until(lambda: cluster.must("get", PLURAL, "bad", *where) == "False", "the operator refuses it later")
        wait_until(lambda: reviews(guarded.operator)["failed"] >= 2, "refused clients are counted")
        assert reviews(guarded.operator).keys() == {"failed"}


def certificate_ends(operator: OperatorProcess) -> dict[str, float]:
    """Return server -> Unix time of its certificate's end, from the operator's metrics."""
    name = "finetune_certificate_expiration_timestamp_seconds"
    families = text_string_to_metric_families(operator.metrics())
    return {one.labels["server"]: one.value for family in families for one in family.samples if one.name == name}


def test_foreign_certificate_is_served_and_its_expiry_is_reported(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    pair = self_signed.for_loopback(tmp_path, "webhook")
    folder = tmp_path / "certificate"
    folder.mkdir()
    (folder / "tls.crt").write_text(pair.certificate.read_text())
    (folder / "tls.key").write_text(pair.key.read_text())
    port = free_port()
    bundle = base64.b64encode(pair.certificate.read_bytes()).decode()
    cluster.must(
        "apply", "-f", "-", stdin=configuration("Fail", url=f"https://127.0.0.1:{port}/validate", bundle=bundle)
    )
    options = ("--webhook-port", str(port), "--webhook-certificate", str(folder))
    operator = OperatorProcess(cluster, tmp_path, CLOSED, name="operator-webhook", options=options)
    operator.start()
    try:
        guarded = Guarded(cluster, namespace, operator)
        wait_until(
            lambda: "not allowed by the admin" in guarded.apply("x", {"image": "e.example.com/t:1"}).stderr, "asked"
        )
        assert bundle_of(cluster) == bundle, "who keeps the certificate tells of its authority"
        # The metric is its end: two days from now, and a year for that of the operator's own.
        ends = certificate_ends(operator)
        assert [round((ends[server] - time.time()) / 86400) for server in ("webhook", "progress")] == [2, 365]
    finally:
        operator.terminate()
