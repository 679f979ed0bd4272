"""The surroundings of the operator's tests work like the originals: nodes, training operators, faults, an audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from cluster_support.api_access import Access, Api, ApiError, Object, new_session, path_of, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.fault_proxy import NONE, FaultProxy, Faults
from cluster_support.kubelet import ON_STAND_IN
from cluster_support.plays import RUNS, SUCCEEDS, Play
from cluster_support.world import namespace_for_pods, record_uids
from suite_plugins.patience import patient

SECURE: Object = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    **ON_STAND_IN,
    "restartPolicy": "Never",
}
CONTAINER: Object = {
    "name": "pytorch",
    "image": "nothing:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


def pod_spec(**more: Any) -> Object:
    return {**SECURE, "containers": [CONTAINER], **more}


@pytest.fixture
def namespace(cluster: Cluster, kinds: None, stand_ins: Any) -> Iterator[str]:
    with namespace_for_pods(cluster) as name:
        yield name
        stand_ins.kubelet.playbook.clear()
        stand_ins.background.check()


@pytest.fixture
def api(cluster: Cluster) -> Api:
    return Api(cluster.access)


def batch_job(name: str, spec: Object) -> Object:
    template = {"spec": spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": template},
    }


def test_a_batch_job_runs_on_a_stand_in_node_and_its_log_can_be_read(
    cluster: Cluster, namespace: str, api: Api, stand_ins: Any
) -> None:
    stand_ins.kubelet.playbook.other = Play(message="well done", log="one\ntwo\nthree\n")
    api.create(path_of("batch/v1", "jobs", namespace), batch_job("fine", pod_spec()))
    cluster.must("wait", "--for=condition=Complete", "job/fine", "-n", namespace, "--timeout=120s")
    (pod,) = api.items(path_of("v1", "pods", namespace))
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert pod["spec"]["nodeName"].startswith("stand-in-")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (0, "Completed", "well done")
    if cluster.folder is not None:
        log = cluster.must("logs", pod["metadata"]["name"], "-n", namespace, "--tail=2")
        assert log == "two\nthree\n"


def test_a_pod_waits_for_its_config_map_and_ends_when_it_is_deleted(cluster: Cluster, namespace: str, api: Api) -> None:
    volumes = [{"name": "c", "configMap": {"name": "late"}}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod_spec(volumes=volumes)}
    path = path_of("v1", "pods", namespace, "p")
    api.create(path_of("v1", "pods", namespace), pod)
    wait_until(lambda: (api.get(path) or {})["spec"].get("nodeName"), "the pod has a node")
    assert (api.get(path) or {})["status"]["phase"] == "Pending"
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
    api.create(path_of("v1", "configmaps", namespace), config_map)
    wait_until(lambda: (api.get(path) or {})["status"]["phase"] == "Succeeded", "the pod has run")
    api.delete(path)
    wait_until(lambda: api.get(path) is None, "the pod is gone")


def test_a_pod_security_violation_is_refused(namespace: str, api: Api) -> None:
    spec = {**pod_spec(), "hostNetwork": True}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        api.create(path_of("v1", "pods", namespace), pod)


GANGS: dict[str, tuple[str, str, Object, set[str]]] = {
    "PyTorchJob": (
        "kubeflow.org/v1",
        "pytorchjobs",
        {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                "Worker": {"replicas": 2, "restartPolicy": "Never", "template": {"spec": pod_spec()}}
            },
        },
        {"gang-worker-0", "gang-worker-1"},
    ),
    "MPIJob": (
        "kubeflow.org/v2beta1",
        "mpijobs",
        {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod_spec()}},
                "Worker": {"replicas": 2, "restartPolicy": "Never", "template": {"spec": pod_spec()}},
            },
        },
        {"gang-launcher", "gang-worker-0", "gang-worker-1"},
    ),
}


@pytest.mark.parametrize("kind", GANGS)
@pytest.mark.parametrize("exit_code", [0, 10])
def test_a_gang_gets_pods_and_a_final_condition(
    namespace: str, api: Api, stand_ins: Any, kind: str, exit_code: int
) -> None:
    version, plural, spec, pods = GANGS[kind]
    stand_ins.kubelet.playbook.other = Play(lasts=0.5, exit_code=exit_code, message="")
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": "gang"}, "spec": spec}
    # By a watch, as the pods that are cleaned up exist for a moment only.
    seen = record_uids(stand_ins.background, stand_ins.watching, path_of("v1", "pods", namespace))
    api.create(path_of(version, plural, namespace), body)

    def over() -> Object | None:
        status = (api.get(path_of(version, plural, namespace, "gang")) or {}).get("status", {})
        return status if status.get("completionTime") else None

    status = wait_until(over, f"the {kind} has ended")
    last = "Failed" if exit_code else "Succeeded"
    wait_until(lambda: seen.keys() >= pods, "each pod was seen", detail=lambda: seen)
    assert seen.keys() == pods
    assert status["conditions"][-1]["type"] == last
    assert status["conditions"][-1]["reason"] == f"{kind}{last}"


def test_restarted_api_server_keeps_its_objects(cluster: Cluster, namespace: str, api: Api) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}}
    api.create(path_of("v1", "configmaps", namespace), config_map)
    cluster.restart_api_server()
    assert Api(cluster.access).get(path_of("v1", "configmaps", namespace, "kept")) is not None


def test_audit_log_records_account_and_request(cluster: Cluster, namespace: str, api: Api) -> None:
    mark = cluster.audit_mark()
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "seen"}}
    api.create(path_of("v1", "configmaps", namespace), config_map)
    # The controllers use the same account, and ConfigMaps too.
    seen = {"resource": "configmaps", "namespace": namespace, "name": "seen"}
    found = [
        (entry["verb"], entry["responseStatus"]["code"])
        for entry in cluster.audit(mark, "admin")
        if seen.items() <= entry.get("objectRef", {}).items()
    ]
    assert found == [("create", 201)]


@pytest.fixture
def proxy(cluster: Cluster, stand_ins: Any, tmp_path: Any) -> Iterator[FaultProxy]:
    made = FaultProxy(cluster.access, stand_ins.background, tmp_path, seed=1)
    made.up()
    yield made
    made.down()


def test_the_proxy_passes_on_refuses_and_cuts(cluster: Cluster, namespace: str, api: Api, proxy: FaultProxy) -> None:
    through = Api(Access(proxy.url, str(proxy.ca), cluster.access.token))
    path = path_of("v1", "configmaps", namespace)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    proxy.faults = Faults(conflicts=1.0)
    with pytest.raises(ApiError, match="409: "):
        through.create(path, body)
    assert api.get(f"{path}/a") is None
    proxy.faults = Faults(lost_answers=1.0)
    with pytest.raises(requests.ConnectionError):
        through.create(path, body)
    assert api.get(f"{path}/a") is not None
    proxy.faults = NONE
    assert through.get(f"{path}/a") == api.get(f"{path}/a")
    headers = {"Authorization": f"Bearer {cluster.access.token}"}
    with new_session().get(
        f"{proxy.url}{path}?watch=true", headers=headers, verify=str(proxy.ca), stream=True, timeout=patient(120)
    ) as watch:
        lines = watch.iter_lines()
        assert json.loads(next(lines))["object"]["metadata"]["name"]
        assert proxy.cut_watches() == 1
        with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            [list(lines) for _ in range(2)]
    assert proxy.injected == {"409": 1, "lost answer": 1}


def test_pods_run_until_their_play_is_switched(namespace: str, api: Api, stand_ins: Any) -> None:
    stand_ins.kubelet.playbook.other = RUNS
    labels = {"finetune.dev/job": "j", "finetune.dev/stage": "train", "finetune.dev/attempt": "1"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "labels": labels},
        "spec": {**pod_spec(), "volumes": []},
    }
    api.create(path_of("v1", "pods", namespace), body)
    path = path_of("v1", "pods", namespace, "p")
    wait_until(lambda: (api.get(path) or {})["status"]["phase"] == "Running", "the pod runs")
    assert stand_ins.kubelet.switch_play("j", "train", SUCCEEDS) == 1
    wait_until(lambda: (api.get(path) or {})["status"]["phase"] == "Succeeded", "the pod has ended")
