"""The `evaluate` stage: metrics of the model and of the majority class on rows that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from finetune_contract.job import Gate, TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.failures import StageError
from finetune_trainer.inference.runner import DEFAULT_BATCH_TOKENS, DEFAULT_DEVICE, logits_of, model_to_use
from finetune_trainer.progress import ProgressSink
from finetune_trainer.reporting import merge_metrics, write_model_card, write_samples
from finetune_trainer.tasks.base import LabelIds, Logits, task_module

_SAMPLES = 20


def evaluate(job: TrainerJob, paths: JobPaths, progress: ProgressSink) -> dict[str, Any]:
    """Writes `evaluate` and `majority` into metrics.json and returns both.

    StageError DATA `NoLabels` without labelled rows, CONFIG `UnknownMetric`, STRATEGY_NOT_IN_EFFECT `DeviceMissing`,
    GATE_NOT_MET after the metrics are written.
    """
    task = task_module(job.task)
    prepared = PreparedData.open(paths)
    role, labels = _labelled_split(prepared)
    names = prepared.facts.labels
    wanted = _wanted(job, task.majority(labels, names))
    model = model_to_use(job, paths, prepared)
    device, batch_tokens = DEFAULT_DEVICE, DEFAULT_BATCH_TOKENS
    if job.evaluation:
        device, batch_tokens = job.evaluation.device, job.evaluation.batch_tokens
    logits = logits_of(model, prepared, role, device=device, batch_tokens=batch_tokens, progress=progress)
    measured = task.metrics(logits, labels, names)
    majority = task.majority(labels, names)
    sections: dict[str, Any] = {
        "evaluate": {
            **{name: measured[name] for name in wanted},
            "loss": task.loss(logits, labels),
            "rows": len(labels),
            "split": role,
        },
        "majority": {name: majority[name] for name in wanted},
    }
    merged = merge_metrics(paths, sections)
    if job.training is not None:
        write_model_card(paths, job, prepared.facts, merged)
    write_samples(paths, _samples(job, prepared, role, logits, labels))
    if job.evaluation and job.evaluation.gate:
        _check_gate(job.evaluation.gate, measured, role)
    return sections


def _labelled_split(prepared: PreparedData) -> tuple[str, LabelIds]:
    """Test, or validation when there is no test split or it has no labels; the result says which."""
    for role in ("test", "validation"):
        labels = prepared.labels(role) if role in prepared.facts.splits else None
        if labels is not None:
            return role, labels
    raise StageError(
        FailureClass.DATA,
        "NoLabels",
        f"Neither test nor validation has labels; prepared are {', '.join(prepared.facts.splits)}.",
        "Set dataset.columns.label and a split with labels, or leave evaluation out.",
    )


def _wanted(job: TrainerJob, available: Mapping[str, float]) -> list[str]:
    asked = job.evaluation.metrics if job.evaluation and job.evaluation.metrics is not None else tuple(available)
    gate = [job.evaluation.gate.metric] if job.evaluation and job.evaluation.gate else []
    # A gate is a minimum, and of the loss a smaller value is better.
    allowed = {"evaluation.metrics": (asked, [*available, "loss"]), "evaluation.gate.metric": (gate, [*available])}
    for path, (names, known) in allowed.items():
        for name in names:
            if name not in known:
                raise StageError(
                    FailureClass.CONFIG,
                    "UnknownMetric",
                    f"{path} is {name!r}; {job.task} has {', '.join(known)} there.",
                    f"Set {path} to one of them.",
                )
    return [name for name in available if name in asked or name in gate]


def _check_gate(gate: Gate, measured: Mapping[str, float], role: str) -> None:
    value = measured[gate.metric]
    if not value >= gate.minimum:  # written so that NaN does not pass
        raise StageError(
            FailureClass.GATE_NOT_MET,
            "GateNotMet",
            f"{gate.metric} is {value:.4f} on the {role} split; evaluation.gate.minimum is {gate.minimum}.",
            "Train longer or on better data, or lower evaluation.gate.minimum. The model and the metrics are kept.",
        )


def _samples(
    job: TrainerJob, prepared: PreparedData, role: str, logits: Logits, labels: LabelIds
) -> list[dict[str, Any]]:
    """Rows for the report: the wrong answers given with most confidence first (at most half), then the first right
    ones.
    """
    names = prepared.facts.labels
    answers = logits.argmax(axis=1)
    predictions = task_module(prepared.task).predictions(logits, prepared.facts)
    wrong = np.flatnonzero(answers != labels)
    wrong = wrong[np.argsort([-predictions[row]["score"] for row in wrong], kind="stable")][: _SAMPLES // 2]
    right = np.flatnonzero(answers == labels)[: _SAMPLES - len(wrong)]
    chosen = [*wrong.tolist(), *right.tolist()]
    if not chosen:
        return []
    assert job.dataset is not None
    # Not all columns of the split: those that predictions copy are there too.
    texts = list(task_module(prepared.task).texts(job.dataset.columns).values())
    raw = prepared.raw(role).select_columns(texts)
    return [
        {
            "row": row,
            "text": [str(raw[row][name]) for name in texts],
            "label": names[labels[row]],
            "predicted": predictions[row]["label"],
            "score": predictions[row]["score"],
        }
        for row in chosen
    ]
