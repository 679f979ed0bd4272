"""Plans of endpoints that vLLM's own server serves: GPUs, memory, precision, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.facts import ModelFacts
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.summary import summarise
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused, Servers, VllmServer
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Price, Settings
from planning_support.cases import job, llama_1b

LLAMA_1B = llama_1b("text-generation", max_position_embeddings=8192)
SERVES: dict[str, Any] = {
    "task": "text-generation",
    "model": {"uri": "pvc://models/llama"},
    "dataset": None,
    "training": None,
    "resources": {"gpusPerNode": 8},
}
ADAPTERS = [{"name": f"a{at}", "uri": f"pvc://tuned/a{at}"} for at in range(12)]


def llama(h: int, layers: int, heads: int, wide: int) -> ModelFacts:
    """Return the facts of a Llama 3 with 8 heads of keys and values."""
    return llama_1b(
        "text-generation", hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=wide,
        max_position_embeddings=8192,
    )  # fmt: skip


LLAMA_8B, LLAMA_70B = llama(4096, 32, 32, 14_336), llama(8192, 80, 64, 28_672)


def served(
    model: ModelFacts | None = LLAMA_1B,
    hardware: str = "gpu=H100,gpus=8,cpu=96,hostMemory=1Ti",
    settings: Settings = CLUSTER_SETTINGS,
    endpoint: dict[str, Any] | None = None,
    kserve: bool = False,
    **spec: Any,
) -> JobPlan:
    """Plan a job that vLLM serves on nodes of eight GPUs."""
    whole = {**SERVES, "endpoint": {"optimization": "vllm", **(endpoint or {})}, **spec}
    facts = Facts(hardware=parse_hardware(hardware), model=model, kserve=kserve)
    return plan(job(whole), facts, settings)


def servers(made: JobPlan) -> tuple[Servers, VllmServer]:
    assert made.servers is not None
    assert made.servers.vllm is not None
    return made.servers, made.servers.vllm


def refusals(**options: Any) -> list[Problem]:
    with pytest.raises(PlanRefused) as refused:
        served(**options)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [
        pytest.param(LLAMA_1B, "H100", 1, id="1B in 80 GB"),
        pytest.param(LLAMA_8B, "L4", 1, id="8B in 24 GB"),
        pytest.param(LLAMA_70B, "H100", 2, id="70B in 80 GB"),
        pytest.param(LLAMA_70B, "A100-40GB", 8, id="70B in 40 GB"),
        pytest.param(LLAMA_70B, "L4", 8, id="70B in 24 GB"),
    ],
)
def test_server_takes_the_least_gpus_that_hold_the_model(model: ModelFacts, gpu: str, gpus: int) -> None:
    made, vllm = servers(served(model, f"gpu={gpu},gpus=8,cpu=96,hostMemory=1Ti"))
    assert (vllm.gpus, made.limits) == (gpus, {"nvidia.com/gpu": str(gpus)})
    assert made.requests["cpu"] == str(2 + gpus)


def test_gpus_divide_the_attention_heads() -> None:
    shape = llama_1b(
        "text-generation", num_attention_heads=6, num_key_value_heads=2, hidden_size=6144, num_hidden_layers=60,
        intermediate_size=24_576,
    )  # fmt: skip
    by_gpu = {gpu: served(shape, f"gpu={gpu},gpus=8,cpu=96,hostMemory=1Ti") for gpu in ("H100", "L4")}
    assert {gpu: servers(made)[1].gpus for gpu, made in by_gpu.items()} == {"H100": 2, "L4": 6}


def test_server_of_an_unknown_model_takes_all_gpus_of_a_node() -> None:
    made = served(None, resources={"gpusPerNode": 4})
    assert servers(made)[1].gpus == 4
    assert any("all of spec.resources.gpusPerNode, as the model is not known" in reason for reason in made.reasons)


def test_plan_reports_weights_and_the_room_for_keys_and_values() -> None:
    made = served(LLAMA_8B)
    [reason] = [text for text in made.reasons if "vLLM's own" in text]
    assert "in bf16 on 1 GPU: the weights take 15.0 GiB of 71.7 GiB" in reason
    assert made.trainer.serving is None
    rows = next(section.rows for section in summarise(made) if section.title == "Endpoint")
    assert [row.label for row in rows] == ["servers", "one takes", "a batch", "cost an hour"]


def test_adapters_take_memory_up_to_eight_at_a_time() -> None:
    _, vllm = servers(served(LLAMA_8B, endpoint={"adapters": ADAPTERS, "maxAdapterRank": 100}))
    assert (vllm.adapter_rank, vllm.concurrent_adapters) == (128, 8)
    _, usual = servers(served(LLAMA_8B, endpoint={"adapters": ADAPTERS[:3]}))
    assert (usual.adapter_rank, usual.concurrent_adapters) == (64, 3)
    on_l4 = {"hardware": "gpu=L4,gpus=8,cpu=96,hostMemory=1Ti"}
    many = {"adapters": ADAPTERS, "maxAdapterRank": 512}
    assert servers(served(LLAMA_8B, **on_l4))[1].gpus < servers(served(LLAMA_8B, endpoint=many))[1].gpus + 1
    assert refusals(model=LLAMA_8B, **on_l4, endpoint=many, resources={"gpusPerNode": 1})[0].path == "spec.endpoint"


def test_evaluation_computes_in_bf16_and_its_gate_names_the_difference() -> None:
    trained = {"dataset": {"uri": "hf://org/texts"}, "training": {"globalBatchSize": 16, "maxSteps": 10}}
    gate = {"evaluation": {"gate": {"metric": "loss", "maximum": 2}}}
    made = served(**trained, **gate)
    assert made.trainer.evaluation is not None
    assert (made.trainer.evaluation.precision, made.trainer.evaluation.optimization) == ("bf16", "none")
    assert "evaluate in bf16, as the vLLM servers compute" in made.reasons
    assert any("the gate is judged by the job's own process in bf16" in reason for reason in made.reasons)
    plain = served(**trained, **gate, endpoint={"optimization": "none"})
    assert plain.trainer.evaluation is not None
    assert plain.trainer.evaluation.precision == "fp32"
    assert not any("gate is judged" in reason for reason in served(**trained).reasons)


def test_cost_counts_the_gpus_of_a_server() -> None:
    price = Price.model_validate({"product": "H100", "gpus": 8, "perHour": 16.0})
    made, _ = servers(served(LLAMA_70B, settings=CLUSTER_SETTINGS.model_copy(update={"prices": (price,)})))
    assert made.cost_per_hour == 4.0


def test_kserve_serves_vllm_as_a_custom_predictor() -> None:
    made, vllm = servers(served(kserve=True))
    assert (made.runtime, vllm.gpus) == ("kserve", 1)
    assert made.ceilings["memory"] > made.requests["memory"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no GPU": (
        {"hardware": "cpu=8,hostMemory=32Gi", "resources": {}},
        "spec.endpoint.optimization: needs a GPU, and the job serves on CPUs",
        "leave it out, or use nodes with GPUs",
    ),
    "a GPU without bf16": (
        {"hardware": "gpu=T4,gpus=1,cpu=8,hostMemory=32Gi", "resources": {"gpusPerNode": 1}},
        "spec.endpoint.optimization: vLLM servers compute in bf16, and T4 does not",
        "leave it out, or use another GPU",
    ),
    "a model that no node holds": (
        {"model": LLAMA_70B, "resources": {"gpusPerNode": 1}},
        "spec.endpoint: does not fit: a vLLM server takes 134.4 GiB of 71.7 GiB, beside 200.0 MiB for one row of 640 "
        "tokens",
        "increase spec.resources.gpusPerNode, or use larger GPUs",
    ),
    "the key as a variable": (
        {"template": {"env": [{"name": "VLLM_API_KEY", "value": "x"}]}},
        "spec.template.env[0].name: is set by the operator with spec.endpoint.optimization vllm",
        "leave it out, and name the Secret in spec.endpoint.token",
    ),
    "more GPUs than the settings allow": (
        {
            "model": LLAMA_70B,
            "endpoint": {"maxReplicas": 3},
            "settings": CLUSTER_SETTINGS.model_copy(
                update={"allow": CLUSTER_SETTINGS.allow.model_copy(update={"max_gpus": 4})}
            ),
        },
        "spec.endpoint.maxReplicas: requests 6 GPUs for servers, 2 each; the settings allow 4",
        "set it to 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_endpoint_is_refused_with(case: str) -> None:
    options, text, hint = REFUSED[case]
    [problem] = refusals(**options)
    assert f"{problem.path}: {problem.rule}" == text
    assert problem.hint == hint
    assert len(f"{problem.path}: {problem.value}: {problem.rule}. {problem.hint}") <= 240
