"""Every example of `manifests/examples` runs to its end, and shows there its subject.

A cluster in a box has no GPU, no internet and two cores. `fitted` has the changes for that, the same for all; launcher,
strategy, adapter, spot, secrets, stages and run policy stay as printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from box_support.box import EXAMPLES_GIT_HOST, Box
from box_support.endpoint_client import Client
from box_support.git_pod import TEMPLATE as TRUSTING_THE_GIT_HOST
from box_support.git_pod import git_pod
from box_support.hub_pod import Hub
from box_support.team import INPUTS, Team, stage_of
from cluster_support.api_access import Object, path_of
from examples import FITTED_LOCALLY, IN_CLUSTER, example_document
from script_support.programs import documented

AT_ONCE = 4
"""Examples that run at the same time: a starting pod keeps a core busy for seconds, and then mostly waits."""
SPOT_LABEL = ("karpenter.sh/capacity-type", "spot")
"""One of the labels of spot nodes in the settings as shipped."""
PRIVATE = "your-organisation/your-private-model"
TOUR = ("quickstart-cluster",)
"""Examples that the tour runs, unchanged."""


# ------------------------------------------------------------------------------------------------- made to fit the box


def fitted(document: Object, name: str) -> Object:
    """Return the example, renamed, with a tiny model and data, no GPU, a few steps, and little of everything."""
    document = deepcopy(document)
    document["metadata"]["name"] = name
    spec: Object = document["spec"]
    if spec["model"]["uri"].startswith("hf://") and "secrets" not in spec:
        spec["model"]["uri"] = f"pvc://{INPUTS}/tiny/" + ("model" if "training" in spec else "classifier")
    if spec.get("dataset", {}).get("uri", "").startswith("hf://"):
        spec["dataset"] = {"uri": f"pvc://{INPUTS}/tiny/data"}
    if spec.get("preparation", {}).get("maxLength", 0) > TINY_LENGTH:
        spec["preparation"]["maxLength"] = TINY_LENGTH
        spec["preparation"].pop("stride", None)
    spec["resources"] = _without_gpus(spec["resources"])
    spec["storage"] = {"size": "1Gi"}
    training = spec.get("training", {})
    if script := training.get("script"):
        script["git"]["url"] = f"https://{EXAMPLES_GIT_HOST}/programs"
        script["hyperparameters"]["epochs"] = 1
        spec["template"] = TRUSTING_THE_GIT_HOST
    elif training:
        training.pop("epochs", None)
        training |= {"maxSteps": 6, "precision": "fp32"}
    if "steps" in spec.get("checkpoints", {}).get("every", {}):
        spec["checkpoints"]["every"] = {"steps": 3}
    if gate := (spec.get("evaluation") or {}).get("gate"):
        gate["minimum"] = 0.0
    return document


TINY_LENGTH = 64
"""Most tokens of the tiny model."""


def _without_gpus(resources: Object) -> Object:
    small = {**resources, "gpusPerNode": 0, "cpu": "1", "memory": "4Gi"}
    small.pop("accelerator", None)
    return {**small, "processesPerNode": 1} if resources.get("gpusPerNode") else small


# ------------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Ended:
    """An ended job, and records of its run."""

    name: str
    status: Object
    seen: Object


Run = Callable[[Team, Hub, str, Object], Object]
"""Applies the fitted document and waits for its end; returns `Ended.seen`."""


def to_the_end(team: Team, hub: Hub, name: str, document: Object) -> Object:
    team.apply_manifest(document)
    team.succeeds(name)
    return {}


def held_then_started(team: Team, hub: Hub, name: str, document: Object) -> Object:
    """`suspended`: planned, and without a pod until the patch in its comment is applied."""
    team.apply_manifest(document)

    def planned(status: Object) -> Object | None:
        conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
        return status if status.get("phase") == "Suspended" and conditions.get("Planned") == "True" else None

    status = team.wait(name, planned, "suspended and planned")
    pods, children = team.pods(name), team.of_job(name, "batch/v1", "jobs")
    team.patch(name, {"runPolicy": {"suspend": False}})
    team.succeeds(name)
    return {"held": status, "pods": pods, "children": children}


def refused_then_taken(team: Team, hub: Hub, name: str, document: Object) -> Object:
    """`private-model`: with an invalid token, and with the right one."""
    own = document["spec"]["secrets"]["hubToken"]
    team.apply_manifest(_secret(own["name"], "hf_of_somebody_else"))
    refused = deepcopy(document)
    refused["metadata"]["name"] = f"{name}-refused"
    team.apply_manifest(refused)
    failure = team.fails(refused["metadata"]["name"])
    team.apply_manifest(_secret(own["name"], hub.token), document)
    team.succeeds(name)
    return {"failure": failure}


def used_then_deleted(team: Team, hub: Hub, name: str, document: Object) -> Object:
    """`endpoint`: asked for a label once it is ready; servers run until they are deleted."""
    team.apply_manifest(document)

    def ready(status: Object) -> Object | None:
        conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
        return status if conditions.get("Ready") == "True" else None

    status = team.wait(name, ready, "Ready")
    service = team.box.api.get(path_of("v1", "services", team.namespace, f"{name}-endpoint"))
    assert service is not None
    answer = Client(f"http://{service['spec']['clusterIP']}").post("/", {"inputs": ["A text to try the model with."]})
    team.box.kubectl("delete", "ftj", name, "-n", team.namespace, "--wait=false")
    return {"ready": status, "code": answer.status_code, "answer": answer.json()}


def _secret(name: str, token: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"token": token}}


RUNS: dict[str, Run] = {name: to_the_end for name in IN_CLUSTER if name not in TOUR + FITTED_LOCALLY} | {
    "suspended": held_then_started,
    "private-model": refused_then_taken,
    "endpoint": used_then_deleted,
}


@pytest.fixture(scope="module")
def spot_node(box: Box) -> Iterator[str]:
    """Label a node as a spot node."""
    node = box.nodes[-1]
    box.kubectl("label", "node", node, "=".join(SPOT_LABEL))
    yield node
    box.kubectl("label", "node", node, f"{SPOT_LABEL[0]}-")


@pytest.fixture(scope="module")
def programs(team: Team, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a git host with the program of docs/scripts.md."""
    repositories = {"programs": {"train.py": documented("python")}}
    with git_pod(team, EXAMPLES_GIT_HOST, repositories, tmp_path_factory.mktemp("git")):
        yield


@pytest.fixture(scope="module")
def runs(
    team: Team, hub: Hub, programs: None, training_operators: None, spot_node: str
) -> Iterator[dict[str, Future[Ended]]]:
    """Run all examples, some at a time, in the order of the table."""

    def run(example: str) -> Ended:
        name = team.new_name(example)
        seen = RUNS[example](team, hub, name, fitted(example_document(example), name))
        return Ended(name, seen.get("ready") or team.status(name), seen)

    with hub.answers(team.namespace), ThreadPoolExecutor(AT_ONCE) as pool:
        yield {example: pool.submit(run, example) for example in RUNS}
        pool.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------------------------- their results


def test_every_example_for_a_cluster_is_run() -> None:
    assert len(RUNS) >= 10
    assert set(RUNS) | set(TOUR) | set(FITTED_LOCALLY) == set(IN_CLUSTER)


@pytest.mark.parametrize("example", [name for name in RUNS if name != "endpoint"])
def test_an_example_runs_to_its_end(runs: dict[str, Future[Ended]], example: str) -> None:
    status = runs[example].result().status
    assert {stage["state"] for stage in status["stages"]} == {"Succeeded"}
    assert status["restarts"] == 0


def test_deepspeed_by_mpi_is_zero_2_over_the_ranks_of_two_nodes(runs: dict[str, Future[Ended]], team: Team) -> None:
    ended = runs["rotten-tomatoes-deepspeed-mpi"].result()
    assert stage_of(ended.status, "train")["child"]["kind"] == "MPIJob"
    metrics = _json(team.results(ended.name) / "metrics.json")
    assert (metrics["train"]["strategy"], metrics["train"]["world_size"]) == ("deepspeed-zero2", 2)
    assert (team.results(ended.name) / "predictions.jsonl").is_file()


def test_fsdp_is_in_effect_in_a_pytorchjob(runs: dict[str, Future[Ended]], team: Team) -> None:
    ended = runs["rotten-tomatoes-fsdp-pytorchjob"].result()
    assert stage_of(ended.status, "train")["child"]["kind"] == "PyTorchJob"
    metrics = _json(team.results(ended.name) / "metrics.json")
    assert (metrics["train"]["strategy"], metrics["train"]["world_size"]) == ("fsdp", 2)


def test_plain_cluster_example_avoids_installed_training_operators(runs: dict[str, Future[Ended]], team: Team) -> None:
    ended = runs["plain-cluster"].result()
    assert stage_of(ended.status, "train")["child"]["kind"] == "Job"
    assert ended.status["plan"]["worldSize"] == 2
    for api_version, plural in (("kubeflow.org/v1", "pytorchjobs"), ("kubeflow.org/v2beta1", "mpijobs")):
        assert team.of_job(ended.name, api_version, plural) == []
    assert len(team.of_job(ended.name, "v1", "services")) == 1
    (job,) = [
        job
        for job in team.of_job(ended.name, "batch/v1", "jobs")
        if job["metadata"]["labels"]["finetune.dev/stage"] == "train"
    ]
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 2)


def test_two_processes_share_the_pod_of_the_cpu_example(runs: dict[str, Future[Ended]], team: Team) -> None:
    ended = runs["cpu-only"].result()
    assert (ended.status["plan"]["strategy"], ended.status["plan"]["worldSize"]) == ("ddp", 2)
    (pod,) = team.pods(ended.name, "train")
    resources = pod["spec"]["containers"][0]["resources"]
    assert "nvidia.com/gpu" not in {**resources.get("requests", {}), **resources.get("limits", {})}


def test_lora_leaves_an_adapter_beside_the_whole_model(runs: dict[str, Future[Ended]], team: Team) -> None:
    from transformers import AutoModelForSequenceClassification

    ended = runs["lora"].result()
    results = team.results(ended.name)
    config = _json(results / "adapter" / "adapter_config.json")
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 16, 32)
    assert (results / "adapter" / "adapter_model.safetensors").is_file()
    model = AutoModelForSequenceClassification.from_pretrained(results / "model")
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


def test_long_documents_get_a_tag_for_each_word_under_offload(runs: dict[str, Future[Ended]], team: Team) -> None:
    ended = runs["longformer-tokens"].result()
    metrics = _json(team.results(ended.name) / "metrics.json")
    assert metrics["train"]["strategy"] == "deepspeed-zero2+activation-checkpointing+optimizer-offload"
    assert set(metrics["evaluate"]) >= {"f1", "precision", "recall"}
    rows = _lines(team.results(ended.name) / "predictions.jsonl")
    assert len(rows) == 32
    assert all(len(row["tags"]) == len(row["scores"]) > 0 for row in rows)


def test_a_wrong_token_ends_the_private_example_before_anything_is_trained(runs: dict[str, Future[Ended]]) -> None:
    failure = runs["private-model"].result().seen["failure"]
    found = {key: failure.get(key) for key in ("class", "reason", "stage", "attempt")}
    assert found == {"class": "ModelError", "reason": "TokenRefused", "stage": "prepare", "attempt": 1}
    assert "secrets.hubToken" in failure["hint"]


def test_status_has_the_commit_of_the_private_model_that_was_trained(
    runs: dict[str, Future[Ended]], team: Team
) -> None:
    ended = runs["private-model"].result()
    commit = ended.status["artifacts"]["modelRevision"]
    assert len(commit) == 40
    orders = {
        config["metadata"]["labels"]["finetune.dev/stage"]: json.loads(config["data"]["job.json"])["model"]["revision"]
        for config in team.of_job(ended.name, "v1", "configmaps")
    }
    assert orders == {"prepare": "main", "train": commit, "evaluate": commit}


def test_the_token_is_in_no_object_and_no_log(runs: dict[str, Future[Ended]], hub: Hub, box: Box, team: Team) -> None:
    runs["private-model"].result()
    kinds = "ftj,pods,jobs,configmaps,services,events,pytorchjobs,mpijobs,persistentvolumeclaims"
    published = box.kubectl("get", kinds, "-n", team.namespace, "-o", "yaml") + box.operator_log(2000)
    for pod in box.api.items(f"/api/v1/namespaces/{team.namespace}/pods"):
        published += box.cluster.kubectl("logs", "-n", team.namespace, pod["metadata"]["name"]).stdout
    assert PRIVATE in published
    assert hub.token not in published


def test_the_own_program_is_the_one_of_a_commit_and_its_model_is_evaluated(
    runs: dict[str, Future[Ended]], team: Team
) -> None:
    from transformers import AutoModelForSequenceClassification

    ended = runs["own-script"].result()
    address, _, commit = ended.status["artifacts"]["script"].rpartition("@")
    assert (address, len(commit)) == (f"https://{EXAMPLES_GIT_HOST}/programs", 40)
    assert ended.status["plan"]["worldSize"] == 2
    assert ended.status["artifacts"]["metrics"]["train_epoch"] == 1
    assert 0 <= ended.status["artifacts"]["metrics"]["accuracy"] <= 1
    AutoModelForSequenceClassification.from_pretrained(team.results(ended.name) / "model")


def test_inference_alone_labels_every_row_of_the_file(
    runs: dict[str, Future[Ended]], team: Team, input_files: Path
) -> None:
    ended = runs["inference-only"].result()
    assert [stage["name"] for stage in ended.status["stages"]] == ["prepare", "predict"]
    rows = [_row["text"] for _row in _lines(input_files / "reviews" / "test.jsonl")]
    predicted = _lines(team.results(ended.name) / "predictions.jsonl")
    assert [row["text"] for row in predicted] == rows
    assert {row["label"] for row in predicted} <= {"negative", "positive"}


def test_endpoint_example_answers_with_a_label(runs: dict[str, Future[Ended]], box: Box) -> None:
    box.own("asking a Service from this machine")
    ended = runs["endpoint"].result()
    assert ended.status["phase"] == "Serving"
    assert ended.status["artifacts"]["endpointUrl"].startswith(f"http://{ended.name}-endpoint.")
    runtime = "in a Deployment, up to 3 under load: the cluster is not known to serve KServe's"
    assert any(runtime in one for one in ended.status["plan"]["reasons"])
    assert ended.seen["code"] == 200
    assert {one["label"] for row in ended.seen["answer"] for one in row} == {"negative", "positive"}


def test_the_spot_example_trains_on_the_spot_node_and_nothing_else_does(
    runs: dict[str, Future[Ended]], team: Team, spot_node: str
) -> None:
    ended = runs["spot"].result()
    assert ended.status["plan"]["capacity"] == "spot"
    (pod,) = team.pods(ended.name, "train")
    assert pod["spec"]["nodeName"] == spot_node
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    wanted = {
        (one["key"], tuple(one["values"])) for term in terms["nodeSelectorTerms"] for one in term["matchExpressions"]
    }
    assert (SPOT_LABEL[0], (SPOT_LABEL[1],)) in wanted
    for stage in ("prepare", "evaluate"):
        (other,) = team.pods(ended.name, stage)
        assert "requiredDuringSchedulingIgnoredDuringExecution" not in json.dumps(other["spec"].get("affinity", {}))


def test_the_suspended_example_has_a_plan_and_no_pod_until_it_is_patched(runs: dict[str, Future[Ended]]) -> None:
    seen = runs["suspended"].result().seen
    # Its measures against memory depend on the small model and its small pods.
    assert seen["held"]["plan"]["strategy"].split("+")[0] == "single"
    assert (seen["pods"], seen["children"]) == ([], [])


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _lines(file: Path) -> list[Object]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
