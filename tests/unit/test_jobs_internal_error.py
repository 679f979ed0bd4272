"""Errors of the operator over one job: its status tells them, and it fails if they go on and nothing of it runs."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from finetune_operator.controller.reconcile.operator_state import OperatorState, ProgressBook
from finetune_operator.controller.reconcile.reconciler import Reconciler
from finetune_operator.controller.resync import store_object
from finetune_operator.controller.store.queue import JobKey, WorkQueue
from finetune_operator.controller.store.store import Store
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.jobs.decide.internal_error import MOST_IN_A_ROW, after_internal_error
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.state.decision_types import Decision, Observed
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from reconcile_world import NOON, World, through

NOTHING = Observed(children=(), pods=())


def after(world: World, in_row: int, observed: Observed | None = None) -> Decision:
    """Return the decision after that many errors in a row."""
    known = world.observed() if observed is None else observed
    return after_internal_error(world.job(), known, world.now, world.settings, "OverflowError", in_row)


def test_new_job_stalls_and_says_which_error_to_report():
    decision = after(World(), 1, NOTHING)
    stalled = condition(decision.status, "Stalled")
    assert stalled is not None
    assert (decision.status.phase, stalled.status, stalled.reason) == ("Pending", "True", "InternalError")
    assert stalled.message == (
        "The operator cannot process this job because of an error of its own (OverflowError). It tries again. Report "
        "this as a bug of the operator, with the job's file and the operator's log."
    )
    assert [(note.type, note.reason) for note in decision.events] == [("Warning", "InternalError")]


def test_running_job_keeps_its_pods_and_its_other_conditions():
    world = World()
    through(world, 1)
    before = world.job().status
    decision = after(world, 50)
    assert (decision.status.phase, decision.delete, decision.create, decision.remove) == ("Training", (), (), ())
    assert decision.status.model_copy(update={"conditions": before.conditions}) == before
    changed = [one.type for one in decision.status.conditions if one not in before.conditions]
    assert changed == ["Stalled"]


def test_second_error_in_a_row_changes_nothing():
    world = World()
    through(world, 1)
    first = after(world, 1)
    world.status = json.loads(json.dumps(first.status.model_dump(mode="json", by_alias=True, exclude_none=True)))
    second = after(world, 2)
    assert (second.status, second.events) == (world.job().status, ())


def test_job_that_runs_nothing_fails_after_five_errors():
    world = World()
    through(world, 0)
    world.succeed()
    assert after(world, MOST_IN_A_ROW - 1).status.phase == "Preparing"
    decision = after(world, MOST_IN_A_ROW)
    failure = decision.status.failure
    assert failure is not None
    assert (decision.status.phase, failure.failure_class, failure.stage, failure.attempt) == (
        "Failed", "InternalError", "prepare", 1,
    )  # fmt: skip
    conditions = {one.type: (one.status, one.reason) for one in decision.status.conditions}
    assert conditions["Failed"] == ("True", "InternalError")
    assert conditions["Stalled"] == ("True", "Failed")
    assert decision.status.completion_time == world.now


def test_ended_job_stays_as_it_is():
    world = World()
    through(world, 4)
    assert world.phase == "Succeeded"
    assert after(world, 9) == Decision(world.job().status)


def test_job_of_another_manager_stays_as_it_is():
    world = World()
    world.edit(managedBy="kueue.x-k8s.io/multikueue")
    assert after(world, 9, NOTHING) == Decision(world.job().status)


class StatusesOnly:
    """API server that takes statuses and nothing else."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.clock = SimpleNamespace(now=lambda: NOON)
        self.outage = SimpleNamespace(down=False)

    async def apply_status(self, namespace: str, name: str, uid: str, version: str, status: Any) -> Any:
        """Store it, and return the job with its next version."""
        metadata = self.document["metadata"]
        assert (metadata["uid"], metadata["resourceVersion"]) == (uid, version)
        metadata = {**metadata, "resourceVersion": str(int(version) + 1)}
        self.document = {**self.document, "metadata": metadata, "status": json.loads(json.dumps(status))}
        return self.document


class Refreshed:
    """Discovery and nodes of a cluster with batch Jobs alone."""

    served = ("job",)
    kserve = custom_metrics = http_routes = http_scaled_objects = False
    answer = None

    async def refresh(self) -> None:
        """Do nothing."""


def operator_of(kube: Any) -> OperatorState:
    """Return the state of an operator that leads."""
    state = OperatorState(
        CLUSTER_SETTINGS, "ops", kube, Store(CLUSTER_SETTINGS), WorkQueue(), ProgressBook(),
        asyncio.Event(), asyncio.Event(), lambda: None,
    )  # fmt: skip
    state.leading.set()
    return state


def test_object_that_cannot_be_read_keeps_no_other_from_the_store(caplog: pytest.LogCaptureFixture):
    async def scene() -> list[JobKey]:
        state = operator_of(StatusesOnly({}))
        for name, created in (("odd", "yesterday"), ("reviews", "2026-01-01T00:00:00Z")):
            metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
            await store_object(
                state, FINETUNE_JOB, {
                    "apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob",
                    "metadata": {**metadata, "creationTimestamp": created}, "spec": {},
                },
            )  # fmt: skip
        return state.store.jobs()

    assert asyncio.run(scene()) == [JobKey("team", "reviews")]
    assert "ignoring a FineTuneJob because of an error in the operator" in caplog.text


@pytest.mark.parametrize("errors", [3, MOST_IN_A_ROW])
def test_job_over_which_the_operator_errs_is_told_and_recovers_or_fails(errors: int):
    asyncio.run(_reconciled(errors))


async def _reconciled(errors: int) -> None:
    metadata = {"name": "reviews", "namespace": "team", "uid": "u", "generation": 1, "resourceVersion": "1"}
    metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata}
    kube = StatusesOnly(document | {"spec": {**World().spec, "runPolicy": {"suspend": True}}})
    state = operator_of(kube)
    state.store.put(kube.document)
    left = errors

    def erring(*given: Any) -> Decision:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OverflowError("int too large to convert to float")
        return decide(*given[:-1])  # without a planner: it plans at once

    reconciler = Reconciler(state, cast(Any, Refreshed()), cast(Any, Refreshed()), erring)
    key = JobKey("team", "reviews")
    reasons = []
    for _ in range(errors + 1):
        await reconciler.reconcile(key)
        reasons.append([one["reason"] for one in kube.document["status"]["conditions"] if one["type"] == "Stalled"])
    phase = kube.document["status"]["phase"]
    if errors < MOST_IN_A_ROW:
        assert (reasons, phase) == ([["InternalError"]] * errors + [["Progressing"]], "Suspended")
    else:
        assert (reasons, phase) == ([["InternalError"]] * (errors - 1) + [["Failed"]] * 2, "Failed")
    state.queue.close()
