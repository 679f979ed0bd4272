"""Metrics that only the user's own program measures, for the gate and the results of the stage evaluate.

The program writes them with transformers' `Trainer.save_metrics`, and the stage train copies them into metrics.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune_contract.inference_settings import Gate
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.metrics import metrics_of
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError

_PREFIXES = ("", "eval_", "test_")
"""Prefixes that `save_metrics` has in a program for the metrics of its splits, in the order of preference."""


@dataclass(frozen=True)
class OwnMetrics:
    """Metrics of the program that an evaluation names."""

    values: Mapping[str, float]
    """Name in the job -> value."""
    gate: Gate | None = None
    """The job's gate, if it is on one of them."""


def without_own_metrics(job: TrainerJob) -> TrainerJob:
    """Return the job with the metrics of its task alone, which the stage evaluate measures itself."""
    evaluation, names = job.evaluation, _names(job)
    if evaluation is None or not names:
        return job
    metrics = None if evaluation.metrics is None else tuple(name for name in evaluation.metrics if name not in names)
    gate = None if evaluation.gate is None or evaluation.gate.metric in names else evaluation.gate
    return job.model_copy(update={"evaluation": evaluation.model_copy(update={"metrics": metrics, "gate": gate})})


def own_metrics(job: TrainerJob, paths: JobPaths) -> OwnMetrics:
    """Read the metrics that the job names and its task does not have. StageError CONFIG `UnknownMetric` for one that
    the program has not written.
    """
    names = _names(job)
    written = _written(paths) if names else {}
    gate = job.evaluation.gate if job.evaluation else None
    values = {}
    for name in names:
        key = next((f"{prefix}{name}" for prefix in _PREFIXES if f"{prefix}{name}" in written), None)
        if key is None:
            path = "gate.metric" if gate is not None and gate.metric == name else "metrics"
            raise StageError(
                FailureClass.CONFIG,
                "UnknownMetric",
                f"evaluation.{path} is {name!r}; {job.task} has {', '.join(metrics_of(job.task))}, and the program "
                f"wrote {', '.join(sorted(written)[:20]) or 'no metric'}.",
                f"Set evaluation.{path} to one of them, or write {name} with Trainer.save_metrics.",
            )
        values[name] = written[key]
    return OwnMetrics(values, gate if gate is not None and gate.metric in names else None)


def _names(job: TrainerJob) -> Sequence[str]:
    """Return the metrics that the evaluation names and the job's task does not have, each once."""
    if job.evaluation is None:
        return ()
    gate, known = job.evaluation.gate, metrics_of(job.task)
    named = [*(job.evaluation.metrics or ()), *(() if gate is None else [gate.metric])]
    return tuple(dict.fromkeys(name for name in named if name not in known))


def _written(paths: JobPaths) -> dict[str, float]:
    """Return the numbers of the section `train` of metrics.json; empty if the file is missing."""
    try:
        section = json.loads(paths.metrics.read_bytes()).get("train", {})
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in section.items() if isinstance(value, int | float)}
