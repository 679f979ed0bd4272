"""GPUs of nodes, on a real API server: pretended nodes with labels and allocatable resources, the operator's plans for
them, and `finetune doctor`, also with hardly any rights.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_support.api_access import Api, Object, kubeconfig_text, path_of
from cluster_support.control_plane import Cluster
from cluster_support.jobs_with_status import FINETUNE, Jobs
from cluster_support.kubelet import NODE_MARK
from cluster_support.operator_process import install
from cluster_support.world import World, condition

POOL = "example.com/pool"
PRODUCT = "nvidia.com/gpu.product"
H100: Object = {PRODUCT: "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
H200: Object = {PRODUCT: "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"}
GPUS: Object = {"nvidia.com/gpu": "8"}
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
EFA: Object = {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "10Gi"}
FLEET: dict[str, tuple[Object, Object]] = {
    "discovered": (H100, GPUS),
    "gke": ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, GPUS),
    "eks": ({"node.kubernetes.io/instance-type": "p4d.24xlarge"}, GPUS),
    "silent": ({}, GPUS),
    "mig": (
        {PRODUCT: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"},
        {"nvidia.com/mig-3g.40gb": "16", "nvidia.com/gpu": "0"},
    ),
    "amd": ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, {"amd.com/gpu": "8", "rdma/ib": "8"}),
    "efa-a": ({**H200, INSTANCE_TYPE: "p5e.48xlarge"}, {**GPUS, **EFA}),
    "efa-b": ({**H200, INSTANCE_TYPE: "p5e.48xlarge"}, {**GPUS, **EFA}),
    "mixed-old": ({PRODUCT: "Tesla-T4"}, GPUS),
    "mixed-new": (H100, GPUS),
}
"""Labels and allocatable resources by node; the part before - is the pool."""


@pytest.fixture(scope="module")
def fleet(cluster: Cluster) -> Iterator[None]:
    """Create the nodes, without a machine behind any."""
    api = Api(cluster.access)
    for name, (labels, resources) in FLEET.items():
        metadata = {"name": f"gpu-{name}", "labels": {**labels, POOL: name.partition("-")[0]}}
        body: Object = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        api.create(path_of("v1", "nodes"), body)
        status = {"allocatable": {"cpu": "96", "pods": "100", **resources}, "capacity": {"cpu": "96", **resources}}
        api.patch(path_of("v1", "nodes", name=f"gpu-{name}", sub="status"), {"status": status})
    yield
    for name in FLEET:
        api.delete(path_of("v1", "nodes", name=f"gpu-{name}"))


def job(pool: str, gpus: int = 8, **accelerator: str) -> Object:
    """Return a job for one pool, which is planned and never starts."""
    spec: Object = {"runPolicy": {"suspend": True}, "resources": {"gpusPerNode": gpus, "accelerator": accelerator}}
    return {**spec, "template": {"nodeSelector": {POOL: pool, NODE_MARK: None}, "tolerations": []}}


def planned(world: World, name: str, spec: Object) -> tuple[Object, str]:
    """Return the nodes in the status, and the reasons of the plan in one text."""
    world.apply(name, spec)
    status = world.wait(name, "planned", lambda found: found.get("plan") and found.get("measured", {}).get("nodes"))
    return status["measured"]["nodes"], "\n".join(status["plan"]["reasons"])


CASES: dict[str, tuple[Object, str, str]] = {
    "discovered": (job("discovered"), "H100", "1 node with 8 x H100 of 79.6 GiB (label nvidia.com/gpu.product)"),
    "gke": (job("gke"), "L4", "(label cloud.google.com/gke-accelerator)"),
    "eks": (job("eks"), "A100-40GB", "(label node.kubernetes.io/instance-type)"),
    "silent": (job("silent"), "unknown GPU", "no label has the product"),
    "mig": (
        job("mig", 1, resource="nvidia.com/mig-3g.40gb"),
        "A100-80GB-MIG-3g.40gb",
        "(resource nvidia.com/mig-3g.40gb, label nvidia.com/gpu.product)",
    ),
    "amd": (job("amd", resource="amd.com/gpu"), "MI300X", "(label amd.com/gpu.product-name)"),
    "mixed": (job("mixed"), "T4", "the plan is for the weakest, T4"),
    "chosen": (job("mixed", product="H100"), "H100", "1 node with 8 x H100"),
}


def test_plans_use_gpu_facts_from_each_kind_of_node_label(world: World, fleet: None) -> None:
    found = {name: planned(world, name, spec) for name, (spec, _, _) in CASES.items()}
    assert {name: hardware["gpu"]["product"] for name, (hardware, _) in found.items()} == {
        name: product for name, (_, product, _) in CASES.items()
    }
    assert [name for name, (_, _, reason) in CASES.items() if reason not in found[name][1]] == []
    assert "precision bf16: unknown GPU has units" in found["silent"][1]
    assert "precision fp16: T4" in found["mixed"][1]
    wrong, reasons = planned(world, "wrong", job("gke", product="H100"))
    assert "gpu" not in wrong
    assert "no node with nvidia.com/gpu fits the job's labels and tolerations now" in reasons


def network_of(world: World, name: str, pool: str, network: str) -> tuple[str, str]:
    """Return the network in the plan of a job for two nodes of a pool, and its reasons."""
    spec = job(pool)
    spec["resources"] = {**spec["resources"], "nodes": 2, "network": network}
    _, reasons = planned(world, name, {**spec, "launcher": "job"})
    return world.status(name)["plan"]["network"], reasons


def test_plans_use_the_network_devices_that_nodes_advertise(world: World, fleet: None) -> None:
    network, reasons = network_of(world, "auto", "efa", "auto")
    assert network == "efa"
    assert "network efa: pods request 32 vpc.amazonaws.com/efa: all 2 nodes that fit the job have it" in reasons
    network, reasons = network_of(world, "silent-net", "discovered", "auto")
    assert (network, "advertise no RDMA or EFA devices" in reasons) == ("tcp", True)
    assert network_of(world, "asked", "efa", "tcp")[0] == "tcp"


def test_a_job_that_requires_missing_devices_is_refused(world: World, fleet: None) -> None:
    spec = job("discovered")
    spec["resources"] = {**spec["resources"], "nodes": 2, "network": "rdma"}
    world.apply("lacking", spec)
    status = world.wait("lacking", "refused", lambda found: condition(found, "Planned").get("status") == "False")
    message = condition(status, "Planned")["message"]
    assert message.startswith("spec.resources.network")
    assert "advertise no RDMA devices" in message


def test_operator_without_permission_to_read_nodes_plans_with_a_note(world: World, fleet: None) -> None:
    world.cluster.own("the operator's rights")
    path = path_of("rbac.authorization.k8s.io/v1", "clusterroles", name="finetune-operator")
    role = world.api.get(path)
    assert role is not None
    world.operator.terminate()
    try:
        world.api.patch(path, {"rules": [rule for rule in role["rules"] if "nodes" not in rule["resources"]]})
        world.operator.start()
        hardware, reasons = planned(world, "blind", job("discovered", product="H100"))
        assert hardware == {"words": "the operator has no right to read nodes (rbac.nodes of the chart)"}
        assert f"hardware: {hardware['words']}" in reasons
        assert "precision bf16: H100" in reasons
    finally:
        install(world.cluster)


# --------------------------------------------------------------------------------------------------------------- doctor


def doctor(jobs: Jobs, spec: Object | None = None, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the findings by topic."""
    names = []
    if spec is not None:
        whole = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}}
        document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "big"}}
        (jobs.folder / "job.yaml").write_text(yaml.safe_dump({**document, "spec": {**whole, "training": {}, **spec}}))
        names = [str(jobs.folder / "job.yaml")]
    code, out, err = jobs.finetune("doctor", *names, "-o", "json", *options)
    assert err == ""
    return code, {one["what"]: one for one in json.loads(out)["findings"]}


def test_doctor_reports_findings_with_hints_for_gaps(jobs: Jobs, fleet: None) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    hard = {"requests.nvidia.com/gpu": "8", "limits.cpu": "64"}
    Api(jobs.api.access).create(path_of("v1", "resourcequotas", jobs.namespace), {**quota, "spec": {"hard": hard}})
    spec = {
        "launcher": "mpijob",
        "resources": {"nodes": 2, "gpusPerNode": 8, "network": "efa", "accelerator": {"product": "H100"}},
        "storage": {"storageClassName": "none-such"},
    }
    code, found = doctor(jobs, spec)
    assert code == 1
    assert found["FineTuneJob"]["state"] == "ok"
    assert found["GPUs of the job, 8 x nvidia.com/gpu"]["state"] == "ok"
    assert "2 nodes with 8 x H100" in found["GPUs of the job, 8 x nvidia.com/gpu"]["found"]
    assert found["GPU nodes, nvidia.com/mig-3g.40gb"]["state"] == "ok"
    lacking = {name: one["hint"] for name, one in found.items() if one["state"] == "gap"}
    assert "device plugin for vpc.amazonaws.com/efa" in lacking["network of the job"]
    assert "EFA device plugin" in lacking["EFA, p4d.24xlarge"]
    assert "vpc.amazonaws.com/efa on 2 (at least 32 each)" in found["network between nodes"]["found"]
    assert "quota few" in lacking
    assert "16 requests.nvidia.com/gpu" in found["quota few"]["found"]
    assert "storage" in lacking
    assert "no registry" in found["image"]["found"]
    assert all(one["hint"] for name, one in found.items() if one["state"] == "gap")
    assert found[f"namespace {jobs.namespace}"]["found"].startswith("PodSecurity restricted")


def test_the_command_plans_with_the_same_facts_as_the_operator(jobs: Jobs, fleet: None) -> None:
    doctor(jobs, {"resources": {"gpusPerNode": 8, "accelerator": {"product": "T4"}}})
    command = [FINETUNE, "plan", jobs.folder / "job.yaml", "--cluster", "--nodes", "-o", "json"]
    ran = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, check=True)
    made = json.loads(ran.stdout)
    assert made["hardware"]["gpu"]["product"] == "T4"
    assert "hardware: 1 node with 8 x T4 of 15.0 GiB (label nvidia.com/gpu.product)" in made["assumptions"]


def test_the_doctor_shows_a_table_for_people_without_a_job(jobs: Jobs, fleet: None) -> None:
    code, out, err = jobs.finetune("doctor")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code in (0, 1), err) == (True, "")
    assert lines[0] == "CHECK STATE FOUND"
    assert any(line.startswith("GPU nodes, amd.com/gpu ok 1 node with 8 x MI300X of 192.0 GiB") for line in lines)
    assert "missing" in lines[-1]


def test_doctor_reports_unreadable_parts_as_unknown(jobs: Jobs, fleet: None, tmp_path: Path) -> None:
    api = Api(jobs.api.access)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "somebody"}}
    api.create(path_of("v1", "serviceaccounts", jobs.namespace), account)
    token = jobs.api.must("create", "token", "somebody", "-n", jobs.namespace).strip()
    config = tmp_path / "somebody.kubeconfig"
    access = jobs.api.access
    config.write_text(kubeconfig_text(access.host, str(access.ca) if access.ca else None, token))
    _, found = doctor(jobs, {"resources": {"gpusPerNode": 8}}, "--kubeconfig", str(config))
    unread = ("operator", "GPU nodes", "storage", "quota", f"namespace {jobs.namespace}")
    assert {name: found[name]["state"] for name in unread} == dict.fromkeys(unread, "unknown")
    assert found["GPU nodes"]["found"] == "no permission to read nodes"
    assert found["FineTuneJob"]["state"] == "ok"
