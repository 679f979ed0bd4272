"""Endpoints by a serving runtime of KServe: the InferenceService, which its definition allows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml

from finetune_operator.endpoints.render.endpoint_objects import revision_digest
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import Owner, RenderContext
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import job, llama_1b
from suite_plugins.shared_folder import CRDS, missing

RUNTIME = "kserve-huggingfaceserver"
FACTS = Facts(
    hardware=parse_hardware("gpu=H100,gpus=2,cpu=16,hostMemory=128Gi"),
    model=llama_1b("text-generation", max_position_embeddings=8192),
    kserve=True,
)
SERVES: dict[str, Any] = {
    "task": "text-generation",
    "model": {"uri": "pvc://models/llama"},
    "dataset": None,
    "training": None,
    "resources": {"gpusPerNode": 2},
}
CRD = CRDS / "serving.kserve.io_inferenceservices.yaml"


def planned(endpoint: dict[str, Any] | None = None, facts: Facts = FACTS, **spec: Any) -> tuple[JobPlan, RenderContext]:
    """Return the plan of a job that the runtime serves, and the context to render it."""
    given = {"runtime": "kserve", "optimization": "vllm", "kserveRuntime": RUNTIME, **(endpoint or {})}
    wanted = job({**SERVES, "endpoint": given, **spec}, "chat")
    context = RenderContext("team-a", wanted.spec, CLUSTER_SETTINGS, Owner("chat", "uid-1"))
    return plan(wanted, facts, CLUSTER_SETTINGS), context


def objects(endpoint: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return the endpoint's objects by kind."""
    wanted, context = planned(endpoint, **spec)
    found = [one for one in render(wanted, context) if "endpoint" in str(one["metadata"])]
    return {str(one["kind"]): one for one in found}


def predictor(endpoint: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = objects(endpoint, **spec)["InferenceService"]["spec"]["predictor"]
    return found


def closed(schema: Any) -> Any:
    """Return the schema so that it refuses unknown fields, which the API server would drop."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {name: closed(each) for name, each in schema.items()}
    open_ = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    return {**found, "additionalProperties": False} if "properties" in schema and not open_ else found


def test_runtime_reads_the_model_of_the_claim() -> None:
    model = predictor()["model"]

    assert model["modelFormat"] == {"name": "huggingface"}
    assert (model["runtime"], model["storageUri"]) == (RUNTIME, "pvc://models/llama")
    assert not {"name", "image", "command", "workingDir"} & set(model), "the runtime has these"
    assert model["args"] == [
        "--model_name=chat",
        "--model_dir=/mnt/models",
        "--backend=vllm",
        "--dtype=bfloat16",
        "--tensor-parallel-size=1",
        "--gpu-memory-utilization=0.9",
        "--max-num-seqs=256",
        "--generation-config=vllm",
        '--override-generation-config={"temperature": 0.0, "top_p": 1.0}',
    ]


def test_runtime_reads_a_trained_model_from_the_workspace() -> None:
    training: dict[str, Any] = {
        "training": {"maxSteps": 5},
        "dataset": {"uri": "hf://org/texts"},
        "storage": {"workspace": "pvc://results/team"},
    }
    assert predictor(**training)["model"]["storageUri"] == "pvc://results/team/chat/model"


@pytest.fixture(scope="module")
def definition() -> Any:
    """Return a validator of `spec` by the definition of KServe."""
    if not CRD.exists():
        pytest.skip(missing(CRD))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    (version,) = yaml.load(CRD.read_text(encoding="utf-8"), loader)["spec"]["versions"]
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))


@pytest.mark.parametrize("endpoint", [{}, {"replicas": 2, "maxReplicas": 4, "maxBatchTokens": 4096}])
def test_inference_service_is_one_that_its_definition_allows(endpoint: dict[str, Any], definition: Any) -> None:
    found = objects(endpoint)["InferenceService"]["spec"]
    model = {**found["predictor"]["model"], "unknown": 1}

    definition.validate(found)
    assert not definition.is_valid({"predictor": {**found["predictor"], "model": model}})


def test_pod_is_restricted_and_mounts_no_claim_itself() -> None:
    found = predictor(storage={"cache": "pvc://hub"})
    model = found["model"]

    assert "containers" not in found
    assert {volume["name"] for volume in found["volumes"]} == {"shared-memory", "tmp"}
    assert {mount["name"] for mount in model["volumeMounts"]} == {"shared-memory", "tmp"}
    assert found["securityContext"]["runAsNonRoot"]
    assert model["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not found["automountServiceAccountToken"]
    variables = {each["name"]: each.get("value") for each in model["env"]}
    assert variables["HF_HOME"].startswith(variables["HOME"]), "the cache's claim is not mounted"
    assert model["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert model["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    assert model["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_service_selects_the_runtime_servers() -> None:
    found = objects()
    labels = found["InferenceService"]["spec"]["predictor"]["labels"]
    selector = found["Service"]["spec"]["selector"]
    assert {name: labels[name] for name in selector} == selector
    assert found["InferenceService"]["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"


def test_plan_names_the_runtime_and_its_paths() -> None:
    wanted, _ = planned()
    assert [reason for reason in wanted.reasons if RUNTIME in reason] == [
        f"each server is one of KServe's runtime {RUNTIME}, with OpenAI's API below /openai/v1 and no token "
        "(spec.endpoint.kserveRuntime)"
    ]


def test_another_runtime_is_another_revision() -> None:
    digests = {revision_digest(*planned({"kserveRuntime": name})) for name in (RUNTIME, "of-team-a", None)}
    assert len(digests) == 3
    assert revision_digest(*planned()) in digests


def test_runtime_needs_a_cluster_with_kserve() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(facts=replace(FACTS, kserve=False))
    assert [problem.path for problem in refused.value.problems] == [
        "spec.endpoint.runtime",
        "spec.endpoint.kserveRuntime",
    ]


def test_no_runtime_is_chosen_unless_the_job_names_one() -> None:
    found = predictor({"kserveRuntime": None, "runtime": "auto"})
    assert "model" not in found
    assert found["containers"][0]["image"] == CLUSTER_SETTINGS.defaults.vllm_image
