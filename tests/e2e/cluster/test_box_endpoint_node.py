"""An endpoint with a server on each of two nodes, of which one loses its power while clients send requests.

The lost server keeps its place in the Service until somebody detects the loss: here a few moments later, as the node
controller does it, or after the 50 s that the controller itself waits for a silent node. Processes of a lost node
refuse connections here; a machine without power does not answer at all, so that clients need a time-out of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from box_support.box import Box, on_fragile_nodes
from box_support.endpoint_client import BACK_OFF, HUNG_SECONDS, Answers, Client
from box_support.faults import node_off
from box_support.team import INPUTS, Team, tiny_spec
from cluster_support.api_access import Object, new_session, path_of, wait_until
from finetune_contract.layout import METRICS_PATH, REQUESTS_METRIC, SERVE_PORT
from finetune_operator.spec.status_times import stamp
from suite_plugins.patience import patient

pytestmark = pytest.mark.alone
TEXT = "A text to try the model with."
LEAST_REQUESTS = 30
"""Requests before and after the loss of the node."""


Detection: TypeAlias = Literal["at once", "by the node controller"]


@dataclass(frozen=True)
class Lost:
    """The endpoint after the loss of a node under requests."""

    detection: Detection
    plain: Answers
    """Answers to clients that send each request once."""
    retrying: Answers
    """Answers to clients that retry with back-off, for 5 s in all."""
    after: Answers
    """Answers to clients that send each request once, without the lost server's endpoint."""
    seconds: float
    """Time from the loss until the Service had no endpoint of the lost server."""
    codes: set[str]
    """Status codes of all answers of the server on the other node."""
    ready: Object
    """Condition Ready meanwhile."""


def ready_servers(team: Team, job: str) -> dict[str, Object]:
    """Return the servers that are ready by the address that the Service leads to."""
    service = f"{job}-endpoint"
    slices = team.box.api.items(
        path_of("discovery.k8s.io/v1", "endpointslices", team.namespace),
        labelSelector=f"kubernetes.io/service-name={service}",
    )
    addresses = {
        one["addresses"][0] for each in slices for one in each.get("endpoints") or [] if one["conditions"].get("ready")
    }
    pods = {pod["status"].get("podIP"): pod for pod in team.pods(job, "serve")}
    return {address: pods[address] for address in addresses if address in pods}


def url_of(team: Team, job: str) -> str:
    """Return the Service's URL by its address: this machine cannot resolve the cluster's names."""
    service = team.box.api.get(path_of("v1", "services", team.namespace, f"{job}-endpoint"))
    assert service is not None
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"


@pytest.fixture(scope="module")
def served(box: Box, team: Team) -> Iterator[str]:
    """Serve a model with one server on each fragile node."""
    box.own("losing a node")
    name = team.new_name("spread")
    alone = dict.fromkeys(("dataset", "training", "parallelism", "launcher"))
    size = {"cpu": "1", "memory": "2Gi"}
    spec = tiny_spec(
        **alone,
        model={"uri": f"pvc://{INPUTS}/tiny/classifier"},
        resources=size,
        endpoint={"runtime": "deployment", "resources": size},
        template=on_fragile_nodes(box, "inference"),
    )
    team.apply(name, {key: value for key, value in spec.items() if value is not None})

    def answering(count: int) -> None:
        wait_until(lambda: len(ready_servers(team, name)) == count, f"{count} servers answer", 600)

    answering(1)
    (first,) = ready_servers(team, name).values()
    node = first["spec"]["nodeName"]
    box.kubectl("cordon", node)
    try:
        team.patch(name, {"endpoint": {"replicas": 2}})
        answering(2)
    finally:
        box.kubectl("uncordon", node)
    yield name
    team.delete(name)


def codes_of(pod: Object) -> set[str]:
    """Return the status codes of all requests to the model that a server has answered."""
    with new_session() as session:
        url = f"http://{pod['status']['podIP']}:{SERVE_PORT}{METRICS_PATH}"
        text = session.get(url, timeout=patient(10)).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {
        one.labels["code"] for one in samples if one.name == f"{REQUESTS_METRIC}_total" and one.labels["path"] == "/"
    }


def wait_for_answers(answers: Answers, more: int) -> None:
    until = answers.over + more
    wait_until(lambda: answers.over >= until, f"{more} more requests are answered or given up")


def condition(status: str, reason: str) -> Object:
    """Return the condition Ready of a node or a pod since now."""
    now = stamp(datetime.now(UTC))
    times = {"lastHeartbeatTime": now} if reason == "KubeletReady" else {}
    return {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": now, **times}


def detect(box: Box, team: Team, pod: Object, detection: Detection) -> None:
    """Have the loss of a pod's node detected. The box reports a node as lost itself, which the node controller takes as
    the kubelet's own word, and leaves the pods alone.
    """
    if detection == "at once":
        patch = json.dumps({"status": {"conditions": [condition("False", "NodeNotReady")]}})
        name = pod["metadata"]["name"]
        box.kubectl("patch", "pod", name, "-n", team.namespace, "--subresource=status", "-p", patch)
    else:
        # A node that was ready and is silent from now on.
        patch = json.dumps({"status": {"conditions": [condition("True", "KubeletReady")]}})
        box.kubectl("patch", "node", pod["spec"]["nodeName"], "--subresource=status", "-p", patch)


@pytest.fixture(scope="module", params=get_args(Detection))
def lost(box: Box, team: Team, served: str, request: pytest.FixtureRequest) -> Lost:
    detection: Detection = request.param
    servers = ready_servers(team, served)
    gone, left = sorted(servers)
    assert servers[gone]["spec"]["nodeName"] != servers[left]["spec"]["nodeName"]
    client = Client(url_of(team, served), answer_seconds=HUNG_SECONDS)
    with client.steady_requests(TEXT) as plain, client.steady_requests(TEXT, BACK_OFF) as retrying:
        for answers in (plain, retrying):
            wait_for_answers(answers, LEAST_REQUESTS)
        began = time.monotonic()
        with node_off(box, servers[gone]["spec"]["nodeName"]):
            detect(box, team, servers[gone], detection)
            wait_until(lambda: set(ready_servers(team, served)) == {left}, "the lost server has no endpoint", 180)
            seconds = time.monotonic() - began
            wait_for_answers(retrying, LEAST_REQUESTS)
            with client.steady_requests(TEXT) as after:
                wait_for_answers(after, LEAST_REQUESTS)
            status = team.status(served)
            ready = next(one for one in status["conditions"] if one["type"] == "Ready")
        wait_until(lambda: len(ready_servers(team, served)) == 2, "both servers answer again", 300)
        wait_for_answers(retrying, LEAST_REQUESTS)
    return Lost(detection, plain, retrying, after, seconds, codes_of(servers[left]), ready)


def test_requests_fail_at_the_lost_server_only(lost: Lost, record_testsuite_property: Any) -> None:
    for name, answers in (("without retries", lost.plain), ("with retries", lost.retrying)):
        counts = f"{answers.sent} sent, {answers.retried} tried again, {len(answers.failed)} failed"
        record_testsuite_property(f"node lost, detected {lost.detection}, requests {name}", counts)
    record_testsuite_property(f"node lost, detected {lost.detection}, endpoint gone after", f"{lost.seconds:.1f} s")
    assert lost.plain.failed, "the lost server answers no more"
    assert lost.codes == {"200"}, "the other server answers all of its requests"
    assert lost.after.failed == []
    assert lost.ready["status"] == "True"


def test_clients_that_retry_see_nothing_of_a_lost_node(lost: Lost) -> None:
    if lost.detection == "at once":  # others may meet the lost server for longer than they retry
        assert lost.retrying.failed == []
    assert len(lost.retrying.failed) <= len(lost.plain.failed)
