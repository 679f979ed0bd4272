"""Time of a plan that is not spent in steps: checkpoints and validation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import NOT_ADAPTED, plan
from finetune_operator.plan.summary import summarise
from finetune_operator.plan.time.pauses import Pauses, checkpoint_count
from finetune_operator.plan.types.plan_types import Adaptation, Facts, JobPlan
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Planning
from finetune_operator.spec.types import FineTuneJob

MODEL = "hf://meta-llama/Llama-3.2-1B"
NODE = "gpu=H100,gpus=8,hostMemory=1Ti"
ROWS = DataFacts(
    fingerprint="f00d",
    splits={
        "train": SplitFacts(rows=6400, tokens=6400 * 512, longest=512),
        "validation": SplitFacts(rows=6400, tokens=6400 * 512, longest=512),
    },
    max_length=512,
)


NO_ROOM = {"resources": {"gpusPerNode": 8, "memory": "16Gi"}}
"""Nodes without room for a copy of the state: the training waits for its checkpoints."""


def planned(
    facts: Facts | None = None,
    rate: float = 200.0,
    adaptation: Adaptation = NOT_ADAPTED,
    hardware: str = NODE,
    **fields: Any,
) -> JobPlan:
    spec = {
        "task": "text-generation",
        "model": {"uri": MODEL},
        "dataset": {"uri": "hf://org/texts"},
        "training": {"epochs": 2, "globalBatchSize": 64},
        "preparation": {"maxLength": 512, "packing": "never"},
        "parallelism": {"strategy": "ddp"},
        "resources": {"gpusPerNode": 8},
        **fields,
    }
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "a"}, "spec": spec}
    settings = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(saveMegabytesPerSecond=rate)})
    facts = facts or Facts(data=ROWS)
    node = parse_hardware(hardware, settings.hardware)
    return plan(FineTuneJob.model_validate(document), replace(facts, hardware=node), settings, adaptation)


def test_time_of_a_plan_is_that_of_steps_checkpoints_and_validations():
    made = planned(**NO_ROOM)
    estimate, training = made.estimate, made.trainer.training
    assert training is not None
    assert estimate.step_seconds is not None
    assert (training.max_steps, training.checkpoints.every_steps) == (200, 100)
    # Two checkpoints of weights and moments in fp32, written by the node, and read by its 8 processes.
    size = 12 * made.model.parameters
    assert estimate.pauses["checkpoints"] == pytest.approx(2 * (size / 200e6 + size / 8e9))
    # Two passes over as many rows, each a third of a training's passes over them.
    passes = 100 * estimate.step_parts["computation"]
    assert estimate.pauses["validation"] == pytest.approx(2 * passes / 3)
    assert estimate.seconds == pytest.approx(200 * estimate.step_seconds + sum(estimate.pauses.values()))
    rows = {row.label: row for section in summarise(made) for row in section.rows if section.title == "Estimate"}
    assert list(rows) == ["time", "checkpoints", "validation", "cost"]
    assert rows["checkpoints"].remark.endswith("% of the time, between steps")
    assert "with 2 checkpoints of " in estimate.basis
    assert " and 2 validations of " in estimate.basis


def test_validation_is_not_known_before_prepare():
    estimate = planned(Facts()).estimate
    assert set(estimate.pauses) == {"checkpoints"}
    assert "validation of data that are not prepared yet" in estimate.basis
    alone = ROWS.model_copy(update={"splits": {"train": ROWS.splits["train"]}})
    without = planned(Facts(data=alone)).estimate
    assert set(without.pauses) == {"checkpoints"}
    assert "validation" not in without.basis


def test_setting_of_the_workspace_speeds_up_saving():
    slow, quick = (planned(rate=rate, **NO_ROOM).estimate.pauses for rate in (200.0, 2000.0))
    assert slow["checkpoints"] > 2.5 * quick["checkpoints"]
    assert slow["validation"] == quick["validation"]


def test_full_recomputation_makes_validation_a_quarter_of_the_passes():
    estimate = planned(parallelism={"strategy": "ddp", "activationCheckpointing": "full"}).estimate
    assert estimate.pauses["validation"] == pytest.approx(2 * 100 * estimate.step_parts["computation"] / 4)


def test_deepspeed_saves_master_copies_from_all_nodes_at_once():
    size = 14 * planned().model.parameters
    fields = {"parallelism": {"strategy": "deepspeed", "zeroStage": 1}, "resources": {"gpusPerNode": 8, "nodes": 2}}
    estimate = planned(**fields).estimate
    assert estimate.pauses["checkpoints"] == pytest.approx(2 * (size / 400e6 + size / 16e9))


def test_adapters_save_only_trained_weights():
    adapter = {"model": {"uri": MODEL, "adapter": {"method": "lora"}}}
    whole, adapted = (planned(**NO_ROOM, **fields).estimate.pauses["checkpoints"] for fields in ({}, adapter))
    assert adapted < whole / 20


def test_training_goes_on_while_a_copy_of_its_state_is_written():
    made = planned()
    assert made.trainer.training is not None
    assert made.trainer.training.checkpoints.asynchronous
    assert made.memory is not None
    size = 12 * made.model.parameters
    # The first of two is copied by 8 processes and waited for by the next, which is the last.
    assert made.estimate.step_seconds is not None
    copied, written, between = size / (8 * 3e9), size / 200e6 + size / 8e9, 100 * made.estimate.step_seconds
    assert made.estimate.pauses["checkpoints"] == pytest.approx(copied + written - between + written)
    longer = planned(rate=1000.0, training={"epochs": 60, "globalBatchSize": 64})
    assert longer.estimate.pauses["checkpoints"] == pytest.approx(19 * copied + size / 1e9 + size / 8e9)
    assert "with 20 checkpoints of less than 1 s (the last 17 s)" in longer.estimate.basis
    [reason] = [each for each in made.reasons if each.startswith("checkpoints are written beside the training")]
    assert "for a copy of 13.8 GiB in a node's memory" in reason
    waiting = planned(rate=20_000.0)
    assert waiting.trainer.training is not None
    assert waiting.memory is not None
    assert not waiting.trainer.training.checkpoints.asynchronous, "a short pause is not worth the memory"
    assert made.memory.host_bytes == waiting.memory.host_bytes + size


WAITS = {
    "too little memory": (NO_ROOM, "would leave less than 10% of the"),
    "deepspeed": ({"parallelism": {"strategy": "deepspeed", "zeroStage": 1}}, "DeepSpeed gathers and writes its state"),
}


@pytest.mark.parametrize("case", WAITS)
def test_reasons_explain_why_the_training_waits_for_checkpoints(case: str):
    fields, why = WAITS[case]
    made = planned(**fields)
    assert made.trainer.training is not None
    assert not made.trainer.training.checkpoints.asynchronous
    [reason] = [each for each in made.reasons if each.startswith("the training waits ")]
    assert why in reason


def test_no_copy_is_planned_after_an_attempt_ran_out_of_memory():
    made = planned(adaptation=Adaptation(micro_batch_limit=1))
    assert made.trainer.training is not None
    assert not made.trainer.training.checkpoints.asynchronous
    assert any("an earlier attempt ran out of memory" in reason for reason in made.reasons)


def test_on_cpus_the_copy_is_in_the_memory_of_the_processes():
    fields = {
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "task": "text-classification",
        "resources": {"gpusPerNode": 0},
        "hardware": "cpu=16,hostMemory=64Gi",
    }
    made, waiting = planned(**fields), planned(rate=20_000.0, **fields)
    assert made.memory is not None
    assert waiting.memory is not None
    [term] = [term for term in made.memory.terms if term.name == "checkpoint copy"]
    assert made.trainer.world is not None
    processes = made.trainer.world.processes_per_node
    assert processes * term.bytes == pytest.approx(12 * made.model.parameters, rel=1e-6)
    assert made.memory.total_bytes == waiting.memory.total_bytes + term.bytes
    assert made.memory.host_bytes == waiting.memory.host_bytes + processes * term.bytes


SCHEDULES = {
    "every epoch": ({"every_steps": 100}, 1.0, 10.0, 3),
    "by the clock": ({"every_steps": 100, "every_minutes": 10}, 6.0, 10.0, 3),
    "epochs of less than ten minutes": ({"every_steps": 100, "within_minutes": 10}, 5.0, 10.0, 3),
    "after ten minutes of work in an epoch": ({"every_steps": 100, "within_minutes": 10}, 7.0, 10.0, 6),
    "saving that would take more than 3 % of the time": ({"every_steps": 100, "within_minutes": 10}, 7.0, 30.0, 3),
    "after the last epoch": ({"every_steps": 200, "within_minutes": 10}, 6.5, 10.0, 4),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_checkpoints_of_300_steps_are_counted_as_they_are_due(case: str):
    schedule, step, save, expected = SCHEDULES[case]
    found = CheckpointSchedule.model_validate({"keep": 2, **schedule})
    assert checkpoint_count(found, 300, step, save) == expected


def test_pauses_without_checkpoints_have_no_part():
    none = Pauses(0, 10.0, 0)
    assert (none.parts, none.words) == ({}, "loading and the final evaluation are not counted")
