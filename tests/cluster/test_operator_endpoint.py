"""Endpoints on a real API server, whose own controllers create ReplicaSets and pods of the Deployment; a stand-in for
KServe works on its real kind.
"""

from __future__ import annotations

from cluster_support.api_access import Object, wait_until
from cluster_support.http_scaled_object import install_http_scaled_objects
from cluster_support.httproute import install_httproutes, weights
from cluster_support.plays import RUNS
from cluster_support.world import World, condition, conditions, install_kserve, states
from finetune_operator.endpoints.kinds import IDLE_API, IDLE_PLURAL, ROUTE_API, ROUTE_PLURAL

DEPLOYED: Object = {"runtime": "deployment"}
ALONE: Object = {"training": None, "dataset": None, "evaluation": None, "predict": None, "endpoint": DEPLOYED}
"""A job that only serves a model."""
APPS = "apps/v1"


def deployment(world: World, job: str, revision: int = 1) -> Object | None:
    found = world.api.get(world.path(APPS, "deployments", f"{job}-endpoint-{revision}"))
    return found if isinstance(found, dict) else None


def of_endpoint(world: World, job: str, revision: int = 1) -> set[str]:
    """Return the kinds of the endpoint's objects, with that revision of its servers."""
    kinds = {
        "Deployment": (APPS, "deployments"),
        "Service": ("v1", "services"),
        "ConfigMap": ("v1", "configmaps"),
        "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
        "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
        "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    }
    shared = f"{job}-endpoint"
    names = {kind: f"{shared}-{revision}" if kind in ("Deployment", "ConfigMap") else shared for kind in kinds}
    return {kind for kind, of in kinds.items() if world.api.get(world.path(*of, names[kind])) is not None}


def led_to(world: World, job: str) -> str:
    """Return the revision that the job's Service selects."""
    service = world.api.get(world.path("v1", "services", f"{job}-endpoint"))
    assert isinstance(service, dict)
    return str(service["spec"]["selector"]["finetune.dev/attempt"])


def serves(world: World, job: str, revision: int) -> Object:
    """Return the endpoint's status once that revision serves, and no other one has servers."""
    status = world.wait(
        job,
        f"revision {revision} serves",
        lambda one: (
            (one.get("endpoint") or {}).get("revision") == revision
            and conditions(one).get("Ready") == "True"
            and one["endpoint"]["target"] == revision
        ),
    )
    assert led_to(world, job) == str(revision)
    wait_until(
        lambda: (
            [
                one["metadata"]["name"]
                for one in world.of_job(job, APPS, "deployments")
                if "deletionTimestamp" not in one["metadata"]
            ]
            == [f"{job}-endpoint-{revision}"]
        ),
        "servers of other revisions are gone",
    )
    return status["endpoint"]


def answers(world: World, job: str) -> Object:
    """Return the status once the endpoint is ready."""
    return world.wait(job, "the endpoint is ready", lambda status: conditions(status).get("Ready") == "True")


def test_trained_model_is_served_once_all_stages_have_succeeded(world: World) -> None:
    world.kubelet.playbook.set("served", "serve", RUNS)
    world.apply("served", {"endpoint": DEPLOYED})
    answers(world, "served")
    status = world.status("served")
    assert status["phase"] == "Serving"
    assert states(status) == {
        **dict.fromkeys(("prepare", "train", "evaluate", "predict"), ("Succeeded", 1)),
        "serve": ("Running", 1),
    }
    url = f"http://served-endpoint.{world.namespace}.svc"
    assert status["artifacts"]["endpointUrl"] == url
    assert condition(status, "Ready")["reason"] == "EndpointReady"
    assert url in condition(status, "Ready")["message"]
    assert conditions(status)["Stalled"] == "False"
    assert "completionTime" not in status
    assert of_endpoint(world, "served") == {"Deployment", "Service", "ConfigMap", "NetworkPolicy"}
    world.wait_event("served", "the endpoint is told of", lambda kind, reason, _: reason == "EndpointReady")
    wide = world.cluster.must("get", "ftj", "served", "-n", world.namespace, "-o", "wide")
    assert url in wide
    assert "Serving" in wide


def test_endpoint_follows_its_spec_and_goes_with_it(world: World) -> None:
    world.kubelet.playbook.set("edited", "serve", RUNS)
    world.apply("edited", {"endpoint": DEPLOYED})
    answers(world, "edited")
    first = deployment(world, "edited")
    assert first is not None
    world.change("edited", {"endpoint": {"replicas": 2, "maxReplicas": 3}})
    wait_until(
        lambda: {"HorizontalPodAutoscaler", "PodDisruptionBudget"} <= of_endpoint(world, "edited"),
        "what several servers need is there",
    )
    wait_until(lambda: (deployment(world, "edited") or {})["spec"]["replicas"] == 2, "there are two servers")
    after = deployment(world, "edited")
    assert after is not None
    assert after["metadata"]["uid"] == first["metadata"]["uid"]
    world.change("edited", {"endpoint": {"replicas": 1, "maxReplicas": None}})
    wait_until(
        lambda: not {"HorizontalPodAutoscaler", "PodDisruptionBudget"} & of_endpoint(world, "edited"),
        "what one server does not need is gone",
    )
    answers(world, "edited")
    world.change("edited", {"endpoint": None})
    wait_until(lambda: of_endpoint(world, "edited") == set(), "nothing of the endpoint is left")
    status = world.wait_phase("edited", "Succeeded")
    assert "endpointUrl" not in status.get("artifacts", {})
    assert "endpoint" not in status
    assert not [one for one in status["plan"]["reasons"] if "server" in one]


def test_new_revision_takes_over_when_it_is_ready_and_is_rolled_back(world: World) -> None:
    world.kubelet.playbook.set("rolled", "serve", RUNS)
    world.apply("rolled", {**ALONE, "endpoint": {**DEPLOYED, "maxQueue": 5}})
    serves(world, "rolled", 1)
    world.change("rolled", {"endpoint": {"maxQueue": 7}})
    assert [one["state"] for one in serves(world, "rolled", 2)["revisions"]] == ["Ended", "Serving"]
    assert world.order("rolled-endpoint-2")["serving"]["maxQueue"] == 7
    world.change("rolled", {"image": None, "endpoint": {"maxQueue": 7, "resources": {"cpu": "4000"}}})
    world.wait("rolled", "revision 3 finds no node", lambda one: one["endpoint"]["target"] == 3)
    wait_until(lambda: deployment(world, "rolled", 3) is not None, "revision 3 starts")
    assert led_to(world, "rolled") == "2"
    world.cluster.must("annotate", "ftj", "rolled", "-n", world.namespace, "finetune.dev/rollback=3:1")
    endpoint = serves(world, "rolled", 4)
    assert endpoint["rolledBackFrom"] == 3
    assert world.order("rolled-endpoint-4")["serving"]["maxQueue"] == 5
    assert [(one["number"], one.get("reason")) for one in endpoint["revisions"]] == [
        (1, "Superseded"), (2, "RolledBack"), (3, "RolledBack"), (4, None),
    ]  # fmt: skip
    world.wait_event("rolled", "the rollback is told of", lambda kind, reason, _: reason == "RolledBack")


def test_weights_of_an_httproute_move_to_a_canary_and_back(world: World) -> None:
    install_httproutes(world.cluster)
    world.kubelet.playbook.set("led", "serve", RUNS)

    def shares() -> dict[str, int]:
        return weights(world.api, world.namespace, "led-endpoint")

    traffic = {"canaryPercent": 5, "gateway": "infra/public", "hostnames": ["led.example.com"]}
    world.apply("led", {**ALONE, "endpoint": {**DEPLOYED, "maxQueue": 5, "traffic": traffic}})
    serves(world, "led", 1)
    before = world.api.get(world.path(ROUTE_API, ROUTE_PLURAL, "led-endpoint"))
    assert before is not None
    assert before["metadata"]["ownerReferences"][0]["name"] == "led"
    assert shares() == {"led-endpoint": 100}
    world.change("led", {"endpoint": {"maxQueue": 7}})
    wait_until(lambda: shares() == {"led-endpoint": 95, "led-endpoint-2": 5}, "the canary gets its share")
    assert led_to(world, "led") == "1"
    service = world.api.get(world.path("v1", "services", "led-endpoint-2"))
    assert service is not None
    assert service["spec"]["selector"]["finetune.dev/attempt"] == "2"
    world.change("led", {"endpoint": {"maxQueue": 5}})
    serves(world, "led", 1)
    assert shares() == {"led-endpoint": 100}
    wait_until(lambda: world.api.get(world.path("v1", "services", "led-endpoint-2")) is None, "its Service is gone")
    world.change("led", {"endpoint": {"maxQueue": 8}})
    wait_until(lambda: shares() == {"led-endpoint": 95, "led-endpoint-3": 5}, "the next canary gets its share")
    world.change("led", {"endpoint": {"traffic": {"canaryPercent": None}}})
    serves(world, "led", 3)
    assert shares() == {"led-endpoint": 100}
    after = world.api.get(world.path(ROUTE_API, ROUTE_PLURAL, "led-endpoint"))
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "the route stays"
    reasons = [reason for _, reason, _ in world.events("led")]
    assert [reasons.count(one) for one in ("CanaryStarted", "RevisionServes")] == [2, 1]
    world.change("led", {"runPolicy": {"suspend": True}})
    wait_until(lambda: world.api.get(world.path(ROUTE_API, ROUTE_PLURAL, "led-endpoint")) is None, "the route is gone")


def scale(world: World, job: str, count: int) -> None:
    """Set the number of servers as KEDA does."""
    world.api.patch(world.path(APPS, "deployments", f"{job}-endpoint-1"), {"spec": {"replicas": count}})


def test_endpoint_scaled_to_zero_by_keda_is_idle_until_a_request(world: World) -> None:
    install_http_scaled_objects(world.cluster)
    world.kubelet.playbook.set("sleepy", "serve", RUNS)
    idle = {"scaleToZeroAfterSeconds": 600}
    world.apply("sleepy", {**ALONE, "endpoint": {**DEPLOYED, "idle": idle, "maxReplicas": 3}})
    answers(world, "sleepy")
    path = world.path(IDLE_API, IDLE_PLURAL, "sleepy-endpoint")
    found = world.api.get(path)
    assert found is not None
    assert found["metadata"]["ownerReferences"][0]["name"] == "sleepy"
    assert found["spec"]["replicas"] == {"min": 0, "max": 3}
    assert found["spec"]["scaleTargetRef"]["name"] == "sleepy-endpoint-1"
    scaler = world.path("autoscaling/v2", "horizontalpodautoscalers", "sleepy-endpoint")
    assert world.api.get(scaler) is None
    scale(world, "sleepy", 0)
    status = world.wait("sleepy", "it is idle", lambda one: condition(one, "Ready").get("reason") == "EndpointIdle")
    assert conditions(status)["Ready"] == "True"
    assert status["endpoint"]["idleSince"]
    world.change("sleepy", {"endpoint": {"idle": {"scaleToZeroAfterSeconds": 60}}})
    wait_until(lambda: (world.api.get(path) or {})["spec"]["scaledownPeriod"] == 60, "the new time is set")
    servers = deployment(world, "sleepy")
    assert servers is not None
    assert servers["spec"]["replicas"] == 0, "the operator leaves the number to KEDA"
    scale(world, "sleepy", 2)
    status = world.wait(
        "sleepy", "it answers again", lambda one: condition(one, "Ready").get("reason") == "EndpointReady"
    )
    assert "idleSince" not in status["endpoint"]
    world.change("sleepy", {"endpoint": {"idle": None}})
    wait_until(lambda: world.api.get(path) is None, "the HTTPScaledObject is gone")
    wait_until(lambda: world.api.get(scaler) is not None, "an autoscaler takes its place")


def test_endpoint_of_another_job_is_left_alone_and_labels_select_either(world: World) -> None:
    for job in ("old", "new"):
        world.kubelet.playbook.set(job, "serve", RUNS)
    world.apply("old", {**ALONE, "endpoint": DEPLOYED})
    answers(world, "old")
    path = world.path("v1", "services", "old-endpoint")
    before = world.api.get(path)
    # takesOver is a retired field: stored jobs and manifests keep it, and it has no effect.
    world.apply("new", {**ALONE, "endpoint": {**DEPLOYED, "name": "old", "takesOver": "old"}})
    status = world.wait("new", "the name is refused", lambda one: conditions(one).get("Stalled") == "True")
    assert condition(status, "Stalled")["reason"] == "NameTaken"
    assert any("spec.endpoint.takesOver is retired" in one for one in status["plan"]["reasons"])
    assert world.of_job("new", APPS, "deployments") == [], "no server starts that nobody could reach"
    assert world.api.get(path) == before
    world.change("new", {"endpoint": {"name": None}})
    answers(world, "new")
    selectors = [
        world.api.get(world.path("v1", "services", f"{job}-endpoint"))["spec"]["selector"]  # type: ignore[index]
        for job in ("old", "new")
    ]
    assert [(one["finetune.dev/job"], one["finetune.dev/stage"]) for one in selectors] == [
        ("old", "serve"), ("new", "serve"),
    ]  # fmt: skip
    assert world.api.get(path) == before


def test_job_that_only_serves_needs_no_claim_and_stops_while_suspended(world: World) -> None:
    world.kubelet.playbook.set("alone", "serve", RUNS)
    world.apply("alone", ALONE)
    answers(world, "alone")
    assert world.of_job("alone", "v1", "persistentvolumeclaims") == []
    world.change("alone", {"runPolicy": {"suspend": True}})
    world.wait_phase("alone", "Suspended")
    wait_until(lambda: of_endpoint(world, "alone") == set(), "nothing of the endpoint is left")
    world.change("alone", {"runPolicy": {"suspend": False}})
    answers(world, "alone")
    assert world.status("alone")["phase"] == "Serving"


def test_foreign_deployment_is_left_alone(world: World) -> None:
    labels = {"app": "theirs"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a.example/b"}]}}
    theirs = {
        "apiVersion": APPS,
        "kind": "Deployment",
        "metadata": {"name": "taken-endpoint-1"},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod},
    }
    world.api.create(world.path(APPS, "deployments"), theirs)
    before = deployment(world, "taken")
    world.apply("taken", ALONE)
    status = world.wait(
        "taken",
        "it is told",
        lambda one: conditions(one).get("Stalled") == "True" and condition(one, "Stalled")["reason"] == "NameTaken",
    )
    assert conditions(status)["Ready"] == "False"
    after = deployment(world, "taken")
    assert before is not None
    assert after is not None
    assert after["spec"] == before["spec"]
    assert "ownerReferences" not in after["metadata"]


def test_endpoint_moves_to_kserve_and_back_without_being_unready(world: World) -> None:
    install_kserve(world.cluster)
    world.kubelet.playbook.set("moved", "serve", RUNS)
    world.apply("moved", ALONE)
    answers(world, "moved")
    service = world.path("serving.kserve.io/v1beta1", "inferenceservices", "moved-endpoint-2")
    predictor = world.path(APPS, "deployments", "moved-endpoint-2-predictor")
    world.change("moved", {"endpoint": {"runtime": "kserve", "replicas": 2}})
    wait_until(lambda: deployment(world, "moved") is None, "KServe's servers have taken the place of the Deployment")
    status = world.wait("moved", "both answer", lambda one: "2 of 2 servers" in condition(one, "Ready")["message"])
    assert f"http://moved-endpoint-2-{world.namespace}.example.com" in condition(status, "Ready")["message"]
    assert status["stages"][-1]["child"]["kind"] == "InferenceService"
    assert led_to(world, "moved") == "2"
    found = world.api.get(predictor)
    assert found is not None
    revision = found["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
    world.change("moved", {"endpoint": {"replicas": 1}})
    world.wait("moved", "one is left", lambda one: "1 of 1 server " in condition(one, "Ready")["message"])
    after = world.api.get(predictor)
    assert after is not None
    assert (after["metadata"]["uid"], after["spec"]["replicas"]) == (found["metadata"]["uid"], 1)
    assert after["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == revision, "none was replaced"
    world.change("moved", {"endpoint": {"runtime": "deployment"}})
    wait_until(lambda: world.api.get(service) is None, "the Deployment's servers have taken the place of KServe's")
    answers(world, "moved")
    reasons = [reason for _, reason, _ in world.events("moved")]
    assert reasons.count("RevisionServes") == 2
    assert "EndpointNotReady" not in reasons
    everywhere = world.api.items(world.path("v1", "events"))
    assert [one["message"] for one in everywhere if one["reason"] == "NotOfThisJob"] == []
