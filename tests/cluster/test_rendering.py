"""The objects of all golden jobs on a real API server: each is accepted under strict field validation, and so is every
pod that controllers would create of it in a namespace that enforces PodSecurity `restricted`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster_support.control_plane import Cluster
from cluster_support.world import install_kserve
from finetune_operator.cli.terminal.yaml_text import documents as yaml_text
from finetune_operator.endpoints.kinds import KSERVE_GROUP, KSERVE_KIND, KSERVE_PLURAL
from finetune_operator.spec.launcher_rows import SUPPORTED, LauncherName
from golden_cases import JOBS, NAMESPACE, golden_manifests
from suite_plugins.shared_folder import CRDS, missing

RENDERED = [(job, launcher) for job in JOBS for launcher in golden_manifests(job)]
OF_PREDICTOR = ("minReplicas", "maxReplicas", "deploymentStrategy", "labels", "annotations")
"""Fields of an InferenceService's predictor that do not belong to its pods."""
PRIORITY_CLASSES = ("finetune-golden-high",)
SURROUNDINGS: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    },
    *(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE}}
        for name in ("default", "trainer", "spark-driver")
    ),
    *(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": 1000,
        }
        for name in PRIORITY_CLASSES
    ),
]
CUSTOM = {each.kind: f"{each.plural}.{each.group}" for each in SUPPORTED if not each.built_in} | {
    KSERVE_KIND: f"{KSERVE_PLURAL}.{KSERVE_GROUP}"
}


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, kinds: None) -> Iterator[str]:
    """Create the namespace of the golden jobs, with all that their pods refer to."""
    install_kserve(cluster)
    for document in SURROUNDINGS:
        cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))
    yield NAMESPACE
    cluster.must("delete", "namespace", NAMESPACE, "--wait=false")
    cluster.must("delete", "priorityclass", *PRIORITY_CLASSES)


def dry_run(cluster: Cluster, text: str) -> tuple[list[str], list[str]]:
    """Return kinds and names that the API server would create, and its errors and warnings."""
    ran = cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-", stdin=text)
    return ran.stdout.split(), ran.stderr.splitlines()


def as_json(*documents: dict[str, Any]) -> str:
    """Return JSON, one after the other: PyYAML writes the text `1e3` without quotes, and kubectl reads a number."""
    return "\n".join(map(json.dumps, documents))


def templates(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return pod name -> pod template, for any kind that creates pods."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    match manifest["kind"]:
        case "Job" | "Deployment":
            return {f"{name}-0": spec["template"]}
        case "InferenceService":
            pod = {key: value for key, value in spec["predictor"].items() if key not in OF_PREDICTOR}
            about = {key: spec["predictor"][key] for key in ("labels", "annotations")}
            return {f"{name}-predictor-0": {"metadata": about, "spec": pod}}
        case "PyTorchJob":
            replicas = spec["pytorchReplicaSpecs"]
        case "MPIJob":
            replicas = spec["mpiReplicaSpecs"]
        case "SparkApplication":
            return {f"{name}-{role}": spec[role]["template"] for role in ("driver", "executor")}
        case other:
            raise AssertionError(f"{other} makes pods in a way that this test does not know")
    return {f"{name}-{role.lower()}-0": replica["template"] for role, replica in replicas.items()}


def pods_of(manifests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    children = [each for each in manifests if "spec" in each and each["kind"] in ("Job", "Deployment", *CUSTOM)]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": name, "namespace": NAMESPACE},
            "spec": template["spec"],
        }
        for child in children
        for name, template in templates(child).items()
    ]


def needs(cluster: Cluster, manifests: Sequence[dict[str, Any]]) -> None:
    for kind in {each["kind"] for each in manifests} & CUSTOM.keys():
        if cluster.kubectl("get", "crd", CUSTOM[kind]).returncode != 0:
            pytest.skip(f"the cluster does not serve {kind}; {missing(CRDS)}")


def test_there_are_manifests_of_every_kind_of_child():
    kinds = {manifest["kind"] for job, launcher in RENDERED for manifest in golden_manifests(job)[launcher]}
    endpoint = {"Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    assert kinds == {"NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Service", "Job", *endpoint, *CUSTOM}


@pytest.mark.parametrize(("job", "launcher"), RENDERED)
def test_api_server_accepts_every_object_without_a_warning(
    cluster: Cluster, namespace: str, job: str, launcher: LauncherName
):
    manifests = golden_manifests(job)[launcher]
    needs(cluster, manifests)
    created, warnings = dry_run(cluster, yaml_text(manifests))
    assert warnings == []
    assert [name.partition("/")[2] for name in created] == [each["metadata"]["name"] for each in manifests]


@pytest.mark.parametrize(("job", "launcher"), RENDERED)
def test_every_pod_is_admitted_where_pod_security_is_restricted(
    cluster: Cluster, namespace: str, job: str, launcher: LauncherName
):
    pods = pods_of(golden_manifests(job)[launcher])
    assert pods
    created, warnings = dry_run(cluster, as_json(*pods))
    assert warnings == []
    assert created == [f"pod/{pod['metadata']['name']}" for pod in pods]


def test_a_misspelt_field_and_a_pod_that_may_gain_privileges_would_be_seen(cluster: Cluster, namespace: str):
    job = copy.deepcopy(next(each for each in golden_manifests("one-gpu")["job"] if each["kind"] == "Job"))
    (pod,) = pods_of([job])
    job["spec"]["backofLimit"] = 0
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    _, warnings = dry_run(cluster, as_json(job))
    assert any('unknown field "spec.backofLimit"' in line for line in warnings)
    _, warnings = dry_run(cluster, as_json(pod))
    assert any('violates PodSecurity "restricted' in line for line in warnings)
