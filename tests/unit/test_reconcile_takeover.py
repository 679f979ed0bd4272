"""Takeover of an endpoint's name by another job: when the URL moves, and what the former job does then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.reconcile.endpoint_takeover import taken_by
from reconcile_world import World
from rollout_world import NAME, edit, history, serving, stands, status, there

CLAIM = {"name": "movies", "takesOver": "movies"}
SERVICE = ("Service", "movies-endpoint")


def newcomer(**endpoint: Any) -> World:
    """Return a job that takes over the endpoint `movies`, and whose servers start."""
    world = World(spec={"task": "text-classification", "model": {"uri": "hf://a/b"}, "endpoint": {**CLAIM, **endpoint}})
    world.former_endpoint = "movies-endpoint"
    world.settle()
    return world


def test_url_moves_once_all_servers_of_the_other_job_answer() -> None:
    world = newcomer(replicas=2)
    stands(world, 1, 1)
    assert (SERVICE in world.others, ("Service", NAME) in world.others) == (False, False)
    assert world.job_condition("Ready") == (
        "False", "TakingOver", "The endpoint is taken over from FineTuneJob movies once all servers answer.",
    )  # fmt: skip
    assert status(world).taken_over_from is None
    stands(world, 1, 2)
    assert world.others[SERVICE]["spec"]["selector"]["finetune.dev/job"] == "reviews"
    assert (status(world).taken_over_from, status(world).name) == ("movies", "movies")
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady")
    assert "http://movies-endpoint.team.svc" in world.job_condition("Ready")[2]
    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert artifacts.endpoint_url == "http://movies-endpoint.team.svc"
    assert world.event_reasons()[-2:] == ["EndpointTaken", "EndpointReady"]
    stands(world, 1, 1)
    assert world.job_condition("Ready")[0] == "True", "it is taken over once"


def test_takeover_that_ends_early_is_made_up_for() -> None:
    for writes in range(1, 5):
        world = newcomer()
        world.servers[f"{NAME}-1"]["status"] = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 1}
        world.step(crash_after=writes)
        world.settle()
        assert SERVICE in world.others
        assert status(world).taken_over_from == "movies"


def test_takeover_of_another_name_is_refused() -> None:
    world = newcomer()
    world.former_endpoint = "films-endpoint"
    stands(world, 1, 1)
    assert SERVICE not in world.others
    assert world.job_condition("Stalled") == (
        "True",
        "TakeoverMismatch",
        "spec.endpoint.name is movies, and the endpoint of FineTuneJob movies has the Service films-endpoint: set it "
        "to films.",
    )
    assert world.job_condition("Ready")[:2] == ("False", "TakeoverMismatch")
    edit(world, name="films", takesOver="movies")
    assert ("Service", "films-endpoint") in world.others


def test_former_job_succeeds_and_its_servers_end() -> None:
    world = serving()
    world.taken_by = "better"
    world.settle()
    assert there(world) == []
    assert ("Service", NAME) in world.others, "it is the other job's now"
    assert world.phase == "Succeeded"
    assert (status(world).taken_over_by, history(world)) == ("better", [(1, "Ended", "TakenOver")])
    assert "EndpointTakenOver" in world.event_reasons()
    assert "EndpointRemoved" not in world.event_reasons()
    artifacts = world.job().status.artifacts
    assert artifacts is None or artifacts.endpoint_url is None


def test_former_job_serves_again_once_the_other_has_gone() -> None:
    world = serving()
    world.taken_by = "better"
    world.settle()
    world.taken_by = None
    del world.others["Service", NAME]
    world.settle()
    stands(world, 1, 1)
    assert (world.phase, status(world).taken_over_by, there(world)) == ("Serving", None, [1])
    assert ("Service", NAME) in world.others
    assert world.job_condition("Ready")[0] == "True"


def test_new_name_of_an_endpoint_replaces_its_service() -> None:
    world = serving()
    edit(world, name="films")
    assert ("Service", "films-endpoint") in world.others
    assert ("Service", NAME) not in world.others
    assert (there(world), status(world).name) == ([1], "films")
    world.edit(suspend=True)
    world.settle()
    assert ("Service", "films-endpoint") not in world.others


@pytest.mark.parametrize(
    ("claim", "taken", "deleting", "expected"),
    [
        pytest.param({"name": "reviews", "takesOver": "reviews"}, "reviews", False, "other", id="taken"),
        pytest.param({"name": "reviews", "takesOver": "reviews"}, None, False, None, id="not yet"),
        pytest.param({"name": "reviews", "takesOver": "third"}, "reviews", False, None, id="claims another job's"),
        pytest.param({"name": "films", "takesOver": "reviews"}, "reviews", False, None, id="another name"),
        pytest.param({"name": "reviews", "takesOver": "reviews"}, "reviews", True, None, id="being deleted"),
    ],
)
def test_endpoint_is_taken_by_the_job_that_claims_and_has_it(
    claim: dict[str, Any], taken: str | None, deleting: bool, expected: str | None
) -> None:
    former, other = serving(), serving(**claim)
    view = replace(other.job(), name="other", deleting=deleting)
    found = status(other).model_copy(update={"taken_over_from": taken})
    view = replace(view, status=view.status.model_copy(update={"endpoint": found}))
    assert taken_by(former.job(), [view]) == expected
