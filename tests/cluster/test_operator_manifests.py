"""`kubectl apply -k manifests/operator` on a real API server with RBAC and PodSecurity."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from cluster_support.api_access import wait_until
from finetune_operator.cli.files.job_files import read_settings
from finetune_operator.spec.settings.settings import Settings

OPERATOR = Path(__file__).parents[2] / "manifests" / "operator"
NAMESPACE = "finetune-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:finetune-operator"


class Cluster(Protocol):
    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]: ...

    def must(self, *arguments: str, stdin: str | None = None) -> str: ...


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    cluster.must("apply", "-k", str(OPERATOR))
    yield cluster
    cluster.kubectl("delete", "-k", str(OPERATOR), "--wait=true", "--timeout=120s", "--ignore-not-found")


def test_applying_a_second_time_changes_nothing(installed: Cluster) -> None:
    objects = ("get", "-k", str(OPERATOR), "-o", "jsonpath={range .items[*]}{.kind}={.metadata.generation} {end}")
    before = installed.must(*objects)
    installed.must("apply", "-k", str(OPERATOR))
    assert len(before.split()) > 12
    assert installed.must(*objects) == before
    differences = installed.kubectl("diff", "-k", str(OPERATOR))
    assert (differences.returncode, differences.stdout) == (0, "")


def test_every_object_passes_strict_validation(installed: Cluster) -> None:
    ran = installed.kubectl("apply", "--dry-run=server", "--validate=strict", "-k", str(OPERATOR))
    assert (ran.returncode, ran.stderr) == (0, "")


def test_podsecurity_restricted_lets_both_replicas_in(installed: Cluster) -> None:
    pods = ("get", "pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "-o", "name")
    events = ("get", "events", "-n", NAMESPACE, "-o", "jsonpath={.items[*].message}")
    wait_until(lambda: len(installed.must(*pods).split()) == 2, "two pods", detail=lambda: installed.must(*events))
    assert "violates PodSecurity" not in installed.must(*events)


def test_the_shipped_settings_are_good_and_name_the_default_image() -> None:
    assert read_settings(OPERATOR / "settings.yaml").defaults.image == Settings().defaults.image


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "secrets"),
        ("list", "secrets"),
        ("update", "finetunejobs.finetune.dev"),
        ("create", "pods"),
        ("delete", "persistentvolumeclaims"),
        ("update", "jobs.batch"),
        ("create", "pods/exec"),
    ],
)  # fmt: skip
def test_in_the_namespaces_of_jobs_the_operator_may_not(installed: Cluster, verb: str, resource: str) -> None:
    ran = installed.kubectl("auth", "can-i", verb, resource, "-n", "default", "--as", ACCOUNT)
    assert ran.stdout.strip() == "no"


def test_namespace_editor_may_create_jobs_but_not_write_their_status(installed: Cluster) -> None:
    installed.must("create", "clusterrolebinding", "someone-edits", "--clusterrole=edit", "--user=someone")
    create = ("auth", "can-i", "create", "finetunejobs.finetune.dev", "-n", "default", "--as", "someone")
    patch_status = ("auth", "can-i", "patch", "finetunejobs.finetune.dev", "--subresource=status", *create[-4:])
    try:
        # A controller fills the aggregated roles.
        wait_until(lambda: installed.kubectl(*create).stdout.strip() == "yes", "who may edit may create jobs")
        assert installed.kubectl(*patch_status).stdout.strip() == "no"
    finally:
        installed.must("delete", "clusterrolebinding", "someone-edits")


def test_the_services_reach_the_ports_that_the_deployment_opens(installed: Cluster) -> None:
    deployment = json.loads(installed.must("get", "deployment", "finetune-operator", "-n", NAMESPACE, "-o", "json"))
    ports = {
        port["name"]: port["containerPort"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    services = json.loads(installed.must("get", "services", "-n", NAMESPACE, "-o", "json"))["items"]
    reached = {
        service["metadata"]["name"]: [port["targetPort"] for port in service["spec"]["ports"]] for service in services
    }
    assert ports == {"http": 8080, "progress": 8443}
    assert reached == {"finetune-operator": ["http"], "finetune-operator-progress": ["progress"]}
