"""Today's operator replaces an earlier release: its jobs continue, and nothing is started or created again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster_support.api_access import Api, Object, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.jobs_with_status import FINETUNE
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.plays import PREEMPTED, RUNS, SUCCEEDS, WRONG_COLUMN
from cluster_support.stand_ins import StandIns
from cluster_support.world import (
    CHILD_KINDS,
    OTHER_KINDS,
    SETTINGS,
    World,
    install_kinds,
    merged,
    namespace_for_pods,
    stage_of,
    states,
)
from earlier_release import python_path, script, unpack
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.schema.served_schema import OPENAPI_PATH, lacking
from finetune_operator.spec.types import API_VERSION, PLURAL

PATIENT_SETTINGS = merged(SETTINGS, {"limits": {"restartDelaySeconds": 3600, "restartDelayMostSeconds": 3600}})
"""Settings under which a job waits for its next attempt for as long as the upgrade takes."""
ONE_EACH = dict.fromkeys(("prepare", "train", "evaluate", "predict"), ("Succeeded", 1))
GONE_ON = {**ONE_EACH, "train": ("Succeeded", 2)}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source of the earlier release."""
    return unpack(tmp_path_factory.mktemp("earlier"), "operator", "trainer_image/contract", "manifests")


@pytest.fixture(scope="module")
def earlier_environment(earlier: Path) -> Mapping[str, str]:
    """Environment in which Python imports the earlier release."""
    return python_path(earlier / "operator", earlier / "trainer_image" / "contract")


@pytest.fixture
def world(
    cluster: Cluster, stand_ins: StandIns, earlier: Path, earlier_environment: Mapping[str, str], tmp_path: Path
) -> Iterator[World]:
    """A world with the kinds, the rights and the operator of the earlier release."""
    install_kinds(cluster)
    cluster.must("apply", "--server-side", "--force-conflicts", "-k", str(earlier / "manifests" / "crd"))
    install(cluster, earlier / "manifests" / "operator")
    operator = OperatorProcess(
        cluster,
        tmp_path,
        PATIENT_SETTINGS,
        name="operator-earlier",
        environment=earlier_environment,
        program=script(earlier / "operator", "finetune-operator"),
    )
    operator.start()
    try:
        with namespace_for_pods(cluster) as name:
            yield World(
                namespace=name,
                cluster=cluster,
                api=Api(cluster.access),
                kubelet=stand_ins.kubelet,
                gangs=stand_ins.gangs,
                operator=operator,
                background=stand_ins.background,
                watching=stand_ins.watching,
            )
            complaints, stand_ins.kubelet.complaints[:] = list(stand_ins.kubelet.complaints), []
            stand_ins.background.check()
            assert complaints == []
    finally:
        stand_ins.kubelet.playbook.clear()
        operator.terminate()
        install_kinds(cluster)
        install(cluster)


def made(world: World, name: str) -> dict[str, str]:
    """Return the uid of each object that the job has created."""
    return {
        f"{plural}/{item['metadata']['name']}": item["metadata"]["uid"]
        for version, plural in (*CHILD_KINDS, *OTHER_KINDS)
        for item in world.of_job(name, version, plural)
    }


def begin(world: World) -> tuple[str, ...]:
    """Bring one job into each state in which an upgrade can meet it."""
    play = world.kubelet.playbook.set
    for name in ("training", "gang", "paused"):
        play(name, "train", RUNS, attempt=1)
    play("preparing", "prepare", RUNS)
    play("retrying", "train", PREEMPTED, attempt=1)
    play("refused", "prepare", WRONG_COLUMN)
    world.apply("asleep", {"runPolicy": {"suspend": True}})
    world.apply("gang", {"launcher": "pytorchjob", "resources": {"nodes": 2}})
    for name in ("paused", "preparing", "training", "retrying", "refused", "ended"):
        world.apply(name)
    world.wait_running("paused", "train")
    world.change("paused", {"runPolicy": {"suspend": True}})
    for name in ("asleep", "paused"):
        world.wait_phase(name, "Suspended")
    world.wait_running("preparing", "prepare")
    for name in ("training", "gang"):
        world.wait_running(name, "train")
    world.wait("retrying", "waits", lambda status: (stage_of(status, "train") or {}).get("nextAttemptTime"))
    world.wait_phase("refused", "Failed")
    world.wait_phase("ended", "Succeeded")
    return "asleep", "paused", "preparing", "training", "gang", "retrying", "refused", "ended"


def let_go_on(world: World, name: str) -> None:
    """Bring the time of the next attempt forward to now."""
    stages = world.status(name)["stages"]
    for stage in stages:
        if stage.get("nextAttemptTime"):
            stage["nextAttemptTime"] = stage["completionTime"]
    world.api.patch(world.path(API_VERSION, PLURAL, name, "status"), {"status": {"stages": stages}})


def test_jobs_of_an_earlier_operator_go_on_after_an_upgrade(world: World, cluster: Cluster, tmp_path: Path) -> None:
    names = begin(world)
    assert world.operator.terminate() == 0
    children = {name: made(world, name) for name in names}
    statuses: dict[str, Object] = {name: world.status(name) for name in names}
    assert all(children[name] for name in names if name != "asleep")

    install_kinds(cluster)
    install(cluster)
    today = OperatorProcess(cluster, tmp_path, PATIENT_SETTINGS)
    today.start()
    try:
        world.catch_up()
        assert {name: made(world, name) for name in names} == children
        assert {name: _kept(world.status(name)) for name in names} == {
            name: _kept(status) for name, status in statuses.items()
        }

        world.kubelet.switch_play("preparing", "prepare", SUCCEEDS)
        for name in ("training", "gang"):
            world.kubelet.switch_play(name, "train", SUCCEEDS)
        for name in ("asleep", "paused"):
            world.change(name, {"runPolicy": {"suspend": False}})
        let_go_on(world, "retrying")
        ended = {name: world.wait_phase(name, "Succeeded") for name in names if name != "refused"}
        assert {name: (states(status), status["restarts"]) for name, status in ended.items()} == {
            "asleep": (ONE_EACH, 0),
            "paused": (GONE_ON, 0),
            "preparing": (ONE_EACH, 0),
            "training": (ONE_EACH, 0),
            "gang": (ONE_EACH, 0),
            "retrying": (GONE_ON, 1),
            "ended": (ONE_EACH, 0),
        }
        for name in names:
            after = made(world, name)
            assert {key: after.get(key, uid) for key, uid in children[name].items()} == children[name]
        assert world.status("refused")["failure"] == statuses["refused"]["failure"]
    finally:
        today.terminate()


def earlier_crd() -> str:
    """Return the CRD without a field of the status that this release writes."""
    made = crd()
    status = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    del status["properties"]["plan"]["properties"]["reasons"]
    return json.dumps(made)


def test_operator_waits_for_the_crd_of_its_release(cluster: Cluster, stand_ins: StandIns, tmp_path: Path) -> None:
    install_kinds(cluster)
    install(cluster)
    cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=earlier_crd())
    api, operator = Api(cluster.access), OperatorProcess(cluster, tmp_path, SETTINGS)
    wait_until(lambda: lacking(api.get(OPENAPI_PATH) or {}), "the API server shows the CRD without the field")
    operator.start(wait=False)
    try:
        with namespace_for_pods(cluster) as name:
            around = stand_ins.kubelet, stand_ins.gangs, operator, stand_ins.background, stand_ins.watching
            world = World(name, cluster, api, *around)
            world.apply("one")
            wait_until(lambda: "lacks status.plan.reasons. No job is reconciled" in operator.logs(), "the log says so")
            assert not operator.ready()
            assert made(world, "one") == {}
            shown = subprocess.run(
                [FINETUNE, "doctor"],
                env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
                capture_output=True,
                text=True,
            )
            assert shown.returncode == 1
            assert "status.plan.reasons" in " ".join(shown.stdout.split())

            install_kinds(cluster)
            operator.wait_ready()
            world.wait_phase("one", "Succeeded")
    finally:
        operator.terminate()
        install_kinds(cluster)


LATER = {"replacedPods"}
"""Fields of a stage that the earlier release does not know."""


def _kept(status: Object) -> Object:
    """Return the part of a status that an operator must not change by reading it."""
    kept = {key: status.get(key) for key in ("phase", "stages", "restarts", "failure", "plan", "artifacts", "cost")}
    stages = [{name: value for name, value in stage.items() if name not in LATER} for stage in kept["stages"] or ()]
    # A job that has not begun is planned again, and figures and wording of a plan depend on the release.
    begun = any(stage["attempt"] for stage in kept["stages"] or ())
    planned_again = {"reasons"} if begun else {"reasons", "estimated", "memoryPerDevice", "product"}
    plan = {name: value for name, value in (kept["plan"] or {}).items() if name not in planned_again}
    return {**kept, "stages": stages, "plan": _without_empty(plan)}


def _without_empty(value: Any) -> Any:
    """Return the value without empty fields, which a later release adds when it writes a status."""
    if not isinstance(value, dict):
        return value
    return {name: _without_empty(one) for name, one in value.items() if one not in ({}, [], None)}
