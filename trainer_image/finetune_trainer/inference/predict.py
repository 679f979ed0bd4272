"""The `predict` stage: one prediction for each row that can be answered, in the order of the rows.

Rows are answered shard by shard, and each shard is written as a part that outlives the attempt: who was killed goes on
where it was. When all parts are there they become the output, which appears whole or not at all. Rows that cannot be
read or answered go to a file beside it with the reason; too many of them fail the stage.

A copied column that is called like a column of the predictions (`label`, say) is written as `input_<name>`; nothing
is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.data.prepare import labels_of_model, predict_part
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.row_shards import PreparedRows, RowSource, ShardKey, no_rows, row_source
from finetune_trainer.data.shards import Encoder
from finetune_trainer.failures import StageError
from finetune_trainer.files import replaced
from finetune_trainer.inference.answering import ROW, Answerer, Asked
from finetune_trainer.inference.prediction_parts import PartFacts, Parts
from finetune_trainer.inference.runner import Means, used_model
from finetune_trainer.models import load_config, load_tokenizer, truncation_length, window_stride
from finetune_trainer.progress import NoProgress, ProgressSink
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.uris import Uri, local_path

log = logging.getLogger(__name__)

_FORMAT = 1
"""Counts up when parts change."""
_PARTS = "predictions.parts"
_LEAST_TO_JUDGE = 1000
"""Rows after which too many bad ones end the stage early."""


def predict(job: TrainerJob, paths: JobPaths, progress: ProgressSink) -> dict[str, Any]:
    """Writes the predictions and returns `rows`, `path` (file or URI), `split`, `bad_rows` and `bad_rows_path` where
    there are any, and what was computed in unless fp32.

    StageError DATA (`TooManyBadRows` when the rest is written nowhere), MODEL, STRATEGY_NOT_IN_EFFECT `DeviceMissing`,
    or CONFIG for an output that cannot be written; an earlier result stays when it fails.
    """
    copies = _output_names(job.predict.columns if job.predict else (), {ROW, *task_of(job).answer_columns})
    output = _output(job, paths)
    given = _Given.of(job, paths, copies)
    parts = Parts(paths.root / _PARTS / given.key(paths))
    done = _answered(given, parts, _Done(progress, given.source.weight), paths)
    if not done.rows:
        raise no_rows(given.source)
    aside = output.beside(_BAD_ROWS)
    if done.bad:
        aside.write(parts.aside(done.keys))
        if done.bad > _allowed(job, done.rows):
            raise _too_many(job, done, aside.name, parts)
    else:
        aside.discard()
    output.write(parts.joined(done.keys, given.source.numbered), parquet=output.name.endswith(".parquet"))
    shutil.rmtree(parts.folder.parent, ignore_errors=True)
    if done.truncated:
        share, length = f"{done.truncated:,} of {done.rows:,} rows", given.coding.max_length
        log.warning("%s are longer than %d tokens and lose text.", share, length)
    told: dict[str, Any] = {"bad_rows": done.bad, "bad_rows_path": aside.name} if done.bad else {}
    return {"rows": done.rows, "path": output.name, "split": given.role, **told, **given.means.told}


_BAD_ROWS = ".bad-rows.jsonl"


@dataclass(frozen=True)
class _Given:
    """What predictions depend on."""

    job: TrainerJob
    source: RowSource
    role: str
    asked: Asked
    means: Means

    @classmethod
    def of(cls, job: TrainerJob, paths: JobPaths, copies: Mapping[str, str]) -> _Given:
        """StageErrors of the data source and of the task's columns."""
        task, means = task_of(job), Means.of(job.predict)
        part = predict_part(job, task)
        if part is not None:
            source = row_source(part.source, part.needs)
            return cls(job, source, "predict", Asked(part.columns, part.setting, copies), means)
        prepared = PreparedData.open(paths)
        role = next((role for role in ("test", "validation") if role in prepared.facts.splits), None)
        if role is None:
            raise StageError(
                FailureClass.DATA,
                "SplitNotFound",
                f"There is no prepared split test to predict; prepared are {', '.join(prepared.facts.splits)}.",
                "Set predict.dataset, or dataset.splits.test, and run the stage prepare again.",
            )
        assert job.dataset is not None
        split = prepared.of(role)
        source = PreparedRows(split, prepared.facts.fingerprint)
        return cls(job, source, role, Asked(job.dataset.columns, "dataset", copies), means)

    @cached_property
    def coding(self) -> Coding:
        config = load_config(self.job)
        length = truncation_length(self.job, config)
        return Coding(load_tokenizer(self.job), length, window_stride(self.job, length), config.model_type)

    def key(self, paths: JobPaths) -> str:
        """Digest of all that a part depends on."""
        job = self.job
        basis = {
            "format": _FORMAT,
            "source": self.source.identity(),
            "columns": self.asked.columns.model_dump(exclude_none=True),
            "copies": dict(self.asked.copies),
            "job": job.model_dump(mode="json", include={"task", "model", "generation", "preference", "seed"}),
            "length": [self.coding.max_length, self.coding.stride],
            "means": [self.means.device, self.means.batch_tokens, self.means.precision],
            "trained": _version_of_model(job, paths),
        }
        return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:32]


def _version_of_model(job: TrainerJob, paths: JobPaths) -> object:
    """Identify the weights without reading them: files on this machine by their sizes and times."""
    uri = Uri.parse(job.model.uri, "model.uri")
    folder = paths.model if job.trains else local_path(uri) if uri.scheme == "file" else None
    if folder is None:
        return [job.model.uri, job.model.revision]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return [[str(path.relative_to(folder)), (at := path.stat()).st_size, at.st_mtime_ns] for path in files]


class _Done:
    """What is answered so far; tells progress in rows, of how many is an estimate until the last shard."""

    def __init__(self, progress: ProgressSink, weight: int | None) -> None:
        self.keys: list[ShardKey] = []
        self.rows = self.bad = self.truncated = 0
        self._progress = progress
        self._all = weight
        self._weight = 0

    def add(self, key: ShardKey, facts: PartFacts) -> None:
        """A part is there."""
        self.keys.append(key)
        self.rows += facts.rows
        self.bad += facts.rows - facts.answered
        self.truncated += facts.truncated
        self._weight += facts.weight
        self.tell(self.rows, self.total())

    def total(self, rows: int = 0, weight: int = 0) -> int:
        """Rows that there may be, by the share of the data that those so far and `rows` more of `weight` are."""
        seen = self.rows + rows
        whole = seen if not self._all else round(seen * self._all / max(1, self._weight + weight))
        return max(seen, whole)

    def tell(self, rows: int, total: int) -> None:
        """Tell how many rows are answered, and of how many."""
        self._progress.update(rows, total)

    def end(self) -> None:
        """All parts are there."""
        self.tell(self.rows, self.rows)


class _Within(NoProgress):
    """Takes the progress inside of the next shard."""

    def __init__(self, done: _Done, rows: int, weight: int) -> None:
        self._done = done
        self._rows = rows
        self._total = done.total(rows, weight)

    def update(self, step: int, total: int, **values: float) -> None:
        """A share of the shard."""
        self._done.tell(self._done.rows + self._rows * step // max(1, total), self._total)


def _answered(given: _Given, parts: Parts, done: _Done, paths: JobPaths) -> _Done:
    """All parts in the order of the rows; computes what is not there yet."""
    answerer: Answerer | None = None
    reused = 0
    for shard in given.source.shards():
        facts = parts.facts(shard.key)
        if facts is None:
            rows = shard.read()
            answerer = answerer or _answerer(given, paths)
            facts = parts.write(shard, rows, answerer.answers(shard, rows, _Within(done, rows.count, shard.weight)))
        else:
            reused += facts.rows
        done.add(shard.key, facts)
        if done.rows >= _LEAST_TO_JUDGE and done.bad > _allowed(given.job, done.total()):
            return done  # the rest would not make it right
    done.end()
    if reused:
        log.info("%s of %s rows were answered by an earlier attempt.", f"{reused:,}", f"{done.rows:,}")
    return done


def _answerer(given: _Given, paths: JobPaths) -> Answerer:
    model, _ = used_model(given.job, paths, given.means.precision)
    task = task_of(given.job)
    labels = labels_of_model(given.job, task, model.config)
    return Answerer(given.job, Encoder(task, given.coding, packing=False), model, labels, given.means, given.asked)


def _allowed(job: TrainerJob, rows: int) -> int:
    predict = job.predict
    return 0 if predict is None else max(predict.max_bad_rows, int(predict.max_bad_share * rows))


def _too_many(job: TrainerJob, done: _Done, path: str, parts: Parts) -> StageError:
    first = next(iter(parts.aside(done.keys)))
    place = f"line {first['line']}" if first["line"] is not None else f"row {first['row']}"
    return StageError(
        FailureClass.DATA,
        "TooManyBadRows",
        f"{done.bad:,} of {done.rows:,} rows cannot be answered, and predict.maxBadRows allows "
        f"{_allowed(job, done.rows):,}; all are in {path}. The first, {first['file']}, {place}: {first['message']}",
        "Correct the rows or raise predict.maxBadRows; the rows that were answered are kept.",
    )


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


# ----------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class _LocalOutput:
    """A file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def beside(self, ending: str) -> _LocalOutput:
        """A file of the same name with another ending."""
        return _LocalOutput(self.path.with_name(self.path.stem + ending))

    def write(self, rows: Iterable[pa.Table] | Iterable[dict[str, object]], *, parquet: bool = False) -> None:
        """Beside its place first, then moved there in one step."""
        with replaced(self.path) as temporary:
            _write(temporary, rows, parquet=parquet)

    def discard(self) -> None:
        """Removes what an earlier attempt has left."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _RemoteOutput:
    """An object behind fsspec; object stores show an upload only when it is whole."""

    uri: str
    scratch: Path

    @property
    def name(self) -> str:
        return self.uri

    def beside(self, ending: str) -> _RemoteOutput:
        """An object of the same name with another ending."""
        return _RemoteOutput(self.uri.rpartition(".")[0] + ending, self.scratch)

    def write(self, rows: Iterable[pa.Table] | Iterable[dict[str, object]], *, parquet: bool = False) -> None:
        """Locally first, then uploaded."""
        temporary = self.scratch / f".predictions.{uuid.uuid4().hex}"
        try:
            _write(temporary, rows, parquet=parquet)
            filesystem, path = fsspec.core.url_to_fs(self.uri)
            filesystem.put_file(str(temporary), path)
        finally:
            temporary.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what an earlier attempt has left."""
        filesystem, path = fsspec.core.url_to_fs(self.uri)
        with suppress(FileNotFoundError):
            filesystem.rm_file(path)


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


def _write(path: Path, rows: Iterable[pa.Table] | Iterable[dict[str, object]], *, parquet: bool) -> None:
    if not parquet:
        with path.open("w", encoding="utf-8") as file:
            for each in rows:
                found = each.to_pylist() if isinstance(each, pa.Table) else [each]
                # default=str: dates and the like, which only Parquet input can hold.
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in found)
        return
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for table in rows:
            assert isinstance(table, pa.Table)
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, table.schema))
            writer.write_table(table)
