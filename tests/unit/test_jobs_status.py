"""Phase and conditions, as `kubectl get`, `kubectl wait` and kstatus read them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_contract.choices import Stage, Task
from finetune_contract.metrics import METRICS, headline_first
from finetune_operator.cli.terminal.result_tables import result_rows
from finetune_operator.controller.reconcile.reconciler import status_body
from finetune_operator.jobs.outcomes.attempt_outcomes import delay_seconds
from finetune_operator.jobs.outcomes.status import complete
from finetune_operator.jobs.outcomes.waiting_reasons import PodWait, pod_wait
from finetune_operator.jobs.state.decision_state import Inputs, ReconcileState
from finetune_operator.jobs.state.decision_types import Decision, PodView, Waiting
from finetune_operator.jobs.state.plan_table import PlanTable
from finetune_operator.jobs.state.results import _numbers, headline, result
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Limits
from finetune_operator.spec.status_times import earliest, stamp
from finetune_operator.spec.types import FineTuneJobStatus, StageStatus
from reconcile_world import LIVES, NOON, SPEC, World


@dataclass(frozen=True)
class Case:
    phase: str
    holds: tuple[str, ...]
    """Conditions that are True; all others are False, or Unknown in `unknown`."""
    unknown: tuple[str, ...] = ()


BEFORE = ("Accepted", "Planned")
CASES = {
    "a spec that is refused": Case("Pending", ("Stalled",), ("Planned",)),
    "a plan that is refused": Case("Pending", ("Accepted", "Stalled")),
    "a first stage whose pods are not made yet": Case("Preparing", BEFORE),
    "prepare runs": Case("Preparing", (*BEFORE, "Running")),
    "train runs": Case("Training", (*BEFORE, "Running")),
    "evaluate runs": Case("Evaluating", (*BEFORE, "Running")),
    "predict runs": Case("Predicting", (*BEFORE, "Running")),
    "all is done": Case("Succeeded", (*BEFORE, "Ready", "Succeeded")),
    "a stage that starts again": Case("Training", BEFORE),
    "a job that has failed": Case("Failed", (*BEFORE, "Stalled", "Failed")),
    "a suspended job": Case("Suspended", BEFORE),
    "a quota in the way": Case("Pending", (*BEFORE, "Stalled")),
}


@pytest.mark.parametrize("life", LIVES)
def test_phase_and_conditions(life: str):
    case, world = CASES[life], World()
    LIVES[life](world)
    conditions = {one.type: one for one in world.job().status.conditions}
    # a job without a queue has no Admitted
    types = ("Accepted", "Planned", "Running", "Ready", "Stalled", "Succeeded", "Failed")
    expected = {
        kind: "True" if kind in case.holds else "Unknown" if kind in case.unknown else "False" for kind in types
    }
    assert ({kind: one.status for kind, one in conditions.items()}, world.phase) == (expected, case.phase)
    for one in conditions.values():
        assert one.message.endswith((".", "quota")), one
        assert one.observed_generation == world.generation


def test_a_condition_keeps_its_time_until_its_status_changes():
    world = World()
    world.settle()
    world.wait(60)
    world.start()
    world.settle()
    times = {one.type: one.last_transition_time for one in world.job().status.conditions}
    later = NOON + timedelta(seconds=60)
    assert times == {**dict.fromkeys(times, NOON), "Running": later}
    world.wait(60)
    world.succeed()
    world.settle()  # another message of Ready, the same status
    times = {one.type: one.last_transition_time for one in world.job().status.conditions}
    assert times == {**dict.fromkeys(times, NOON), "Running": NOON + timedelta(seconds=120)}
    assert world.job_condition("Ready") == ("False", "InProgress", "1 of 4 stages have succeeded.")


def test_the_observed_generation_is_the_one_that_was_looked_at():
    world = World()
    world.settle()
    world.edit(ttlSecondsAfterFinished=5)
    world.settle()
    assert world.job().status.observed_generation == 2


def queued(suspend: bool) -> ReconcileState:
    """Return a job in a queue whose first child exists."""
    world = World()
    world.settle()
    child = world.children["reviews-prepare-1"]
    child["spec"]["suspend"] = suspend
    job = world.job()
    assert job.job is not None
    policy = job.job.spec.run_policy.model_copy(update={"queue": "team-queue"})
    spec = job.job.spec.model_copy(update={"run_policy": policy})
    view = replace(job, job=job.job.model_copy(update={"spec": spec}))
    inputs = Inputs(view, world.observed(), world.now, CLUSTER_SETTINGS, None, PlanTable().find)
    return ReconcileState(inputs, Decision(view.status))


@pytest.mark.parametrize(
    ("suspend", "expected"),
    [
        (True, ("Queued", "False", "The queue has not admitted the job yet.")),
        (False, ("Preparing", "True", "Queue team-queue has admitted reviews-prepare-1.")),
    ],
)
def test_a_queue_admits_a_job_by_letting_its_child_run(suspend: bool, expected: tuple[str, str, str]):
    status = complete(queued(suspend))
    admitted = next(one for one in status.conditions if one.type == "Admitted")
    assert (status.phase, admitted.status, admitted.message) == expected


# ------------------------------------------------------------------------------------------------------------- waiting


def pending(name: str, **fields: object) -> PodView:
    world = World()
    world.settle()
    world.make_pods("reviews-prepare-1")
    return replace(world.observed().pods[0], name=name, **fields)  # type: ignore[arg-type]


PULL = Waiting("ErrImagePull", "not found")
OF_ONE = "Waiting for 1 pod of reviews-prepare-1"
WAITS: dict[str, tuple[tuple[PodView, ...], Limits, PodWait | None]] = {
    "no pods": (
        (),
        Limits(),
        PodWait("Waiting for the pods of reviews-prepare-1 to be created.", until=NOON + timedelta(seconds=60)),
    ),
    "pods that run": ((pending("a", phase="Running"),), Limits(), None),
    "pods of which nothing is said": (
        (pending("a"), pending("b"), pending("c", phase="Running")),
        Limits(),
        PodWait("Waiting for 2 pods of reviews-prepare-1 to start.", until=NOON + timedelta(seconds=60)),
    ),
    "a pod that finds no node, for as long as it takes": (
        (pending("a", unschedulable="0/1 nodes"),),
        Limits(),
        PodWait(f"{OF_ONE}: 0/1 nodes"),
    ),
    "a pod that finds no node, with a bound": (
        (pending("a", unschedulable="0/1 nodes"),),
        Limits.model_validate({"unschedulableSeconds": 60}),
        PodWait(f"{OF_ONE}: 0/1 nodes", until=NOON + timedelta(seconds=60)),
    ),
    "a pod of a preparation that finds no node has no bound, as the first does its share": (
        (pending("a", phase="Running"), pending("b", index=1, unschedulable="0/1 nodes")),
        Limits.model_validate({"unschedulableSeconds": 60}),
        PodWait(f"{OF_ONE}: 0/1 nodes", idle=False),
    ),
    "the first pod of a preparation is waited for": (
        (pending("b", index=1, unschedulable="no room for b"), pending("a", unschedulable="no room for a")),
        Limits.model_validate({"unschedulableSeconds": 60}),
        PodWait("Waiting for 2 pods of reviews-prepare-1: no room for a", until=NOON + timedelta(seconds=60)),
    ),
    "an image counts from when its pull first failed": (
        (pending("a", waiting=PULL, created=NOON - timedelta(days=1), scheduled=NOON - timedelta(days=1)),),
        Limits(),
        PodWait(f"{OF_ONE}: ErrImagePull: not found", until=NOON + timedelta(seconds=600), blocked_since=NOON),
    ),
    "the bound that comes first": (
        (pending("a", waiting=PULL), pending("b", waiting=Waiting("CreateContainerConfigError", "no secret"))),
        Limits(),
        PodWait(
            "Waiting for 2 pods of reviews-prepare-1: ErrImagePull: not found",
            until=NOON + timedelta(seconds=120),
            blocked_since=NOON,
        ),
    ),
    "a reason that we do not know": (
        (pending("a", waiting=Waiting("Thinking", "")),),
        Limits(),
        PodWait(f"{OF_ONE}: Thinking"),
    ),
}


@pytest.mark.parametrize(("pods", "limits", "expected"), WAITS.values(), ids=WAITS.keys())
def test_wait_of_an_attempt_follows_from_its_pods(pods: tuple[PodView, ...], limits: Limits, expected: PodWait | None):
    world = World()
    world.settle()
    (child,) = world.observed().children
    found = pod_wait(child, pods, NOON, limits)
    assert (found and replace(found, end=None, since=None)) == expected


# --------------------------------------------------------------------------------------------------------- small parts


TIMES = {
    "2026-01-01T12:00:00Z": NOON,
    "2026-01-01T14:00:00.9+02:00": NOON,
    "2026-01-01T12:00:00": NOON,
    "soon": None,
    "0001-01-01T00:00:00+14:00": None,
    None: None,
}


@pytest.mark.parametrize(("written", "expected"), TIMES.items())
def test_status_reads_times_as_utc_and_none_where_there_is_none(written: str | None, expected: datetime | None):
    stage = {"name": "train", "state": "Running", "attempt": 1, "startTime": written}
    assert StageStatus.model_validate(stage).start_time == expected
    assert StageStatus.model_validate_json(json.dumps(stage)).start_time == expected


def test_status_holds_and_writes_times_in_whole_seconds():
    later = NOON + timedelta(seconds=1.9)
    stage = StageStatus(name=Stage.TRAIN, state="Running", attempt=1, start_time=later)
    changed = stage.model_copy(update={"completion_time": later, "furthest_step": 5})
    assert (changed.start_time, changed.completion_time) == (NOON + timedelta(seconds=1),) * 2
    assert status_body(FineTuneJobStatus(stages=(changed,)))["stages"] == [
        {
            "name": "train", "state": "Running", "attempt": 1, "furthestStep": 5,
            "startTime": "2026-01-01T12:00:01Z", "completionTime": "2026-01-01T12:00:01Z",
            "failuresInRow": 0, "freeRestarts": 0, "avoidedNodes": [], "replacedPods": 0,
        }
    ]  # fmt: skip
    assert stamp(later) == "2026-01-01T12:00:01Z"


def test_earliest_ignores_times_that_are_not_known():
    assert earliest(None, NOON, NOON - timedelta(seconds=1)) == NOON - timedelta(seconds=1)
    assert earliest(None) is None


def test_the_delay_is_bounded_however_often_a_stage_failed():
    limits = Limits()
    assert [delay_seconds(limits, count) for count in (0, 1, 2, 6, 10_000)] == [10, 10, 20, 300, 300]


def test_headline_is_the_first_known_metric():
    figures = _numbers({"loss": 0.25, "accuracy": 0.8765, "split": "test", "best": True})
    assert headline(figures, "text-classification") == "accuracy 0.8765"
    assert headline({"rows": 5.0}, "text-classification") == ""
    assert headline({"train_loss": 0.5, "train_steps": 3.0}, "summarization") == "train_loss 0.5"
    validated = {"train_loss_last": 0.5, "eval_loss": 0.4, "eval_rouge1": 0.25}
    assert headline(validated, "summarization") == "eval_rouge1 0.25"


GATES: dict[str, tuple[dict[str, Any], str]] = {
    "a minimum": ({"metric": "f1", "minimum": 0.9}, "f1 0.91 (gate 0.9)"),
    "a maximum": ({"metric": "loss", "maximum": 0.5}, "loss 0.25 (gate 0.5)"),
    "a metric that was not measured": ({"metric": "recall", "minimum": 0.5}, "accuracy 0.95"),
}


@pytest.mark.parametrize("case", GATES)
def test_result_is_the_metric_of_the_gate_with_its_limit(case: str):
    gate, expected = GATES[case]
    job = World(spec={**SPEC, "evaluation": {"gate": gate}}).job().job
    assert job is not None
    spec = job.spec
    assert result({"accuracy": 0.95, "f1": 0.91, "loss": 0.25}, spec) == expected
    assert result({}, spec) is None


HEADLINES: dict[Task, str] = {
    "text-generation": "perplexity",
    "masked-lm": "perplexity",
    "summarization": "rouge1",
    "translation": "bleu",
    "preference-tuning": "rewards/accuracies",
    "question-answering": "exact_match",
    "token-classification": "f1",
    "text-classification": "accuracy",
}


@pytest.mark.parametrize("task", HEADLINES)
def test_results_begin_with_the_metric_of_the_task(task: Task):
    own = next(iter(METRICS[task].values()))
    metrics = {**dict.fromkeys(own, 0.5), "loss": 0.1, "rows": 20}
    assert headline(metrics, task) == f"{HEADLINES[task]} 0.5"
    by_name = dict(sorted({**metrics, "train_loss_last": 0.3, "eval_accuracy": 0.4}.items()))
    assert next(iter(headline_first(by_name, task))) == HEADLINES[task]
    data = {"metrics": {"evaluate": {**metrics, "split": "test"}}, "worldSize": 1, "strategy": "single"}
    labels = [label for label, _ in result_rows({**data, "stages": [], "artifacts": {}})]
    assert labels[0] == HEADLINES[task]
    assert not {"loss", "rows", "split"} & set(labels)


def test_a_regression_is_compared_with_its_baseline_in_words():
    evaluated = {"pearson": 0.8, "mse": 0.25, "loss": 0.25, "rows": 9, "baseline": "always predicting the mean"}
    metrics = {"evaluate": evaluated, "majority": {"mse": 1.5}}
    data = {"metrics": metrics, "worldSize": 1, "strategy": "single", "stages": [], "artifacts": {}}
    assert result_rows(data)[:3] == [
        ("pearson", "0.8000"),
        ("mse", "0.2500  (baseline: 1.5000)"),
        ("baseline", "always predicting the mean"),
    ]
