"""The chart on a real API server: it accepts all objects, and an operator for given namespaces needs no more rights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_files import CHART, ROOT, rights
from chart_rendering import NAMESPACE, RELEASE, VALUE_SETS, Object, complete_chart, helm, one, render
from cluster_support.api_access import Api, kubeconfig_text, path_of, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.operator_process import USER, OperatorProcess
from cluster_support.plays import RUNS, SUCCEEDS
from cluster_support.stand_ins import running_stand_ins
from cluster_support.world import BASE, SETTINGS, World, install_kinds, states
from finetune_operator.controller.cluster.kube import KEYS_PATH
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL
from suite_plugins.patience import patient
from suite_plugins.shared_folder import CRDS, missing

MONITORING = ("servicemonitors", "podmonitors", "prometheusrules")
TEAM, OTHER = "team-a", "team-b"
HELM, ALICES = "finetune-helm", "finetune-alice"
"""Namespaces of real installations by Helm."""
SCRIPT = CHART / "files" / "test_job.py"


@pytest.fixture(scope="module")
def cluster(own_cluster: Cluster) -> Cluster:
    return own_cluster


@pytest.fixture(scope="module")
def ready(cluster: Cluster) -> Cluster:
    """The cluster with the kinds and namespaces that the sets of values use."""
    files = [CRDS / f"monitoring.coreos.com_{name}.yaml" for name in MONITORING]
    if not all(file.is_file() for file in files):
        pytest.skip(missing(files[0]))
    install_kinds(cluster)
    for file in files:
        cluster.must("apply", "--server-side", "-f", str(file))
    cluster.wait_served(*[f"{name}.monitoring.coreos.com" for name in MONITORING])
    for name in (NAMESPACE, TEAM, OTHER, "0815", "ml-team", HELM, ALICES):
        if cluster.kubectl("get", "namespace", name).returncode:
            cluster.must("create", "namespace", name)
    cluster.must("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    return cluster


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_api_server_takes_every_object_without_a_warning(name: str, ready: Cluster, tmp_path: Path) -> None:
    found = render(None, name, chart=complete_chart(tmp_path))
    # Without its account, a pod is not even tried.
    accounts = tuple(each for each in found if each["kind"] == "ServiceAccount")
    ready.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=as_text(accounts))
    ran = ready.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=as_text(found),
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(ran.stdout.splitlines()) == len(found)


@pytest.mark.parametrize("name", ["air-gap", "high-availability", "monitoring", "namespaced"])
def test_the_api_server_takes_every_object_of_an_overlay(name: str, ready: Cluster) -> None:
    ran = ready.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
        "-k", str(ROOT / "manifests" / "overlays" / name),
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


def as_text(found: tuple[Object, ...]) -> str:
    return "\n---\n".join(json.dumps(each) for each in found)


# ---------------------------------------------------------------------------------------- an operator for one namespace

VALUES: Object = {"watchNamespaces": [TEAM], "crds": {"install": False}, "settings": SETTINGS}
RBAC = {"ServiceAccount", "Role", "RoleBinding"}


@pytest.fixture(scope="module")
def namespaced(ready: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OperatorProcess, int]]:
    """Yield the operator, and the place in the audit log where it began."""
    mark = ready.audit_mark()
    found = render(VALUES)
    granted = tuple(each for each in found if each["kind"] in RBAC)
    ready.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=as_text(granted))
    settings = yaml.safe_load(one(found, "ConfigMap", "finetune-operator-settings")["data"]["settings.yaml"])
    # Left over from another module, cluster-wide rights would hide missing ones.
    ready.kubectl("delete", "clusterrolebinding", "finetune-operator", "--ignore-not-found")
    process = OperatorProcess(ready, tmp_path_factory.mktemp("operator"), settings, name="operator-namespaced")
    process.start()
    try:
        yield process, mark
    finally:
        process.terminate()
        ready.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=as_text(granted))


def conditions(api: Api, namespace: str, name: str) -> dict[str, Any]:
    found = api.get(path_of(API_VERSION, PLURAL, namespace, name)) or {}
    return {each["type"]: each["status"] for each in found.get("status", {}).get("conditions", [])}


def test_namespaced_operator_runs_jobs_within_its_rights(
    ready: Cluster, namespaced: tuple[OperatorProcess, int]
) -> None:
    process, mark = namespaced
    api = Api(ready.access)
    for namespace in (TEAM, OTHER):
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "first"}, "spec": BASE}
        api.create(path_of(API_VERSION, PLURAL, namespace), body)
    try:
        planned = lambda: conditions(api, TEAM, "first").get("Planned") == "True"  # noqa: E731
        wait_until(planned, "the job is planned", detail=lambda: process.logs()[-4000:])
        stage = path_of("batch/v1", "jobs", TEAM, "first-prepare-1")
        wait_until(lambda: api.get(stage), "its first stage is made", detail=lambda: process.logs()[-4000:])
        assert conditions(api, OTHER, "first") == {}
        assert refused(ready, mark) == []
    finally:
        for namespace in (TEAM, OTHER):
            api.delete(path_of(API_VERSION, PLURAL, namespace, "first"))


def refused(cluster: Cluster, mark: int) -> list[str]:
    """Return the operator's requests that the API server refused."""
    return [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in cluster.audit(mark, USER)
        if entry.get("responseStatus", {}).get("code") == 403
    ]


@pytest.fixture
def team(ready: Cluster, namespaced: tuple[OperatorProcess, int], tmp_path: Path) -> Iterator[World]:
    """The namespace that the operator serves, with nodes."""
    with running_stand_ins(ready, tmp_path) as around:
        api = Api(ready.access)
        yield World(TEAM, ready, api, around.kubelet, around.gangs, namespaced[0], around.background, around.watching)
        around.background.check()


HANGS = {"evaluation": None, "predict": None, "runPolicy": {"progressDeadlineSeconds": math.ceil(patient(4))}}


def test_namespaced_operator_gets_progress_and_finds_hangs_without_reviews(
    ready: Cluster, namespaced: tuple[OperatorProcess, int], team: World
) -> None:
    process, mark = namespaced
    may = ("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", "--as", USER)
    groups = ("--as-group=system:serviceaccounts", "--as-group=system:authenticated")
    assert ready.kubectl(*may, *groups).stdout.strip() == "no"
    team.kubelet.playbook.set("hung", "train", RUNS, attempt=1)
    team.kubelet.playbook.set("hung", "train", SUCCEEDS, attempt=2)
    team.apply("hung", HANGS)
    try:
        team.wait_running("hung", "train")
        (pod,) = team.pods("hung", "train")
        assert team.report("hung", pod, {"step": 5, "total_steps": 9}).status_code == 200
        early = team.token(pod)
        team.wait("hung", "progress", lambda status: (status.get("progress") or {}).get("step") == 5)
        status = team.wait_phase("hung", "Succeeded")
        assert (states(status)["train"], status["countedRestarts"]) == (("Succeeded", 2), 1)
        # Controllers delete the pod; its token is still valid for most of an hour and well signed.
        refused_now = lambda: team.report("hung", pod, {"step": 6}, token=early).status_code == 403  # noqa: E731
        wait_until(refused_now, "nothing is heard of a pod that is gone")
    finally:
        team.delete("hung")
    assert refused(ready, mark) == []
    paths = [entry["requestURI"].partition("?")[0] for entry in ready.audit(mark, USER)]
    assert paths.count(KEYS_PATH) >= 1
    assert [path for path in paths if "tokenreviews" in path] == []
    assert "verified by public keys (progress.tokens: keys)" in process.logs()


# ------------------------------------------------------------------------------------------------------------ helm test


def run_test(cluster: Cluster, folder: Path, values: Object) -> subprocess.CompletedProcess[str]:
    """Run the command of the `helm test` pod, under the rights that the chart grants it."""
    found = [each for each in render({**VALUES, **values}) if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    (pod,) = (each for each in found if each["kind"] == "Pod")
    around = tuple(each for each in found if each["kind"] != "Pod")
    cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=as_text(around))
    account = pod["spec"]["serviceAccountName"]
    token = cluster.must("create", "token", account, "-n", NAMESPACE).strip()
    container = pod["spec"]["containers"][0]
    access = cluster.access
    config = folder / "kubeconfig"
    config.write_text(kubeconfig_text(access.host, access.ca, token))
    variables = {each["name"]: each["value"] for each in container["env"]}
    command = [sys.executable, *container["command"][1:], *container["args"]]
    return subprocess.run(
        command,
        env={**os.environ, **variables, "KUBECONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )


def test_its_own_test_has_a_job_planned_and_leaves_nothing(
    ready: Cluster, namespaced: tuple[OperatorProcess, int], tmp_path: Path
) -> None:
    ran = run_test(ready, tmp_path, {})
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert "\nPlanned: " in ran.stdout
    # A second time, as after an upgrade.
    assert run_test(ready, tmp_path, {}).returncode == 0
    path = path_of(API_VERSION, PLURAL, TEAM, "finetune-operator-test")
    wait_until(lambda: Api(ready.access).get(path) is None, "the job is gone")


FAILURES: dict[str, tuple[Object, str]] = {
    "a job that is refused": (
        {"spec": {**BASE, "model": {"uri": "hf://a/b", "trustRemoteCode": True}}},
        "Accepted=False InvalidSpec",
    ),
    "a spec that the kind does not take": ({"spec": {"task": "guessing"}}, "the API server answered 422"),
    "a namespace that the operator does not serve": (
        {"namespace": OTHER, "timeoutSeconds": 5}, "the operator has not set a status"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_release_test_fails_with_the_reason_for(
    case: str, ready: Cluster, namespaced: tuple[OperatorProcess, int], tmp_path: Path
) -> None:
    values, reason = FAILURES[case]
    ran = run_test(ready, tmp_path, {"tests": values})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].endswith("logs deployment/finetune-operator")
    assert reason in ran.stdout


def test_release_test_script_imports_only_packages_of_the_image() -> None:
    imported = {
        line.split()[1].split(".")[0] for line in SCRIPT.read_text().splitlines() if line.startswith(("import", "from"))
    }
    assert imported == {"json", "os", "sys", "time", "kubernetes"}


# ------------------------------------------------------------------------------------------------- installed by Helm

ALICE = "alice"


def helm_here(cluster: Cluster, namespace: str, *arguments: str, stdin: str | None = None) -> str:
    """Run Helm on this cluster and require success."""
    ran = helm(*arguments, "--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace, stdin=stdin)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def alice(ready: Cluster) -> Iterator[str]:
    """Yield a user who administers two namespaces with the rights of docs/install.md, and has none in the cluster."""
    documents: list[Object] = []
    group = "rbac.authorization.k8s.io"
    for namespace in (ALICES, OTHER):
        meta = {"name": ALICE, "namespace": namespace}
        user = {"kind": "User", "name": ALICE, "apiGroup": group}
        documents.append({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rights()["jobs"]})
        for kind, role in (("Role", ALICE), ("ClusterRole", "admin")):
            documents.append({
                "apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": {**meta, "name": f"{ALICE}-{role}"},
                "roleRef": {"apiGroup": group, "kind": kind, "name": role}, "subjects": [user],
            })  # fmt: skip
    ready.must("apply", "--server-side", "-f", "-", stdin=as_text(tuple(documents)))
    # A controller fills the role admin.
    may = ("auth", "can-i", "create", "roles.rbac.authorization.k8s.io", "-n", ALICES, "--as", ALICE)
    wait_until(lambda: ready.kubectl(*may).stdout.strip() == "yes", "alice administers her namespaces")
    yield ALICE
    ready.kubectl("delete", "-f", "-", stdin=as_text(tuple(documents)))


def test_namespace_admin_installs_upgrades_and_uninstalls_the_chart(ready: Cluster, alice: str) -> None:
    as_alice = ("--kube-as-user", alice, "--values", "-")
    values = {**VALUES, "watchNamespaces": [OTHER], "labels": {"by": alice}}
    install = ("install", RELEASE, str(CHART), *as_alice)
    assert "runs jobs of the namespaces team-b" in helm_here(ready, ALICES, *install, stdin=yaml.safe_dump(values))
    try:
        helm_here(
            ready, ALICES, "upgrade", RELEASE, str(CHART), *as_alice, stdin=yaml.safe_dump({**values, "replicas": 3})
        )
        kinds = ready.must("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").split()
        made = ready.must("get", ",".join(kinds), "-l", f"by={alice}", "-o", "name")
        assert made == ""
        config = ready.must(
            "get", "configmap", "finetune-operator-settings", "-n", ALICES, "-o", "jsonpath={.data.settings\\.yaml}"
        )
        settings, problems = check_settings(yaml.safe_load(config))
        assert problems == []
        assert settings is not None
        assert (settings.progress.enabled, settings.progress.tokens) == (True, "keys")
    finally:
        helm_here(ready, ALICES, "uninstall", RELEASE, "--kube-as-user", alice)


def test_upgrade_updates_the_crd_and_uninstall_keeps_it_and_all_jobs(ready: Cluster, tmp_path: Path) -> None:
    new = complete_chart(tmp_path)
    text = (new / "files/crd.yaml").read_text()
    (new / "files/crd.yaml").write_text(text.replace("Fine-tunes, evaluates", "Tunes, evaluates"))
    column = "jsonpath={.spec.versions[0].schema.openAPIV3Schema.description}"
    look = ("get", "crd", "finetunejobs.finetune.dev", "-o", column)
    # The kind exists already, as other tests need it.
    helm_here(ready, HELM, "install", RELEASE, str(CHART), "--take-ownership", "--force-conflicts")
    api, path = Api(ready.access), path_of(API_VERSION, PLURAL, TEAM, "kept")
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "kept"}, "spec": BASE}
    api.create(path_of(API_VERSION, PLURAL, TEAM), body)
    try:
        before = ready.must("get", "ftj", "kept", "-n", TEAM, "-o", "jsonpath={.metadata.uid} {.metadata.generation}")
        helm_here(ready, HELM, "upgrade", RELEASE, str(new))
        assert ready.must(*look).startswith("Tunes, evaluates")
        helm_here(ready, HELM, "rollback", RELEASE, "1")
        assert ready.must(*look).startswith("Fine-tunes, evaluates")
        helm_here(ready, HELM, "uninstall", RELEASE)
        after = ready.must("get", "ftj", "kept", "-n", TEAM, "-o", "jsonpath={.metadata.uid} {.metadata.generation}")
        assert after == before
        assert ready.kubectl("get", "deployment", RELEASE, "-n", HELM).returncode != 0
        assert ready.kubectl("get", "clusterrole", RELEASE).returncode != 0
    finally:
        api.delete(path)
