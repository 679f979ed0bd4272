"""The trainer's job: the part of a finished draft that its stages read."""

from __future__ import annotations

from finetune_contract.choices import Stage, Task
from finetune_contract.data_settings import Columns, DataSource, ModelSource, Preparation, Splits
from finetune_contract.inference_settings import Evaluation, Gate, Generation, InferenceProcesses, Prediction
from finetune_contract.trainer_job import EarlyStopping, Preference, TrainerJob, Training
from finetune_operator.endpoints.endpoint_plan import judged_optimization, serving_order
from finetune_operator.plan.inference.inference_memory import inference_tokens
from finetune_operator.plan.script import script_order
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.types import DatasetSpec, FineTuneJobSpec

_TASK_COLUMNS: dict[Task, tuple[str, ...]] = {
    "text-classification": ("text", "label"),
    "token-classification": ("tokens", "tags"),
    "question-answering": ("question", "context", "answers"),
    "text-generation": ("text",),
    "preference-tuning": ("prompt", "chosen", "rejected"),
    "summarization": ("source", "target"),
    "translation": ("source", "target"),
    "masked-lm": ("text",),
}
"""Columns that a task reads, by their default names."""
INSTEAD_OF_TEXT = frozenset({"messages", "source", "target"})
"""Columns of rows of text-generation that are not plain text."""
_ANSWERS = frozenset({"label", "tags", "answers", "target", "chosen", "rejected"})
"""Columns with answers; rows to predict have them only if the job names them."""


def predicted_source(spec: FineTuneJobSpec) -> DataSource | None:
    """Return the source of `predict.dataset`. For text-generation, rows have the form of the trained rows, which the
    trainer takes from these if no column is named.
    """
    rows = None if spec.predict is None else spec.predict.dataset
    return None if rows is None else data_source(spec.task, rows, False, spec.dataset is not None)


def data_source(
    task: Task, dataset: DatasetSpec, with_answers: bool = True, has_trained_rows: bool = False
) -> DataSource:
    """Return the trainer's form of a data set, with the task's default names for columns that the job does not name."""
    given = dataset.columns.model_dump(by_alias=False, exclude_none=True)
    names = [name for name in _TASK_COLUMNS[task] if with_answers or name not in _ANSWERS]
    if task == "text-generation" and has_trained_rows and not given:
        names = []
    elif task == "text-generation" and given.keys() & INSTEAD_OF_TEXT:
        names = ["source", "target"] if "messages" not in given else []
        names = [name for name in names if with_answers or name not in _ANSWERS]
    columns = {name: name for name in names} | given
    splits = dataset.splits
    return DataSource(
        uri=dataset.uri,
        config=dataset.config,
        splits=Splits(train=splits.train, validation=splits.validation, test=splits.test),
        columns=Columns(**columns),
        labels=dict(sorted(dataset.labels.items())),
        label_separator=dataset.label_separator,
    )


def packs_any_rows(spec: FineTuneJobSpec) -> bool:
    """Return whether rows are to be packed even if they turn out to be no plain text, where the columns leave that
    open.
    """
    named = set() if spec.dataset is None else spec.dataset.columns.model_dump(exclude_none=True).keys()
    return spec.preparation.packing == "always" and not named & INSTEAD_OF_TEXT


def _training(draft: Draft) -> Training:
    asked, steps = draft.training, decided(draft.steps)
    stopping = asked.early_stopping
    return Training(
        max_steps=steps.total,
        steps_per_epoch=steps.per_epoch,
        learning_rate=asked.learning_rate,
        scheduler=asked.scheduler,
        warmup_steps=steps.warmup,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.max_grad_norm,
        optimizer=asked.optimizer,
        seed=asked.seed,
        label_smoothing=asked.label_smoothing,
        early_stopping=None if stopping is None else EarlyStopping(metric=stopping.metric, patience=stopping.patience),
        adapter=draft.adapter,
        precision=decided(draft.precision),
        strategy=decided(draft.strategy),
        batch=decided(draft.batch),
        world=decided(draft.world),
        checkpoints=decided(draft.checkpoints),
        arguments=asked.arguments,
        compiles_by_plan=draft.compiles_by_plan,
    )


def _pod(draft: Draft, models: int, tensor: int) -> InferenceProcesses:
    """Return the processes of a pod with so many models."""
    devices = draft.inference.devices if tensor == 1 else 1
    return InferenceProcesses(processes=models * tensor, devices_per_process=devices, tensor=tensor)


def _evaluation(draft: Draft) -> Evaluation | None:
    if Stage.EVALUATE not in draft.stages:
        return None
    asked = draft.spec.evaluation
    metrics = None if asked is None or asked.metrics == "auto" else asked.metrics
    gate = None
    if asked is not None and asked.gate is not None:
        gate = Gate(metric=asked.gate.metric, minimum=asked.gate.minimum, maximum=asked.gate.maximum)
    pod = _pod(draft, draft.inference.evaluate_processes, draft.inference.evaluate_tensor)
    return Evaluation(
        processes=pod.processes,
        devices_per_process=pod.devices_per_process,
        tensor=pod.tensor,
        metrics=metrics,
        gate=gate,
        device=draft.inference_device,
        batch_tokens=inference_tokens(draft),
        precision=draft.inference.precision,
        **judged_optimization(draft),
    )


BAD_ROWS = 0.01
"""Allowed share of unreadable rows: data of many sources have a few, and more of them are a mistake."""


def _prediction(draft: Draft) -> Prediction | None:
    asked = draft.spec.predict
    if asked is None:
        return None
    pod = _pod(draft, draft.inference.predict_processes, draft.inference.predict_tensor)
    return Prediction(
        processes=pod.processes,
        devices_per_process=pod.devices_per_process,
        tensor=pod.tensor,
        dataset=predicted_source(draft.spec),
        output=asked.output,
        columns=asked.columns,
        max_bad_rows=asked.max_bad_rows or 0,
        max_bad_share=BAD_ROWS if asked.max_bad_rows is None else 0.0,
        device=draft.inference_device,
        batch_tokens=inference_tokens(draft),
        precision=draft.inference.precision,
        workers=draft.inference.predict_workers,
        server=None if draft.inference.predict_optimization == "none" else asked.server,
        engine=draft.inference.predict_engine,
        format=asked.format,
        id_column=asked.id_column,
        optimization=draft.inference.predict_optimization,
        tolerance=None if draft.inference.predict_optimization == "none" else asked.tolerance,
        metric_tolerance=None if draft.inference.predict_optimization == "none" else asked.metric_tolerance,
    )


def trainer_job(draft: Draft) -> TrainerJob:
    """Return the trainer's job of a finished draft."""
    spec = draft.spec
    job = TrainerJob(
        name=draft.job.name,
        task=spec.task,
        model=ModelSource(
            uri=spec.model.uri,
            revision=draft.inputs.facts.model_revision or spec.model.revision,
            trust_remote_code=spec.model.trust_remote_code,
        ),
        dataset=None if spec.dataset is None else data_source(spec.task, spec.dataset),
        preparation=Preparation(
            max_length=spec.preparation.max_length,
            stride=spec.preparation.stride,
            engine=draft.engine,
            workers=spec.preparation.workers,
            packing=draft.packing,
            chat_template=spec.preparation.chat_template,
            packing_asked=draft.packing and packs_any_rows(spec),
        ),
        training=_training(draft) if draft.loops else None,
        device=draft.device,
        script=None if draft.script is None else script_order(draft, draft.script),
        evaluation=_evaluation(draft),
        predict=_prediction(draft),
        serving=serving_order(draft),
        generation=Generation(**spec.generation.model_dump()),
        preference=Preference(**spec.preference.model_dump()),
    )
    return job if spec.training is None else job.model_copy(update={"seed": spec.training.seed})
