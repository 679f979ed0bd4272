"""A model that the real KServe serves: its controller and webhooks, in Standard mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from box_support.box import Box
from box_support.endpoint_client import Client
from box_support.team import INPUTS, Team, stage_of, tiny_spec
from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.control_plane import assets_folder

# `auto` chooses KServe as soon as it is installed, so no other test may run meanwhile.
pytestmark = pytest.mark.alone
SERVICES = ("serving.kserve.io/v1beta1", "inferenceservices")
TEXT = "A text to try the model with."


@dataclass(frozen=True)
class Served:
    """A job that KServe serves."""

    team: Team
    name: str
    status: Object
    answer: Any
    """Answer by our Service; below, by KServe's."""
    answer_by_kserve: Any
    service: Object
    """The InferenceService."""

    def get(self, version: str, plural: str, name: str) -> Object | None:
        found = self.team.box.api.get(path_of(version, plural, self.team.namespace, name))
        return None if found is None else dict(found)


@pytest.fixture(scope="module")
def kserve(box: Box) -> None:
    """Install the controller by its own manifests."""
    box.own("installing KServe")
    if not (assets_folder() / "images" / "kserve").is_dir():
        pytest.skip("KServe is not built: run kube-assets/build kserve")
    box.install_controller("kserve")


@pytest.fixture(scope="module")
def served(box: Box, team: Team, kserve: None) -> Iterator[Served]:
    name = team.new_name("kserve")
    alone = dict.fromkeys(("dataset", "training", "parallelism", "launcher"))
    spec = tiny_spec(
        **alone,
        model={"uri": f"pvc://{INPUTS}/tiny/classifier"},
        resources={"cpu": "1", "memory": "2Gi"},
        endpoint={"resources": {"cpu": "1", "memory": "2Gi"}},
    )
    team.apply(name, {key: value for key, value in spec.items() if value is not None})
    status = team.wait(name, lambda one: one if _ready(one) else None, "Ready")
    ready = wait_until(lambda: _service_ready(team, name), f"KServe says that {name} is ready", 120)
    urls = [_address(team, f"{name}-endpoint"), _address(team, f"{name}-endpoint-1-predictor")]
    answers = [Client(url).post("/", {"inputs": [TEXT]}).json() for url in urls]
    yield Served(team, name, status, *answers, ready)
    team.delete(name)


def _ready(status: Object) -> bool:
    return ("Ready", "True") in {(one["type"], one["status"]) for one in status.get("conditions", [])}


def _service_ready(team: Team, job: str) -> Object | None:
    found = team.box.api.get(path_of(*SERVICES, team.namespace, f"{job}-endpoint-1"))
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return found if ("Ready", "True") in {(one["type"], one["status"]) for one in conditions} else None


def _address(team: Team, service: str) -> str:
    """Return a Service's URL by its address: this machine cannot resolve the cluster's names."""
    found = team.box.api.get(path_of("v1", "services", team.namespace, service))
    assert found is not None
    return f"http://{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"


RUNTIME: Object = {
    "apiVersion": "serving.kserve.io/v1alpha1",
    "kind": "ServingRuntime",
    "metadata": {"name": "texts"},
    "spec": {
        "supportedModelFormats": [{"name": "huggingface", "version": "1"}],
        "protocolVersions": ["v2"],
        "containers": [
            {"name": "kserve-container", "image": "texts.invalid/server:1", "args": ["--model_name={{.Name}}"]}
        ],
    },
}
"""A runtime for Hugging Face models, as KServe's own. Its pods need a GPU, which no node has, and start nothing."""


def test_kserve_merges_its_runtime_with_the_model_and_its_arguments(box: Box, team: Team, kserve: None) -> None:
    team.apply_manifest(RUNTIME)
    name = team.new_name("texts")
    team.apply(
        name,
        {
            "task": "text-generation",
            "model": {"uri": f"pvc://{INPUTS}/tiny/model"},
            "resources": {"gpusPerNode": 1, "accelerator": {"product": "H100"}, "cpu": "1", "memory": "4Gi"},
            "endpoint": {"runtime": "kserve", "optimization": "vllm", "kserveRuntime": "texts"},
        },
    )
    # KServe mounts the model when a pod is created, and not in its Deployment.
    found = wait_until(
        lambda: team.pods(name, "serve"), "KServe's Deployment has a pod", 120, lambda: team.describe(name)
    )
    pod = found[0]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "texts.invalid/server:1"
    assert container["args"][0] == f"--model_name={name}-endpoint-1"
    assert {f"--model_name={name}", "--model_dir=/mnt/models", "--backend=vllm"} <= set(container["args"][1:])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    claims = {one["name"]: one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["volumes"]}
    (model,) = (one for one in container["volumeMounts"] if one["mountPath"] == "/mnt/models")
    assert (claims[model["name"]], model["subPath"], model["readOnly"]) == (INPUTS, "tiny/model", True)
    assert pod["securityContext"]["runAsNonRoot"], "the namespace accepts restricted pods alone"
    team.delete(name)


def test_auto_serves_by_kserve_where_it_is_installed(served: Served) -> None:
    assert served.status["phase"] == "Serving"
    assert stage_of(served.status, "serve")["child"]["kind"] == "InferenceService"
    assert any("by KServe in an InferenceService" in reason for reason in served.status["plan"]["reasons"])
    url = f"http://{served.name}-endpoint.{served.team.namespace}.svc"
    assert served.status["artifacts"]["endpointUrl"] == url
    assert served.service["status"]["deploymentMode"] == "Standard"


def test_our_service_and_that_of_kserve_lead_to_the_same_answer(served: Served) -> None:
    assert {one["label"] for one in served.answer[0]} == {"negative", "positive"}
    assert served.answer == served.answer_by_kserve


def test_kserve_creates_no_autoscaler_and_keeps_the_pod_template(served: Served) -> None:
    predictor = f"{served.name}-endpoint-1-predictor"
    assert served.get("autoscaling/v2", "horizontalpodautoscalers", predictor) is None
    deployment = served.get("apps/v1", "deployments", predictor)
    assert deployment is not None
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {name: {"cpu": "1", "memory": "2Gi"} for name in ("limits", "requests")}
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    generation = served.service["metadata"]["generation"]
    assert generation == 1, "what KServe's webhooks change is not applied anew again and again"


def test_kserve_scales_up_and_a_deployment_takes_over(served: Served) -> None:
    team, name = served.team, served.name
    (first,) = (pod["metadata"]["name"] for pod in team.pods(name, "serve"))
    team.patch(name, {"endpoint": {"replicas": 2}})
    team.wait(name, lambda one: "2 of 2 servers" in str(one.get("conditions")) and one, "two servers answer")
    pods = {pod["metadata"]["name"] for pod in team.pods(name, "serve")}
    assert len(pods) == 2
    assert first in pods
    team.patch(name, {"endpoint": {"runtime": "deployment", "replicas": 1}})
    team.wait(name, lambda one: one["endpoint"]["revision"] == 2 and one, "the Deployment serves")
    wait_until(lambda: served.get(*SERVICES, f"{name}-endpoint-1") is None, "the InferenceService is gone", 120)
    wait_until(lambda: not pods & {pod["metadata"]["name"] for pod in team.pods(name, "serve")}, "its pods too", 300)
    assert Client(_address(team, f"{name}-endpoint")).post("/", {"inputs": [TEXT]}).json() == served.answer
    reasons = {event["reason"] for event in team.events(name)}
    assert "EndpointNotReady" not in reasons
