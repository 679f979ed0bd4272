"""A job.json with incompatible choices is refused before anything is read, by the table that planned it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.combinations import CONSTRAINTS, broken
from finetune_contract.constraints import Choices, choices_of
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.stage.stages import STAGES, StageInput, refuse_combinations
from trainer_support.tasks import task_job, training_of

PIPELINE = {"degree": 2, "micro_batches": 2}
COMPILED = {"arguments": {"torch_compile": True}}
LIGER = {"arguments": {"use_liger_kernel": True}}


def adapter(method: str) -> dict[str, Any]:
    return {"adapter": {"method": method, "rank": 4, "alpha": 16, "dropout": 0.0}}


def strategy(name: str, **settings: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, **settings}}


def ddp(**settings: Any) -> dict[str, Any]:
    return strategy("ddp", **settings)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a ZeRO stage without DeepSpeed": (ddp(zero_stage=2), ("zero-stage-needs-deepspeed",)),
    "sharding without fsdp": (ddp(fsdp_sharding="grad-op"), ("sharding-needs-fsdp",)),
    "hybrid sharding of one node": (strategy("fsdp", fsdp_sharding="hybrid"), ("hybrid-sharding-needs-nodes",)),
    "single as two processes": (strategy("single"), ("single-is-one-process",)),
    "an offload of ddp": (ddp(offload_optimizer="cpu"), ("offload-needs-a-strategy",)),
    "the optimizer alone of fsdp": (strategy("fsdp", offload_optimizer="cpu"), ("fsdp-offloads-together",)),
    "an offload of stage 0": (
        strategy("deepspeed", zero_stage=0, offload_optimizer="cpu"),
        ("optimizer-offload-needs-zero",),
    ),
    "files of stage 2": (
        strategy("deepspeed", zero_stage=2, offload_optimizer="nvme"),
        ("nvme-offload-needs-stage-3",),
    ),
    "parameters of stage 2": (
        strategy("deepspeed", zero_stage=2, offload_parameters="cpu"),
        ("parameter-offload-needs-stage-3",),
    ),
    "sgd in host memory": (
        {**strategy("deepspeed", zero_stage=2, offload_optimizer="cpu"), "optimizer": "sgd"},
        ("offloaded-optimizer-is-adamw",),
    ),
    "fp32 in files on a CPU": (
        strategy("deepspeed", zero_stage=3, offload_parameters="nvme"),
        ("cpu-swaps-bf16-parameters",),
    ),
    "DeepSpeed beside split layers": (strategy("deepspeed", zero_stage=1, tensor=2), ("model-parallel-has-replicas",)),
    "ZeRO-2 beside split layers": (ddp(zero_stage=2, tensor=2), ("replicas-divide-optimizer-state",)),
    "ZeRO-1 beside fsdp of split layers": (
        strategy("fsdp", zero_stage=1, tensor=2),
        ("divided-optimizer-is-beside-ddp",),
    ),
    "hybrid sharding of split layers": (
        strategy("fsdp", fsdp_sharding="hybrid", tensor=2),
        ("hybrid-sharding-needs-nodes", "spread-models-shard-over-all-replicas"),
    ),
    "state of split layers in host memory": (
        strategy("fsdp", offload_optimizer="cpu", offload_parameters="cpu", tensor=2),
        ("spread-models-keep-state-on-devices",),
    ),
    "an adapter beside stages": (
        {**ddp(pipeline=PIPELINE), **adapter("lora")},
        ("model-parallel-trains-all-weights",),
    ),
    "selective recomputation of split layers": (
        ddp(tensor=2, activation_checkpointing="selective"),
        ("spread-models-keep-activations",),
    ),
    "moved activations of stages": (
        ddp(pipeline=PIPELINE, offload_activations="cpu"),
        ("spread-models-offload-no-activations",),
    ),
    "slices of split layers": (ddp(sequence=2, tensor=2), ("sequence-has-whole-models",)),
    "qlora with ZeRO": (
        {**strategy("deepspeed", zero_stage=2), **adapter("qlora")},
        ("qlora-keeps-packed-weights",),
    ),
    "fp16 on a CPU": ({**ddp(), "precision": "fp16"}, ("precision-has-hardware",)),
    "fp8 with DeepSpeed": (
        {**strategy("deepspeed", zero_stage=2), "precision": "fp8"},
        ("precision-has-hardware", "fp8-has-a-strategy"),
    ),
    "fp8 of split layers": (
        {**ddp(tensor=2), "precision": "fp8"},
        ("precision-has-hardware", "spread-models-have-a-precision"),
    ),
    "fp8 of slices": (
        {**ddp(sequence=2), "precision": "fp8"},
        ("precision-has-hardware", "slices-do-not-multiply-in-fp8"),
    ),
    "fp8 of an adapter": (
        {**ddp(), "precision": "fp8", **adapter("dora")},
        ("precision-has-hardware", "adapters-do-not-multiply-in-fp8"),
    ),
    "adafactor over shards": ({**strategy("fsdp"), "optimizer": "adafactor"}, ("adafactor-has-whole-matrices",)),
    "adafactor of split layers": ({**ddp(tensor=2), "optimizer": "adafactor"}, ("adafactor-has-whole-matrices",)),
    "a compiled model in stages": ({**ddp(pipeline=PIPELINE), **COMPILED}, ("compiled-models-are-whole",)),
    "stages with a backend of torch.compile": (
        {**ddp(pipeline=PIPELINE), "arguments": {"torch_compile_backend": "eager"}},
        ("compiled-models-are-whole",),
    ),
    "compiled slices": ({**ddp(sequence=2), **COMPILED}, ("compiled-models-are-whole",)),
    "moved activations of a compiled model": (
        {**ddp(offload_activations="cpu"), **COMPILED},
        ("compiled-models-are-whole",),
    ),
    "compiled weights in 4 bits": ({**ddp(), **adapter("qlora"), **COMPILED}, ("compiled-models-are-whole",)),
    "Liger's kernels on a CPU": ({**ddp(), **LIGER}, ("liger-has-gpus-and-whole-rows",)),
}
"""Changes of a job of text-generation on two processes of a CPU, and the constraints that they break."""
OF_A_TASK: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "pairs through stages": ("preference-tuning", ddp(pipeline=PIPELINE), ("pairs-need-whole-rows",)),
    "slices of a classification": (
        "text-classification",
        ddp(sequence=2),
        ("sequence-divides-rows-of-text",),
    ),
}
NOT_HERE = ("deepspeed-config-needs-deepspeed", "single-has-whole-rows", "packing-is-of-text-generation")
"""Constraints on facts that are in no job.json, or that no job.json breaks alone."""


def job_of(task: str, changes: dict[str, Any]) -> TrainerJob:
    world = {"nodes": 1, "processes_per_node": 2, "device": "cpu", "threads_per_process": 1}
    return task_job(task, "hf://a/b", Path("/nowhere"), (), training=training_of(steps=1, world=world, **changes))


CASES = {name: ("text-generation", *row) for name, row in REFUSED.items()} | OF_A_TASK


@pytest.mark.parametrize("case", CASES)
def test_choices_that_do_not_go_together_are_refused_by_name(case: str) -> None:
    task, changes, names = CASES[case]
    job = job_of(task, changes)
    assert job.training is not None
    found = broken(choices_of(job, job.training))
    assert tuple(each.name for each in found) == names
    with pytest.raises(StageError) as error:
        refuse_combinations(job, job.training)
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "NotCombined")
    for constraint in found:
        assert f"spec.{constraint.field}" in error.value.message
        assert constraint.rule in error.value.message
        assert constraint.hint in error.value.hint


def test_every_constraint_on_a_planned_job_is_broken_by_one_of_them() -> None:
    named = {name for _, _, names in CASES.values() for name in names}
    assert named | set(NOT_HERE) == {constraint.name for constraint in CONSTRAINTS}


def test_open_choices_break_nothing() -> None:
    assert broken(Choices()) == ()


@pytest.mark.parametrize("stage", [Stage.PREPARE, Stage.TRAIN])
def test_both_stages_refuse_them_before_anything_is_read(stage: Stage, tmp_path: Path) -> None:
    job = job_of("text-generation", {**ddp(sequence=2), **LIGER})
    world = ProcessWorld(rank=0, size=2, local_rank=0, local_size=2)
    given = StageInput(job, JobPaths(tmp_path), NoProgress(), world, None, Interruption())
    with pytest.raises(StageError, match="use_liger_kernel needs GPUs"):
        STAGES[stage](given)
    assert list(tmp_path.iterdir()) == []
