"""Connections to a real API server that die in silence, watches from versions that its storage has forgotten, and the
Lease of an operator that is uninstalled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster_support.api_access import Api, Object, path_of, wait_until
from cluster_support.background import Background
from cluster_support.control_plane import Cluster, needs_controllers, running_cluster
from cluster_support.deaf_proxy import DeafProxy
from cluster_support.fault_proxy import NONE, FaultProxy, Faults
from cluster_support.operator_process import MANIFESTS, OperatorProcess, install
from cluster_support.operator_process import NAMESPACE as SYSTEM
from cluster_support.world import BASE, SETTINGS, condition, install_kinds, merged
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

NAMESPACE = "default"
INVALID = merged(BASE, {"model": {"trustRemoteCode": True}})
"""Spec that an operator refuses: its status shows that it was read, without pods."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane that keeps no versions beside those of its storage."""
    with running_cluster(tmp_path_factory.mktemp("compacted"), "--watch-cache=false") as found:
        found.own("compaction")
        install_kinds(found)
        install(found)
        yield found


def path(name: str = "") -> str:
    return path_of(API_VERSION, PLURAL, NAMESPACE, name)


def create(api: Api, name: str) -> Object:
    return api.create(path(), {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": INVALID})


def refused(api: Api, name: str, generation: int = 1) -> bool:
    status = (api.get(path(name)) or {}).get("status", {})
    accepted = condition(status, "Accepted")
    return (accepted.get("status"), accepted.get("observedGeneration")) == ("False", generation)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


def test_operator_loses_no_change_when_its_watch_is_too_old(
    cluster: Cluster, background: Background, tmp_path: Path
) -> None:
    api = Api(cluster.access)
    proxy = FaultProxy(cluster.access, background, tmp_path, seed=1)
    proxy.up()
    operator = OperatorProcess(cluster, tmp_path, SETTINGS, server=proxy.url, ca=proxy.ca)
    operator.start()
    try:
        for name in ("changed", "deleted"):
            create(api, name)
            wait_until(lambda name=name: refused(api, name), f"{name} is read", detail=operator.logs)
        seen = api.get(path())["metadata"]["resourceVersion"]  # type: ignore[index]
        proxy.faults = Faults(refuse_watches=True)
        proxy.cut_watches()
        api.delete(path("deleted"))
        api.patch(path("changed"), {"spec": {"model": {"uri": "hf://a/c"}}})
        create(api, "created")
        cluster.compact()
        too_old = api.call("GET", f"{path()}?watch=true&timeoutSeconds=5&resourceVersion={seen}")
        assert too_old["object"]["code"] == 410
        proxy.faults = NONE
        wait_until(lambda: refused(api, "created"), "what was created is read", detail=operator.logs)
        wait_until(lambda: refused(api, "changed", generation=2), "what was changed is read", detail=operator.logs)
        two = lambda: 'finetune_jobs{phase="Pending"} 2.0' in operator.metrics()  # noqa: E731
        wait_until(two, "what was deleted is gone", detail=operator.metrics)
        # It was no outage, after whose end everything is read anyway; kopf counts its list when that is over.
        resyncs = set(re.findall(r'^finetune_resyncs_total\{reason="(\w+)"\}', operator.metrics(), re.MULTILINE))
        assert resyncs - {"relist"} == {"start", "leadership"}
    finally:
        operator.terminate()
        proxy.down()


def test_leader_stays_when_its_open_connections_die(cluster: Cluster, background: Background, tmp_path: Path) -> None:
    api = Api(cluster.access)
    proxy = DeafProxy(cluster.access, background)
    proxy.up()
    operator = OperatorProcess(cluster, tmp_path, SETTINGS, server=proxy.url)
    operator.start()
    try:
        names = [f"before-{number}" for number in range(16)]
        for name in names:  # together they need several connections, which are idle afterwards
            create(api, name)
        wait_until(lambda: all(refused(api, name) for name in names), "all are read", detail=operator.logs)
        assert proxy.go_deaf() > 8
        create(api, "after")
        wait_until(lambda: refused(api, "after"), "a new job is read", detail=operator.logs)
        lag = re.search(r"^finetune_event_loop_lag_seconds (\S+)$", operator.metrics(), re.MULTILINE)
        assert lag is not None
        if float(lag[1]) < 4.0:  # else this machine may be too slow for the Lease itself
            assert "no longer leads" not in operator.logs()
    finally:
        operator.terminate()
        proxy.down()


def test_lease_goes_with_the_deployment_though_rights_went_first(cluster: Cluster, tmp_path: Path) -> None:
    """As in `helm uninstall`: when the operator is told to stop, it may not release the Lease any more."""
    needs_controllers(cluster)
    rendered = list(yaml.safe_load_all(cluster.must("kustomize", str(MANIFESTS))))
    deployment = json.dumps(next(one for one in rendered if one["kind"] == "Deployment"))
    cluster.must("apply", "--server-side", "-f", "-", stdin=deployment)
    lease = ("get", "lease", "finetune-operator", "-n", SYSTEM)
    operator = OperatorProcess(cluster, tmp_path, SETTINGS)
    operator.start()
    try:
        wait_until(lambda: "this replica leads now" in operator.logs(), "it leads", detail=operator.logs)
        cluster.must("delete", "deployment", "finetune-operator", "-n", SYSTEM)
        cluster.must("delete", "rolebinding", "finetune-operator", "-n", SYSTEM)
    finally:
        operator.terminate()
    gone = lambda: "NotFound" in cluster.kubectl(*lease).stderr  # noqa: E731
    wait_until(gone, "the Lease is gone", detail=lambda: cluster.kubectl(*lease, "-o", "yaml").stdout)
