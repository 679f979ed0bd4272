"""Models of the Hub for the servers of an endpoint: from a shared cache, or fetched by each."""

from __future__ import annotations

from typing import Any

import pytest

from reconcile_world import SPEC, World

HUB = {"uri": "hf://org/reviews"}
CACHED = {"cache": "pvc://hub/models"}


def serving_world(**spec: Any) -> World:
    """Return a job that serves `model` with two servers, reconciled until nothing changes."""
    world = World(spec={"task": SPEC["task"], "model": HUB, "endpoint": {"replicas": 2}, **spec})
    world.settle()
    return world


def fetch_reasons(world: World) -> list[str]:
    plan = world.job().status.plan
    assert plan is not None
    return [reason for reason in plan.reasons if "fetches the model" in reason]


def test_all_servers_read_and_write_the_shared_cache() -> None:
    pod = serving_world(storage=CACHED).server["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/cache"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]

    assert {"name": "HF_HOME", "value": "/cache/models"} in container["env"]
    assert volume["persistentVolumeClaim"] == {"claimName": "hub"}
    assert not mount.get("readOnly")


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        pytest.param({}, True, id="of the Hub"),
        pytest.param({"storage": CACHED}, False, id="with a cache"),
        pytest.param({"model": {"uri": "pvc://models/reviews"}}, False, id="in a claim"),
    ],
)
def test_plan_reports_that_each_server_fetches_the_model(spec: dict[str, Any], reported: bool) -> None:
    found = fetch_reasons(serving_world(**spec))
    assert len(found) == reported
    assert all("spec.storage.cache" in reason for reason in found)
