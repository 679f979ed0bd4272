"""Metrics that only the user's own program measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.scripts.own_metrics import own_metrics, without_own_metrics

WRITTEN = {"loss": 0.3, "eval_f1_macro": 71.5, "test_f1_macro": 70.0, "bleurt": 0.4}


def job(**evaluation: Any) -> TrainerJob:
    return TrainerJob.model_validate(
        {
            "name": "own",
            "task": "text-classification",
            "model": {"uri": "file:///m"},
            "dataset": {"uri": "file:///d", "columns": {"text": "text", "label": "label"}},
            "evaluation": {"device": "cpu", "batch_tokens": 1024, **evaluation},
        }
    )


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    found = JobPaths(tmp_path)
    found.metrics.write_text(json.dumps({"train": WRITTEN}), encoding="utf-8")
    return found


def test_metrics_of_the_program_are_found_with_the_prefix_of_their_split(paths: JobPaths) -> None:
    given = job(metrics=["accuracy", "f1_macro", "bleurt"], gate={"metric": "f1_macro", "minimum": 70})
    found = own_metrics(given, paths)
    assert found.values == {"f1_macro": 71.5, "bleurt": 0.4}
    assert found.gate == given.evaluation.gate
    left = without_own_metrics(given).evaluation
    assert (left.metrics, left.gate) == (("accuracy",), None)


def test_metrics_of_the_task_are_not_those_of_the_program(paths: JobPaths) -> None:
    given = job(metrics=["accuracy", "loss"], gate={"metric": "loss", "maximum": 0.5})
    assert own_metrics(given, paths).values == {}
    assert own_metrics(given, paths).gate is None
    assert without_own_metrics(given) == given


@pytest.mark.parametrize(
    ("evaluation", "field"),
    [({"gate": {"metric": "auroc", "minimum": 0.5}}, "gate.metric"), ({"metrics": ["auroc"]}, "metrics")],
)
def test_metric_that_the_program_did_not_write_is_refused(
    evaluation: dict[str, Any], field: str, paths: JobPaths
) -> None:
    with pytest.raises(StageError, match=f"evaluation.{field} is 'auroc'; .*accuracy.*wrote bleurt, eval_f1") as caught:
        own_metrics(job(**evaluation), paths)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "UnknownMetric")
    paths.metrics.unlink()
    with pytest.raises(StageError, match="the program wrote no metric"):
        own_metrics(job(**evaluation), paths)
