"""Time of a plan that is not spent in steps: checkpoints and validation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_operator.api.settings import CLUSTER_SETTINGS, Planning
from finetune_operator.api.types import FineTuneJob
from finetune_operator.planning.assumed_facts import parse_hardware
from finetune_operator.planning.pauses import Pauses, checkpoint_count
from finetune_operator.planning.plan import plan
from finetune_operator.planning.plan_types import Facts, JobPlan
from finetune_operator.planning.summary import summarise

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


def planned(facts: Facts | None = None, rate: float = 200.0, **fields: Any) -> JobPlan:
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
    hardware = parse_hardware(NODE, settings.hardware)
    return plan(FineTuneJob.model_validate(document), replace(facts, hardware=hardware), settings)


def test_time_of_a_plan_is_that_of_steps_checkpoints_and_validations():
    made = planned()
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
    slow, quick = (planned(rate=rate).estimate.pauses for rate in (200.0, 2000.0))
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
    whole, adapted = (planned(**fields).estimate.pauses["checkpoints"] for fields in ({}, adapter))
    assert adapted < whole / 20


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
