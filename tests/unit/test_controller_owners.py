"""Labels are a claim: an object belongs to a job if the chain of its controllers leads to the job."""

import sys
from typing import Any

import pytest

from finetune_operator.controller.store.owners import Owner, controller_of
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.controller.store.store import Store
from finetune_operator.kubernetes_api.resources import POD
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS

KEY, ID = JobKey("team", "demo"), ("team", "job-1")
API_VERSIONS = {
    "FineTuneJob": "finetune.dev/v1alpha1", "MPIJob": "kubeflow.org/v2beta1", "Job": "batch/v1", "Pod": "v1",
    "SparkApplication": "sparkoperator.k8s.io/v1beta2", "Deployment": "apps/v1", "ReplicaSet": "apps/v1",
    "InferenceService": "serving.kserve.io/v1beta1",
}  # fmt: skip
KINDS = {kind: GroupKind.of(version, kind) for kind, version in API_VERSIONS.items()}
OF_THE_JOB = Owner(KINDS["FineTuneJob"], "demo", "job-1")
CHILD = Owner(KINDS["MPIJob"], "demo-train-1", "child-1")
OTHER_CHILD = Owner(KINDS["MPIJob"], "other-train-1", "other")
LAUNCHER = Owner(KINDS["Job"], "demo-train-1-launcher", "launcher-1")
DRIVER = Owner(KINDS["Pod"], "demo-prepare-1-driver", "driver-1")
_versions = iter(range(1, 10_000))


def reference(owner: Owner, controller: bool = True) -> dict[str, Any]:
    version = "/".join(filter(None, (owner.kind.group, "v1")))
    about = {"apiVersion": version, "kind": owner.kind.name, "name": owner.name, "uid": owner.uid}
    return {**about, "controller": controller}


def metadata(name: str, uid: str, owner: Owner | None, stage: str = "train", attempt: str = "1") -> dict[str, Any]:
    labels = {"job": "demo", "job-uid": "job-1", "stage": stage, "attempt": attempt}
    return {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(next(_versions)),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {f"finetune.dev/{label}": value for label, value in labels.items()},
        "ownerReferences": [] if owner is None else [reference(owner)],
    }


def job() -> dict[str, Any]:
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata("demo", "job-1", None)}


def child(owner: Owner | None = OF_THE_JOB, kind: str = "MPIJob") -> dict[str, Any]:
    stage = "prepare" if kind == "SparkApplication" else "train"
    about = metadata(f"demo-{stage}-1", "child-1", owner, stage)
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": about}


def pod(name: str, owner: Owner | None, **claims: str) -> dict[str, Any]:
    about = metadata(name, f"uid-of-{name}", owner, **claims)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "status": {"phase": "Running"}}


@pytest.fixture
def store() -> Store:
    made = Store(CLUSTER_SETTINGS)
    made.put(job())
    return made


def pods(store: Store) -> list[str]:
    return [view.name for view in store.pods(ID)]


def foreign(store: Store) -> list[str]:
    return [entry.name for entry in store.foreign(KEY)]


FORGED: dict[str, tuple[Owner | None, dict[str, str]]] = {
    "a copy without its references": (None, {}),
    "of an object that is none of the job's": (Owner(KINDS["ReplicaSet"], "web", "web-1"), {}),
    "of the child's name with another uid": (Owner(KINDS["MPIJob"], "demo-train-1", "forged"), {}),
    "of the child's name and another kind": (Owner(KINDS["ReplicaSet"], "demo-train-1", "forged"), {}),
    "of the child's kind in another group": (Owner(GroupKind("other.org", "MPIJob"), "demo-train-1", "forged"), {}),
    "of the child of another job": (Owner(KINDS["MPIJob"], "other-train-1", "other-1"), {}),
    "of an attempt that there cannot be": (Owner(KINDS["MPIJob"], "demo-train-0", "forged"), {"attempt": "0"}),
    "of a driver, where nothing is run by Spark": (DRIVER, {}),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_pod_with_the_jobs_labels_alone_is_not_its_own(store: Store, case: str):
    owner, claims = FORGED[case]
    store.put(child())
    store.put(pod("worker", CHILD))
    entry = store.put(pod("copy", owner, **claims))
    assert entry is not None
    assert pods(store) == ["worker"]
    assert not store.belongs(entry)
    assert foreign(store) == ["copy"]
    # Nor does it belong after its end.
    store.remove(pod("copy", owner, **claims))
    assert pods(store) == ["worker"]


def test_a_reference_that_is_no_controllers_counts_for_nothing(store: Store):
    store.put(child())
    copy = pod("copy", None)
    copy["metadata"]["ownerReferences"] = [reference(CHILD, controller=False)]
    store.put(copy)
    assert (pods(store), foreign(store)) == ([], ["copy"])


def test_a_child_that_the_job_does_not_control_runs_none_of_its_attempts(store: Store):
    store.put(child(owner=None))
    store.put(pod("worker", CHILD))
    assert store.children(ID) == ()
    assert foreign(store) == ["demo-train-1", "worker"]


def test_copies_of_objects_of_a_missing_job_are_reported():
    store = Store(CLUSTER_SETTINGS)
    store.put(pod("copy", None))
    leaving = pod("leaving", None)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store.put(leaving)
    assert foreign(store) == ["copy"]


@pytest.mark.parametrize("answer", ["found", "gone", "another", "of another job"])
def test_batch_job_of_an_mpijob_is_read_once(store: Store, answer: str):
    store.put(child())
    store.put(pod("launcher", LAUNCHER))
    assert store.unresolved(ID) == {LAUNCHER}
    # It is not reported before it is known.
    assert (pods(store), foreign(store)) == ([], [])
    there = {
        "found": metadata("demo-train-1-launcher", LAUNCHER.uid, CHILD),
        "gone": None,
        "another": metadata("demo-train-1-launcher", "another", CHILD),
        "of another job": metadata("demo-train-1-launcher", LAUNCHER.uid, OTHER_CHILD),
    }[answer]
    store.resolve(ID, LAUNCHER, None if there is None else {"metadata": there})
    assert store.unresolved(ID) == set()
    # A pod may outlive its controller for a moment; its name then shows whose it is.
    own = answer in ("found", "gone")
    assert (pods(store), foreign(store)) == ((["launcher"], []) if own else ([], ["launcher"]))


def test_a_link_outlives_the_objects_that_showed_it(store: Store):
    """Reports are read after a child is deleted, and executors after their driver."""
    spark = child(kind="SparkApplication")
    driver = pod(DRIVER.name, Owner(KINDS["SparkApplication"], "demo-prepare-1", "child-1"), stage="prepare")
    executor = pod("executor", Owner(KINDS["Pod"], DRIVER.name, f"uid-of-{DRIVER.name}"), stage="prepare")
    # An order in which a start may list them.
    for raw in (executor, driver, spark):
        store.put(raw)
    assert pods(store) == ["executor", DRIVER.name] or pods(store) == [DRIVER.name, "executor"]
    store.mark_deleted(KINDS["SparkApplication"], "team", "demo-prepare-1")
    store.mark_deleted(KINDS["Pod"], "team", DRIVER.name)
    store.put(pod("executor", Owner(KINDS["Pod"], DRIVER.name, f"uid-of-{DRIVER.name}"), stage="prepare"))
    assert pods(store) == ["executor"]


def test_pods_of_a_child_deleted_unseen_belong_to_the_job_by_name(store: Store):
    store.put(pod("worker", CHILD))
    assert pods(store) == ["worker"]


def test_a_driver_without_a_reference_is_its_applications_by_its_name(store: Store):
    store.put(child(kind="SparkApplication"))
    store.put(pod(DRIVER.name, None, stage="prepare"))
    store.put(pod("copy", None, stage="prepare"))
    assert (pods(store), foreign(store)) == ([DRIVER.name], ["copy"])


@pytest.mark.parametrize(
    "references",
    [
        None,
        "text",
        [None],
        [{}],
        [reference(CHILD, False)],
        [reference(CHILD) | {"kind": 1}],
        [reference(CHILD) | {"apiVersion": None}],
    ],
)
def test_references_that_cannot_be_read_are_none(references: Any):
    assert controller_of({"ownerReferences": references}) is None


DEPLOYMENT = Owner(KINDS["Deployment"], "demo-endpoint-1", "servers-1")
OTHER_DEPLOYMENT = Owner(KINDS["Deployment"], "web", "web-1")
REPLICA_SET = Owner(KINDS["ReplicaSet"], "demo-endpoint-1-5f7c", "revision-1")


def servers(owner: Owner | None = OF_THE_JOB) -> dict[str, Any]:
    about = metadata(DEPLOYMENT.name, DEPLOYMENT.uid, owner, "serve")
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**about, "generation": 1}}


@pytest.mark.parametrize("answer", ["found", "another", "of another deployment", "of nobody"])
def test_server_belongs_to_the_job_of_its_replica_set_and_deployment(store: Store, answer: str):
    store.put(servers())
    store.put(pod("server", REPLICA_SET, stage="serve"))
    assert store.unresolved(ID) == {REPLICA_SET}
    assert (pods(store), foreign(store)) == ([], [])
    there = {
        "found": metadata(REPLICA_SET.name, REPLICA_SET.uid, DEPLOYMENT, "serve"),
        "another": metadata(REPLICA_SET.name, "another", DEPLOYMENT, "serve"),
        "of another deployment": metadata(REPLICA_SET.name, REPLICA_SET.uid, OTHER_DEPLOYMENT),
        "of nobody": metadata(REPLICA_SET.name, REPLICA_SET.uid, None, "serve"),
    }[answer]
    store.resolve(ID, REPLICA_SET, {"metadata": there})
    assert store.unresolved(ID) == set()
    assert (pods(store), foreign(store)) == ((["server"], []) if answer == "found" else ([], ["server"]))


def test_a_deployment_that_the_job_does_not_control_serves_nothing_of_it(store: Store):
    store.put(servers(owner=None))
    store.put(pod("server", REPLICA_SET, stage="serve"))
    there = metadata(REPLICA_SET.name, REPLICA_SET.uid, DEPLOYMENT, "serve")
    store.resolve(ID, REPLICA_SET, {"metadata": there})
    assert store.endpoints(ID) == ()
    assert pods(store) == []
    assert DEPLOYMENT.name in foreign(store)


SERVICE = Owner(KINDS["InferenceService"], "demo-endpoint", "service-1")
PREDICTOR = Owner(KINDS["Deployment"], "demo-endpoint-predictor", "servers-2")


def service(owner: Owner | None = OF_THE_JOB) -> dict[str, Any]:
    about = metadata(SERVICE.name, SERVICE.uid, owner, "serve")
    spec = {"predictor": {"minReplicas": 2, "maxReplicas": 2}}
    return {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": about, "spec": spec}


def predictor() -> dict[str, Any]:
    about = metadata(PREDICTOR.name, PREDICTOR.uid, SERVICE, "serve")
    labels = {**about["labels"], "serving.kserve.io/inferenceservice": SERVICE.name}
    status = {"availableReplicas": 2}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**about, "labels": labels}, "status": status}


@pytest.mark.parametrize("first", ["service", "deployment"])
def test_kserve_servers_belong_to_the_job_in_any_order_of_arrival(store: Store, first: str):
    made = (service(), predictor()) if first == "service" else (predictor(), service())
    store.put(made[0])
    store.put(pod("server", REPLICA_SET, stage="serve"))
    store.put(made[1])
    store.resolve(ID, REPLICA_SET, {"metadata": metadata(REPLICA_SET.name, REPLICA_SET.uid, PREDICTOR, "serve")})
    assert (pods(store), foreign(store)) == (["server"], [])
    (found,) = store.endpoints(ID)
    assert (found.ref.name, found.replicas, found.available, found.has_deployment) == (SERVICE.name, 2, 2, True)


def test_foreign_inference_service_does_not_serve_the_job(store: Store):
    store.put(service(owner=None))
    store.put(predictor())
    assert store.endpoints(ID) == ()
    assert foreign(store) == [SERVICE.name, PREDICTOR.name]


def test_pod_with_only_the_labels_of_a_server_is_foreign(store: Store):
    store.put(servers())
    store.put(pod("copy", None, stage="serve"))
    assert (pods(store), foreign(store)) == ([], ["copy"])


def test_replica_set_is_resolved_only_for_the_serving_stage(store: Store):
    store.put(child())
    store.put(pod("copy", REPLICA_SET))
    assert store.unresolved(ID) == set()
    assert foreign(store) == ["copy"]


MANY = 500


def chained(number: int) -> Owner | None:
    """Return the next pod of a chain, the last of which is the job's."""
    last = number == MANY - 1
    return OF_THE_JOB if last else Owner(KINDS["Pod"], f"p{number + 1}", f"uid-of-p{number + 1}")


@pytest.mark.parametrize("owner_of", [chained, lambda _: OF_THE_JOB, lambda _: None], ids=["a chain", "own", "foreign"])
def test_work_for_many_pods_of_a_job_grows_with_their_number(store: Store, owner_of: Any):
    for number in range(MANY):
        store.put(pod(f"p{number}", owner_of(number)))
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = len(pods(store)) + len(foreign(store))
        store.retain_listed(POD.group_kind, (), 10**9)
    finally:
        sys.setprofile(None)
    # 70 for each pod; work that grows with the square is 280 to 3,600 for each of 500.
    assert (found, pods(store), calls < 100 * MANY) == (MANY, [], True), calls
