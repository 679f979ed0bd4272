"""The `predict` stage: one prediction for each row of the predict data set, written so that the file appears whole or
not at all.

A copied column that is called like a column of the predictions (`label`, say) is written as `input_<name>`; nothing
is overwritten.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from finetune_contract.choices import Stage
from finetune_contract.job import TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.data.prepared import PreparedData, PreparedSplit, arrow_table
from finetune_trainer.failures import StageError
from finetune_trainer.inference.runner import Means, answers_of, model_to_use
from finetune_trainer.progress import ProgressSink
from finetune_trainer.tasks.base import Answer
from finetune_trainer.tasks.registry import task_module, task_of
from finetune_trainer.uris import Uri, local_path

_CHUNK_ROWS = 4096


def predict(job: TrainerJob, paths: JobPaths, progress: ProgressSink) -> dict[str, Any]:
    """Writes the predictions and returns `rows`, `path` (file or URI), `split`, and what was computed in unless fp32.

    StageError DATA, MODEL, STRATEGY_NOT_IN_EFFECT `DeviceMissing`, or CONFIG for an output that cannot be written; an
    earlier result stays when it fails.
    """
    prepared = PreparedData.open(paths)
    wanted = ("predict",) if job.predict and job.predict.dataset else ("test", "validation")
    role = next((role for role in wanted if role in prepared.facts.splits), None)
    if role is None:
        raise StageError(
            FailureClass.DATA,
            "SplitNotFound",
            f"There is no prepared split {wanted[0]} to predict; prepared are {', '.join(prepared.facts.splits)}.",
            "Set predict.dataset, or dataset.splits.test, and run the stage prepare again.",
        )
    copies = _output_names(job.predict.columns if job.predict else (), {"row", *task_of(job).answer_columns})
    output = _output(job, paths)
    means = Means.of(job.predict)
    model = model_to_use(job, paths, prepared, means.precision)
    split = prepared.of(role)
    answers = answers_of(
        Stage.PREDICT, job, model, split, device=means.device, batch_tokens=means.batch_tokens, progress=progress
    )
    output.write(_tables(split, answers, copies), parquet=output.name.endswith(".parquet"))
    return {"rows": split.rows, "path": output.name, "split": role, **means.told}


def _output_names(columns: tuple[str, ...], own: Collection[str]) -> dict[str, str]:
    """Column of the input -> its name in the output, where `own` are taken."""
    names = {column: f"input_{column}" if column in own else column for column in columns}
    if len(set(names.values())) < len(names):
        raise StageError(
            FailureClass.CONFIG,
            "ColumnNameTaken",
            f"predict.columns {', '.join(columns)} would write one name twice ({', '.join(names.values())}).",
            "Rename one of the columns in the data, or do not copy it.",
        )
    return names


def _tables(split: PreparedSplit, answers: Sequence[Answer], copies: Mapping[str, str]) -> Iterator[pa.Table]:
    """Chunks of the output in the order of the rows, all of one schema."""
    task = task_module(split.data.task)
    index, raw = split.index(), arrow_table(split.raw())
    for start in range(0, split.rows, _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        columns = {"row": index[chunk], **{name: raw[column][chunk] for column, name in copies.items()}}
        said = task.predictions(answers, split, chunk)
        yield pa.table({**columns, **dict(zip(said.column_names, said.columns, strict=True))})


# ----------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class _LocalOutput:
    """A file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def write(self, tables: Iterator[pa.Table], *, parquet: bool) -> None:
        """Beside its place first, then moved there in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            _write(temporary, tables, parquet=parquet)
            temporary.replace(self.path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


@dataclass(frozen=True)
class _RemoteOutput:
    """An object behind fsspec; object stores show an upload only when it is whole."""

    uri: str
    scratch: Path

    @property
    def name(self) -> str:
        return self.uri

    def write(self, tables: Iterator[pa.Table], *, parquet: bool) -> None:
        """Locally first, then uploaded."""
        temporary = self.scratch / f".predictions.{uuid.uuid4().hex}"
        try:
            _write(temporary, tables, parquet=parquet)
            filesystem, path = fsspec.core.url_to_fs(self.uri)
            filesystem.put_file(str(temporary), path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _output(job: TrainerJob, paths: JobPaths) -> _LocalOutput | _RemoteOutput:
    """Where predictions go; found before the model runs, so that a bad URI costs no time."""
    text = job.predict.output if job.predict else None
    if text is None:
        return _LocalOutput(paths.predictions_jsonl)
    uri = Uri.parse(text, "predict.output")
    if not uri.rest.endswith((".jsonl", ".parquet")):
        raise StageError(
            FailureClass.CONFIG,
            "OutputFormat",
            f"predict.output is {text!r}; the ending chooses the format, and it is neither .jsonl nor .parquet.",
            "Let it end in .jsonl or .parquet.",
        )
    if uri.scheme == "file":
        return _LocalOutput(local_path(uri).absolute())
    try:
        fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise StageError(
            FailureClass.CONFIG,
            "DriverMissing",
            f"predict.output is {text!r}, but nothing installed here writes to {uri.scheme}://: {error}",
            "Install the fsspec driver of this scheme, or use file://.",
        ) from error
    return _RemoteOutput(text, paths.root)


def _write(path: Path, tables: Iterator[pa.Table], *, parquet: bool) -> None:
    if not parquet:
        with path.open("w", encoding="utf-8") as file:
            for table in tables:
                # default=str: dates and the like, which only Parquet input can hold.
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table.to_pylist())
        return
    first = next(tables)
    with pq.ParquetWriter(path, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
