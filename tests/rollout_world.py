"""A simulated cluster with a job that only serves: its revisions, their servers, the Service, and the history."""

from __future__ import annotations

from typing import Any

from finetune_operator.spec.types import EndpointStatus, RevisionStatus
from reconcile_world import SPEC, World

NAME = "reviews-endpoint"
ROLLBACK = "finetune.dev/rollback"


def serving(**endpoint: Any) -> World:
    """Return a job whose first revision serves with all of its servers."""
    world = World(spec={"task": SPEC["task"], "model": SPEC["model"], "endpoint": endpoint})
    world.settle()
    stands(world, 1, endpoint.get("replicas", 1))
    return world


def stands(world: World, revision: int, available: int, stuck: str | None = None) -> None:
    """Set the status of that revision's Deployment."""
    raw = world.servers[f"{NAME}-{revision}"]
    raw["status"] = {
        "availableReplicas": available,
        "updatedReplicas": raw["spec"]["replicas"],
        "observedGeneration": raw["metadata"]["generation"],
        "conditions": [{"type": "Progressing", "status": "False", "message": stuck}] if stuck else [],
    }
    world.settle()


def edit(world: World, **endpoint: Any) -> None:
    world.spec = {**world.spec, "endpoint": endpoint}
    world.generation += 1
    world.settle()


def roll_back(world: World, request: str | None) -> None:
    world.annotations = {} if request is None else {ROLLBACK: request}
    world.settle()


def led_to(world: World) -> int | None:
    """Return the revision that the Service selects; None: all of them."""
    selector = world.others["Service", NAME]["spec"]["selector"]
    return int(selector["finetune.dev/attempt"]) if "finetune.dev/attempt" in selector else None


def there(world: World) -> list[int]:
    """Return the revisions that have a Deployment, each with its ConfigMap."""
    deployed = sorted(int(name.removeprefix(f"{NAME}-")) for name in world.servers)
    revisions = sorted(int(name.removeprefix(f"{NAME}-")) for kind, name in world.others if kind == "ConfigMap")
    assert revisions == deployed
    return deployed


def status(world: World) -> EndpointStatus:
    found = world.job().status.endpoint
    assert found is not None
    return found


def revision(world: World, number: int) -> RevisionStatus:
    return next(one for one in status(world).revisions if one.number == number)


def history(world: World) -> list[tuple[int, str, str | None]]:
    return [(one.number, one.state, one.reason) for one in status(world).revisions]


def rolled_out(world: World, **endpoint: Any) -> None:
    """Edit the endpoint and let its new revision take over."""
    edit(world, **endpoint)
    target = status(world).target
    assert target is not None
    stands(world, target, endpoint.get("replicas", 1))
    assert led_to(world) == target
    assert there(world) == [target]
