"""Network between nodes: devices that nodes advertise, the choice of the plan, and the requests of its pods."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_operator.jobs.render.contract import stage_files
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.jobs.state.planned import plan_status
from finetune_operator.plan.hardware.gpu_nodes import Node, facts_of_nodes, read_node
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan, NetworkPlan, PlanRefused
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from planning_support.cases import BERT, job

EFA, SHARED = "vpc.amazonaws.com/efa", "rdma/hca_shared_devices_a"
ETH0 = {"NCCL_SOCKET_IFNAME": "eth0"}
EFA_ENV = {**ETH0, "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
HUGE = {"hugepages-2Mi": "5120Mi"}


def node(name: str, instance: str | None = None, gpus: int = 8, **resources: str) -> Node:
    """Return a node with H100s; `resources`: what it advertises beside them, by short names."""
    keys = {"efa": EFA, "shared": SHARED, "huge": "hugepages-2Mi", "vf": "nvidia.com/sriov-rdma-vf"}
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    labels |= {} if instance is None else {"node.kubernetes.io/instance-type": instance}
    there = {"nvidia.com/gpu": str(gpus), **{keys.get(key, key): value for key, value in resources.items()}}
    return read_node({"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"allocatable": there}})


def planned(
    *nodes: Node, network: str = "auto", settings: Settings = CLUSTER_SETTINGS, known: bool = True, **spec: Any
) -> JobPlan:
    resources = {"nodes": 2, "gpusPerNode": 8, "network": network, **spec.pop("resources", {})}
    requested = job({"resources": resources, "training": {"maxSteps": 10}, **spec})
    facts = Facts(model=BERT, nodes=facts_of_nodes(nodes, requested.spec, settings) if known else None)
    return plan(requested, facts, settings)


def settings_of(value: dict[str, Any]) -> Settings:
    found, problems = check_settings(value)
    assert problems == []
    assert found is not None
    return found


def network_notes(made: JobPlan) -> str:
    return "\n".join(each for each in (*made.reasons, *made.assumptions) if "network" in each or "huge" in each)


P5 = [node(name, "p5.48xlarge", efa="32", huge="10752Mi") for name in "ab"]
IB = [node(name, shared="1k") for name in "ab"]


@pytest.mark.parametrize(
    ("nodes", "transport", "limits", "reason"),
    [
        (P5, "efa", {EFA: "32", **HUGE}, f"network efa: pods request 32 {EFA}: all 2 nodes that fit the job have it"),
        (IB, "rdma", {SHARED: "1"}, f"network rdma: pods request 1 {SHARED}: all 2 nodes that fit the job have it"),
        (
            [node("a", vf="16")],
            "rdma",
            {"nvidia.com/sriov-rdma-vf": "16"},
            "network rdma: pods request 16 nvidia.com/sriov-rdma-vf: the node that fits the job has it",
        ),
        (
            [*IB, node("c")],
            "tcp",
            {},
            f"network tcp: only 2 of 3 nodes that fit the job have {SHARED}; resources.network rdma has pods wait for "
            "these",
        ),
        ([node("a")], "tcp", {}, "network tcp: nodes that fit the job advertise no RDMA or EFA devices"),
        (
            [node("a", "p4d.24xlarge")],
            "tcp",
            {},
            "network tcp: nodes that fit the job advertise no RDMA or EFA devices; a p4d.24xlarge has 4 EFA "
            "interfaces, which the EFA device plugin advertises",
        ),
        ([node("a", shared="0")], "tcp", {}, "network tcp: nodes that fit the job advertise no RDMA or EFA devices"),
    ],
    ids=["EFA", "shared RDMA", "virtual functions", "some nodes", "none", "no device plugin", "a count of 0"],
)
def test_auto_requests_devices_that_all_nodes_advertise(nodes, transport, limits, reason):
    made = planned(*nodes)
    assert made.network is not None
    assert (made.network.transport, made.network.limits) == (transport, limits)
    assert network_notes(made) == reason
    assert plan_status(made).network == transport


def test_nodes_that_cannot_run_the_job_do_not_count():
    made = planned(*IB, node("small", gpus=4))
    assert made.network is not None
    assert made.network.transport == "rdma"


def test_a_pod_with_half_of_the_gpus_requests_half_of_the_interfaces():
    made = planned(*P5, resources={"gpusPerNode": 4})
    assert made.network is not None
    assert made.network.limits[EFA] == "16"


def test_huge_pages_that_nodes_lack_are_not_requested():
    made = planned(*(node(name, "p5.48xlarge", efa="32", huge="2Gi") for name in "ab"))
    assert made.network == NetworkPlan(
        transport="efa", limits={EFA: "32"}, env={**EFA_ENV, "FI_EFA_USE_HUGE_PAGE": "0"}
    )
    assert f"no huge pages: {EFA} works with 5120Mi of hugepages-2Mi, and nodes have 2.0 GiB" in network_notes(made)


def test_unknown_nodes_get_no_devices_with_a_note():
    made = planned(known=False)
    assert made.network == NetworkPlan(transport="tcp", env=ETH0)
    assert network_notes(made) == (
        "network: the nodes' devices are not known, so pods request none and NCCL uses TCP; resources.network rdma or "
        "efa requests them"
    )


@pytest.mark.parametrize(
    ("network", "instance", "limits"),
    [
        ("rdma", None, {"rdma/ib": "1"}),
        ("efa", None, {EFA: "1", **HUGE}),
        ("efa", "p4d.24xlarge", {EFA: "4", **HUGE}),
        ("efa", "p5.48xlarge", {EFA: "32", **HUGE}),
        ("efa", "metal.huge", {EFA: "1", **HUGE}),
    ],
)
def test_devices_of_unknown_nodes_follow_from_settings_and_instance_type(network, instance, limits):
    selector = {} if instance is None else {"node.kubernetes.io/instance-type": instance}
    made = planned(known=False, network=network, template={"nodeSelector": selector})
    assert made.network is not None
    assert made.network.limits == limits
    assert f"network {network}: as asked; pods request" in network_notes(made)


@pytest.mark.parametrize(
    ("network", "nodes", "rule", "hint"),
    [
        ("rdma", [node("a")], "nodes that fit the job advertise no RDMA devices", "set it to auto, install"),
        ("rdma", P5, "nodes that fit the job advertise no RDMA devices", "set it to efa or auto, install"),
        (
            "efa",
            [node("a", "p5.48xlarge")],
            "nodes that fit the job advertise no EFA devices; a p5.48xlarge has 32 EFA interfaces, which the EFA "
            "device plugin advertises",
            "set it to auto, install the device plugin, or add its resource to network.devices of the settings",
        ),
    ],
)
def test_devices_that_no_node_advertises_are_refused(network, nodes, rule, hint):
    with pytest.raises(PlanRefused) as refused:
        planned(*nodes, network=network)
    (problem,) = refused.value.problems
    assert (problem.path, problem.rule) == ("spec.resources.network", rule)
    assert problem.hint.startswith(hint)


def test_devices_of_some_nodes_are_requested_by_an_explicit_network():
    made = planned(*IB, node("c"), network="rdma")
    assert made.network is not None
    assert made.network.limits == {SHARED: "1"}
    assert network_notes(made).endswith("as asked; 2 of 3 nodes that fit the job have it")


def test_tcp_requests_nothing_and_keeps_nccl_off_the_devices():
    made = planned(*IB, network="tcp")
    assert made.network == NetworkPlan(transport="tcp", env={**ETH0, "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"})


@pytest.mark.parametrize("resources", [{"nodes": 1}, {"gpusPerNode": 0}])
def test_one_node_and_processes_on_cpus_request_no_devices(resources):
    assert planned(*IB, resources=resources).network is None
    made = planned(*IB, network="rdma", resources=resources)
    assert made.network is None
    assert "resources.network rdma has no effect" in network_notes(made)


def test_rows_of_the_settings_come_before_the_built_in_ones():
    row = {"resource": "example.com/nic", "perGpu": 2, "hugePages": "1Gi", "env": {"NCCL_IB_HCA": "mlx5"}}
    known = {"resource": EFA, "transport": "efa", "perNode": 8}
    settings = settings_of({"network": {"devices": [row, known], "socketInterface": ""}})
    both = [node(name, efa="32", huge="10Gi", **{"example.com/nic": "16"}) for name in "ab"]
    assert planned(*both, settings=settings).network == NetworkPlan(
        transport="rdma", limits={"example.com/nic": "16", "hugepages-2Mi": "1Gi"}, env={"NCCL_IB_HCA": "mlx5"}
    )
    assert planned(*both, network="efa", settings=settings).network == NetworkPlan(transport="efa", limits={EFA: "8"})


def test_interfaces_of_the_settings_replace_those_of_the_nodes():
    made = planned(*P5, settings=settings_of({"defaults": {"efaInterfaces": 4}}))
    assert made.network is not None
    assert made.network.limits[EFA] == "4"


def test_only_a_training_with_devices_names_its_network_in_the_contract():
    def contract(made: JobPlan) -> str:
        return stage_files(made, RenderContext("team-a", job().spec, CLUSTER_SETTINGS), Stage.TRAIN)["job.json"]

    assert '"network": "rdma"' in contract(planned(*IB))
    assert '"network"' not in contract(planned(*IB, network="tcp"))


def test_nodes_facts_of_an_earlier_operator_are_read():
    facts = facts_of_nodes(IB, job({"resources": {"nodes": 2, "gpusPerNode": 8}}).spec, CLUSTER_SETTINGS)
    stored = facts.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert type(facts).model_validate(stored) == facts
    del stored["network"]
    assert type(facts).model_validate(stored).network is None


@pytest.mark.parametrize(
    ("devices", "path"),
    [
        ([{"resource": "a.com/b", "env": {"NOT-A-NAME": "1"}}], "network.devices[0].env.NOT-A-NAME"),
        ([{"resource": "a.com/b", "hugePages": "5Mi"}], "network.devices[0].hugePages"),
        ([{"resource": "a.com/b", "hugePages": "0"}], "network.devices[0].hugePages"),
        ([{"resource": "a.com/b"}, {"resource": "a.com/b"}], "network.devices[1]"),
        ([{"resource": "nameless"}], "network.devices[0].resource"),
    ],
)
def test_rows_that_no_pod_could_have_are_problems_of_the_settings(devices, path):
    _, problems = check_settings({"network": {"devices": devices}})
    assert [problem.path.replace('["', ".").replace('"]', "") for problem in problems] == [path]
