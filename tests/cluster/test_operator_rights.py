"""The operator has the rights that it uses: RBAC against the audit log, both ways; and secrets stay where they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_rendering import one, render, without_tests
from cluster_support.api_access import Api, Object, path_of, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.http_scaled_object import install_http_scaled_objects
from cluster_support.httproute import install_httproutes
from cluster_support.operator_process import ACCOUNT, MANIFESTS, NAMESPACE, USER, OperatorProcess, install
from cluster_support.plays import RUNS, WRONG_COLUMN, Play
from cluster_support.world import SETTINGS, World, condition, conditions, install_kserve, namespace_for_pods
from finetune_operator.jobs.render.render_types import PROGRESS_AUDIENCE, STAGE_LABEL
from finetune_operator.kubernetes_api.resources import DEPLOYMENT, INFERENCE_SERVICE
from finetune_operator.spec.launcher_rows import SUPPORTED, TRAINING
from finetune_operator.spec.types import API_VERSION, PLURAL
from suite_plugins.patience import patient

ROLES = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
LEASE = "finetune-operator"
TLS_SECRET = "finetune-operator-tls"
HUB_TOKEN = "hf_CanaryCanaryCanaryCanaryCanary01"
STORAGE_KEY = "canary-storage-key-7f3a"

Right = tuple[str, str, str]
"""API group, resource (with its subresource), verb."""

FOREIGN: dict[str, tuple[str, str, str, Object, Object]] = {
    # Object in the way -> its version, plural, name, other fields that it needs, and the job's own spec.
    "claim": ("v1", "persistentvolumeclaims", "claim-workspace", {
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}, {}),
    "config": ("v1", "configmaps", "config-prepare-1", {}, {}),
    "network": ("networking.k8s.io/v1", "networkpolicies", "network-network", {
        "spec": {"podSelector": {"matchLabels": {"nobody": "has-this"}}}}, {}),
    "batch": ("batch/v1", "jobs", "batch-prepare-1", {
        "spec": {"suspend": True, "template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}}, {}),
    "service": ("v1", "services", "service-train-1-ranks", {"spec": {"clusterIP": "None"}}, {
        "resources": {"nodes": 2}}),
    "torch": ("kubeflow.org/v1", "pytorchjobs", "torch-train-1", {
        "spec": {"pytorchReplicaSpecs": {}}}, {"launcher": "pytorchjob"}),
    "mpi": ("kubeflow.org/v2beta1", "mpijobs", "mpi-train-1", {
        "spec": {"runPolicy": {"suspend": True}, "mpiReplicaSpecs": {}}}, {"launcher": "mpijob"}),
    "spark": ("sparkoperator.k8s.io/v1beta2", "sparkapplications", "spark-prepare-1", {
        "spec": {"suspend": True, "type": "Python", "sparkVersion": "4", "mainApplicationFile": "local:///a.py",
            "driver": {}, "executor": {}}}, {"preparation": {"engine": "spark"}}),
}  # fmt: skip
KIND_OF = {
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "configmaps": "ConfigMap",
    "services": "Service",
    "networkpolicies": "NetworkPolicy",
    **{each.plural: each.kind for each in SUPPORTED},
}


@dataclass(frozen=True)
class Scenes:
    """Everything that an operator can have to do, once."""

    world: World
    mark: int
    """The place in the audit log where it began."""
    granted: set[Right]
    """Rights that the manifests, or the chart, grant."""


def for_all_namespaces(cluster: Cluster) -> tuple[list[Object], Object]:
    """Apply the roles of manifests/operator; return them and the settings."""
    install(cluster)
    return list(yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text())), SETTINGS


def for_given_namespaces(cluster: Cluster, namespace: str) -> tuple[list[Object], Object]:
    """Apply the chart's roles for one namespace, and no others; return them and the settings that it renders."""
    install(cluster)  # the namespace
    found = without_tests(render({"watchNamespaces": [namespace], "crds": {"install": False}, "settings": SETTINGS}))
    documents = [each for each in found if each["kind"] in ("ServiceAccount", *ROLES)]
    assert "ClusterRole" not in {each["kind"] for each in documents}
    cluster.must("delete", "clusterrolebinding", ACCOUNT)
    text = "\n---\n".join(json.dumps(each) for each in documents)
    cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    return documents, yaml.safe_load(one(found, "ConfigMap", f"{ACCOUNT}-settings")["data"]["settings.yaml"])


@pytest.fixture(scope="module", params=["all namespaces", "given namespaces"])
def scenes(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    kinds: None,
    stand_ins: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scenes]:
    """Play all scenes under an operator that has never run here: no lease and no certificate of an earlier test."""
    cluster.own("the audit log")
    install_kserve(cluster)
    install_httproutes(cluster)
    install_http_scaled_objects(cluster)
    with namespace_for_pods(cluster) as name:
        given = request.param == "given namespaces"
        roles, settings = for_given_namespaces(cluster, name) if given else for_all_namespaces(cluster)
        operator = OperatorProcess(cluster, tmp_path_factory.mktemp("operator"), settings, name="operator-rights")
        around = stand_ins
        world = World(
            name,
            cluster,
            Api(cluster.access),
            around.kubelet,
            around.gangs,
            operator,
            around.background,
            around.watching,
        )
        mark = cluster.audit_mark()
        try:
            play(world, mark)
            yield Scenes(world, mark, granted_by(roles))
        finally:
            operator.terminate()
            stand_ins.kubelet.playbook.clear()


def play(world: World, mark: int) -> None:
    """Play all scenes."""
    forget(world)
    secrets_of_the_user(world)
    for job, (version, plural, child, more, spec) in FOREIGN.items():
        body = {"apiVersion": version, "kind": KIND_OF[plural], "metadata": {"name": child}, **more}
        world.api.create(world.path(version, plural), body)
        world.apply(job, spec)
    world.operator.start()
    # The events of a pod that has been starting for a minute are read.
    world.kubelet.playbook.set("slow", "prepare", Play(waiting=("ContainerCreating", "")))
    world.apply("slow")
    for job in FOREIGN:
        world.wait_phase(job, "Failed")
    print_secrets(world)
    whole_jobs(world)
    serve_a_model(world)
    damage_certificate(world)
    meet_a_quota(world)
    write_beside_it(world, mark)
    wait_until(lambda: ("", "events", "list") in used(world.cluster, mark)[0], "events are read", patient(150))


def forget(world: World) -> None:
    world.api.delete(path_of("coordination.k8s.io/v1", "leases", NAMESPACE, LEASE))
    world.api.delete(path_of("v1", "secrets", NAMESPACE, TLS_SECRET))


def secrets_of_the_user(world: World) -> None:
    for name, key, value in (("hub", "token", HUB_TOKEN), ("keys", "AWS_SECRET_ACCESS_KEY", STORAGE_KEY)):
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {key: value}}
        world.api.create(world.path("v1", "secrets"), body)


def print_secrets(world: World) -> None:
    """Run a job that refers to secrets and reports progress with its pod's token."""
    world.kubelet.playbook.set("secretive", "prepare", RUNS)
    world.apply("secretive", {"secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "keys"}}})
    world.wait_running("secretive", "prepare")
    (pod,) = world.pods("secretive", "prepare")
    answer = world.report("secretive", pod, {"step": 3, "total_steps": 9, "loss": 0.5})
    assert answer.status_code == 200, answer.text
    world.wait("secretive", "progress", lambda status: status.get("progress", {}).get("step") == 3)


def whole_jobs(world: World) -> None:
    """Run one of each launcher to the end, one that fails, and one whose time to live is over."""
    for launcher in TRAINING:
        world.apply(f"whole-{launcher}", {"launcher": launcher, "resources": {"nodes": 2}})
        world.wait_phase(f"whole-{launcher}", "Succeeded")
        world.kubelet.playbook.set(f"stopped-{launcher}", "train", RUNS)
        world.apply(f"stopped-{launcher}", {"launcher": launcher, "resources": {"nodes": 2}})
        world.wait_running(f"stopped-{launcher}", "train")
        world.change(f"stopped-{launcher}", {"runPolicy": {"suspend": True}})
        world.wait_phase(f"stopped-{launcher}", "Suspended")
    # Its plan rests on the nodes' GPUs, where nodes may be read.
    world.apply("with-gpus", {"resources": {"gpusPerNode": 1}, "runPolicy": {"suspend": True}})
    world.wait_phase("with-gpus", "Suspended")
    world.kubelet.playbook.set("stopped-spark", "prepare", RUNS)
    world.apply("stopped-spark", {"preparation": {"engine": "spark"}})
    world.wait_running("stopped-spark", "prepare")
    world.change("stopped-spark", {"runPolicy": {"suspend": True}})
    world.wait_phase("stopped-spark", "Suspended")
    world.kubelet.playbook.set("failing", "prepare", WRONG_COLUMN)
    world.apply("failing")
    world.wait_phase("failing", "Failed")
    world.apply("brief", {"runPolicy": {"ttlSecondsAfterFinished": 0}})
    world.wait_gone("brief")


def serve_a_model(world: World) -> None:
    """Run servers with all optional objects, by a Deployment and by KServe, and remove them while the job stays."""
    stages = dict.fromkeys(("training", "dataset", "evaluation", "predict"))
    led = {"replicas": 2, "maxReplicas": 3, "traffic": {"gateway": "public", "canaryPercent": 10}}
    idle = {"maxReplicas": 3, "idle": {"scaleToZeroAfterSeconds": 600}}
    by_kserve = {"runtime": "kserve", "replicas": 2, "maxReplicas": 3}
    cases = {"led": (led, DEPLOYMENT), "idle": (idle, DEPLOYMENT), "kserve": (by_kserve, INFERENCE_SERVICE)}
    for name, (fields, kind) in cases.items():
        job = f"serving-{name}"
        world.kubelet.playbook.set(job, "serve", RUNS)
        endpoint = {"runtime": "deployment", **fields}
        world.apply(job, {**stages, "endpoint": endpoint})
        world.wait(job, "it answers", lambda status: conditions(status).get("Ready") == "True")
        world.change(job, {"runPolicy": {"suspend": True}})
        world.wait_phase(job, "Suspended")
        path = kind.path(world.namespace, f"{job}-endpoint-1")
        wait_until(lambda path=path: world.api.get(path) is None, f"the servers of {job} are gone")  # type: ignore[misc]


def damage_certificate(world: World) -> None:
    """Start the operator with an unreadable certificate, which it replaces."""
    world.operator.terminate()
    secret = path_of("v1", "secrets", NAMESPACE, TLS_SECRET)
    world.api.patch(secret, {"data": {"tls.crt": "bm9uZQ=="}})
    world.operator.start()
    wait_until(lambda: (world.api.get(secret) or {})["data"]["tls.crt"] != "bm9uZQ==", "a new certificate")


def meet_a_quota(world: World) -> None:
    """Refuse the gang's Job for now; its other objects are removed, and it starts when there is room."""
    # Objects that the garbage collector has yet to remove would make room for it.
    wait_until(lambda: not world.of_job("brief", "batch/v1", "jobs"), "the Jobs of the job that is gone are collected")
    there = len(world.api.items(world.path("batch/v1", "jobs")))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    hard = {"count/jobs.batch": str(there + 1)}
    world.api.create(world.path("v1", "resourcequotas"), {**quota, "spec": {"hard": hard}})
    path = world.path("v1", "resourcequotas", "few")
    wait_until(lambda: (world.api.get(path) or {}).get("status", {}).get("used"), "the quota counts")
    world.apply("crowded", {"resources": {"nodes": 2}})
    stalled = world.wait(
        "crowded", "refused", lambda status: "exceeded quota" in condition(status, "Running").get("message", "")
    )
    assert stalled["phase"] != "Failed"
    world.api.delete(path)
    world.wait_phase("crowded", "Succeeded")


def write_beside_it(world: World, mark: int) -> None:
    """Annotate a job again and again, until the operator's view of it was out of date once."""
    world.kubelet.playbook.set("disputed", "train", RUNS)
    world.apply("disputed")
    path, numbers = world.path(API_VERSION, PLURAL, "disputed"), itertools.count()

    def read_again() -> bool:
        for suspended in (True, False):
            for _ in range(25):
                world.api.patch(path, {"metadata": {"annotations": {"number": str(next(numbers))}}})
            world.change("disputed", {"runPolicy": {"suspend": suspended}})
        return ("finetune.dev", PLURAL, "get") in used(world.cluster, mark)[0]

    wait_until(read_again, "the operator has met a conflict and read the job again")


def used(cluster: Cluster, mark: int) -> tuple[set[Right], list[str]]:
    """Return the rights that the operator's requests needed, and the requests that were refused."""
    rights: set[Right] = set()
    refused: list[str] = []
    for entry in cluster.audit(mark, USER):
        about = entry.get("objectRef")
        if about is None or "resource" not in about:
            continue  # discovery, which every authenticated client may do
        resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
        group, answer = about.get("apiGroup", ""), entry.get("responseStatus", {})
        rights.add((group, resource, entry["verb"]))
        if entry["verb"] == "patch" and answer.get("code") == 201:
            rights.add((group, resource, "create"))  # an apply that creates needs both, and is logged as a patch
        if answer.get("code") == 403 and "exceeded quota" not in answer.get("message", ""):
            refused.append(f"{entry['verb']} {entry['requestURI']}")
    return rights, refused


def granted_by(documents: Sequence[Object]) -> set[Right]:
    """Return the rights that roles grant."""
    rules = [rule for document in documents if document["kind"] in ROLES for rule in document.get("rules", [])]
    assert len(rules) > 8
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_used_are_the_rights_granted(cluster: Cluster, scenes: Scenes) -> None:
    rights, refused = used(cluster, scenes.mark)
    assert refused == []
    assert {"used, not granted": rights - scenes.granted, "granted, not used": scenes.granted - rights} == {
        "used, not granted": set(),
        "granted, not used": set(),
    }


def test_no_right_is_a_wildcard(scenes: Scenes) -> None:
    assert [right for right in scenes.granted if "*" in right] == []


def test_foreign_object_is_kept_and_its_taken_name_is_reported(scenes: Scenes) -> None:
    world = scenes.world
    for job, (version, plural, child, _, _) in FOREIGN.items():
        failure = world.status(job)["failure"]
        assert (job, failure["class"]) == (job, "NameTaken")
        assert child in failure["message"]
        there = world.api.get(world.path(version, plural, child))
        assert there is not None
        assert "ownerReferences" not in there["metadata"]
        assert "finetune.dev/job" not in there["metadata"].get("labels", {})


def test_secrets_appear_nowhere_but_in_their_secret(cluster: Cluster, scenes: Scenes) -> None:
    world = scenes.world
    namespace = world.namespace
    kinds = "configmaps,events,jobs.batch,pods,finetunejobs,pytorchjobs,mpijobs,services,persistentvolumeclaims"
    texts = {
        "objects": cluster.must("get", kinds, "-n", namespace, "-o", "json"),
        "operator's log": world.operator.logs(),
        "metrics": world.operator.metrics(),
        "operator's namespace": cluster.must("get", "configmaps,events", "-n", NAMESPACE, "-o", "json"),
    }
    assert min(len(text) for text in texts.values()) > 100
    key = json.loads(cluster.must("get", "secret", TLS_SECRET, "-n", NAMESPACE, "-o", "json"))["data"]["tls.key"]
    token = operator_token(world.operator.folder)
    canaries = {"hub token": HUB_TOKEN, "storage key": STORAGE_KEY, "private key": key, "operator's token": token}
    assert [
        (where, secret) for where, text in texts.items() for secret, value in canaries.items() if value in text
    ] == []
    # Tokens of pods are JWTs of this cluster: none of any kind may appear.
    assert [where for where, text in texts.items() if "eyJhbGciOi" in text] == []


def operator_token(folder: Path) -> str:
    (kubeconfig,) = folder.glob("*.kubeconfig")
    token: str = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    return token


def test_pods_get_the_references_and_never_the_values(scenes: Scenes) -> None:
    world, mark = scenes.world, scenes.mark
    about = [entry.get("objectRef", {}) for entry in world.cluster.audit(mark, USER) if entry["verb"] == "create"]
    made = {ref["resource"] for ref in about if ref.get("namespace") == world.namespace}
    assert made >= {"configmaps", "jobs", "persistentvolumeclaims", "events"}
    assert "secrets" not in made
    (policy,) = world.of_job("whole-job", "networking.k8s.io/v1", "networkpolicies")
    assert "In: pods of this job." in policy["metadata"]["annotations"]["finetune.dev/allows"]
    pods = world.pods("whole-job")
    assert {pod["metadata"]["labels"][STAGE_LABEL] for pod in pods} == {"prepare", "train", "evaluate", "predict"}
    gangs = [pod for launcher in ("pytorchjob", "mpijob") for pod in world.pods(f"whole-{launcher}", "train")]
    assert any(pod["metadata"]["name"].endswith("-launcher") for pod in gangs)
    assert {pod["spec"].get("automountServiceAccountToken") for pod in (*pods, *gangs)} == {False}
    audiences = [
        source["serviceAccountToken"]["audience"]
        for pod in (*pods, *gangs)
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        if "serviceAccountToken" in source
    ]
    assert len(audiences) == len(pods) + len(gangs)
    assert set(audiences) == {PROGRESS_AUDIENCE}
