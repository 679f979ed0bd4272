"""Evaluation and prediction are one process with the whole model: what does not fit there is left out or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.api.types import FineTuneJob
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Facts, JobPlan, PlanRefused

NODE = parse_hardware("gpu=H100,gpus=8,cpu=96,hostMemory=2Ti")


def planned(model: str, **spec: Any) -> JobPlan:
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "job"},
        "spec": {
            "task": "text-generation",
            "model": {"uri": f"hf://org/{model}"},
            "dataset": {"uri": "hf://org/texts", "columns": {"text": "text"}},
            "training": {"globalBatchSize": 64, "maxSteps": 10},
            "parallelism": {"tensor": 8, "activationCheckpointing": "full"},
            "resources": {"nodes": 1, "gpusPerNode": 8},
            **spec,
        },
    }
    job = FineTuneJob.model_validate_json(json.dumps(document))
    return plan(job, Facts(hardware=NODE), CLUSTER_SETTINGS)


def test_an_evaluation_that_nobody_asked_for_is_left_out_when_no_gpu_holds_the_model():
    pipelined = {"parallelism": {"tensor": 8, "pipeline": {"degree": 2}, "activationCheckpointing": "full"}}
    made = planned("gpt2-30b", resources={"nodes": 2, "gpusPerNode": 8}, **pipelined)
    assert made.stages == (Stage.PREPARE, Stage.TRAIN)
    assert made.trainer.evaluation is None
    assert any(
        "no evaluation at the end: one process with the whole model does it, whose weights take 111.7 GiB of 79.6 GiB"
        in reason
        for reason in made.reasons
    ), made.reasons


def test_a_model_that_one_gpu_holds_is_evaluated_however_its_training_is_spread():
    assert planned("gpt2-medium").stages[-1] is Stage.EVALUATE


@pytest.mark.parametrize(("field", "value"), [("evaluation", {}), ("predict", {})])
def test_an_evaluation_or_prediction_that_was_asked_for_is_refused(field: str, value: dict[str, Any]):
    with pytest.raises(PlanRefused) as refused:
        planned("gpt2-30b", **{field: value})
    (problem,) = refused.value.problems
    assert (problem.path, problem.reason) == (f"spec.{field}", "NotSupported")
    assert "leave it out, or use devices of more than 111.7 GiB" in problem.way_out
