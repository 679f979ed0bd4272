"""Inputs that the predictions of a job depend on: rows, columns and means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.prepared import PreparedData, PreparedSplit
from finetune_trainer.data.row_shards import PreparedRows, RowSource, row_source
from finetune_trainer.predict.answering import ROW, RequestedColumns, coding_of
from finetune_trainer.predict.prediction_output import FolderOutput, Output
from finetune_trainer.predict.prediction_parts import FILE, POSITION
from finetune_trainer.predict.runner import Means, shown_by_rows, weights_version
from finetune_trainer.predict.tensor_group import WholeModel
from finetune_trainer.prepare.prepare import predict_part
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.task_registry import task_of

PARTS_FORMAT = 3
"""Version of the parts' format; raise it when parts change."""
ID = "id"
"""Column of predictions for `predict.idColumn`."""


@dataclass(frozen=True)
class PredictionInputs:
    """Inputs that predictions depend on."""

    job: TrainerJob
    source: RowSource
    role: str
    requested: RequestedColumns
    means: Means
    group: WholeModel
    """Processes that hold the model."""

    @classmethod
    def of(cls, job: TrainerJob, paths: JobPaths, copies: Mapping[str, str], group: WholeModel) -> PredictionInputs:
        """Return the inputs of the job; StageErrors of the data source and of the task's columns."""
        task, means = task_of(job), Means.of(job.predict)
        part = predict_part(job, task.encoding)
        if part is not None:
            source = row_source(part.source, part.needs)
            return cls(job, source, "predict", RequestedColumns(part.columns, part.setting, copies), means, group)
        prepared = PreparedData.open(paths)
        role = next((role for role in ("test", "validation") if role in prepared.facts.splits), None)
        if role is None:
            raise StageError(
                FailureClass.DATA,
                "SplitNotFound",
                "There is no prepared split test to predict; the prepared splits are "
                f"{', '.join(prepared.facts.splits)}.",
                "Set predict.dataset, or dataset.splits.test, and run the stage prepare again.",
            )
        assert job.dataset is not None
        split = prepared.of(role)
        source = PreparedRows(split, prepared.facts.fingerprint)
        _refuse_missing_id(job, split)
        return cls(job, source, role, RequestedColumns(job.dataset.columns, "dataset", copies), means, group)

    @cached_property
    def coding(self) -> Coding:
        return coding_of(self.job)

    def key(self, paths: JobPaths) -> str:
        """Return a digest of everything that a part depends on."""
        job = self.job
        basis = {
            "format": PARTS_FORMAT,
            "source": self.source.identity(),
            "columns": self.requested.columns.model_dump(exclude_none=True),
            "copies": dict(self.requested.copies),
            "job": job.model_dump(
                mode="json", include={"task", "model", "generation", "preference", "seed"}, exclude_defaults=True
            ),
            "length": [self.coding.max_length, self.coding.stride],
            "means": [self.means.device, self.means.batch_tokens, self.means.precision],
            "trained": weights_version(job, paths),
            **shown_by_rows(job, paths),
            "optimization": None if job.predict is None else [job.predict.optimization, job.predict.tolerance],
        }
        if job.predict is not None and job.predict.metric_tolerance is not None:
            basis["metric_tolerance"] = job.predict.metric_tolerance
        if job.preparation.chat_template == "always":
            basis["chat"] = True
        if self.means.tensor > 1:
            basis["tensor"] = self.means.tensor
        return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:32]


def _refuse_missing_id(job: TrainerJob, split: PreparedSplit) -> None:
    name = job.predict.id_column if job.predict else None
    has = split.raw().column_names
    if name is not None and name not in has:
        raise StageError(
            FailureClass.DATA,
            "MissingColumn",
            f"predict.idColumn is {name!r}, but the prepared split {split.role} has the columns {', '.join(has)}.",
            "Run the stage prepare again: it keeps the columns that predict names.",
        )


def copied_columns(job: TrainerJob, output: Output) -> dict[str, str]:
    """Return the column of the predictions -> the column of the data that it copies."""
    requested = job.predict
    if requested is None:
        return {}
    taken = {FILE, POSITION, ROW} if isinstance(output, FolderOutput) else {ROW}
    taken |= set(task_of(job).description.answer_columns)
    identity = {ID: requested.id_column} if requested.id_column is not None else {}
    columns = [column for column in requested.columns if identity.get(column) != column]
    return {**identity, **_output_names(columns, {*taken, *identity})}


def _output_names(columns: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Return the column of the output -> the column of the input; names in `taken` get a prefix."""
    names = {f"input_{column}" if column in taken else column: column for column in columns}
    if len(names) < len(set(columns)):
        raise StageError(
            FailureClass.CONFIG,
            "ColumnNameTaken",
            f"predict.columns {', '.join(columns)} would write a column name twice ("
            f"{', '.join(f'input_{column}' if column in taken else column for column in columns)}).",
            "Rename one of the columns in the data, or do not copy it.",
        )
    return names
