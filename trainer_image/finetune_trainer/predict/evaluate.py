"""The `evaluate` stage: metrics of the model and of a baseline on rows outside training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import Stage
from finetune_contract.inference_settings import Gate
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.metrics import BASELINE
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.data.prepared import PreparedData, PreparedSplit
from finetune_trainer.predict.backends.backend_protocol import ForwardPass
from finetune_trainer.predict.backends.served_backend import JUDGED_IN, judged_backend
from finetune_trainer.predict.labelled_rows import labelled_split
from finetune_trainer.predict.pod_processes import BatchShard, evaluation_shard
from finetune_trainer.predict.runner import (
    Means,
    answers_of,
    fitted_budgets,
    follow,
    model_to_use,
    reference_model,
    settle,
)
from finetune_trainer.predict.token_rate import TokenRate, log_tokens
from finetune_trainer.report.model_card import write_model_card
from finetune_trainer.report.report_parts import not_met
from finetune_trainer.report.reporting import merge_generation, merge_metrics, write_confusion, write_samples
from finetune_trainer.tasks.conversations import BESIDE
from finetune_trainer.tasks.metric_names import refuse_unknown_metrics
from finetune_trainer.tasks.task_protocol import REFERENCE, Answer, TaskParts, labels_of
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.tasks.writing import generated_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 20


def evaluate(
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    world: ProcessWorld = ProcessWorld(),  # noqa: B008  # frozen
) -> dict[str, Any]:
    """Write `evaluate` and `majority` into metrics.json and return both; nothing in a process that does not lead.

    StageError DATA `NoLabels` without labelled rows, CONFIG `UnknownMetric`, STRATEGY_NOT_IN_EFFECT `DeviceMissing`,
    WORLD_SIZE, GATE_NOT_MET after the metrics are written.
    """
    task = task_of(job)
    prepared = PreparedData.open(paths)
    split = labelled_split(task.scoring, prepared)
    wanted = _wanted(job, task.scoring.metrics[prepared.facts.label_form])
    means = Means.of(job.evaluation)
    share = evaluation_shard(world, job.inference(Stage.EVALUATE), means.device)
    rate = TokenRate(progress, share.count)
    answers, backend = _answers(job, paths, prepared, split, share, rate)
    share.end()
    if answers is None:
        return {}
    measured = task.scoring.score(answers, split)
    baseline = task.scoring.baseline(split)
    sections: dict[str, Any] = {
        "evaluate": {
            **{name: measured[name] for name in wanted},
            "loss": measured["loss"],
            "rows": split.rows,
            "split": split.role,
            **({BASELINE: task.description.card(job, prepared.facts).baseline} if baseline else {}),
            **means.entry,
            **({} if backend is None else {JUDGED_IN: backend}),
        },
        "majority": {name: baseline[name] for name in wanted if name in baseline},
    }
    written = rate.figures(generated_tokens(answers))
    log_tokens(written)
    # Not in the section of the metrics, which are the same in each run.
    merge_generation(paths, Stage.EVALUATE, written)
    merged = merge_metrics(paths, sections)
    if job.training is not None:
        write_model_card(paths, job, prepared.facts, merged)
    write_samples(paths, _samples(job, task, split, answers))
    write_confusion(paths, task.scoring.confusion(answers, split))
    if job.evaluation and job.evaluation.gate:
        check_gate(job.evaluation.gate, measured, f"on the {split.role} split")
    return sections


def _answers(
    job: TrainerJob,
    paths: JobPaths,
    prepared: PreparedData,
    split: PreparedSplit,
    share: BatchShard,
    progress: ProgressSink,
) -> tuple[list[Answer] | None, str | None]:
    """Return the answers of all processes, with those of the model before training if the task compares them; None if
    this process does not lead. Return also the backend that computed them, if the job requests one.
    """
    task, means, group = task_of(job), Means.of(job.evaluation), share.group
    place = (means.precision, means.devices, group)

    def answered(model: PreTrainedModel, forward: ForwardPass | None = None) -> list[Answer] | None:
        if not group.leads:
            follow(Stage.EVALUATE, job, model, group, device=means.device, pad_token_id=split.data.pad_token_id)
            return share.gathered([])
        tokens = means.batch_tokens
        if group.size > 1:
            settle(model, means.device)
        budgets = fitted_budgets(Stage.EVALUATE, job, model, split, batch_tokens=tokens, share=share)
        answers = answers_of(
            Stage.EVALUATE,
            job,
            model,
            split,
            device=means.device,
            batch_tokens=tokens,
            progress=progress,
            forward=forward,
            share=share,
            budgets=budgets,
        )
        group.end()
        return share.gathered(answers)

    reference: list[Answer] | None = None
    if task.head.compared:  # one model at a time
        reference = answered(reference_model(job, task.head, *place))
    model = model_to_use(job, paths, prepared, *place)
    with judged_backend(job, paths, model, labels_of(prepared.facts)) as (backend, forward):
        answers = answered(model, forward)
    if answers is None or reference is None:
        return answers, backend
    return [{**answer, **_of_reference(base)} for answer, base in zip(answers, reference, strict=True)], backend


def _of_reference(answer: Answer) -> Answer:
    return {f"{REFERENCE}{name}": value for name, value in answer.items()}


def _wanted(job: TrainerJob, available: Sequence[str]) -> list[str]:
    refuse_unknown_metrics(job, available)
    requested = job.evaluation.metrics if job.evaluation and job.evaluation.metrics is not None else tuple(available)
    gate = job.evaluation.gate.metric if job.evaluation and job.evaluation.gate else None
    return [name for name in available if name in requested or name == gate]


def check_gate(gate: Gate, measured: Mapping[str, float], where: str) -> None:
    """Raise StageError GATE_NOT_MET if the metric of the gate is beyond its limit; `where`: end of "0.8 ..."."""
    value = measured[gate.metric]
    match not_met(gate, value):
        case "minimum":
            limit, change = f"minimum is {gate.minimum}", "lower evaluation.gate.minimum"
        case "maximum":
            limit, change = f"maximum is {gate.maximum}", "raise evaluation.gate.maximum"
        case None:
            return
    raise StageError(
        FailureClass.GATE_NOT_MET,
        "GateNotMet",
        f"{gate.metric} is {value:.4f} {where}; evaluation.gate.{limit}.",
        f"Train longer or on better data, or {change}. The model and the metrics are kept.",
    )


def _samples(job: TrainerJob, task: TaskParts, split: PreparedSplit, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return rows for the report, with the inputs that they were judged by."""
    samples = task.scoring.samples(answers, split, _SAMPLES)
    if not samples:
        return []
    assert job.dataset is not None
    # Not all columns of the split, which also holds those that predictions copy.
    inputs = task.encoding.inputs(job.dataset.columns)
    names = [name for role, name in inputs.items() if role not in BESIDE]
    raw = split.raw().select_columns(names)
    return [{**sample, "text": [_shown(raw[sample["row"]][name]) for name in names]} for sample in samples]


def _shown(value: object) -> str:
    """Join the words of a list; write a conversation as `role: content`."""
    if isinstance(value, list):
        return " ".join(f"{item['role']}: {item.get('content')}" if _is_message(item) else str(item) for item in value)
    return str(value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value
