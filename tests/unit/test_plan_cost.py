"""Operations that a training takes, by the parameters that a token meets."""

from __future__ import annotations

import re

import pytest

from finetune_contract.choices import Task
from finetune_operator.plan.hardware.assumed_hardware import HardwareError, parse_hardware
from finetune_operator.plan.hardware.gpu_table import GPU_MODELS
from finetune_operator.plan.models.assumed_models import assumed_model
from finetune_operator.plan.plan import plan
from finetune_operator.plan.time.cost import forward_flops, training_flops
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.settings.settings_nodes import HardwareRow
from planning_support.cases import encoder, job


def operations_a_token(task: Task, model: str) -> float:
    """Return the figure of a plan that recomputes nothing, without attention scores."""
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "a"},
        "spec": {
            "task": task,
            "model": {"uri": f"hf://{model}"},
            "dataset": {"uri": "hf://org/texts"},
            "preparation": {"maxLength": 8},
            "training": {"maxSteps": 10},
            "parallelism": {"activationCheckpointing": "none"},
            "resources": {"gpusPerNode": 8},
        },
    }
    job, problems = validate_job(document, CLUSTER_SETTINGS)
    assert job is not None, problems
    made = plan(job, Facts(hardware=parse_hardware("gpu=H200,gpus=8,hostMemory=4Ti")), CLUSTER_SETTINGS)
    assert made.estimate is not None
    found = re.match(r"(\S+) operations for ([\d,]+) tokens", made.estimate.basis)
    assert found is not None, made.estimate.basis
    return float(found[1]) / int(found[2].replace(",", ""))


@pytest.mark.parametrize(
    ("task", "billions"),
    [
        pytest.param("text-generation", 0.494, id="each token is scored by the embeddings once more"),
        pytest.param("text-classification", 0.358, id="embeddings are looked up"),
    ],
)
def test_a_tied_head_counts_where_the_task_uses_it(task: Task, billions: float) -> None:
    assert operations_a_token(task, "Qwen/Qwen2.5-0.5B") / 6e9 == pytest.approx(billions, rel=0.01)


def test_a_token_passes_the_experts_that_are_chosen_for_it() -> None:
    mixture, _ = assumed_model("hf://mistralai/Mixtral-8x7B-v0.1", "text-generation")
    dense = mixture.model_copy(update={"idle_parameters": 0})
    assert training_flops(mixture, 1, 0, recompute=False) / 6e9 == pytest.approx(12.9 - 0.13, rel=0.01)
    assert training_flops(dense, 1, 0, recompute=False) / training_flops(mixture, 1, 0, recompute=False) > 3.5
    assert forward_flops(mixture, 1, 0) == training_flops(mixture, 1, 0, recompute=False) / 3


def step_of(
    hardware: str, settings: Settings = CLUSTER_SETTINGS, network: str = "rdma", **training: object
) -> tuple[str, float, str]:
    """Return precision, time of a step and basis of a plan for two nodes, whose model is divided by ZeRO-3."""
    spec = {
        "task": "text-generation",
        "model": {"uri": "hf://meta-llama/Llama-3.2-1B"},
        "training": {"maxSteps": 10, "globalBatchSize": 32, **training},
        "preparation": {"maxLength": 512},
        "parallelism": {"strategy": "deepspeed", "zeroStage": 3},
        "resources": {"gpusPerNode": 8, "nodes": 2, "network": network},
    }
    made = plan(job(spec), Facts(hardware=parse_hardware(hardware, settings.hardware)), settings)
    assert made.trainer.training is not None
    assert made.estimate.step_seconds is not None
    return made.trainer.training.precision, made.estimate.step_seconds, made.estimate.basis


def test_a_slow_network_makes_a_training_over_nodes_longer():
    node = "gpu=H100,gpus=8,hostMemory=1Ti"
    quick, slow = (step_of(f"{node},network={gigabits}")[1] for gigabits in (3200, 25))
    assert slow > 3 * quick
    assert step_of(node)[1] == quick


def test_tcp_counts_with_one_interface_of_each_node():
    node = "gpu=H100,gpus=8,hostMemory=1Ti"
    assert step_of(node, network="tcp")[1] == step_of(f"{node},network=100")[1]
    assert step_of(node, network="auto")[1] == step_of(node, network="tcp")[1]
    # A figure that was given counts, whatever carries it.
    assert step_of(f"{node},network=3200", network="tcp")[1] == step_of(node)[1]


def test_figures_of_the_settings_take_the_place_of_those_of_the_table():
    node = "gpu=H100,gpus=8,hostMemory=1Ti"
    row = HardwareRow.model_validate({"name": "H100", "networkGigabytes": 25 / 8 / 8})
    settings = CLUSTER_SETTINGS.model_copy(update={"hardware": (row,)})
    assert step_of(node, settings)[1] == pytest.approx(step_of(f"{node},network=25")[1])


@pytest.mark.parametrize("product", ["T4,memory=15Gi", "V100-32GB"])
def test_gpus_without_bf16_train_in_fp16_at_the_rate_of_their_matrix_units(product: str):
    node = f"gpu={product},gpus=8,hostMemory=1Ti"
    precision, seconds, basis = step_of(node)
    assert precision == "fp16"
    assert "TFLOP/s in fp16" in basis
    assert step_of(node, precision="fp32")[1] > 1.5 * seconds


def test_fp32_multiplies_in_tf32_at_half_the_16_bit_rate_unless_it_is_off():
    node = "gpu=A100-80GB,gpus=8,hostMemory=1Ti"
    _, quick, basis = step_of(node, precision="fp32")
    assert "of A100-80GB's 156 TFLOP/s in TF32" in basis
    _, slow, basis = step_of(node, precision="fp32", arguments={"tf32": False})
    assert "TFLOP/s in fp32" in basis
    assert slow > 2 * quick
    # Products in other precisions do not change, nor do GPUs before Ampere.
    assert step_of(node, precision="bf16", arguments={"tf32": False}) == step_of(node, precision="bf16")
    older = "gpu=V100-32GB,gpus=8,hostMemory=1Ti"
    off = {"tf32": False}
    assert step_of(older, precision="fp32", arguments=off) == step_of(older, precision="fp32")


def test_half_of_the_16_bit_peak_is_the_tf32_peak_of_the_data_sheets():
    sheets = {"A100-80GB": 156, "A10": 62.5, "A40": 74.8, "RTX-4090": 82.6, "L40S": 183, "H100": 495, "H20": 74}
    products = {gpu.name: gpu for gpu in GPU_MODELS}
    for name, tflops in sheets.items():
        assert products[name].tf32_flops / 1e12 == pytest.approx(tflops, rel=0.02), name
    assert not any(products[name].tf32_flops for name in ("T4", "V100-32GB", "MI300X"))


@pytest.mark.parametrize(
    ("gpu", "arguments", "expected"),
    [
        ("A100-80GB", {}, "matrix products in TF32, which A100-80GB has"),
        ("A100-80GB", {"tf32": False}, "matrix products in plain fp32: training.arguments.tf32 is false"),
        ("T4", {}, None),
    ],
)
def test_reasons_name_the_form_of_fp32_products(gpu: str, arguments: dict[str, object], expected: str | None):
    spec = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "training": {"precision": "fp32", "arguments": arguments},
        "resources": {"gpusPerNode": 1},
    }
    made = plan(job(spec), Facts(hardware=parse_hardware(f"gpu={gpu},gpus=1")), CLUSTER_SETTINGS)
    found = [reason for reason in made.reasons if reason.startswith("matrix products")]
    assert [expected in reason for reason in found] == [True] if expected else not found


@pytest.mark.parametrize("text", ["fast", "0", "-1", "1e9", "nan"])
def test_a_network_that_is_no_number_of_gigabits_is_refused(text: str):
    with pytest.raises(HardwareError, match=rf"network={text}: it is a number of Gbit/s of one node"):
        parse_hardware(f"gpu=H100,network={text}")


@pytest.mark.parametrize(("layers", "measured"), [(2, 7.15e-3), (12, 22e-3)])
def test_step_of_a_tiny_model_takes_milliseconds_on_a_cpu(layers: int, measured: float):
    facts = Facts(model=encoder(16, layers, 100), hardware=parse_hardware("cpu=2"))
    spec = {"resources": {"gpusPerNode": 0}, "preparation": {"maxLength": 8}}
    estimate = plan(job(spec), facts, CLUSTER_SETTINGS).estimate
    assert estimate.step_seconds == pytest.approx(measured, rel=0.25)
    assert "mostly for calls of Python" in estimate.basis
    assert estimate.seconds is not None
    assert estimate.seconds >= 900 * estimate.step_seconds


def test_step_of_a_usual_model_on_a_cpu_takes_the_time_of_its_operations():
    hardware = parse_hardware("cpu=2")
    estimate = plan(
        job({"resources": {"gpusPerNode": 0}}), Facts(model=encoder(768, 12), hardware=hardware), CLUSTER_SETTINGS
    ).estimate
    operations, tokens = re.match(r"(\S+) operations for ([\d,]+) tokens", estimate.basis).groups()  # type: ignore[union-attr]
    assert int(tokens.replace(",", "")) > 0
    assert "calls of Python" not in estimate.basis
    assert estimate.step_seconds == pytest.approx(float(operations) / 936 / (2 * 80e9 * 0.5), rel=0.01)
