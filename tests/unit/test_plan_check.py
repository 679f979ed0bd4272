"""Estimates of a plan against the measurements of its training: ratios, sentences, status, event, log and metrics."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from finetune_contract.plan_check import Comparison, MeasuredTraining, PlanCheck, PlannedTraining, check_plan, deviation
from finetune_operator.cli.cluster.cluster_jobs import ClusterJob
from finetune_operator.cli.cluster.jobview import Page, print_page
from finetune_operator.cli.terminal.result_tables import result_rows
from finetune_operator.controller.reconcile.reconciler import _log_transition
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.spec.types import FineTuneJobStatus
from reconcile_world import NOON, World, report

GIB = 1 << 30
ON_GPU = PlannedTraining(
    memory_bytes=20 * GIB,
    memory_terms={"parameters": 8 * GIB, "activations": 9 * GIB, "allocator": 2 * GIB, "process": GIB},
    step_seconds=2.0,
    step_parts={"computation": 1.5, "communication": 0.25, "optimizer": 0.25},
)


def measured(**fields: Any) -> MeasuredTraining:
    return MeasuredTraining.model_validate({"steps": 10, "memoryBytes": 20 * GIB, **fields})


# ---------------------------------------------------------------------------------------------------------- comparison


def test_ratio_is_measured_over_planned_in_whole_and_by_part():
    terms = {"parameters": 8 * GIB, "tensors": 17 * GIB, "allocator": 3 * GIB, "process": 2 * GIB, "unknown": 1}
    parts = {"data": 0.5, "forward": 1.0, "backward": 2.0, "communication": 0.5, "optimizer": 0.5, "rest": 0.5}
    check = check_plan(ON_GPU, measured(memoryBytes=22 * GIB, memoryTerms=terms, stepSeconds=5.0, stepParts=parts))
    assert check.memory == Comparison(
        planned=20 * GIB,
        measured=22 * GIB,
        ratio=1.1,
        terms={"parameters": 1.0, "tensors": 1.0, "allocator": 1.5, "process": 2.0},
    )
    assert check.step_time == Comparison(planned=2.0, measured=5.0, ratio=2.5, terms={"passes": 2.0, "optimizer": 2.0})


def test_parts_with_hidden_communication_are_not_compared():
    parts = {"forward": 1.0, "backward": 1.0, "optimizer": 0.5}
    check = check_plan(ON_GPU, measured(stepSeconds=2.5, stepParts=parts, withCommunication=["backward", "optimizer"]))
    assert check.step_time is not None
    assert (check.step_time.ratio, check.step_time.terms) == (1.25, {})


def test_memory_beyond_the_process_is_compared_on_a_cpu():
    terms = {"process": GIB, "training": 38 * GIB}
    check = check_plan(ON_GPU, measured(memoryBytes=39 * GIB, memoryTerms=terms))
    assert check.memory is not None
    assert check.memory.terms == {"process": 1.0, "training": 2.0}
    assert check.step_time is None


def test_nothing_is_compared_that_the_plan_does_not_estimate():
    assert check_plan(PlannedTraining(), measured(stepSeconds=1.0)) == PlanCheck()


def test_attempt_without_a_step_of_its_own_is_not_compared():
    assert check_plan(ON_GPU, measured(steps=0, stepSeconds=1.0)) == PlanCheck()


DEVIATIONS = {
    1.003: "right to 1 %",
    1.24: "24 % too low",
    0.76: "24 % too high",
    2.345: "too low by a factor of 2.35",
    1218.4: "too low by a factor of 1,218",
    0.004: "100 % too high",
}


@pytest.mark.parametrize("ratio", DEVIATIONS)
def test_deviation_is_a_share_of_the_planned_value(ratio: float):
    assert deviation(ratio) == DEVIATIONS[ratio]


@pytest.mark.parametrize(("seconds", "off"), [(2.28, False), (2.32, True), (1.72, False), (1.68, True)])
def test_estimate_is_off_beyond_15_percent(seconds: float, off: bool):
    check = check_plan(ON_GPU, measured(stepSeconds=seconds))
    assert len(check.off()) == off
    assert len(check.sentences()) == 2


def test_sentence_has_the_planned_and_the_measured_value():
    check = check_plan(ON_GPU, measured(memoryBytes=int(24.8 * GIB), stepSeconds=0.5))
    assert check.off() == (
        "Plan's memory was 24 % too low: 20.0 GiB planned, 24.8 GiB measured per device.",
        "Plan's time of a step was 75 % too high: 2 s planned, 500 ms measured.",
    )


# -------------------------------------------------------------------------------------------------------------- status


def planned_world() -> World:
    """Return a job whose training runs."""
    world = World()
    world.settle()
    world.succeed()
    world.settle()
    world.start()
    world.settle()
    return world


def train_report(world: World, memory: float, step: float, *, shared: bool = False) -> dict[str, Any]:
    """Return fields of a report with `memory` and `step` times the planned values; `shared`: of such a machine."""
    plan = world.job().status.plan
    assert plan is not None
    assert plan.estimated.step_seconds
    figures = {
        "memory_bytes": round(memory * plan.memory_per_device["total"]),
        "memory_terms": {"process": plan.memory_per_device["process"]},
        "step_seconds": step * plan.estimated.step_seconds,
        "steps": 20,
        **({"machine_shared": True} if shared else {}),
    }
    return {"metrics": {"train": {"loss_last": 0.5, "measured": figures}}, "artifacts": {"model": "model"}}


def events(world: World) -> list[str]:
    return [note.message for note in world.events if note.reason == "PlanInaccurate"]


def test_status_compares_the_plan_with_the_finished_training_once():
    world = planned_world()
    assert world.job().status.plan_check is None
    world.succeed(**train_report(world, 1.24, 1.1))
    world.settle()
    check = world.job().status.plan_check
    assert check is not None
    assert (check.strategy, check.attempt) == ("single", 1)
    assert check.memory is not None
    assert check.step_time is not None
    assert (check.memory.ratio, check.step_time.ratio) == (1.24, 1.1)
    assert check.memory.terms == {"process": 1.0}
    assert check.message.startswith("Plan's memory was 24 % too low: ")
    for _ in range(2):
        world.succeed()
        world.settle()
    assert world.phase == "Succeeded"
    assert world.job().status.plan_check == check


MEMORY, STEP = "Plan's memory was", "Plan's time of a step was"
INACCURATE = {
    # (memory, step, shared machine) -> beginnings of the sentences in the event
    "both within a factor of 2": ((1.9, 0.55, False), []),
    "memory too low": ((2.1, 1.0, False), [f"{MEMORY} too low by a factor of 2.1"]),
    "a step too slow": ((1.3, 2.1, False), [f"{STEP} too low by a factor of 2.1"]),
    "a step too fast": ((1.0, 0.45, False), [f"{STEP} 55 % too high"]),
    "a slow step on a shared machine": ((1.0, 5.0, True), []),
    "memory and a slow step on a shared machine": ((2.1, 5.0, True), [f"{MEMORY} too low by a factor of 2.1"]),
}


@pytest.mark.parametrize("case", INACCURATE)
def test_event_names_estimates_wrong_by_more_than_a_factor_of_2(case: str):
    (memory, step, shared), beginnings = INACCURATE[case]
    world = planned_world()
    world.succeed(**train_report(world, memory, step, shared=shared))
    world.settle()
    found = [f"Plan's {sentence}" for text in events(world) for sentence in text.split("Plan's ")[1:]]
    assert [sentence[: len(start)] for sentence, start in zip(found, beginnings, strict=True)] == beginnings
    check = world.job().status.plan_check
    assert check is not None
    assert check.message.endswith("shared with other programs, or limited.") == shared


def test_estimates_that_were_right_are_no_event():
    world = planned_world()
    world.succeed(**train_report(world, 1.1, 0.9))
    world.settle()
    check = world.job().status.plan_check
    assert check is not None
    assert (check.message, events(world)) == ("", [])


def test_report_of_an_older_image_is_not_compared():
    world = planned_world()
    world.succeed()
    world.settle()
    assert world.job().status.plan_check is None
    assert events(world) == []


@pytest.mark.parametrize("damaged", [{"memory_bytes": "many"}, [], "text", None])
def test_measurements_that_cannot_be_read_are_not_compared(damaged: Any):
    world = planned_world()
    world.succeed(metrics={"train": {"loss_last": 0.5, "measured": damaged}})
    world.settle()
    assert world.job().status.plan_check is None
    assert world.job().status.artifacts is not None
    assert world.job().status.artifacts.metrics == {"train_loss_last": 0.5}


def test_status_of_an_earlier_operator_compares_memory_alone():
    world = planned_world()
    fields = train_report(world, 1.5, 1.0)
    for name in ("stepSeconds", "stepParts"):
        world.status["plan"]["estimated"].pop(name, None)
    assert FineTuneJobStatus.model_validate(world.status).plan is not None
    world.succeed(**fields)
    world.settle()
    check = world.job().status.plan_check
    assert check is not None
    assert check.memory is not None
    assert (check.memory.ratio, check.step_time) == (1.5, None)


def test_largest_measurements_fit_into_a_termination_message():
    world = planned_world()
    fields = train_report(world, 1.0, 1.0)
    parts = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer", "rest"), 0.123456)
    terms = dict.fromkeys(("parameters", "optimizer state", "tensors", "allocator", "process"), 123_456_789_012)
    fields["metrics"]["train"]["measured"] |= {"step_parts": parts, "memory_terms": terms}
    message = report("train", **fields)
    assert len(message) < 2000
    assert json.loads(message)["metrics"] == fields["metrics"]


# ------------------------------------------------------------------------------------------------- where it is shown


def changed(world: World) -> tuple[JobView, FineTuneJobStatus]:
    """Return the job before its training's end, and the status after."""
    before = world.job()
    world.succeed(**train_report(world, 1.24, 0.5))
    world.settle()
    return before, world.job().status


def test_ratios_are_metrics_by_strategy_and_figure():
    before, after = changed(planned_world())
    metrics = Metrics()
    metrics.status_written(before, after)
    metrics.status_written(replace(before, status=after), after)  # a later change of the same status
    assert after.plan_check is not None
    sharded = after.plan_check.model_copy(update={"strategy": "fsdp-hybrid+activation-checkpointing"})
    metrics.status_written(before, after.model_copy(update={"plan_check": sharded}))
    lines = metrics.exposition().decode().splitlines()
    found = [line for line in lines if line.startswith("finetune_plan_ratio_") and "bucket" not in line]
    assert sorted(found) == [
        'finetune_plan_ratio_count{figure="memory",strategy="fsdp"} 1.0',
        'finetune_plan_ratio_count{figure="memory",strategy="single"} 1.0',
        'finetune_plan_ratio_count{figure="step_time",strategy="fsdp"} 1.0',
        'finetune_plan_ratio_count{figure="step_time",strategy="single"} 1.0',
        'finetune_plan_ratio_sum{figure="memory",strategy="fsdp"} 1.24',
        'finetune_plan_ratio_sum{figure="memory",strategy="single"} 1.24',
        'finetune_plan_ratio_sum{figure="step_time",strategy="fsdp"} 0.5',
        'finetune_plan_ratio_sum{figure="step_time",strategy="single"} 0.5',
    ]


def test_operator_logs_the_comparison_once(caplog: pytest.LogCaptureFixture):
    before, after = changed(planned_world())
    with caplog.at_level(logging.INFO):
        _log_transition(JobKey("team", "reviews"), before.status, after)
        _log_transition(JobKey("team", "reviews"), after, after)
    logged = [record.getMessage() for record in caplog.records if "Plan's" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].startswith("team/reviews: Plan's memory was 24 % too low: ")
    assert "Plan's time of a step was 50 % too high: " in logged[0]


def test_status_command_shows_the_comparison():
    world = planned_world()
    changed(world)
    metadata = {"name": "reviews", "namespace": "team", "uid": "1", "generation": 1}
    metadata["creationTimestamp"] = "2026-01-01T12:00:00Z"
    job = ClusterJob.model_validate({"metadata": metadata, "spec": {}, "status": world.status})
    console = Console(file=io.StringIO(), width=240)
    print_page(console, Page(job, NOON))
    assert isinstance(console.file, io.StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "plan check" in line)
    assert "Plan's memory was 24 % too low: " in line
    assert "Plan's time of a step was 50 % too high: " in line


def test_result_of_a_run_shows_the_comparison():
    check = check_plan(ON_GPU, measured(memoryBytes=25 * GIB, stepSeconds=2.0))
    train = {"plan_check": check.model_dump(mode="json", exclude_none=True)}
    data = {"metrics": {"train": train}, "worldSize": 1, "strategy": "single", "stages": [], "artifacts": {}}
    rows = dict(result_rows(data))
    assert rows["plan check"] == (
        "Plan's memory was 25 % too low: 20.0 GiB planned, 25.0 GiB measured per device. "
        "Plan's time of a step was right to 1 %: 2 s planned, 2 s measured."
    )
