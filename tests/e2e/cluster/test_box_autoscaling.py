"""An endpoint whose servers Kubernetes' autoscaler adds and removes by the requests in flight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import pytest

from box_support.box import Box
from box_support.endpoint_client import BACK_OFF, Answers, Client
from box_support.metrics_pod import custom_metrics
from box_support.team import INPUTS, Team, tiny_spec
from cluster_support.api_access import Object, path_of, wait_until
from finetune_operator.endpoints.render.endpoint_objects import REQUESTS_IN_FLIGHT

TEXT = "a film that i would see again"
MOST = 2
TARGET = 2
CLIENTS = 8
"""Clients that each always have a request in flight, above the target of all servers together."""
ROWS = 24
"""Rows of each request of the load: a server computes for most of the time, and its queue of 256 rows takes all."""
SERVER = {"cpu": "250m", "memory": "2Gi"}
"""With 1 GiB, a server whose files nobody read before is at its limit: Linux drops its code, and reads it again."""
QUIET_SECONDS = 1.0
"""Time between requests while the load is low."""
BACK_OFF_SCALE_DOWN = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
"""Kubernetes waits for five minutes of low load by default."""


@dataclass(frozen=True)
class Scaled:
    """The endpoint after load rose and fell."""

    autoscaler: Object
    """The autoscaler under load."""
    before: int
    under_load: int
    after: int
    """Servers before, during and after the load."""
    busy: list[int]
    """Requests that each client of the load sent and that were answered."""
    lost: list[str]
    """Requests of the load that got no answer, with the state of the endpoint after them."""
    steady: Answers
    """Answers to a client that sent requests all the time."""


@pytest.fixture(scope="module")
def scaled(box: Box, team: Team, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    box.own("sending requests to a Service from this machine")
    name = team.new_name("scaled")
    with custom_metrics(team, REQUESTS_IN_FLIGHT, tmp_path_factory.mktemp("metrics")):
        endpoint = {"resources": SERVER, "maxReplicas": MOST}
        spec = tiny_spec(
            model={"uri": f"pvc://{INPUTS}/tiny/classifier"},
            resources=SERVER,
            endpoint={**endpoint, "targetRequestsInFlight": TARGET},
        )
        for block in ("dataset", "training", "parallelism", "launcher"):
            del spec[block]
        team.apply(name, spec)
        team.wait(name, lambda one: True if _ready(one) and not _by_cpu(one) else None, "Ready, scaled by requests")
        yield _under_load(team, name)
        team.delete(name)


def _ready(status: Object) -> bool:
    return ("Ready", "True") in {(one["type"], one["status"]) for one in status.get("conditions", [])}


def _by_cpu(status: Object) -> bool:
    """Return True if the plan scales by CPU use, as it does until the operator has seen the custom metrics API."""
    return any("CPU use" in reason for reason in status["plan"]["reasons"])


def _under_load(team: Team, name: str) -> Scaled:
    service = team.box.api.get(path_of("v1", "services", team.namespace, f"{name}-endpoint"))
    assert service is not None
    client = Client(f"http://{service['spec']['clusterIP']}")
    scaler = path_of("autoscaling/v2", "horizontalpodautoscalers", team.namespace, f"{name}-endpoint")
    team.box.api.patch(scaler, {"spec": BACK_OFF_SCALE_DOWN})

    def servers() -> int:
        found = team.box.api.get(path_of("apps/v1", "deployments", team.namespace, f"{name}-endpoint-1"))
        assert found is not None
        return int(found["status"].get("readyReplicas", 0))

    def shown() -> object:
        return team.box.api.get(scaler)

    before = servers()
    with client.steady_requests(TEXT, back_off=BACK_OFF, each_seconds=QUIET_SECONDS) as steady:
        with _busy(client) as busy:
            wait_until(lambda: servers() == MOST, "the autoscaler adds servers", 300, shown)
            under_load, autoscaler = servers(), team.box.api.get(scaler)
        wait_until(lambda: servers() == 1, "the autoscaler removes servers", 300, shown)
        after, at = servers(), steady.sent
        wait_until(lambda: steady.sent > at + 3, "requests after the load", 60)
    assert autoscaler is not None
    lost = [repr(error) for one in busy if (error := one.exception()) is not None]
    lost += [team.describe(name)] if lost else []
    answered = [one.result() for one in busy if one.exception() is None]
    return Scaled(autoscaler, before, under_load, after, answered, lost, steady)


@contextmanager
def _busy(client: Client) -> Iterator[list[Future[int]]]:
    """Keep one request of each client in flight while the block runs; each future has a client's answered requests."""
    over = Event()

    def send() -> int:
        answered = 0
        while not over.is_set():
            client.label_with_retries([TEXT] * ROWS, BACK_OFF)
            answered += 1
        return answered

    with ThreadPoolExecutor(CLIENTS, "load") as pool:
        futures = [pool.submit(send) for _ in range(CLIENTS)]
        try:
            yield futures
        finally:
            over.set()


def test_servers_follow_the_load(scaled: Scaled) -> None:
    assert (scaled.before, scaled.under_load, scaled.after) == (1, MOST, 1)


def test_autoscaler_reads_requests_in_flight_of_servers(scaled: Scaled) -> None:
    conditions = {one["type"]: one["status"] for one in scaled.autoscaler["status"]["conditions"]}
    assert conditions["ScalingActive"] == "True"
    [current] = scaled.autoscaler["status"]["currentMetrics"]
    assert current["type"] == "Pods"
    assert current["pods"]["metric"]["name"] == REQUESTS_IN_FLIGHT


def test_no_request_is_lost_while_servers_come_and_go(scaled: Scaled) -> None:
    assert not scaled.lost, "\n".join(scaled.lost)
    assert all(scaled.busy), "each client of the load got answers"
    # Retries do not count: one of some ten thousand connections is reset on its way, also while nothing changes.
    assert scaled.steady.failed == []
    assert len(scaled.steady.labels) == 1
