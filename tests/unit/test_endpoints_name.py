"""Name of an endpoint: its Service follows it, and jobs that another operator let take over an endpoint go on."""

from __future__ import annotations

from typing import Any

from reconcile_world import World
from rollout_world import NAME, edit, history, serving, stands, status, there

FILMS = ("Service", "films-endpoint")


def takes_over() -> dict[str, Any]:
    """Return the spec of a job that only serves, and names another job in the retired field."""
    model = {"task": "text-classification", "model": {"uri": "hf://org/encoder"}}
    return {**model, "endpoint": {"name": "films", "takesOver": "films"}}


def test_new_name_of_an_endpoint_replaces_its_service() -> None:
    world = serving()
    edit(world, name="films")
    assert FILMS in world.others
    assert ("Service", NAME) not in world.others
    assert (there(world), status(world).name) == ([1], "films")
    world.edit(suspend=True)
    world.settle()
    assert FILMS not in world.others


def test_new_name_beside_another_change_moves_with_the_new_revision() -> None:
    world = serving()
    edit(world, name="films", maxQueue=7)
    assert ("Service", NAME) in world.others, "the URL answers until the new revision does"
    assert (there(world), status(world).name) == ([1, 2], None)
    assert f"http://{NAME}.team.svc" in world.job_condition("Ready")[2]
    stands(world, 2, 1)
    assert ("Service", NAME) not in world.others
    assert FILMS in world.others
    assert (there(world), status(world).name) == ([2], "films")


def test_job_that_took_an_endpoint_over_keeps_its_servers() -> None:
    world = World(spec=takes_over())
    world.settle()
    stands(world, 1, 1)
    world.status["endpoint"]["takenOverFrom"] = "films"
    before, applied = world.servers[f"{NAME}-1"], len(world.applied)
    world.settle()
    assert (world.servers[f"{NAME}-1"], len(world.applied)) == (before, applied)
    assert any("spec.endpoint.takesOver is retired and has no effect" in one for one in world.status["plan"]["reasons"])
    edit(world, name="films")
    assert history(world) == [(1, "Serving", None)], "the retired field is none of a revision's"
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady")


def test_job_that_lost_its_endpoint_serves_once_it_asks_again() -> None:
    world = serving()
    ended = {"state": "Ended", "reason": "TakenOver", "message": "FineTuneJob better has taken the endpoint over."}
    revisions = [{**one, **ended} for one in world.status["endpoint"]["revisions"]]
    endpoint = {**world.status["endpoint"], "takenOverBy": "better", "revisions": revisions}
    world.status |= {"phase": "Succeeded", "stages": [], "endpoint": endpoint}
    world.status["artifacts"].pop("endpointUrl")
    world.servers.clear()
    world.others = {key: one for key, one in world.others.items() if key == ("Service", NAME)}
    world.settle()
    world.generation += 1
    world.settle()
    assert (world.phase, world.servers, status(world).taken_over_by) == ("Succeeded", {}, "better")
    without = {key: one for key, one in world.spec.items() if key != "endpoint"}
    world.spec, asked = without, world.spec
    world.generation += 1
    world.settle()
    assert world.status.get("endpoint") is None
    world.spec, world.generation = asked, world.generation + 1
    world.settle()
    stands(world, 1, 1)
    assert (world.phase, world.job_condition("Ready")[:2]) == ("Serving", ("True", "EndpointReady"))


def test_job_that_waited_to_take_over_is_told_that_the_name_is_taken() -> None:
    world = World(spec=takes_over())
    world.settle()
    stands(world, 1, 1)
    # Its servers were made without the Service, which belongs to the other job.
    del world.others[FILMS], world.status["endpoint"]["name"]
    world.refuse = {"Service": (409, 'Service "films-endpoint" exists already and does not belong to this job')}
    world.settle()
    assert world.job_condition("Stalled")[:2] == ("True", "NameTaken")
    assert "films-endpoint" in world.job_condition("Stalled")[2]
    world.refuse = {}
    world.wait(3600)
    assert FILMS in world.others
    assert (status(world).name, world.job_condition("Ready")[0]) == ("films", "True")
