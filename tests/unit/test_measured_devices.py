"""GPUs that a plan assumes against those that the trainer measures: the rule for a new plan, and the new plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, DeviceFacts, HardwareFacts, SplitFacts
from finetune_contract.measured_devices import MeasuredDevices, PlannedDevice, plan_change, same_kind
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.jobs.render.contract import stage_files
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.plan.hardware.gpu_nodes import Node, facts_of_nodes
from finetune_operator.plan.hardware.gpu_table import GPU_MODELS
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Adaptation, Facts, JobPlan, NodesFacts, PlanRefused
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import job, llama_1b

MIB, GIB = 1 << 20, 1 << 30
L40S = DeviceFacts(product="NVIDIA L40S", memory_bytes=45_467 * MIB, bf16=True, capability="8.9")
T4 = DeviceFacts(product="Tesla T4", memory_bytes=14_930 * MIB, bf16=False, capability="7.5")
V100 = DeviceFacts(product="Tesla V100-SXM2-16GB", memory_bytes=16_151 * MIB, bf16=False, capability="7.0")
HUGE = llama_1b("text-generation", hidden_size=32_768, num_hidden_layers=100)
DATA = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=640, tokens=64_000, longest=512)}, max_length=512)
LLAMA = {"task": "text-generation", "model": {"uri": "hf://meta-llama/Llama-3.1-8B"}}


def measured(device: DeviceFacts, **fields: Any) -> MeasuredDevices:
    return MeasuredDevices(device=device, processes=8, per_node=8, **fields)


def planned(memory: float = 15, **fields: Any) -> PlannedDevice:
    given = {"product": "unknown GPU", "bf16": True, "source": "assumed", "needed_bytes": 0, **fields}
    return PlannedDevice(memory_bytes=round(memory * GIB), **given)


def gpu(memory: float, **fields: Any) -> MeasuredDevices:
    given = {"product": "GPU", "bf16": True, **fields}
    return measured(DeviceFacts(memory_bytes=round(memory * GIB), **given))


ALL = ("memory", "speed", "precision")


@pytest.mark.parametrize(
    ("plan_for", "found", "precision", "why"),
    [
        (planned(16), gpu(15.8), "bf16", None),
        (planned(16), gpu(15.6), "bf16", "GPU has 15.6 GiB, and the plan is for 16.0 GiB"),
        (planned(16, source="measured"), gpu(15.6), "bf16", "GPU has 15.6 GiB, and the plan is for 16.0 GiB"),
        (planned(16, needed_bytes=17 << 30), gpu(16), "bf16", "GPU has 16.0 GiB, and the plan needs 17.0 GiB"),
        (planned(16, undecided=("memory",)), gpu(17.5), "bf16", None),
        (planned(16, undecided=("memory",)), gpu(18), "bf16", "GPU has 18.0 GiB, and the plan uses 16.0 GiB"),
        (planned(16), gpu(80), "bf16", None),
        (planned(16, undecided=("memory",), source="measured"), gpu(80), "bf16", None),
        (planned(16), gpu(16, bf16=False), "bf16", "GPU has no units for bf16, and the plan uses them"),
        (planned(16), gpu(16, bf16=False), "fp8", "GPU has no units for bf16, and the plan uses them"),
        (planned(16), gpu(16, bf16=False), "fp32", None),
        (planned(16, bf16=False, undecided=ALL), gpu(16), "fp32", "GPU has units for bf16, and the plan uses none"),
        (planned(16, bf16=False), gpu(16), "fp32", None),
        (planned(16, undecided=("speed",)), gpu(16), "bf16", "the plan is for a GPU of unknown speed, and this is GPU"),
        (planned(16, product="GPU", undecided=("speed",)), gpu(16), "bf16", None),
    ],
)  # fmt: skip
def test_rule_for_a_new_plan(plan_for: PlannedDevice, found: MeasuredDevices, precision: Any, why: str | None):
    assert plan_change(plan_for, found, precision) == why


def test_kinds_of_gpus_are_products_with_as_much_memory():
    less = L40S.model_copy(update={"memory_bytes": round(L40S.memory_bytes * 0.99)})
    half = L40S.model_copy(update={"memory_bytes": L40S.memory_bytes // 2})
    assert same_kind(L40S, less)
    assert not same_kind(L40S, half)
    assert not same_kind(L40S, L40S.model_copy(update={"product": "NVIDIA L40"}))


def test_measured_gpus_are_described_in_a_line():
    assert measured(L40S).text == "NVIDIA L40S 44.4 GiB, capability 8.9 x 8"
    amd = DeviceFacts(product="AMD Instinct MI300X", memory_bytes=192 * GIB)
    assert measured(amd, others=("X",)).text == "AMD Instinct MI300X 192.0 GiB x 8 (the weakest; also X)"


def test_reports_with_devices_fit_into_a_termination_message():
    long = measured(L40S.model_copy(update={"product": "x" * 64}), others=("y" * 64,) * 4)
    report = TrainerReport(job="reviews", stage=Stage.TRAIN, outcome="succeeded", devices=long)
    read = TrainerReport.model_validate_json(report.to_termination_message())
    assert read.devices == long
    assert TrainerReport.model_validate_json('{"job":"a","stage":"train","outcome":"succeeded"}').devices is None


# ---------------------------------------------------------------------------------------------------------------- plans


def made(spec: dict[str, Any], gpus: int = 8, **facts: Any) -> JobPlan:
    resources = {"gpusPerNode": gpus, **spec.pop("resources", {})}
    return plan(job({**spec, "resources": resources}), Facts(**facts), CLUSTER_SETTINGS)


def device_of(plan_made: JobPlan) -> PlannedDevice:
    assert plan_made.trainer.device is not None
    return plan_made.trainer.device


def test_plan_for_an_unknown_gpu_names_the_choices_that_depend_on_it():
    for_llama = made(dict(LLAMA))
    device = device_of(for_llama)
    assert (device.product, device.memory_bytes, device.bf16) == ("unknown GPU", 15_360 * MIB, True)
    assert (device.source, device.undecided) == ("assumed", ALL)
    assert for_llama.memory is not None
    assert device.needed_bytes == for_llama.memory.total_bytes
    # A small encoder is trained by ddp with the largest micro-batch on any GPU.
    small = device_of(made({"model": {"uri": "hf://google-bert/bert-base-uncased"}}))
    assert small.undecided == ("precision",)
    fixed = made({"training": {"precision": "bf16"}, "model": {"uri": "hf://google-bert/bert-base-uncased"}})
    assert device_of(fixed).undecided == ()


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ({"resources": {"accelerator": {"product": "L40S"}}}, {}),
        ({}, {"nodes": NodesFacts(gpu=L40S, words="labels")}),
        ({}, {"local": True, "hardware": HardwareFacts(cpu_cores=8, memory_bytes=64 * GIB, gpus_per_node=8, gpu=L40S)}),
    ],
    ids=["product of the table", "labels of nodes", "this machine"],
)
def test_plan_for_a_known_gpu_leaves_nothing_to_compare(spec: dict[str, Any], facts: dict[str, Any]):
    known = made(dict(spec), **facts)
    assert known.trainer.device is None
    assert "device" not in json.loads(known.trainer.to_json())


def test_jobs_on_cpus_have_no_planned_device():
    assert made({}, gpus=0).trainer.device is None


@pytest.mark.parametrize(
    ("labels", "resource", "assumed"),
    [
        ({}, "nvidia.com/gpu", True),
        ({"nvidia.com/gpu.product": "X9000"}, "nvidia.com/gpu", True),
        ({"nvidia.com/gpu.product": "X9000", "nvidia.com/gpu.memory": "50000"}, "nvidia.com/gpu", True),
        ({"nvidia.com/gpu.product": "NVIDIA-L40S"}, "nvidia.com/gpu", False),
        ({"nvidia.com/gpu.replicas": "4"}, "nvidia.com/gpu", False),
        (
            {
                "nvidia.com/gpu.product": "X9000",
                "nvidia.com/gpu.memory": "50000",
                "nvidia.com/gpu.compute.major": "11",
                "nvidia.com/gpu.compute.minor": "0",
            },
            "nvidia.com/gpu",
            False,
        ),
    ],
    ids=["no label", "unknown product", "no capability", "known product", "shared", "all but the speed"],
)
def test_labels_of_nodes_leave_memory_or_units_open(labels: dict[str, str], resource: str, assumed: bool):
    node = Node("a", labels, {"cpu": "96", resource: "8"})
    found = facts_of_nodes((node,), job({"resources": {"gpusPerNode": 8}}).spec, CLUSTER_SETTINGS)
    assert found.gpu is not None
    assert found.gpu.assumed == assumed


def test_measured_gpu_leads_to_another_plan_with_a_note():
    before, after = made(dict(LLAMA)), made(dict(LLAMA), devices=(L40S,))
    named = made({**LLAMA, "resources": {"accelerator": {"product": "L40S"}}})
    assert (before.strategy, after.strategy) == ("deepspeed-zero3+optimizer-offload", named.strategy)
    assert before.strategy != after.strategy
    assert "hardware: NVIDIA L40S with 44.4 GiB, with bf16: measured by an earlier attempt" in after.assumptions
    assert not any("is not known" in each for each in after.assumptions)
    device = device_of(after)
    assert (device.product, device.source, device.undecided) == ("NVIDIA L40S", "measured", ())
    assert after.estimate.seconds is not None
    training = after.trainer.training
    assert training is not None
    assert plan_change(device, measured(L40S), training.precision) is None
    assert plan_change(device, measured(T4), training.precision) is not None


def test_plan_is_for_the_weakest_of_several_measured_kinds():
    spec = {"model": {"uri": "hf://google-bert/bert-base-uncased"}}
    both = made(dict(spec), devices=(L40S, V100))
    assert both.trainer.training is not None
    assert (device_of(both).product, both.trainer.training.precision) == (V100.product, "fp16")
    assert plan_change(device_of(both), measured(L40S), "fp16") is None
    assert any("the weakest of 2 kinds: measured" in each for each in both.assumptions)


def test_plan_for_several_kinds_has_the_least_memory_and_units_of_all():
    slice_of = DeviceFacts(product="NVIDIA A100 MIG 1g.10gb", memory_bytes=9_984 * MIB, bf16=True, capability="8.0")
    both = made({"model": {"uri": "hf://google-bert/bert-base-uncased"}}, devices=(T4, slice_of))
    device = device_of(both)
    assert (device.memory_bytes, device.bf16) == (slice_of.memory_bytes, False)
    assert both.trainer.training is not None
    precision = both.trainer.training.precision
    assert [plan_change(device, measured(each), precision) for each in (T4, slice_of)] == [None, None]


LARGE: dict[str, Any] = {
    "model": {"uri": "hf://openai-community/gpt2-xl"},
    "task": "text-generation",
    "parallelism": {"strategy": "single"},
}


def test_job_that_does_not_fit_the_assumed_memory_is_planned_for_more():
    larger = made(dict(LARGE), gpus=1)
    assert larger.memory is not None
    device = device_of(larger)
    sizes = sorted({gpu.memory_mib * MIB for gpu in GPU_MODELS})
    fitting = [size for size in sizes if not refused(dict(LARGE), device.model_copy(update={"memory_bytes": size}))]
    assert device.memory_bytes == fitting[0] > 15_360 * MIB
    assert device.needed_bytes == larger.memory.total_bytes
    assert any("instead, the least of any known GPU with which it fits" in each for each in larger.assumptions)
    least = measured(T4.model_copy(update={"bf16": True}))
    assert plan_change(device, least, "bf16") is not None


def test_adaptation_keeps_the_memory_that_a_job_is_planned_for():
    before = made(dict(LARGE), gpus=1)
    assert before.trainer.training is not None
    half = before.trainer.training.batch.micro_batch_size // 2
    spec = job({**LARGE, "resources": {"gpusPerNode": 1}})
    after = plan(spec, Facts(), CLUSTER_SETTINGS, Adaptation(micro_batch_limit=half))
    assert after.trainer.training is not None
    assert after.trainer.training.batch.micro_batch_size == half
    assert device_of(after).memory_bytes == device_of(before).memory_bytes
    # A job must not be adapted by assuming more memory.
    tried = Adaptation(skipped_strategies=(before.strategy,))
    with pytest.raises(PlanRefused, match="does not fit"):
        plan(spec, Facts(data=DATA), CLUSTER_SETTINGS, tried)


def refused(spec: dict[str, Any], device: PlannedDevice) -> bool:
    gpu = DeviceFacts(product=device.product, memory_bytes=device.memory_bytes)
    try:
        made(spec, gpus=1, nodes=NodesFacts(gpu=gpu, words="labels"))
    except PlanRefused:
        return True
    return False


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"resources": {"accelerator": {"memory": "15Gi"}}}, False),
        ({"resources": {"accelerator": {"product": "T4"}}}, False),
        ({"model": {"uri": "hf://org/gpt-500b"}}, False),
        ({}, True),
    ],
    ids=["memory in the job", "product in the job", "too large for any", "plan by what is known"],
)
def test_job_that_cannot_fit_is_refused_before_it_is_measured(changes: dict[str, Any], known: bool):
    spec = {**LARGE, **changes}
    resources = {"gpusPerNode": 1, **spec.pop("resources", {})}
    shape = {} if "model" in changes else {"as_known": known}
    prepared = Facts(data=DATA, model=None if "model" not in changes else HUGE)
    with pytest.raises(PlanRefused, match="does not fit"):
        plan(job({**spec, "resources": resources}), prepared, CLUSTER_SETTINGS, **shape)


def test_only_the_training_gets_the_planned_device():
    context = RenderContext("team", job().spec, CLUSTER_SETTINGS, None, None)
    given = made(dict(LLAMA))
    read = {
        stage: TrainerJob.model_validate_json(stage_files(given, context, stage)["job.json"])
        for stage in (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE)
    }
    assert {stage: found.device is not None for stage, found in read.items()} == {
        Stage.PREPARE: False,
        Stage.TRAIN: True,
        Stage.EVALUATE: False,
    }
