"""GPUs by nodes' labels and allocatable resources, and pods that go to nodes with the requested product."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from finetune_contract.choices import Stage
from finetune_contract.facts import DeviceFacts
from finetune_operator.jobs.render.render_types import Attempt, RenderContext
from finetune_operator.jobs.render.trainer_pod import StagePods, stage_pod
from finetune_operator.plan.hardware.devices import GPU_MODELS, find_gpu, link_bytes, product_labels
from finetune_operator.plan.hardware.gpu_nodes import Node, facts_of_nodes, read_node
from finetune_operator.plan.plan import plan
from finetune_operator.plan.time.cost import find_price
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.tables import machine_types, rows
from planning_support.cases import job

MIB = 1 << 20
GIB = 1 << 30
PRODUCT, GKE = "nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"


def node(name: str, gpus: int = 8, resource: str = "nvidia.com/gpu", **labels: str) -> Node:
    """Return a node as the API server has it; `labels` by their keys or by short names."""
    keys = {"product": PRODUCT, "gke": GKE, "memory": "nvidia.com/gpu.memory", "replicas": "nvidia.com/gpu.replicas"}
    keys |= {"major": "nvidia.com/gpu.compute.major", "minor": "nvidia.com/gpu.compute.minor"}
    keys |= {"type": "node.kubernetes.io/instance-type", "amd": "amd.com/gpu.product-name", "vram": "amd.com/gpu.vram"}
    return read_node(
        {
            "metadata": {"name": name, "labels": {keys.get(key, key): value for key, value in labels.items()}},
            "spec": {},
            "status": {"allocatable": {"cpu": "96", resource: str(gpus)}},
        }
    )


def settings(value: dict[str, Any]) -> Settings:
    found, problems = check_settings(value)
    assert problems == []
    assert found is not None
    return found


def facts_of(
    *nodes: Node, resources: dict[str, Any] | None = None, more: Settings = CLUSTER_SETTINGS, **spec: Any
) -> Any:
    requested = {"gpusPerNode": 8, **(resources or {})}
    return facts_of_nodes(nodes, job({"resources": requested, **spec}).spec, more)


@pytest.mark.parametrize(
    ("there", "resources", "product", "memory", "bf16"),
    [
        (node("a", product="NVIDIA-H100-80GB-HBM3", memory="81559"), {}, "H100", 81_559 * MIB, True),
        (node("a", product="Tesla-T4", memory="15360", major="7", minor="5"), {}, "T4", 15_360 * MIB, False),
        (node("a", gke="nvidia-a100-80gb"), {}, "A100-80GB", 81_920 * MIB, True),
        (node("a", type="g6e.48xlarge"), {}, "L40S", 46_068 * MIB, True),
        (
            node("a", product="NVIDIA-X9000", memory="50000", major="11", minor="0"),
            {},
            "NVIDIA-X9000",
            50_000 * MIB,
            True,
        ),
        (node("a", product="NVIDIA-Old", memory="8000", major="6", minor="1"), {}, "NVIDIA-Old", 8_000 * MIB, False),
        (node("a", type="metal.huge"), {}, "unknown GPU", 15_360 * MIB, True),
        (node("a", product="NVIDIA-A100-SXM4-80GB", memory="81920", replicas="4"), {}, "A100-80GB", 20_480 * MIB, True),
        (
            node("a", 3, "nvidia.com/mig-3g.40gb", product="NVIDIA-A100-SXM4-80GB", memory="81920"),
            {"gpusPerNode": 1, "accelerator": {"resource": "nvidia.com/mig-3g.40gb"}},
            "A100-80GB-MIG-3g.40gb",
            round(40 * 1024 * 5 / 6) * MIB,
            True,
        ),
        (
            node("a", 8, "amd.com/gpu", amd="AMD_Instinct_MI300X_OAM", vram="192G"),
            {"accelerator": {"resource": "amd.com/gpu"}},
            "MI300X",
            192_000_000_000,
            True,
        ),
    ],
    ids=[
        "gpu feature discovery",
        "without bf16",
        "GKE",
        "EKS",
        "in no table",
        "old",
        "no label",
        "shared",
        "MIG",
        "AMD",
    ],
)
def test_gpu_is_read_from_each_kind_of_node_label(there, resources, product, memory, bf16):
    found = facts_of(there, resources=resources)
    assert found.gpu is not None
    assert (found.gpu.product, found.gpu.memory_bytes, found.gpu.bf16) == (product, memory, bf16)


def test_plan_for_mixed_nodes_is_for_the_weakest_with_a_note():
    nodes = [node("a", product="NVIDIA-H100-80GB-HBM3"), node("b", product="NVIDIA-A100-SXM4-40GB")]
    nodes += [node("c", 2, product="Tesla-T4")]
    found = facts_of(*nodes)
    assert found.gpu is not None
    assert found.gpu.product == "A100-40GB"
    assert found.words == (
        "pods can go to several kinds of nodes: 1 node with 8 x A100-40GB of 40.0 GiB (label nvidia.com/gpu.product), "
        "1 node with 8 x H100 of 79.6 GiB (label nvidia.com/gpu.product); the plan is for the weakest, A100-40GB; "
        "resources.accelerator.product chooses one"
    )
    chosen = facts_of(*nodes, resources={"accelerator": {"product": "H100"}})
    assert (chosen.gpu.product, chosen.words) == (
        "H100",
        "1 node with 8 x H100 of 79.6 GiB (label nvidia.com/gpu.product)",
    )


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"resources": {"accelerator": {"product": "L4"}}}, "no node with nvidia.com/gpu fits the job's labels"),
        ({"resources": {"accelerator": {"resource": "amd.com/gpu"}}}, "no node of the cluster has amd.com/gpu now"),
        ({"template": {"nodeSelector": {"pool": "other"}}}, "no node with nvidia.com/gpu fits the job's labels"),
        ({"resources": {"gpusPerNode": 16}}, "no node has 16 GPUs, and pods wait for one; 1 node with 8 x H100"),
    ],
)
def test_reason_why_no_node_fits_is_reported(spec, text):
    assert facts_of(node("a", product="NVIDIA-H100-80GB-HBM3"), **spec).words.startswith(text)


def affinity(operator: str, *values: str) -> dict[str, Any]:
    expression = {"key": "pool", "operator": operator} | ({"values": list(values)} if values else {})
    term = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}}


@pytest.mark.parametrize(
    ("template", "fits"),
    [
        ({"nodeSelector": {"pool": "big"}}, True),
        (affinity("In", "big", "huge"), True),
        (affinity("NotIn", "big"), False),
        (affinity("Exists"), True),
        (affinity("DoesNotExist"), False),
        (affinity("In", "small"), False),
    ],
)
def test_nodes_are_matched_with_the_jobs_own_selectors(template, fits):
    there = node("a", product="NVIDIA-L4", pool="big")
    assert (facts_of(there, template=template).gpu is not None) is fits


@pytest.mark.parametrize(
    ("taint", "fits"),
    [
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "other", "effect": "NoSchedule"}, False),
        ({"key": "team", "value": "ours", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "other", "effect": "PreferNoSchedule"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, True),
    ],
)
def test_nodes_with_untolerated_taints_do_not_count(taint, fits):
    there = read_node(
        {
            "metadata": {"name": "a", "labels": {PRODUCT: "NVIDIA-L4"}},
            "spec": {"taints": [taint]},
            "status": {"allocatable": {"nvidia.com/gpu": "8"}},
        }
    )
    template = {"tolerations": [{"key": "team", "operator": "Equal", "value": "ours", "effect": "NoSchedule"}]}
    assert (facts_of(there, template=template).gpu is not None) is fits


# ------------------------------------------------------------------------------------------------------------- the plan


def planned(
    resources: dict[str, Any], facts: Facts | None = None, more: Settings = CLUSTER_SETTINGS, **spec: Any
) -> JobPlan:
    return plan(job({"resources": {"gpusPerNode": 1, **resources}, **spec}), facts or Facts(), more)


def precision(made: JobPlan) -> str:
    assert made.trainer.training is not None
    return made.trainer.training.precision


def test_plan_uses_node_facts_and_gives_their_source():
    found = facts_of(node("a", product="Tesla-T4"), resources={"gpusPerNode": 1})
    made = planned({}, Facts(nodes=found))
    assert made.hardware.gpu is not None
    assert (made.hardware.gpu.product, precision(made)) == ("T4", "fp16")
    assert f"hardware: {found.words}" in made.assumptions


@pytest.mark.parametrize("resources", [{}, {"accelerator": {"product": "RX9"}}, {"accelerator": {"memory": "16Gi"}}])
def test_plan_for_an_unknown_gpu_assumes_bf16_with_a_note(resources):
    made = planned(resources)
    assert precision(made) == "bf16"
    assert any(text.startswith("hardware: ") and "units for bf16 are assumed" in text for text in made.assumptions)
    assert made.estimate.seconds is None


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        ({}, "fp16"),
        ({"parallelism": {"strategy": "deepspeed", "zeroStage": 2}}, "fp16"),
        ({"parallelism": {"strategy": "fsdp"}}, "fp16"),
        ({"parallelism": {"tensor": 2}}, "fp32"),
        ({"task": "summarization", "model": {"uri": "hf://google-t5/t5-small"}}, "fp32"),
    ],
)
def test_fp16_is_taken_on_7x_where_its_loss_is_scaled(spec, taken):
    assert precision(planned({"gpusPerNode": 2, "accelerator": {"product": "V100-32GB"}}, **spec)) == taken


def test_a_mig_instance_has_its_own_memory_before_any_node_is_read():
    made = planned({"accelerator": {"product": "A100-80GB", "resource": "nvidia.com/mig-2g.20gb"}})
    assert made.hardware.gpu == DeviceFacts(
        product="A100-80GB-MIG-2g.20gb", memory_bytes=round(20 * 1024 * 5 / 6) * MIB, capability="8.0"
    )
    alone = planned({"accelerator": {"resource": "nvidia.com/mig-2g.20gb"}}).hardware.gpu
    assert alone is not None
    assert alone.memory_bytes == round(20 * 1024 * 5 / 6) * MIB


# ------------------------------------------------------------------------------------------------------------ settings

ROW = {
    "name": "X9000",
    "aliases": ["our-box"],
    "memory": "48Gi",
    "capability": "8.9",
    "halfTflops": 200,
    "fp32Tflops": 50,
    "linkGigabytes": 32,
    "labels": [{"key": "example.com/gpu", "values": ["x9"]}],
    "gpuHour": 2,
    "spotGpuHour": 0.5,
}


def test_the_settings_add_a_product_with_all_that_plans_read_of_one():
    given = settings({"hardware": [ROW]})
    found = find_gpu("our-box", given.hardware)
    assert found is not None
    assert (found.facts(), found.fp8) == (
        DeviceFacts(product="X9000", memory_bytes=48 * GIB, bf16=True, capability="8.9"),
        True,
    )
    assert link_bytes("X9000", given.hardware) == 32e9
    price = find_price(given, "X9000", 4)
    assert price is not None
    assert (price.per_hour, price.spot_per_hour) == (8, 2)
    there = node("a", **{"example.com/gpu": "x9"})
    assert facts_of(there, more=given, resources={"accelerator": {"product": "X9000"}}).gpu == found.facts()
    made = planned({"accelerator": {"product": "our-box"}}, more=given)
    assert made.estimate.cost is not None


def test_the_settings_override_single_figures_of_a_built_in_product():
    rows = settings({"hardware": [{"name": "A100-40GB", "memory": "39Gi"}]}).hardware
    found, built_in = find_gpu("NVIDIA-A100-SXM4-40GB", rows), find_gpu("A100-40GB")
    assert found is not None
    assert built_in is not None
    assert (found.memory_mib, found.half_tflops) == (39 * 1024, built_in.half_tflops)


def test_precisions_of_the_settings_override_the_capability():
    rows = settings({"hardware": [{"name": "Z1", "memory": "16Gi", "precisions": ["fp16"]}]}).hardware
    found = find_gpu("Z1", rows)
    assert found is not None
    assert (found.bf16, found.fp8) == (False, False)


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"name": "A", "aliases": ["a"]}, "hardware[0].aliases[0]"),
        ({"name": "A", "labels": [{"key": "k", "values": ["not a label"]}]}, "hardware[0].labels[0].k"),
        ({"name": "A", "capability": "eight"}, "hardware[0].capability"),
    ],
)
def test_a_row_that_no_cluster_can_have_is_refused(row, path):
    _, problems = check_settings({"hardware": [row]})
    assert [problem.path for problem in problems] == [path]


# ------------------------------------------------------------------------------------------------------------ the pods


def pod(resources: dict[str, Any], more: Settings = CLUSTER_SETTINGS, **spec: Any) -> dict[str, Any]:
    checked = job({"resources": {"gpusPerNode": 1, **resources}, **spec})
    context = RenderContext("team", checked.spec, more)
    found: Any = stage_pod(StagePods(plan(checked, Facts(), more), context, Attempt(Stage.TRAIN))).manifest()["spec"]
    return dict(found)


def required(spec: dict[str, Any]) -> Any:
    return spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


def expression(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def test_product_name_becomes_node_affinity_of_real_labels():
    made = pod({"accelerator": {"product": "H100"}})
    assert "nodeSelector" not in made
    assert required(made)[0] == {"matchExpressions": [expression(PRODUCT, "NVIDIA-H100-80GB-HBM3")]}
    assert required(made)[1] == {"matchExpressions": [expression(GKE, "nvidia-h100-80gb", "nvidia-h100-mega-80gb")]}


def test_label_value_and_unknown_product_become_a_node_selector():
    exact = pod({"accelerator": {"product": "NVIDIA-A100-SXM4-80GB"}})
    assert exact["nodeSelector"] == {PRODUCT: "NVIDIA-A100-SXM4-80GB"}
    assert pod({"accelerator": {"product": "NVIDIA-X9000"}})["nodeSelector"] == {PRODUCT: "NVIDIA-X9000"}


def test_a_product_holds_together_with_the_jobs_own_affinity():
    made = pod({"accelerator": {"product": "L4"}}, template=affinity("In", "big"))
    ours = [each["matchExpressions"] for each in required(made)]
    assert [pair[0] for pair in ours] == [expression("pool", "big")] * len(ours)
    assert [pair[1]["key"] for pair in ours] == list(product_labels("L4"))


def test_only_label_keys_of_the_settings_are_used():
    given = settings({"nodes": {"productLabels": ["cloud.google.com/gke-accelerator"]}})
    assert pod({"accelerator": {"product": "L4"}}, given)["nodeSelector"] == {GKE: "nvidia-l4"}


@pytest.mark.parametrize(
    ("resources", "given", "name"),
    [
        ({}, {}, "nvidia.com/gpu"),
        ({"accelerator": {"resource": "nvidia.com/mig-3g.40gb"}}, {}, "nvidia.com/mig-3g.40gb"),
        ({}, {"defaults": {"gpuResource": "amd.com/gpu"}}, "amd.com/gpu"),
    ],
)
def test_pods_request_the_resource_of_the_job_or_the_settings(resources, given, name):
    made = pod(resources, settings(given))
    assert made["containers"][0]["resources"]["limits"][name] == "1"
    assert {"key": name, "operator": "Exists"} in made["tolerations"]
    assert {"key": f"{name.partition('/')[0]}/gpu", "operator": "Exists"} in made["tolerations"]


def test_a_name_that_leaves_variants_open_means_all_of_them():
    values = product_labels("A100")[PRODUCT]
    assert {"NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"} <= set(values)
    assert "NVIDIA-A100-80GB-PCIe" not in values
    assert product_labels("A100-PCIe-80GB")[PRODUCT] == ("NVIDIA-A100-80GB-PCIe",)


def test_products_of_machine_types_are_in_the_table_of_gpus() -> None:
    assert {row["product"] for row in rows("machine_types.csv")} <= {"", *(gpu.name for gpu in GPU_MODELS)}


@pytest.mark.parametrize(("table", "key"), [("gpus.csv", "name"), ("machine_types.csv", "type")])
def test_rows_of_a_table_have_names_of_their_own(table: Literal["gpus.csv", "machine_types.csv"], key: str) -> None:
    names = [row[key] for row in rows(table)]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("machine_type", "gpus"),
    [
        ("g5.xlarge", 1), ("g6e.12xlarge", 4), ("p4d.24xlarge", 8), ("Standard_NC64as_T4_v3", 4),
        ("Standard_NC80adis_H100_v5", 2), ("a2-ultragpu-2g", 2), ("g2-standard-24", 2), ("m5.large", None),
    ],
)  # fmt: skip
def test_machine_type_has_a_known_number_of_gpus(machine_type: str, gpus: int | None) -> None:
    assert machine_types.gpus_of(machine_type) == gpus
