"""Operations that a training takes, by the parameters that a token meets."""

from __future__ import annotations

import re

import pytest

from finetune_contract.choices import Task
from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.api.validation import validate_job
from finetune_operator.planning.assumed_facts import assumed_model, parse_hardware
from finetune_operator.planning.cost import forward_flops, training_flops
from finetune_operator.planning.plan import plan
from finetune_operator.planning.plan_types import Facts


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
