"""Everything at once: an operator that is killed, an API server that restarts, watches that break, writes that fail.

The outcome has to be that of a quiet day: each job in its end state, each attempt created once.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_support.api_access import Api, ApiError, Object, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.fault_proxy import NONE, FaultProxy, Faults
from cluster_support.operator_process import USER, OperatorProcess, install
from cluster_support.plays import OUT_OF_MEMORY, PREEMPTED, RUNS, SUCCEEDS, WRONG_COLUMN, Play, Playbook
from cluster_support.world import SETTINGS, World, namespace_for_pods, record_uids, states

SEED = 20_240_601
JOBS = 10
KILLS = 20
API_SERVER_RESTARTS = 5
WATCH_CUTS = 10
FAULTS = Faults(conflicts=0.05, too_many=0.05, lost_answers=0.05, delay_seconds=0.05)
SECONDS_OF_CHAOS = 60.0
STAGES = ("prepare", "train", "evaluate", "predict")

WELL = ("Succeeded", dict.fromkeys(STAGES, ("Succeeded", 1)))
AGAIN = ("Succeeded", {**WELL[1], "train": ("Succeeded", 2)})
WRONG = (
    "Failed",
    {
        "prepare": ("Succeeded", 1),
        "train": ("Failed", 1),
        "evaluate": ("Pending", 0),
        "predict": ("Pending", 0),
    },
)


@pytest.fixture(scope="module")
def proxy(cluster: Cluster, stand_ins: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    background = stand_ins.background  # type: ignore[attr-defined]
    made = FaultProxy(cluster.access, background, tmp_path_factory.mktemp("proxy"), SEED)
    made.up()
    yield made
    made.down()


@pytest.fixture
def chaotic(cluster: Cluster, kinds: None, stand_ins: object, proxy: FaultProxy, tmp_path: Path) -> Iterator[World]:
    """A world whose operator talks to the API server through the proxy."""
    install(cluster)
    process = OperatorProcess(cluster, tmp_path, SETTINGS, server=proxy.url, ca=proxy.ca)
    process.start()
    with namespace_for_pods(cluster) as name:
        yield World(
            namespace=name,
            cluster=cluster,
            api=Api(cluster.access),
            kubelet=stand_ins.kubelet,  # type: ignore[attr-defined]
            gangs=stand_ins.gangs,  # type: ignore[attr-defined]
            operator=process,
            background=stand_ins.background,  # type: ignore[attr-defined]
            watching=stand_ins.watching,  # type: ignore[attr-defined]
        )
        proxy.faults = NONE
        process.kill()
        stand_ins.kubelet.playbook.clear()  # type: ignore[attr-defined]
    stand_ins.background.check()  # type: ignore[attr-defined]


def _script(playbook: Playbook, dice: random.Random, name: str, number: int) -> tuple[str, dict[str, tuple[str, int]]]:
    """Script a job's faults, and return its expected end."""
    for stage in STAGES:
        playbook.set(name, stage, Play(lasts=dice.uniform(0.5, 6.0)))
    if number % 5 == 1:
        playbook.set(name, "train", PREEMPTED, attempt=1)
        return AGAIN
    if number % 5 == 2:
        playbook.set(name, "train", OUT_OF_MEMORY, attempt=1)
        return AGAIN
    if number % 5 == 3:
        playbook.set(name, "train", WRONG_COLUMN)
        return WRONG
    return WELL


@pytest.mark.slow
def test_chaos_loses_no_job_and_repeats_no_attempt(chaotic: World, proxy: FaultProxy) -> None:
    world, dice = chaotic, random.Random(SEED)
    mark = world.cluster.audit_mark()
    uids = record_uids(world.background, world.watching, world.path("batch/v1", "jobs"))
    names = [f"storm-{number}" for number in range(JOBS)]
    expected = {name: _script(world.kubelet.playbook, dice, name, number) for number, name in enumerate(names)}
    acts = (
        [(dice.uniform(0, SECONDS_OF_CHAOS), "kill", "") for _ in range(KILLS)]
        + [(dice.uniform(5, SECONDS_OF_CHAOS), "restart", "") for _ in range(API_SERVER_RESTARTS)]
        + [(dice.uniform(0, SECONDS_OF_CHAOS), "cut", "") for _ in range(WATCH_CUTS)]
        + [(SECONDS_OF_CHAOS * 0.6 * number / JOBS, "apply", name) for number, name in enumerate(names)]
    )
    proxy.faults = FAULTS
    done = _carry_out(world, proxy, sorted(acts))
    assert done == {"kill": KILLS, "restart": API_SERVER_RESTARTS, "cut": WATCH_CUTS, "apply": JOBS}
    # On a slow machine few requests may have been made by now.
    wait_until(
        lambda: all(proxy.injected.get(fault) for fault in ("409", "429", "lost answer")),
        "each kind of fault has happened",
        detail=lambda: proxy.injected,
    )
    proxy.faults = NONE

    wait_until(lambda: _restarted(world) and world.operator.ready(), "the operator is ready")
    for name in names:
        world.wait_phase(name, expected[name][0])
    assert {name: (world.status(name)["phase"], states(world.status(name))) for name in names} == expected

    made = Counter(
        entry["objectRef"]["name"]
        for entry in world.cluster.audit(mark, USER)
        if entry["verb"] == "create" and entry["responseStatus"].get("code") == 201
        if entry["objectRef"]["resource"] == "jobs" and entry["objectRef"]["namespace"] == world.namespace
    )
    wanted = {
        f"{name}-{stage}-{attempt}"
        for name in names
        for stage, (_, last) in expected[name][1].items()
        for attempt in range(1, last + 1)
    }
    # A killed API server can have stored an object without an audit entry; the audit log in turn has objects that came
    # and went while the watch was broken.
    wait_until(lambda: wanted <= uids.keys(), "each attempt was seen", detail=lambda: wanted - uids.keys())
    assert set(made) | set(uids) == wanted
    assert [name for name in wanted if made[name] > 1 or len(uids[name]) != 1] == []


def test_hanging_watches_restart_when_another_api_server_answers(chaotic: World, proxy: FaultProxy) -> None:
    world = chaotic
    world.kubelet.playbook.set("hangs", "train", RUNS)
    world.apply("hangs", {"predict": None})
    world.wait_running("hangs", "train")
    muted = proxy.mute_watches()
    assert muted >= 3
    proxy.faults = Faults(lost_answers=1.0)  # also of the lease, which is renewed all the time
    wait_until(lambda: "the API server does not answer" in world.operator.logs(), "the outage is seen")
    proxy.faults = NONE
    wait_until(lambda: "the API server answers again" in world.operator.logs(), "and its end")
    # A watch follows its list: from now on the watches report changes, not a list.
    wait_until(lambda: proxy.live_watches() >= muted, "the operator watches again")
    world.kubelet.switch_play("hangs", "train", SUCCEEDS)
    assert states(world.wait_phase("hangs", "Succeeded"))["train"] == ("Succeeded", 1)


# Answers of an API server that is overloaded, or that starts and does not know its accounts and roles yet.
REFUSALS = {"unauthorized": 401, "forbidden": 403, "an internal error": 500, "unavailable": 503}


@pytest.mark.parametrize(
    ("moment", "case"),
    [
        ("while it runs", "unauthorized"),
        ("while it runs", "forbidden"),
        ("while it runs", "unavailable"),
        ("while it starts", "unauthorized"),
        ("while it starts", "an internal error"),
    ],
)
def test_an_api_server_that_refuses_everything_for_a_while_is_waited_for(
    chaotic: World, proxy: FaultProxy, moment: str, case: str
) -> None:
    world = chaotic
    world.kubelet.playbook.set("patient", "train", RUNS)
    world.apply("patient")
    world.wait_running("patient", "train")
    if moment == "while it starts":
        world.operator.kill()
    before = proxy.refused
    proxy.faults = Faults(refuse_all=REFUSALS[case])
    proxy.cut_watches()
    wait_until(lambda: _restarted(world) and proxy.refused >= before + 3, "the operator has been refused three times")
    proxy.faults = NONE
    wait_until(lambda: _restarted(world) and world.operator.ready(), "the operator is ready")
    world.kubelet.switch_play("patient", "train", SUCCEEDS)
    status = world.wait_phase("patient", "Succeeded")
    assert (states(status), status["restarts"]) == (WELL[1], 0)


def _restarted(world: World) -> bool:
    """Start the operator again if it has ended because it could not start, as the kubelet does with containers."""
    if not world.operator.running:
        world.operator.start(wait=False)
    return True


def _carry_out(world: World, proxy: FaultProxy, acts: list[tuple[float, str, str]]) -> dict[str, int]:
    """Do each act at its time, or as soon after it as possible; return the count of each."""
    begun, done = time.monotonic(), Counter[str]()
    for at, act, name in acts:
        time.sleep(max(0.0, begun + at - time.monotonic()))
        match act:
            case "kill":
                # Killed at any moment, also during its start: it is started again at once without waiting.
                world.operator.kill()
                world.operator.start(wait=False)
            case "restart":
                world.cluster.restart_api_server()
            case "cut":
                proxy.cut_watches()
            case "apply":
                _apply(world, name)
        done[act] += 1
    return dict(done)


def _apply(world: World, name: str) -> None:
    def apply() -> Object | None:
        try:
            return world.apply(name)
        except ApiError as error:
            # An API server that has just started has to read roles and kinds again.
            if error.code not in (403, 404, 409, 429, 500, 503):
                raise
            return world.api.get(world.path("finetune.dev/v1alpha1", "finetunejobs", name))

    wait_until(apply, f"job {name} is stored")
