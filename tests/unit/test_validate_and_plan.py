"""`validate` and `plan` agree: both refuse a spec that fails by itself, and `plan` takes all that `validate` takes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.launcher_rows import ENGINES, TRAINING
from finetune_operator.spec.rules.process_counts import certain_processes, certain_ranks, requested_strategy
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from suite_plugins.fuzz import scaled

HARDWARE = parse_hardware("gpu=H100,memory=80Gi,gpus=64,cpu=2048,hostMemory=100000Gi")
"""Hardware so large that memory decides nothing."""
FACTS = Facts(hardware=HARDWARE, served=(*TRAINING, *ENGINES), prepared=True)
DRAWN = scaled(1500, everything=5000)
CHOICES: dict[str, tuple[Any, ...]] = {
    "task": ("text-classification", "text-generation", "preference-tuning"),
    "model.adapter.method": ("none", "none", "none", "lora", "qlora"),
    "training.globalBatchSize": (96, 100, 32, 30),
    "training.microBatchSize": ("auto", "auto", 4, 3),
    "training.precision": ("auto", "auto", "fp32", "bf16", "fp16", "fp8"),
    "training.optimizer": ("adamw", "adamw", "adafactor", "sgd"),
    "training.warmupSteps": (0, 0, 0.1, 2.5, 10),
    "training.arguments": ({}, {}, {"torch_compile": True}, {"use_liger_kernel": True}, {"optim": "adafactor"}),
    "parallelism.strategy": ("auto", "single", "ddp", "fsdp", "deepspeed"),
    "parallelism.zeroStage": ("auto", "auto", "auto", 0, 1, 2, 3),
    "parallelism.tensor": (1, 1, 1, 2, 3),
    "parallelism.pipeline.degree": (1, 1, 1, 2, 3),
    "parallelism.pipeline.microBatches": ("auto", "auto", 4, 5),
    "parallelism.pipeline.schedule": ("1f1b", "1f1b", "interleaved", "gpipe"),
    "parallelism.sequence": (1, 1, 1, 2, 5),
    "parallelism.sharding": ("full", "full", "hybrid", "grad-op"),
    "parallelism.activationCheckpointing": ("auto", "auto", "selective", "full"),
    "parallelism.offload.optimizer": ("none", "none", "cpu", "nvme"),
    "parallelism.offload.parameters": ("none", "none", "cpu", "nvme"),
    "parallelism.offload.activations": ("none", "none", "cpu"),
    "parallelism.deepspeedConfig": (
        {},
        {},
        {"zero_optimization": {"zero_hpz_partition_size": 8}},
        {"zero_optimization": {"zero_quantized_weights": True}},
        {"zero_optimization": {"offload_param": {"pin_memory": True}}},
    ),
    "preparation.packing": ("auto", "auto", "always", "never"),
    "preparation.engine": ("auto", "auto", "spark", "job"),
    "resources.nodes": (1, 1, 2, 3),
    "resources.gpusPerNode": (0, 0, 1, 2, 8, "auto"),
    "resources.processesPerNode": ("auto", "auto", "auto", 1, 2, 6),
}


def document(spec: dict[str, Any]) -> dict[str, Any]:
    whole = {"model": {"uri": "hf://meta-llama/Llama-8B"}, "dataset": {"uri": "hf://c/d"}, "training": {}, **spec}
    whole.setdefault("task", "text-classification")
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "a"},
        "spec": whole,
    }


def drawn(source: random.Random) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"uri": "hf://meta-llama/Llama-8B"}, "training": {}}
    for path, values in CHOICES.items():
        if source.random() < 0.6:
            continue
        target, (*above, leaf) = spec, path.split(".")
        for part in above:
            target = target.setdefault(part, {})
        target[leaf] = source.choice(values)
    return spec


def node_decides(job: FineTuneJob, path: str) -> bool:
    """Return whether the number of processes, or the precision, depends on the node."""
    resources, parallelism = job.spec.resources, job.spec.parallelism
    if path == "spec.parallelism.offload.parameters":
        return parallelism.offload.parameters == "nvme" and resources.gpus_per_node in (0, "auto")
    spreads = requested_strategy(parallelism) in ("ddp", "fsdp", "deepspeed") and resources.gpus_per_node == 0
    return certain_processes(job.spec) is None and (resources.gpus_per_node == "auto" or spreads)


def test_planner_accepts_valid_jobs_unless_the_node_decides() -> None:
    source, planned, left_to_nodes = random.Random(18), 0, 0
    for _ in range(DRAWN):
        job, problems = validate_job(document(drawn(source)), CLUSTER_SETTINGS)
        if job is None:
            assert problems
            continue
        try:
            plan(job, FACTS, CLUSTER_SETTINGS)
            planned += 1
        except PlanRefused as refused:
            for problem in refused.problems:
                assert node_decides(job, problem.path), (job.spec.model_dump(exclude_defaults=True), problem)
            left_to_nodes += 1
    assert planned > DRAWN // 20
    assert left_to_nodes


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "a batch that 16 GPUs do not divide": (
        {"training": {"globalBatchSize": 100, "microBatchSize": 4}, "resources": {"nodes": 2, "gpusPerNode": 8}},
        "training.globalBatchSize",
    ),
    "degrees that 16 GPUs are no multiple of": (
        {"parallelism": {"tensor": 2, "pipeline": {"degree": 3}}, "resources": {"nodes": 2, "gpusPerNode": 8}},
        "parallelism",
    ),
    "slices that 16 GPUs are no multiple of": (
        {"task": "text-generation", "parallelism": {"sequence": 5}, "resources": {"nodes": 2, "gpusPerNode": 8}},
        "parallelism",
    ),
    "fp8 without a GPU": ({"training": {"precision": "fp8"}}, "training.precision"),
    "one process on eight GPUs": (
        {"parallelism": {"strategy": "single"}, "resources": {"gpusPerNode": 8}},
        "parallelism.strategy",
    ),
    "passes that a step does not fill": (
        {"parallelism": {"pipeline": {"degree": 2, "microBatches": 5}}, "resources": {"gpusPerNode": 2}},
        "parallelism.pipeline.microBatches",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_validate_and_plan_refuse_the_same_field(case: str) -> None:
    spec, path = PROBLEMS[case]
    job, problems = validate_job(document(spec), CLUSTER_SETTINGS)
    assert job is None
    assert [problem.path for problem in problems] == [f"spec.{path}"]
    unchecked = FineTuneJob.model_validate(document(spec), strict=False)
    with pytest.raises(PlanRefused) as caught:
        plan(unchecked, FACTS, CLUSTER_SETTINGS)
    assert f"spec.{path}" in [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("resources", "parallelism", "ranks"),
    [
        ({"nodes": 2, "gpusPerNode": 8}, {}, 16),
        ({"nodes": 2, "gpusPerNode": 8}, {"tensor": 2}, 8),
        ({"nodes": 3}, {}, 3),
        ({"nodes": 3}, {"strategy": "ddp"}, None),
        ({"gpusPerNode": "auto"}, {}, None),
        ({"gpusPerNode": 8, "processesPerNode": 2}, {}, 2),
    ],
)
def test_number_of_ranks_is_known_where_no_node_decides(
    resources: dict[str, Any], parallelism: dict[str, Any], ranks: int | None
) -> None:
    spec = {"resources": resources, "parallelism": parallelism, "training": {"globalBatchSize": 96}}
    job, _ = validate_job(document(spec), CLUSTER_SETTINGS)
    assert job is not None
    assert certain_ranks(job.spec) == ranks
