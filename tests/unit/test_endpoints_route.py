"""HTTPRoute of an endpoint: it stays through rollouts, and its weights give a canary its share."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.endpoints.decide.endpoint_rollout import canary_servers
from finetune_operator.endpoints.decide.route_state import ACCEPT_SECONDS, has_route, route_view
from reconcile_world import SPEC, World
from rollout_world import NAME, edit, history, led_to, serving, stands, status, there

ROUTED = {"gateway": "infra/public", "hostnames": ["reviews.example.com"]}
GATEWAY = {"canaryPercent": 10, **ROUTED}
CANARY = f"{NAME}-2"


def routed(replicas: int = 1, traffic: dict[str, Any] | None = None) -> World:
    """Return an endpoint whose first revision serves behind a Gateway."""
    traffic = GATEWAY if traffic is None else traffic
    world = World(
        spec={"task": SPEC["task"], "model": SPEC["model"], "endpoint": {"replicas": replicas, "traffic": traffic}},
        http_routes=True,
    )
    world.settle()
    stands(world, 1, replicas)
    return world


def canary(replicas: int = 1, traffic: dict[str, Any] | None = None) -> World:
    """Return such an endpoint whose second revision is a canary."""
    traffic = GATEWAY if traffic is None else traffic
    world = routed(replicas, traffic)
    edit(world, replicas=replicas, traffic=traffic, maxQueue=7)
    stands(world, 2, world.servers[CANARY]["spec"]["replicas"])
    return world


def weights(world: World) -> dict[str, int]:
    """Return the weight of each Service in the HTTPRoute."""
    (rule,) = world.others["HTTPRoute", NAME]["spec"]["rules"]
    assert all((one["kind"], one["port"]) == ("Service", 80) for one in rule["backendRefs"])
    return {one["name"]: one["weight"] for one in rule["backendRefs"]}


def services(world: World) -> dict[str, str | None]:
    """Return the revision that each Service selects."""
    return {
        name: raw["spec"]["selector"].get("finetune.dev/attempt")
        for (kind, name), raw in world.others.items()
        if kind == "Service"
    }


def test_route_leads_from_the_gateway_to_the_service() -> None:
    world = routed()
    assert world.others["HTTPRoute", NAME]["spec"] == {
        "parentRefs": [
            {"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": "infra", "name": "public"}
        ],
        "hostnames": ["reviews.example.com"],
        "rules": [{"backendRefs": [{"group": "", "kind": "Service", "name": NAME, "port": 80, "weight": 100}]}],
    }
    assert world.others["HTTPRoute", NAME]["apiVersion"] == "gateway.networking.k8s.io/v1"
    own = routed(traffic={"canaryPercent": 10, "gateway": "public"}).others["HTTPRoute", NAME]["spec"]
    assert own["parentRefs"] == [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "public"}]
    assert "hostnames" not in own, "those of the Gateway's listeners"
    assert any("an HTTPRoute leads requests of Gateway infra/public" in one for one in world.status["plan"]["reasons"])


def test_one_server_is_a_canary_of_any_weight() -> None:
    world = canary()
    assert world.servers[CANARY]["spec"]["replicas"] == 1
    assert weights(world) == {NAME: 90, CANARY: 10}
    assert services(world) == {NAME: "1", CANARY: "2"}
    found = status(world).canary
    assert found is not None
    assert (found.servers, found.weight) == (1, 10)
    assert "is a canary with 10 % of the Gateway's requests on 1 server, until" in world.job_condition("Ready")[2]
    started = next(one.message for one in world.events if one.reason == "CanaryStarted")
    assert "with 10 % of the Gateway's requests on 1 server beside 1 of revision 1" in started


def test_weights_are_moved_only_once_the_canary_answers() -> None:
    world = routed(replicas=2)
    edit(world, replicas=2, traffic=GATEWAY, maxQueue=7)
    assert (weights(world), services(world)) == ({NAME: 100}, {NAME: "1"})
    stands(world, 2, 1)
    assert weights(world) == {NAME: 90, CANARY: 10}


def test_canary_takes_over_once_its_share_is_unset() -> None:
    world = canary(replicas=3)
    world.wait(86_400)
    assert (there(world), status(world).revision) == ([1, 2], 1), "time alone does not end it"
    edit(world, replicas=3, traffic=ROUTED, maxQueue=7)
    assert world.servers[CANARY]["spec"]["replicas"] == 3
    assert (weights(world), led_to(world)) == ({NAME: 100}, 1), "until all of its servers answer"
    stands(world, 2, 3)
    assert (weights(world), led_to(world), there(world)) == ({NAME: 100}, 2, [2])
    assert history(world) == [(1, "Ended", "Superseded"), (2, "Serving", None)]
    edit(world, replicas=3, traffic=GATEWAY, maxQueue=8)
    stands(world, 3, 1)
    assert weights(world) == {NAME: 90, f"{NAME}-3": 10}, "the next one is a canary likewise"


@pytest.mark.parametrize("ended", ["rollback", "change"])
def test_weights_go_back_before_the_canary_is_removed(ended: str) -> None:
    world = canary()
    if ended == "rollback":
        world.annotations = {"finetune.dev/rollback": "2:1"}
    else:
        world.spec["endpoint"] = {"replicas": 1, "traffic": GATEWAY}
        world.generation += 1
    world.step()
    assert (weights(world), led_to(world)) == ({NAME: 100}, 1)
    assert services(world) == {NAME: "1", CANARY: "2"}, "requests under way are still led to it"
    world.settle()
    assert (there(world), services(world)) == ([1], {NAME: "1"})
    assert ("HTTPRoute", NAME) not in world.removed


def test_gateway_leads_nothing_to_a_canary_that_does_not_answer() -> None:
    world = canary()
    stands(world, 2, 0)
    assert (weights(world), status(world).canary, led_to(world)) == ({NAME: 100}, None, 1)
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady")
    stands(world, 2, 1)
    assert weights(world) == {NAME: 90, CANARY: 10}


def test_another_share_or_host_changes_the_weights_of_a_canary() -> None:
    world = canary()
    edit(world, replicas=1, traffic={**GATEWAY, "canaryPercent": 50}, maxQueue=7)
    found = status(world).canary
    assert found is not None
    assert found.weight == 50
    assert weights(world) == {NAME: 50, CANARY: 50}
    edit(world, replicas=1, traffic={**GATEWAY, "canaryPercent": 50, "hostnames": ["other.example.com"]}, maxQueue=7)
    assert world.others["HTTPRoute", NAME]["spec"]["hostnames"] == ["other.example.com"]
    assert weights(world) == {NAME: 50, CANARY: 50}


def test_new_revision_without_a_gateway_takes_over_at_once() -> None:
    world = serving(replicas=2, traffic={"canaryPercent": 34, "canarySeconds": 60})
    assert any("spec.endpoint.traffic has no effect without its gateway" in one for one in reasons(world))
    assert any("spec.endpoint.traffic.canarySeconds is retired" in one for one in reasons(world))
    edit(world, replicas=2, traffic={"canaryPercent": 34}, maxQueue=7)
    assert world.servers[CANARY]["spec"]["replicas"] == 2
    stands(world, 2, 2)
    assert (led_to(world), there(world)) == (2, [2])


def reasons(world: World) -> list[str]:
    found = world.status["plan"]["reasons"]
    assert isinstance(found, list)
    return found


def test_revision_that_was_held_back_stays_so_until_the_spec_changes() -> None:
    world = serving(maxQueue=5)
    edit(world, maxQueue=7)
    ended = {"state": "Ended", "reason": "CanaryFailed", "message": "Its canary failed: 50 of its 100 requests failed."}
    first, second = world.status["endpoint"]["revisions"]
    world.status["endpoint"] |= {"revisions": [first, {**second, **ended}], "target": 1, "rolledBackFrom": 2}
    del world.servers[CANARY], world.others["ConfigMap", CANARY]
    world.settle()
    world.wait(3600)
    assert (there(world), led_to(world), history(world)[1]) == ([1], 1, (2, "Ended", "CanaryFailed"))
    assert world.job_condition("Ready")[0] == "True"
    assert "Revision 2 is held back: Its canary failed" in world.job_condition("Ready")[2]
    edit(world, maxQueue=8)
    stands(world, 3, 1)
    assert (there(world), led_to(world)) == ([3], 3)


def test_canary_of_an_earlier_operator_without_a_gateway_ends() -> None:
    world = serving(replicas=2)
    edit(world, replicas=2, maxQueue=7)
    world.status["endpoint"]["canary"] = {
        "revision": 2,
        "servers": 1,
        "startTime": world.after(0),
        "measuredSeconds": 3,
    }
    del world.others["Service", NAME]["spec"]["selector"]["finetune.dev/attempt"]
    world.settle()
    assert (led_to(world), there(world), status(world).canary) == (1, [1, 2], None)
    stands(world, 2, 2)
    assert (led_to(world), there(world)) == (2, [2])


def test_route_goes_with_the_gateway_of_the_spec() -> None:
    world = routed()
    edit(world)
    assert ("HTTPRoute", NAME) not in world.others
    assert led_to(world) == 1
    edit(world, traffic=GATEWAY)
    assert weights(world) == {NAME: 100}
    world.edit(suspend=True)
    world.settle()
    assert ("HTTPRoute", NAME) not in world.others


def test_canary_without_its_gateway_takes_over() -> None:
    world = canary()
    edit(world, maxQueue=7)
    assert ("HTTPRoute", NAME) not in world.others
    assert (led_to(world), there(world)) == (2, [2])


def test_pass_that_ends_early_leaves_no_weights_behind() -> None:
    for writes in range(1, 7):
        world = canary()
        world.annotations = {"finetune.dev/rollback": "2:1"}
        world.step(crash_after=writes)
        world.settle()
        assert (weights(world), services(world), there(world)) == ({NAME: 100}, {NAME: "1"}, [1])


def test_cluster_without_httproutes_refuses_a_gateway() -> None:
    world = serving()
    before = world.servers[f"{NAME}-1"]
    edit(world, traffic=GATEWAY)
    state, reason, message = world.job_condition("Stalled")
    assert (state, reason) == ("True", "PlanRefused")
    assert "spec.endpoint.traffic.gateway" in message
    assert "the cluster has to serve HTTPRoute (gateway.networking.k8s.io/v1)" in message
    assert (world.job_condition("Ready")[0], world.servers[f"{NAME}-1"]) == ("True", before)
    world.http_routes = True
    world.settle()
    assert weights(world) == {NAME: 100}


def test_policy_admits_the_pods_of_a_gateway_of_another_namespace() -> None:
    peers = {
        gateway: routed(traffic={"canaryPercent": 10, "gateway": gateway}).others["NetworkPolicy", NAME]
        for gateway in ("public", "team/public", "infra/public")
    }
    admitted = {gateway: policy["spec"]["ingress"][0]["from"] for gateway, policy in peers.items()}
    assert admitted["public"] == admitted["team/public"] == [{"podSelector": {}}]
    assert admitted["infra/public"] == [
        {"podSelector": {}},
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "infra"}},
            "podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "public"}},
        },
    ]


@pytest.mark.parametrize(
    ("percent", "running", "servers"), [(1, 1, 1), (1, 9, 1), (20, 4, 1), (34, 2, 2), (50, 3, 3), (10, 20, 3)]
)
def test_canary_has_no_more_requests_per_server_than_others(percent: int, running: int, servers: int) -> None:
    assert canary_servers(percent, running) == servers


# ----------------------------------------------------------------------------------------------------------- its state


def reported(world: World, **conditions: str) -> dict[str, Any]:
    """Return the HTTPRoute with such conditions of its Gateway; none: no controller has seen it."""
    found = [
        {"type": name, "status": value, "reason": f"Not{name}", "message": "no listener allows this namespace"}
        for name, value in conditions.items()
    ]
    raw = world.others["HTTPRoute", NAME]
    parents = [{"parentRef": {"name": "public"}, "conditions": found}] if found else []
    return {**raw, "metadata": {**raw["metadata"], "creationTimestamp": world.after(0)}, "status": {"parents": parents}}


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ({"Accepted": "True", "ResolvedRefs": "True"}, None),
        ({"Accepted": "True"}, None),
        ({"Accepted": "False"}, "no listener allows this namespace"),
        ({"Accepted": "True", "ResolvedRefs": "False"}, "no listener allows this namespace"),
        ({"Accepted": "Unknown"}, "no controller of the Gateway has accepted it"),
        ({}, "no controller of the Gateway has accepted it"),
    ],
)
def test_route_that_is_not_accepted_is_reported_once(conditions: dict[str, str], problem: str | None) -> None:
    world = routed()
    world.route = route_view(reported(world, **conditions))
    world.settle()
    assert "RouteNotAccepted" not in world.event_reasons(), "controllers take a while"
    for _ in range(2):
        world.wait(ACCEPT_SECONDS)
    message = world.job_condition("Ready")[2]
    if problem is None:
        assert "Gateway" not in message
        assert "RouteNotAccepted" not in world.event_reasons()
        return
    assert f"The Gateway does not lead requests to it: {problem}. See kubectl describe httproute" in message
    assert world.event_reasons().count("RouteNotAccepted") == 1
    world.route = route_view(reported(world, Accepted="True"))
    world.wait(ACCEPT_SECONDS)
    assert "does not lead" not in world.job_condition("Ready")[2]


def test_route_is_read_only_where_there_is_one() -> None:
    assert has_route(routed().job())
    assert not has_route(serving().job())
    assert route_view({"metadata": 3}) is None
