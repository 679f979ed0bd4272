"""Invariants of every job, whatever happens, in whatever order, and wherever the operator dies.

The world itself checks in every reconcile that no attempt is created twice or beside another one that still runs, that
an ended job creates nothing, that a status survives its way through the API server, and that reconciles settle.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from finetune_contract.layout import FailureClass
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.types import ProgressStatus
from reconcile_world import World
from suite_plugins.fuzz import examples

PASSES_TO_THE_END = 60
"""Reconciles until the end: counted restarts and the ladder bound the failures in a row; then all succeeds."""


def with_newest(world: World, act: Callable[[str], object]) -> None:
    """Call `act` with the newest child that still runs, if there is one."""
    running = [name for name in world.created if name in world.children and world.unfinished(name)]
    if running:
        act(running[-1])


def evict(world: World, name: str) -> None:
    if not world.pods_of(name):
        world.start(name)
    pod = world.pods_of(name)[0]
    world.end_pod(pod, 137, reason="Error")
    world.pods[pod]["status"] |= {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
    world.end_child(name, succeeded=False)


def lose_node(world: World, name: str) -> None:
    if not world.pods_of(name):
        world.start(name)
    pod = world.pods[world.pods_of(name)[0]]
    pod["stuck"] = True
    pod["metadata"]["deletionTimestamp"] = world.after(60)


def evict_half(world: World, name: str) -> None:
    """Evict a pod, to which the child's controller does not react."""
    if not world.pods_of(name):
        world.start(name)
    disrupted = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": world.after(0)}
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
    world.pods[world.pods_of(name)[-1]]["status"] = {**evicted, "conditions": [disrupted]}


def suspend_for_a_moment(world: World) -> None:
    """Suspend, and resume while the suspension is under way."""
    world.edit(suspend=True)
    world.step()
    world.edit(suspend=False)


def vanish(world: World, name: str) -> None:
    """Delete the pods before anyone has read their last report."""
    for pod in world.pods_of(name):
        del world.pods[pod]
    world.end_child(name, succeeded=False)


def report_progress(world: World, name: str) -> None:
    """Report progress; from then on silence counts."""
    if not world.pods_of(name):
        world.start(name)
    world.settle()
    world.progress, world.last_progress_at, world.reports_complete_since = (
        ProgressStatus(step=1, total_steps=9),
        world.now,
        world.now,
    )


def forget_progress(world: World) -> None:
    """Let another replica lead from now on."""
    world.progress = world.last_progress_at = None
    world.reports_complete_since = world.now


ACTIONS: dict[str, Callable[[World], object]] = {
    "the child gets pods that wait": lambda w: with_newest(w, lambda n: w.pods_of(n) or w.make_pods(n)),
    "the child runs": lambda w: with_newest(w, lambda n: w.pods_of(n) or w.start(n)),
    "the child succeeds": lambda w: with_newest(w, w.succeed),
    "a user error": lambda w: with_newest(w, lambda n: w.fail(FailureClass.DATA, n)),
    "the Hub is away": lambda w: with_newest(w, lambda n: w.fail(FailureClass.HUB_UNAVAILABLE, n)),
    "memory runs out": lambda w: with_newest(w, lambda n: w.fail(FailureClass.OUT_OF_MEMORY, n)),
    "the kernel kills": lambda w: with_newest(w, lambda n: w.fail_silently(137, n, "OOMKilled")),
    "the collective fails": lambda w: with_newest(w, lambda n: w.fail(FailureClass.COLLECTIVE, n)),
    "exit 0 without a word": lambda w: with_newest(w, lambda n: w.fail_silently(0, n)),
    "an eviction": lambda w: with_newest(w, lambda n: evict(w, n)),
    "a node is lost": lambda w: with_newest(w, lambda n: lose_node(w, n)),
    "pods vanish": lambda w: with_newest(w, lambda n: vanish(w, n)),
    "the child is deleted by hand": lambda w: with_newest(w, w.delete_child),
    "suspend": lambda w: w.edit(suspend=True),
    "suspend for a moment": suspend_for_a_moment,
    "an eviction that the controller ignores": lambda w: with_newest(w, lambda n: evict_half(w, n)),
    "resume": lambda w: w.edit(suspend=False),
    "jobs may not be made": lambda w: w.refuse.update({"Job": (403, "exceeded quota")}),
    "jobs may be made again": lambda w: w.refuse.clear(),
    "the status is lost": lambda w: with_newest(w, lambda _: setattr(w, "status", {"phase": 7})),
    "progress is told": lambda w: with_newest(w, lambda n: report_progress(w, n)),
    "another replica leads": forget_progress,
    "reports cannot be heard": lambda w: setattr(w, "reports_complete_since", None),
    "a second passes": lambda w: w.wait(1),
    "a minute passes": lambda w: w.wait(60),
    "an hour passes": lambda w: w.wait(3600),
}
ENDED = ("Succeeded", "Failed")
STEPS = st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.none() | st.integers(0, 3)), max_size=25)


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "mpijob"])
@examples(10, everything=30, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_every_walk_succeeds_or_reports_a_cause(launcher: LauncherName, steps: list[tuple[str, int | None]]):
    world = World(served=("job", launcher))
    world.spec["resources"] = {"nodes": 2}
    for action, dies_after in steps:
        ACTIONS[action](world)
        if dies_after is not None:
            world.step(crash_after=dies_after)
        world.settle()
    finish(world)
    status = world.job().status
    assert world.phase in ENDED
    assert (status.failure is not None) == (world.phase == "Failed")
    assert {one.type: one.status for one in status.conditions if one.type in ENDED} == {
        "Succeeded": str(world.phase == "Succeeded"),
        "Failed": str(world.phase == "Failed"),
    }
    assert all(stage.attempt <= 99 for stage in status.stages)


def finish(world: World) -> None:
    """Remove every obstacle, and let every child succeed from now on."""
    world.refuse.clear()
    world.edit(suspend=False)
    for _ in range(PASSES_TO_THE_END):
        world.settle()
        if world.phase in ENDED:
            break
        with_newest(world, world.succeed)
        world.wait(400)
    running = [name for name in world.children if world.unfinished(name)]
    world.settle()
    assert not running or not [name for name in world.children if world.unfinished(name)]
