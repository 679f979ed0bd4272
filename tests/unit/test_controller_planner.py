"""Planning in processes of their own: fair to namespaces, within limits, and once for each change."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import pytest

from finetune_operator.controller.reconcile import plan_process, planner
from finetune_operator.controller.reconcile.plan_process import Limits
from finetune_operator.controller.reconcile.planner import Planner
from finetune_operator.controller.store.fair_queue import FairAsyncQueue, FairQueue
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.jobs.decide.decide import PLANNING, decide
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.state.plan_table import (
    Answer,
    NotPlannedError,
    PlannerLostError,
    PlanningFailedError,
    PlanTable,
    planned,
)
from finetune_operator.plan.plan import NOT_ADAPTED, plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused, PlanRequest
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import API_VERSION, KIND
from reconcile_world import NOON, World
from suite_plugins.patience import patient

SMALL = {
    "task": "text-classification",
    "model": {"uri": "hf://org/encoder"},
    "dataset": {"uri": "hf://org/reviews"},
    "training": {},
}
LARGE = {
    "task": "text-generation",
    "model": {"uri": "hf://meta-llama/Llama-2-70b-hf"},
    "dataset": {"uri": "hf://org/texts"},
    "training": {"maxSteps": 1000},
    "resources": {"gpusPerNode": 8, "accelerator": {"product": "NVIDIA-H100-80GB-HBM3"}},
}
"""A job that fits nowhere: the search tries all forms."""
LIMITS = Limits()


def request_of(name: str, spec: dict[str, Any]) -> PlanRequest:
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    job, problems = validate_job(document, CLUSTER_SETTINGS)
    assert job is not None, problems
    return PlanRequest(job, Facts(), NOT_ADAPTED)


def drained(queue: FairQueue[str]) -> list[str]:
    return [item for item in iter(queue.take, None) if item is not None]


def test_namespaces_take_turns_and_keep_their_own_order():
    queue = FairQueue[str]()
    for number in range(4):
        queue.add("flood", f"flood {number}")
    for number in range(2):
        queue.add("honest", f"honest {number}")

    assert len(queue) == 6
    assert drained(queue) == ["flood 0", "honest 0", "flood 1", "honest 1", "flood 2", "flood 3"]
    assert len(queue) == 0


def test_namespace_that_costs_more_has_fewer_turns():
    queue = FairQueue[str]()
    for number in range(6):
        queue.add("large", f"large {number}")
        queue.add("small", f"small {number}")
    taken = []
    while (item := queue.take(cost=0.0)) is not None:
        taken.append(item)
        queue.charge(item.split()[0], 3.0 if item.startswith("large") else 1.0)

    assert [item.split()[0] for item in taken[:8]] == ["large", "small", "small", "small", "large", *["small"] * 3]


def test_namespace_that_waited_for_nothing_saves_nothing_up():
    queue = FairQueue[str]()
    queue.add("late", "late 0")
    queue.take()
    for number in range(10):
        queue.add("busy", f"busy {number}")
    for _ in range(5):
        queue.take()
    for number in range(1, 4):
        queue.add("late", f"late {number}")

    assert drained(queue)[:5] == ["late 1", "busy 5", "late 2", "busy 6", "late 3"]


def test_namespace_with_an_item_in_progress_is_left_out():
    queue = FairQueue[str]()
    queue.add("one", "first")
    queue.add("two", "second")

    assert queue.take(busy={"one"}) == "second"
    assert queue.take(busy={"one"}) is None
    assert queue.take() == "first"


def test_asynchronous_queue_is_as_fair_and_can_be_joined():
    async def work() -> list[str]:
        queue = FairAsyncQueue[str]()
        getting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        for pair in (("flood", "a"), ("flood", "b"), ("honest", "c")):
            queue.put_nowait(pair)
        taken = [(await getting)[1], (await queue.get())[1], (await queue.get())[1]]
        for _ in taken:
            queue.task_done()
        await queue.join()
        assert queue.empty()
        return taken

    assert asyncio.run(work()) == ["a", "c", "b"]


class Planning:
    """Planner that runs, with its answers in order."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.answers: list[tuple[JobKey, Answer]] = []
        self.planner = Planner(CLUSTER_SETTINGS, lambda key, _, answer: self.answers.append((key, answer)), limits)

    async def answered(self, count: int) -> None:
        while len(self.answers) < count:
            await asyncio.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """Return the processes that plan."""
        children = psutil.Process().children()
        return [one for one in children if plan_process.__name__ in one.cmdline()]


def planning(work: Callable[[Planning], Any], limits: Limits = LIMITS, tasks: int = 1) -> Planning:
    """Run `work` beside a planner."""

    async def run() -> Planning:
        running = Planning(limits)
        planners = [asyncio.create_task(running.planner.run()) for _ in range(tasks)]
        async with asyncio.timeout(patient(60)):
            await work(running)
        for one in planners:
            one.cancel()
        await asyncio.gather(*planners, return_exceptions=True)
        assert running.processes() == [], "a process is left"
        return running

    return asyncio.run(run())


def found(request: PlanRequest, answer: Answer) -> Any:
    table = PlanTable()
    table.put(request, answer)
    return table.find(request)


def test_other_process_plans_and_refuses_as_this_one_does():
    small, large = request_of("small", SMALL), request_of("large", LARGE)

    async def work(running: Planning) -> None:
        await running.planner.ask(JobKey("team", "small"), small)
        await running.planner.ask(JobKey("team", "large"), large)
        await running.answered(2)
        (process,) = running.processes()
        assert process.rlimit(resource.RLIMIT_AS)[0] == LIMITS.memory_bytes

    answers = dict(planning(work).answers)
    assert found(small, answers[JobKey("team", "small")]) == plan(small.job, small.facts, CLUSTER_SETTINGS)
    with pytest.raises(PlanRefused) as refused:
        found(large, answers[JobKey("team", "large")])
    with pytest.raises(PlanRefused) as here:
        plan(large.job, large.facts, CLUSTER_SETTINGS)
    assert refused.value.problems == here.value.problems


def test_flood_of_one_namespace_holds_up_another_by_little():
    flood = [(JobKey("flood", f"job-{number}"), request_of(f"job-{number}", SMALL)) for number in range(20)]
    honest = [(JobKey("honest", f"job-{number}"), request_of(f"job-{number}", SMALL)) for number in range(3)]

    async def work(running: Planning) -> None:
        for key, request in (*flood, *honest):
            await running.planner.ask(key, request)
        await running.answered(23)

    order = [key.namespace for key, _ in planning(work).answers]
    assert sum(one == "flood" for one in order) == 20
    last = max(place for place, one in enumerate(order) if one == "honest")
    assert last <= 10, order


def test_one_namespace_has_one_plan_in_progress():
    async def work(running: Planning) -> None:
        for name in ("a", "b", "c"):
            await running.planner.ask(JobKey("team", name), request_of(name, SMALL))
        await running.answered(3)
        assert len(running.processes()) == 1

    planning(work, tasks=2)


def test_plan_that_takes_too_much_cpu_is_refused_and_others_are_planned():
    small, large = request_of("small", SMALL), request_of("large", LARGE)
    began = time.process_time()
    with suppress(PlanRefused):
        plan(large.job, large.facts, CLUSTER_SETTINGS)
    half = (time.process_time() - began) / 2

    async def work(running: Planning) -> None:
        await running.planner.ask(JobKey("team", "large"), large)
        await running.planner.ask(JobKey("team", "small"), small)
        await running.answered(2)

    answers = dict(planning(work, Limits(cpu_seconds=half)).answers)
    with pytest.raises(PlanRefused, match=r"must not take more than .* s of CPU") as refused:
        found(large, answers[JobKey("team", "large")])
    assert refused.value.problems[0].hint
    assert found(small, answers[JobKey("team", "small")]).name == "small"


def test_plan_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    def bomb(*_: Any) -> bytes:
        raise MemoryError

    monkeypatch.setattr(plan_process, "planned", bomb)
    request = request_of("small", SMALL)
    with pytest.raises(PlanRefused, match="must not take more than 512 MiB of memory"):
        found(request, plan_process.answer(request, CLUSTER_SETTINGS, LIMITS))


def test_error_of_planning_is_raised_once_with_its_trace(monkeypatch: pytest.MonkeyPatch):
    def bug(*_: Any) -> bytes:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(plan_process, "planned", bug)
    request, table = request_of("small", SMALL), PlanTable()
    table.put(request, pickle.loads(pickle.dumps(plan_process.answer(request, CLUSTER_SETTINGS, LIMITS))))
    with pytest.raises(PlanningFailedError, match="ZeroDivisionError: division by zero") as failed:
        table.find(request)
    assert "in bug" in failed.value.__notes__[0]
    with pytest.raises(NotPlannedError):
        table.find(request)


def test_killed_process_fails_one_plan_and_is_started_again():
    first, second = request_of("first", LARGE), request_of("second", SMALL)

    async def work(running: Planning) -> None:
        await running.planner.ask(JobKey("team", "first"), first)
        while not running.processes():
            await asyncio.sleep(0.01)
        os.kill(running.processes()[0].pid, signal.SIGKILL)
        await running.planner.ask(JobKey("team", "second"), second)
        await running.answered(2)

    answers = dict(planning(work).answers)
    with pytest.raises(PlannerLostError):
        found(first, answers[JobKey("team", "first")])
    assert found(second, answers[JobKey("team", "second")]).name == "second"


def test_process_that_cannot_start_is_no_fault_of_the_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "module_command", lambda _: [sys.executable, "-c", "raise SystemExit(1)"])
    request = request_of("small", SMALL)

    async def work(running: Planning) -> None:
        await running.planner.ask(JobKey("team", "small"), request)
        await running.answered(1)

    ((_, answer),) = planning(work).answers
    with pytest.raises(PlannerLostError):
        found(request, answer)


def test_deleted_job_is_not_planned():
    async def work(running: Planning) -> None:
        for name in ("first", "deleted", "last"):
            await running.planner.ask(JobKey("team", name), request_of(name, SMALL))
        running.planner.forget(JobKey("team", "deleted"))
        await running.answered(2)

    assert [key.name for key, _ in planning(work).answers] == ["first", "last"]


def test_job_that_fits_nowhere_is_planned_once():
    world = World(spec=LARGE)
    world.step()
    assert world._plans is not None
    table = world._plans[1]
    table.missing = None
    for _ in range(3):
        world.now += timedelta(minutes=1)
        world.step()

    assert condition(world.job().status, "Planned").reason == "PlanRefused"  # type: ignore[union-attr]
    assert table.missing is None


def test_status_tells_of_a_plan_that_is_waited_for_after_five_seconds():
    world, table = World(), PlanTable()
    first = replace(world.observed(), plan_wanted_since=NOON)
    with pytest.raises(NotPlannedError):
        decide(world.job(), first, NOON + timedelta(seconds=4), world.settings, None, table.find)

    decision = decide(world.job(), first, NOON + timedelta(seconds=5), world.settings, None, table.find)
    expected = condition(decision.status, "Planned")
    assert expected is not None
    assert (decision.status.phase, expected.status, expected.message) == ("Pending", "Unknown", PLANNING)
    assert decision.create == ()
    assert table.missing is not None
    table.put(table.missing, planned(table.missing, world.settings))
    after = decide(world.job(), first, NOON + timedelta(seconds=6), world.settings, None, table.find)
    assert after.create
