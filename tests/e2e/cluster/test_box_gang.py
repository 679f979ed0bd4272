"""A training that gets a part of its nodes leaves them, and trains once it gets all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from box_support.box import SETTINGS, Box, on_fragile_nodes
from box_support.team import Team, stage_of, tiny_spec
from cluster_support.api_access import Object, path_of
from suite_plugins.patience import patient

pytestmark = pytest.mark.alone

HELD_SECONDS = math.ceil(patient(10))


@pytest.fixture
def impatient(box: Box, tmp_path: Path) -> Iterator[None]:
    """An operator that lets nodes be held in vain for seconds."""
    box.own("an operator with settings of its own")
    limits = {**SETTINGS["limits"], "gangSeconds": HELD_SECONDS, "restartDelayMostSeconds": 2}
    box.install_operator(tmp_path / "impatient", {**SETTINGS, "limits": limits})
    yield
    box.install_operator(tmp_path / "as-before")


@pytest.fixture
def closed_node(box: Box) -> Iterator[str]:
    """One of two fragile nodes, which takes no pods."""
    name = box.fragile["training"][0]
    box.kubectl("cordon", name)
    yield name
    box.kubectl("uncordon", name)


def more_than_half_of(box: Box, node: str) -> str:
    """Return CPU of which a node has no two."""
    cores = box.api.get(path_of("v1", "nodes", None, node)) or {}
    return f"{float(cores['status']['allocatable']['cpu']) * 0.6:.1f}"


def running(status: Object) -> Object:
    return next((one for one in status.get("conditions", []) if one["type"] == "Running"), {})


def test_half_placed_gang_is_reported_and_releases_its_node(
    box: Box, team: Team, impatient: None, closed_node: str
) -> None:
    name = team.new_name("gang")
    resources = {
        "nodes": 2,
        "processesPerNode": 1,
        "cpu": more_than_half_of(box, box.fragile["training"][1]),
        "memory": "2Gi",
    }
    team.apply(name, tiny_spec(resources=resources, template=on_fragile_nodes(box, "training")))
    message = team.wait(
        name,
        lambda status: running(status).get("message") if running(status).get("reason") == "GangIncomplete" else None,
        "half placed",
    )
    assert message.startswith("1 of 2 pods holds a node and waits for the others. ")
    assert "nodes are available" in message

    def stopped(status: Object) -> Object | None:
        train = stage_of(status, "train")
        return status if (train["attempt"] == 1 and train["state"] == "Failed") or train["attempt"] > 1 else None

    team.wait(name, stopped, "stopped")
    box.kubectl("uncordon", closed_node)
    status = team.succeeds(name)
    assert stage_of(status, "train")["attempt"] >= 2
    assert status.get("restarts", 0) == 0
    events = [one["message"] for one in team.events(name) if one["reason"] == "GangIncomplete"]
    assert any("limits.gangSeconds" in one for one in events), events
