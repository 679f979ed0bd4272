"""Jobs with `engine: spark` by the real Spark Operator, whose drivers play scripts on stand-in nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_support.api_access import Api, Object, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.plays import PREEMPTED, RUNS, WRONG_COLUMN, Play
from cluster_support.spark_operator import running_spark_operator
from cluster_support.stand_ins import StandIns, running_stand_ins
from cluster_support.world import SETTINGS, World, install_kinds, namespace_for_pods, stage_of, states

SPARK = {"preparation": {"engine": "spark", "workers": 2}, "predict": None, "evaluation": None}
APPLICATIONS = ("sparkoperator.k8s.io/v1beta2", "sparkapplications")


@pytest.fixture(scope="module")
def stand_ins(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIns]:
    """Run nodes and training operators, but for Spark's."""
    with running_stand_ins(own_cluster, tmp_path_factory.mktemp("kubelet"), spark=False) as around:
        yield around


@pytest.fixture(scope="module")
def spark_operator(
    own_cluster: Cluster, stand_ins: StandIns, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Run the real Spark Operator and yield its log."""
    install_kinds(own_cluster)
    with running_spark_operator(own_cluster, tmp_path_factory.mktemp("spark-operator")) as log:
        yield log


@pytest.fixture(scope="module")
def operator_process(
    own_cluster: Cluster, spark_operator: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """Run our operator."""
    install(own_cluster)
    process = OperatorProcess(own_cluster, tmp_path_factory.mktemp("operator"), SETTINGS)
    process.start()
    try:
        yield process
    finally:
        process.terminate()


@pytest.fixture
def world(own_cluster: Cluster, stand_ins: StandIns, operator_process: OperatorProcess) -> Iterator[World]:
    """A namespace in which PodSecurity enforces `restricted`."""
    with namespace_for_pods(own_cluster) as name:
        yield World(
            namespace=name,
            cluster=own_cluster,
            api=Api(own_cluster.access),
            kubelet=stand_ins.kubelet,
            gangs=stand_ins.gangs,
            operator=operator_process,
            background=stand_ins.background,
            watching=stand_ins.watching,
        )
        stand_ins.kubelet.playbook.clear()
        stand_ins.background.check()


def _application(world: World, name: str) -> Object:
    (found,) = world.of_job(name, *APPLICATIONS)
    return found


def _properties(world: World, driver: Object) -> dict[str, str]:
    """Return the properties that `spark-submit` has written to the driver's ConfigMap."""
    mounted = [
        one["configMap"]["name"] for one in driver["spec"]["volumes"] if one["name"] == "spark-conf-volume-driver"
    ]
    found = world.api.get(world.path("v1", "configmaps", mounted[0]))
    assert found is not None, mounted
    lines = [line for line in found["data"]["spark.properties"].splitlines() if "=" in line and line[0] != "#"]
    return dict(line.replace("\\", "").split("=", 1) for line in lines)


def _executor_labels(world: World, driver: Object) -> dict[str, str]:
    prefix = "spark.kubernetes.executor.label."
    found = _properties(world, driver)
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def test_the_driver_that_it_submits_is_the_pod_of_the_attempt(world: World) -> None:
    world.kubelet.playbook.set("by-spark", "prepare", Play(lasts=0.5))
    world.apply("by-spark", SPARK)
    status = world.wait_phase("by-spark", "Succeeded")
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    assert stage_of(status, "prepare")["child"]["name"] == "by-spark-prepare-1"  # type: ignore[index]
    (driver,) = world.pods("by-spark", "prepare")
    assert driver["metadata"]["name"] == "by-spark-prepare-1-driver"
    assert driver["spec"]["serviceAccountName"] == "default"
    # From these the driver creates executors: pods of the job, for its NetworkPolicy, and of no attempt.
    labels = _executor_labels(world, driver)
    assert (labels["finetune.dev/job"], labels["finetune.dev/stage"], labels["finetune.dev/attempt"]) == (
        "by-spark",
        "",
        "",
    )
    assert _application(world, "by-spark")["status"]["applicationState"]["state"] == "COMPLETED"


def test_driver_that_predicts_is_the_pod_of_the_attempt(world: World) -> None:
    world.kubelet.playbook.set("answers", "predict", Play(lasts=0.5))
    predict = {"engine": "spark", "workers": 4}
    world.apply("answers", {"predict": predict, "evaluation": None, "resources": {"cpu": "1500m", "memory": "3Gi"}})
    status = world.wait_phase("answers", "Succeeded")
    assert status["artifacts"]["predictions"].endswith("/answers/predictions.jsonl")
    assert status["plan"]["predictWorkers"] == 4
    assert states(status)["predict"] == ("Succeeded", 1)
    (driver,) = world.pods("answers", "predict")
    assert driver["metadata"]["name"] == "answers-predict-1-driver"
    (container,) = driver["spec"]["containers"]
    assert "predict" in container["args"]
    assert container["resources"]["limits"] == {"cpu": "1500m", "memory": "4Gi"}
    properties = _properties(world, driver)
    assert properties["spark.executor.instances"] == "3"
    assert properties["spark.executor.memoryOverhead"] == "3072m"
    assert properties["spark.kubernetes.executor.request.cores"] == "1500m"
    assert _executor_labels(world, driver)["finetune.dev/stage"] == ""


def test_error_of_the_spark_driver_ends_the_job_on_the_real_operator(world: World) -> None:
    world.kubelet.playbook.set("refused", "prepare", WRONG_COLUMN)
    world.apply("refused", SPARK)
    failure = world.wait_phase("refused", "Failed")["failure"]
    found = (failure["class"], failure["reason"], failure["stage"], failure["attempt"], failure["pod"])
    assert found == ("DataError", "MissingColumn", "prepare", 1, "refused-prepare-1-driver")


def test_a_preempted_driver_is_another_application(world: World) -> None:
    world.kubelet.playbook.set("lost", "prepare", PREEMPTED, attempt=1)
    world.apply("lost", SPARK)
    status = world.wait_phase("lost", "Succeeded")
    assert (states(status)["prepare"], status["restarts"]) == (("Succeeded", 2), 1)


def test_a_job_that_is_deleted_leaves_no_driver(world: World) -> None:
    world.kubelet.playbook.set("deleted", "prepare", RUNS)
    world.apply("deleted", SPARK)
    world.wait_running("deleted", "prepare")
    world.delete("deleted")
    world.wait_gone("deleted")
    wait_until(lambda: not _left(world), "all but the claim is gone", detail=lambda: str(_left(world)))


def _left(world: World) -> list[str]:
    """Return the objects of the job and of Spark, which has labels of its own, left in the namespace."""
    kinds = (APPLICATIONS, ("v1", "pods"), ("v1", "services"), ("v1", "configmaps"))
    found = [item["metadata"]["name"] for kind in kinds for item in world.api.items(world.path(*kind))]
    return [name for name in found if name != "kube-root-ca.crt"]
