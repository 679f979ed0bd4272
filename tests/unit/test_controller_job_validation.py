"""Jobs are validated away from the event loop, and a slow one delays no other."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_operator.controller.reconcile.job_validation import THREADS, JobValidator
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from suite_plugins.patience import patient

SPEC = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}, "training": {}}


def job(name: str, generation: int = 1, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name, "namespace": "team", "uid": name, "generation": generation, "labels": labels},
        "spec": SPEC,
    }


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Yield an event that is set at the end, so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()


class Watched:
    """`validate_job`, recording whether each job ran in the main thread; one called `slow` waits for the event."""

    def __init__(self, released: threading.Event) -> None:
        self.judged: list[tuple[str, bool]] = []
        self._released = released

    def __call__(self, value: Any, settings: Any) -> Any:
        name = value["metadata"]["name"]
        self.judged.append((name, threading.current_thread() is threading.main_thread()))
        if name.startswith("slow"):
            self._released.wait()
        return validate_job(value, settings)


def test_unchanged_job_is_validated_once_in_another_thread(released: threading.Event) -> None:
    watched = Watched(released)

    async def go() -> list[JobView]:
        validator = JobValidator(CLUSTER_SETTINGS, validate=watched)
        views = [await validator.view(job("a"), None)]
        for raw in (job("a"), job("a", generation=2), job("a", generation=2, team="x")):
            views.append(await validator.view(raw, views[-1]))
        return views

    views = asyncio.run(go())
    assert [view.problems for view in views] == [()] * 4
    assert watched.judged == [("a", False)] * 3


def test_job_that_cannot_be_validated_in_time_is_refused_alone(released: threading.Event) -> None:
    watched = Watched(released)
    slow = [f"slow-{number}" for number in range(THREADS + 1)]

    async def go() -> dict[str, JobView]:
        validate_job(job("first"), CLUSTER_SETTINGS)
        validator = JobValidator(CLUSTER_SETTINGS, validate=watched, limit_seconds=patient(1.5))
        names = [*slow, "a", "b"]
        views = await asyncio.gather(*(validator.view(job(name), None) for name in names))
        return dict(zip(names, views, strict=True))

    views = asyncio.run(go())
    assert {name for name, view in views.items() if view.job is None} == set(slow)
    for name in slow:
        (problem,) = views[name].problems
        assert "TooSlowError: validation took longer than" in problem.rule
        assert "finetune validate" in problem.hint
    assert views["a"].problems == views["b"].problems == ()


def test_namespaces_take_turns_at_being_validated(released: threading.Event) -> None:
    watched = Watched(released)
    flood = [job(f"flood-{number}") for number in range(20)]
    honest = job("honest")
    honest["metadata"]["namespace"] = "other"

    async def go() -> None:
        validator = JobValidator(CLUSTER_SETTINGS, validate=watched)
        await asyncio.gather(*(validator.view(raw, None) for raw in (*flood, honest)))

    asyncio.run(go())
    names = [name for name, _ in watched.judged]
    assert names.index("honest") < 3, names
