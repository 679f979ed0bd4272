"""The `prepare` stage: raw rows are read, checked and tokenised once, and everything later reads the result.

A wrong column or a bad row fails here, before an accelerator is taken. The result is a folder that appears whole or
not at all: it is written beside its place, marked complete last and moved by one rename. It is used again while what
it was made from is the same: contents of the raw files, columns, tokenizer, truncation length, task and seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.job import Columns, TrainerJob
from finetune_contract.layout import COMPLETION_MARKER, FailureClass, JobPaths
from finetune_trainer.data.prepared import FACTS_FILE, INPUTS_FILE, POSITION, ROW, PreparedInputs, arrow_table
from finetune_trainer.data.sources import ColumnNeed, RawSplit, Role, SplitSource, predict_split, splits_by_role
from finetune_trainer.failures import StageError
from finetune_trainer.files import locked
from finetune_trainer.models import load_config, load_tokenizer, truncation_length, window_stride
from finetune_trainer.progress import ProgressSink
from finetune_trainer.tasks.base import Coding, Encoded, Labels, Targets, TaskModule, task_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_FORMAT = 2
"""Counts up when the layout of the folder or the way of tokenising changes; part of the fingerprint."""
_VALIDATION_SHARE = 0.05
_CHUNK_ROWS = 10_000
"""Rows tokenised at a time: bounds memory (about 100 bytes for each token while they are Python lists) and paces
progress.
"""
_ROWS_PER_WORKER = 50_000
"""Below this a worker's start (some 4 s for its imports) costs more than it saves; one process tokenises over 20,000
rows a second.
"""
_TEMPORARY = "prepared.tmp-"
_TARGETS = ("label", "tags", "answers", "target")
"""Roles of columns that rows to predict need not have, and that nothing would read there."""


@dataclass(frozen=True)
class _Part:
    """One split to prepare, with the columns to read from it."""

    source: SplitSource
    columns: Columns
    setting: str
    needs: tuple[ColumnNeed, ...]
    copies: tuple[str, ...]
    """Columns that predictions repeat."""


@dataclass(frozen=True)
class _Order:
    """Everything that the result depends on."""

    job: TrainerJob
    task: TaskModule
    parts: Mapping[Role, _Part]
    known_labels: Labels | None
    coding: Coding
    fingerprint: str
    key: str


@dataclass(frozen=True)
class _Rows:
    """Raw rows with a role, their index in the raw split, and their targets."""

    raw: RawSplit
    index: NDArray[np.int64]
    targets: NDArray[Any] | None


def prepare(job: TrainerJob, paths: JobPaths, progress: ProgressSink) -> DataFacts:
    """Writes `paths.prepared`, or finds it done already. Two processes at once prepare once.

    StageError DATA, CONFIG, MODEL or HUB_UNAVAILABLE; an earlier result stays when it fails.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with locked(paths.root / ".prepare.lock"):
        order = _order(job)
        done = _same(paths, order.key)
        if done is not None:
            total = sum(split.rows for split in done.splits.values())
            progress.update(total, total)
            return done
        for leftover in paths.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        rows, targets, set_aside = _checked_rows(order)
        temporary = _new_folder(paths.root)
        try:
            facts = _write(temporary, order, rows, targets.labels, set_aside, progress)
            _move(temporary, paths.prepared)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return facts


def _same(paths: JobPaths, key: str) -> DataFacts | None:
    """The facts of a complete result that was made from the same things."""
    if not (paths.prepared / COMPLETION_MARKER).is_file():
        return None
    try:
        inputs = PreparedInputs.model_validate_json((paths.prepared / INPUTS_FILE).read_bytes())
        facts = DataFacts.model_validate_json((paths.prepared / FACTS_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    whole = all((paths.prepared / f"{role}.parquet").is_file() for role in facts.splits)
    return facts if inputs.key == key and whole else None


def _new_folder(parent: Path) -> Path:
    """Readable as the umask says, unlike `tempfile.mkdtemp`: other pods of the job may run as another user."""
    folder = parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def _move(temporary: Path, place: Path) -> None:
    """Puts the folder in its place. A folder cannot replace another in one step; the old one goes first, under
    another name.
    """
    (temporary / COMPLETION_MARKER).write_text("", encoding="utf-8")
    if place.exists():
        old = _new_folder(place.parent)
        place.replace(old / "old")
        temporary.replace(place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.replace(place)


# ------------------------------------------------------------------------------------------- what is to be prepared


def _order(job: TrainerJob) -> _Order:
    task = task_module(job.task)
    config = load_config(job)
    known = None if job.training else _labels_of_model(job, task, config)
    parts = _parts(job, task)
    max_length = truncation_length(job, config)
    stride = window_stride(job, max_length)
    tokenizer = load_tokenizer(job)
    trained = {role: part for role, part in parts.items() if role != "predict"} or parts
    basis = {
        "format": _FORMAT,
        "task": job.task,
        "labels": None if known is None else [known.names, known.form],
        "tokenizer": _tokenizer_digest(tokenizer),
        "max_length": max_length,
        "stride": stride,
        "model_type": config.model_type,
        "seed": job.seed,
    }
    fingerprint = _digest({**basis, "splits": {role: _part_digest(part) for role, part in trained.items()}})
    extra = {role: [_part_digest(part), list(part.copies)] for role, part in parts.items()}
    coding = Coding(tokenizer, max_length, stride, config.model_type)
    return _Order(job, task, parts, known, coding, fingerprint, _digest({"basis": fingerprint, "parts": extra}))


def _labels_of_model(job: TrainerJob, task: TaskModule, config: PretrainedConfig) -> Labels:
    labels = task.model_labels(config)
    if labels is None:
        raise StageError(
            FailureClass.MODEL,
            "NoHead",
            f"Nothing trains (training is not set), and model.uri {job.model.uri!r} has no head for {job.task}.",
            "Set training: {}, or name a model that was trained for this task.",
        )
    return labels


def _parts(job: TrainerJob, task: TaskModule) -> dict[Role, _Part]:
    parts: dict[Role, _Part] = {}
    trains = job.training is not None
    predicted: Role = "predict" if job.predict and job.predict.dataset else "test"
    copies = job.predict.columns if job.predict else ()
    copy_needs = tuple(ColumnNeed("predict.columns", name) for name in copies)
    if job.dataset is not None:
        for role, source in splits_by_role(job.dataset, trains=trains).items():
            labelled = role in ("train", "validation")
            needs = task.columns(job.dataset.columns, "dataset", labelled=labelled)
            copied = job.predict is not None and role == predicted
            extra, names = (copy_needs, copies) if copied else ((), ())
            parts[role] = _Part(source, job.dataset.columns, "dataset", needs + extra, names)
    if job.predict is not None and job.predict.dataset is not None:
        columns = _inherited(job.predict.dataset.columns, job.dataset.columns if job.dataset else Columns())
        columns = columns.model_copy(update=dict.fromkeys(_TARGETS))
        needs = task.columns(columns, "predict.dataset", labelled=False) + copy_needs
        parts["predict"] = _Part(predict_split(job.predict.dataset), columns, "predict.dataset", needs, copies)
    if job.predict is not None and predicted not in parts:
        raise StageError(
            FailureClass.DATA,
            "SplitNotFound",
            "predict.dataset is not set, and the data set has no test split to predict.",
            "Set predict.dataset, or dataset.splits.test.",
        )
    if not parts:
        raise StageError(
            FailureClass.CONFIG,
            "MissingSetting",
            "The job names no data set.",
            "Set dataset.uri or predict.dataset.uri.",
        )
    return parts


def _inherited(own: Columns, base: Columns) -> Columns:
    """The columns of the predict data set; those it does not name are called as in the training data."""
    return base.model_copy(update={name: value for name, value in own if value is not None})


def _part_digest(part: _Part) -> list[object]:
    return [part.source.digest(), part.columns.model_dump(exclude_none=True)]


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        # Padding and truncation are set anew at every call, so what the file holds does not matter.
        content.pop("padding", None)
        content.pop("truncation", None)
    else:
        content = sorted(tokenizer.get_vocab().items())
    return _digest([type(tokenizer).__name__, content, tokenizer.model_input_names, tokenizer.truncation_side])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ reading, checking


def _checked_rows(order: _Order) -> tuple[dict[Role, _Rows], Targets, bool]:
    """All rows with their targets, and whether validation was taken from train."""
    raw: dict[Role, RawSplit] = {}
    for role, part in order.parts.items():
        raw[role] = part.source.read(part.needs)
        order.task.check(raw[role], part.columns, part.setting)
    columns = order.job.dataset.columns if order.job.dataset else Columns()
    targets = order.task.targets(
        {role: split for role, split in raw.items() if role != "predict"}, columns, order.known_labels
    )
    rows = {role: _Rows(split, np.arange(len(split.rows)), targets.of.get(role)) for role, split in raw.items()}
    if order.job.training is None or "validation" in rows:
        return rows, targets, False
    rows["train"], rows["validation"] = _set_aside(rows["train"], order.job.seed)
    return rows, targets, True


def _set_aside(train: _Rows, seed: int) -> tuple[_Rows, _Rows]:
    """Train without, and validation of, a seeded share of its rows, both in the order of the file."""
    count = len(train.index)
    if count < 2:
        raise StageError(
            FailureClass.DATA,
            "EmptySplit",
            f"Split {train.raw.name} ({train.raw.origin}) has {count} row, "
            "and there is no validation split that would leave it whole.",
            "Give it more rows, or a validation split.",
        )
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(seed).permutation(count)[: max(1, round(count * _VALIDATION_SHARE))]] = True
    return _take(train, ~chosen), _take(train, chosen)


def _take(rows: _Rows, mask: NDArray[np.bool_]) -> _Rows:
    index = np.flatnonzero(mask)
    raw = replace(rows.raw, rows=rows.raw.rows.select(index))
    return _Rows(raw, rows.index[index], None if rows.targets is None else rows.targets[index])


# ---------------------------------------------------------------------------------------------------------- writing


def _write(
    folder: Path,
    order: _Order,
    rows: Mapping[Role, _Rows],
    labels: Labels,
    set_aside: bool,
    progress: ProgressSink,
) -> DataFacts:
    total = sum(len(each.index) for each in rows.values())
    before = 0
    # Validation may have been taken from train.
    parts = {role: order.parts.get(role) or order.parts["train"] for role in rows}
    splits: dict[str, SplitFacts] = {}
    for role, each in rows.items():
        part = parts[role]
        chunks: list[pa.Table] = []
        truncated = done = 0
        for encoded, count in _encoded(order, part, each):
            chunks.append(_table(encoded, count, done))
            truncated += encoded.truncated
            done += count
            progress.update(before + done, total)
        before += done
        table = pa.concat_tables(chunks).combine_chunks()
        index = pa.array(each.index).take(table[POSITION].combine_chunks())
        pq.write_table(table.append_column(ROW, index), folder / f"{role}.parquet")
        if role != "train":
            kept = dict.fromkeys([*_kept(order.task, part, each.raw).values(), *part.copies])
            pq.write_table(arrow_table(each.raw.rows.select_columns(list(kept))), folder / f"{role}.raw.parquet")
        splits[role] = _facts(table, truncated, done)
    facts = DataFacts(
        fingerprint=order.fingerprint,
        splits=splits,
        labels=labels.names,
        label_form=labels.form,
        label_counts=_counts(order.task, rows, labels),
        validation_from_train=set_aside,
        max_length=order.coding.max_length,
    )
    (folder / FACTS_FILE).write_text(facts.to_json(), encoding="utf-8")
    pad = order.coding.tokenizer.pad_token_id
    assert isinstance(pad, int)
    inputs = {str(role): _kept(order.task, part, rows[role].raw) for role, part in parts.items()}
    given = PreparedInputs(key=order.key, pad_token_id=pad, task=order.job.task, inputs=inputs)
    (folder / INPUTS_FILE).write_text(given.to_json(), encoding="utf-8")
    return facts


def _kept(task: TaskModule, part: _Part, raw: RawSplit) -> dict[str, str]:
    """Role of each column that results are made of, as far as the split has it -> its name."""
    named = {**task.inputs(part.columns), **task.judged(part.columns)}
    return {role: name for role, name in named.items() if name in raw.rows.column_names}


def _table(encoded: Encoded, rows: int, before: int) -> pa.Table:
    """Features of `rows` rows, which `before` others of their role came before."""
    columns = {name: _array(values) for name, values in encoded.features.items()}
    position = np.arange(rows) if encoded.rows is None else np.asarray(encoded.rows, np.int64)
    return pa.table({**columns, POSITION: pa.array(position + before)})


def _array(values: Sequence[Any]) -> pa.Array:
    if isinstance(values[0], Sequence):
        return _list_array(values)
    return pa.array(values, pa.float64() if isinstance(values[0], float) else pa.int64())


def _list_array(values: Sequence[Sequence[int]]) -> pa.Array:
    """Rows of token ids as one list<int32>; ten times faster than letting Arrow look at every Python int."""
    offsets = np.cumsum([0, *(len(each) for each in values)], dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(values), np.int32, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat))


def _facts(table: pa.Table, truncated: int, rows: int) -> SplitFacts:
    """Of features that were made of so many rows."""
    lengths = np.asarray(pc.list_value_length(table["input_ids"]).to_numpy(), dtype=np.int64)
    edges, counts = np.unique([_bucket_edge(int(length)) for length in lengths], return_counts=True)
    return SplitFacts(
        rows=len(lengths),
        windows_of=None if rows == len(lengths) else rows,
        tokens=int(lengths.sum()),
        truncated_rows=truncated,
        length_histogram={int(edge): int(count) for edge, count in zip(edges, counts, strict=True)},
        longest=int(lengths.max()),
    )


def _bucket_edge(length: int) -> int:
    """The next multiple of 8 up to 128 tokens, then of an eighth of the power of two below: fine enough to plan
    memory.
    """
    width = max(8, (1 << max(length - 1, 1).bit_length() - 1) // 8)
    return -(-max(length, 1) // width) * width


def _counts(task: TaskModule, rows: Mapping[Role, _Rows], labels: Labels) -> dict[str, int]:
    """Of train, else of test, else of validation."""
    for role in ("train", "test", "validation"):
        targets = rows[role].targets if role in rows else None
        if targets is not None:
            return task.count_labels(targets, labels)
    return {}


# ------------------------------------------------------------------------------------------------------- tokenising


def _encoded(order: _Order, part: _Part, rows: _Rows) -> Iterator[tuple[Encoded, int]]:
    """Chunks of features in the order of the rows, each with the number of its rows."""
    count = len(rows.raw.rows)
    workers = min(order.job.preparation.workers, count // _ROWS_PER_WORKER)
    batches = _input_batches(rows.raw, order.task.inputs(part.columns))
    starts = range(0, count, _CHUNK_ROWS)
    sizes = [min(_CHUNK_ROWS, count - start) for start in starts]
    targets = [None if rows.targets is None else rows.targets[start : start + _CHUNK_ROWS] for start in starts]
    if workers < 2:
        for batch, wanted, size in zip(batches, targets, sizes, strict=True):
            yield order.task.encode(batch, wanted, order.coding), size
        return
    coding = (order.coding.max_length, order.coding.stride, order.coding.model_type)
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(order.job, *coding)
    ) as pool:
        yield from zip(pool.map(_encode_in_worker, batches, targets), sizes, strict=True)


def _input_batches(raw: RawSplit, inputs: Mapping[str, str]) -> Iterator[dict[str, list[Any]]]:
    rows = raw.rows.with_format("arrow")
    for start in range(0, len(rows), _CHUNK_ROWS):
        table = rows[start : start + _CHUNK_ROWS]
        yield {role: table[name].to_pylist() for role, name in inputs.items()}


_worker: tuple[TaskModule, Coding] | None = None


def _start_worker(job: TrainerJob, max_length: int, stride: int, model_type: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = (task_module(job.task), Coding(load_tokenizer(job), max_length, stride, model_type))


def _encode_in_worker(batch: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None) -> Encoded:
    assert _worker is not None
    task, coding = _worker
    return task.encode(batch, targets, coding)
