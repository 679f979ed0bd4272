"""Results of the stages in the status: artefacts, metrics, usage with its cost, and progress of the last stage."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from pydantic import JsonValue

from finetune_contract.choices import BackendName, Stage, Task
from finetune_contract.layout import CHECKPOINTS_DELETED
from finetune_contract.metrics import LOSS
from finetune_contract.metrics import metrics_of as metrics_of_task
from finetune_contract.report import Communication, TrainerReport
from finetune_operator.jobs.render.sizes import gpus_of_stage
from finetune_operator.plan.time.cost import find_price
from finetune_operator.plan.types.names import JobNames
from finetune_operator.spec.settings.settings import Price, Settings
from finetune_operator.spec.status_times import seconds_since
from finetune_operator.spec.types import (
    ArtifactsStatus,
    CommunicationStatus,
    CostStatus,
    FineTuneJobSpec,
    FineTuneJobStatus,
    PlanStatus,
    PredictSpec,
    ProgressStatus,
    StageStatus,
)

CHECKPOINT_BYTES = "train_checkpoint_bytes"
"""Metric with the size of the checkpoints."""
BAD_ROWS = "predict_bad_rows"
"""Metric with the number of rows without a prediction; absent when all have one."""
VALIDATED = "eval_"
"""Beginning of the names of metrics that a training measured on validation rows."""
_SECONDS_PER_HOUR = 3600


def finished_progress(progress: ProgressStatus | None) -> ProgressStatus:
    """Return the progress of a stage that is done: complete, whatever was reported last, as reports may get lost."""
    last = progress or ProgressStatus()
    step = last.step if last.total_steps is None else last.total_steps
    return last.model_copy(update={"percent": 100, "step": step, "remaining_seconds": 0.0})


def metrics_of(report: TrainerReport) -> dict[str, float]:
    """Return the report's figures, by the names that Hugging Face uses.

    The trainer writes them as in metrics.json, in a section named after the stage. Those of train get its name as a
    prefix, except those measured on validation rows; the report of a program that knows no sections is read as it is.
    """
    section = report.metrics.get(report.stage.value)
    if not isinstance(section, dict):
        return _numbers(report.metrics)
    figures = _numbers(section)
    if report.stage is not Stage.TRAIN:
        return figures
    return {name if name.startswith(VALIDATED) else f"train_{name}": value for name, value in figures.items()}


def _numbers(metrics: Mapping[str, JsonValue]) -> dict[str, float]:
    """Return the metrics that are numbers; text and booleans are in metrics.json.

    Values that no status can hold are left out (NaN, infinity, integers of hundreds of digits): writes would fail.
    """
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }


def headline(metrics: Mapping[str, float], task: Task) -> str:
    """Return the headline metric as `accuracy 0.854`: the first of the task's own, of test rows before validation rows,
    else a loss, else an empty text.
    """
    own = [name for name in metrics if name in metrics_of_task(task) and name != LOSS]
    validated = [f"{VALIDATED}{name}" for name in metrics_of_task(task) if name != LOSS]
    names = (*own, *(name for name in metrics if name in validated), LOSS, f"{VALIDATED}{LOSS}", f"train_{LOSS}")
    name = next((name for name in names if name in metrics), None)
    return "" if name is None else f"{name} {metrics[name]:.4g}"


def result(metrics: Mapping[str, float], spec: FineTuneJobSpec) -> str | None:
    """Return the metric of the gate with its limit as `f1 0.91 (gate 0.9)`, else the headline metric; None if there is
    none.
    """
    gate = None if spec.evaluation is None else spec.evaluation.gate
    if gate is None or gate.metric not in metrics:
        return headline(metrics, spec.task) or None
    limit = gate.maximum if gate.minimum is None else gate.minimum
    return f"{gate.metric} {metrics[gate.metric]:.4g} (gate {limit:.4g})"


def job_folder(spec: FineTuneJobSpec, job: str) -> str:
    """Return the URI of the folder that holds everything of the job."""
    return f"{(spec.storage.workspace or f'pvc://{JobNames.of(job).claim}').rstrip('/')}/{job}"


def communication_status(communication: Communication) -> CommunicationStatus:
    """Return the transports of a training as the status shows them."""
    return CommunicationStatus(
        inside=communication.inside,
        between=communication.between,
        gpudirect=communication.gpudirect,
        adapters=communication.adapters[:16],
    )


def with_report(before: ArtifactsStatus | None, spec: FineTuneJobSpec, job: str) -> ArtifactsStatus:
    """Return the artefacts with report.html, which the trainer writes when nothing more is to come."""
    return (before or ArtifactsStatus()).model_copy(update={"report": f"{job_folder(spec, job)}/report.html"})


def artifacts(
    status: FineTuneJobStatus, spec: FineTuneJobSpec, job: str, stage: Stage, report: TrainerReport
) -> ArtifactsStatus:
    """Return the artefacts after `stage` succeeded with `report` of rank 0."""
    folder = job_folder(spec, job)
    changes: dict[str, object] = {
        name: path if "://" in path else f"{folder}/{path}"
        for name, path in report.artifacts.items()
        if name in ("model", "report", "predictions", "script", "checkpoints")
    }
    if CHECKPOINTS_DELETED in report.artifacts:
        changes["checkpoints"] = None
    if stage is Stage.PREDICT and "predictions" not in changes:
        changes["predictions"] = _predictions(spec, folder)
    if report.fingerprint is not None:
        changes["dataset_fingerprint"] = report.fingerprint
    if report.model_revision is not None:
        changes["model_revision"] = report.model_revision
    before = status.artifacts or ArtifactsStatus()
    if stage is Stage.EVALUATE:
        changes["judged_optimization"] = _judged_optimization(report)
    if stage in (Stage.TRAIN, Stage.EVALUATE):
        figures = metrics_of(report)
        changes["metrics"] = {**before.metrics, **figures}
        changes["result"] = result(figures, spec) or before.result
    if stage is Stage.PREDICT and (bad := _numbers(report.metrics).get("bad_rows")):
        changes["metrics"] = {**before.metrics, BAD_ROWS: bad}
    return before.model_copy(update=changes)


def _judged_optimization(report: TrainerReport) -> str | None:
    """Return the backend of an evaluation; None if the model was evaluated as it is."""
    section = report.metrics.get(Stage.EVALUATE.value)
    backend = section.get("optimization") if isinstance(section, dict) else None
    return backend if isinstance(backend, str) and backend in get_args(BackendName) else None


def _predictions(spec: FineTuneJobSpec, folder: str) -> str:
    """Return the URI of the predictions."""
    predict = spec.predict or PredictSpec()
    return predict.output or f"{folder}/predictions.{predict.format or 'jsonl'}"


def nodes(spec: FineTuneJobSpec, plan: PlanStatus | None, stage: Stage) -> int:
    """Return the nodes that an attempt at `stage` takes; pods of prepare or predict count as one each."""
    match stage:
        case Stage.PREPARE:
            return spec.preparation.pods
        case Stage.PREDICT:
            return 1 if plan is None or plan.predict_workers is None else plan.predict_workers
        case Stage.TRAIN:
            return spec.resources.nodes
        case _:
            return 1


def gpus(spec: FineTuneJobSpec, plan: PlanStatus | None, stage: Stage) -> int:
    """Return the GPUs that a pod of `stage` takes; 0 if the job leaves their number open."""
    gpus_per_node = spec.resources.gpus_per_node
    inference = () if plan is None else plan.inference
    planned = next((entry.processes * entry.gpus_per_process for entry in inference if entry.stage == stage), 1)
    return gpus_of_stage(stage, 0 if gpus_per_node == "auto" else gpus_per_node, planned)


def cost_after(
    status: FineTuneJobStatus, spec: FineTuneJobSpec, settings: Settings, stage: StageStatus, ended: datetime
) -> CostStatus:
    """Return the cost once the attempt in `stage` is over.

    The amount is left out as soon as any part of it has no price.
    """
    before = status.cost or CostStatus(currency=settings.currency if settings.prices else None)
    kind = stage.name
    pods = nodes(spec, status.plan, kind)
    held = seconds_since(stage.nodes_since, ended) * pods
    if not held:
        return before
    price, counted = _price(spec, status.plan, settings, kind), before.amount if before.billable_seconds else 0.0
    per_hour = None if price is None else price.spot if stage.capacity == "spot" else price.ordinary
    amount, saved = None, None
    if price is not None and per_hour is not None and counted is not None:
        amount, saved = round(counted + held / _SECONDS_PER_HOUR * per_hour, 6), before.saved
        if stage.capacity == "spot":
            less = (before.saved or 0.0) + held / _SECONDS_PER_HOUR * (price.ordinary - per_hour)
            saved = round(max(0.0, less), 6)
    return before.model_copy(
        update={
            "node_seconds": before.node_seconds + seconds_since(stage.running_since, ended) * pods,
            "billable_seconds": before.billable_seconds + held,
            "amount": amount,
            "saved": saved,
        }
    )


@dataclass(frozen=True)
class PodPrice:
    """Price of one pod per hour."""

    ordinary: float
    spot: float | None
    """Price on spot nodes; None: there is none for nodes of this kind."""


def _price(spec: FineTuneJobSpec, plan: PlanStatus | None, settings: Settings, stage: Stage) -> PodPrice | None:
    """Return the price of a node, or of the share of it that goes with the pod's GPUs in inference."""
    gpus_per_node = spec.resources.gpus_per_node
    if gpus_per_node == "auto":
        return None
    if stage is Stage.PREPARE or gpus_per_node == 0:
        return _share(find_price(settings, "cpu", 0), 1.0)
    product = spec.resources.accelerator.product
    if product is None:
        return None
    taken = gpus(spec, plan, stage)
    node = find_price(settings, product, taken)
    return _share(node, 1.0) or _share(find_price(settings, product, gpus_per_node), taken / gpus_per_node)


def _share(price: Price | None, share: float) -> PodPrice | None:
    if price is None:
        return None
    return PodPrice(price.per_hour * share, None if price.spot_per_hour is None else price.spot_per_hour * share)
