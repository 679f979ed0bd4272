"""The `prepare` stage: raw rows are read, checked and tokenised once, and all later stages read the result.

A wrong column or a bad row fails here, before an accelerator is taken. The result is a folder that appears whole or not
at all: it is written to a temporary folder, marked complete last and moved by one rename. It is reused while its inputs
are the same: contents of the raw files, columns, tokenizer, truncation length, task and seed. Other jobs with the same
inputs take it from a cache (`shared`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Prediction
from finetune_contract.layout import COMPLETION_MARKER, FACTS_FILE, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import discard, discard_leftovers, locked, temporary_folder
from finetune_trainer.core.job_file import with_columns
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.data.prepared import INPUTS_FILE, PreparedInputs, raw_name, shard_name, write_tables
from finetune_trainer.data.row_shapes import Shape, recognised, shaped
from finetune_trainer.data.row_shards import check_first_rows, row_source
from finetune_trainer.data.sources import ColumnNeed, RawSplit, Role, SplitSource, predict_split, splits_by_role
from finetune_trainer.models.loading import (
    fetch_card,
    load_config,
    load_tokenizer,
    refuse_long_answers,
    tokenizer_embedded,
    truncation_length,
    window_stride,
)
from finetune_trainer.prepare.data_notes import repeated_notes, row_hashes, unread_note, written_notes
from finetune_trainer.prepare.shards import (
    CHUNK_ROWS,
    Encoder,
    Recipe,
    Rows,
    Shard,
    ShardFacts,
    cut,
    write_here,
    write_in_processes,
)
from finetune_trainer.prepare.shared_data import Entry, SharedData
from finetune_trainer.tasks.head_labels import in_head_order
from finetune_trainer.tasks.metric_names import refuse_unknown_metrics
from finetune_trainer.tasks.task_protocol import Coding, Encoding, Head, Labels, Targets, TaskParts
from finetune_trainer.tasks.task_registry import task_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from finetune_trainer.prepare.prepare_pods import Leader

log = logging.getLogger(__name__)

_FORMAT = 3
"""Part of the fingerprint, by which a training knows its rows: increased when the same data give other rows."""
_LAYOUT = 2
"""Part of the key alone: increased when features or files change, so that data of earlier releases are not reused."""
_VALIDATION_SHARE = 0.05
_TEMPORARY = "prepared.tmp-"
_SCRATCH = "raw"
"""Subfolder for intermediate rows."""
_LIBRARIES = ("tokenizers", "transformers")
"""Libraries that tokenise; folders of prepared data outlive images."""
_TARGETS = ("label", "tags", "answers", "target", "chosen", "rejected")
"""Roles of columns that rows to predict need not have, and that are not read there."""


@dataclass(frozen=True)
class Part:
    """One split to prepare, with the columns to read from it."""

    source: SplitSource
    columns: Columns
    setting: str
    needs: tuple[ColumnNeed, ...]
    copies: tuple[str, ...]
    """Columns copied to the predictions."""
    shape: Shape | None = None
    """Shape of the rows, by which `columns` are known; None: the job names them."""


@dataclass(frozen=True)
class _Order:
    """All inputs on which the result depends."""

    job: TrainerJob
    task: TaskParts
    parts: Mapping[Role, Part]
    known_labels: Labels | None
    """Labels of a model that is not trained."""
    head: Labels | None
    """Labels of the head with which the training begins, if the checkpoint has it."""
    coding: Coding
    fingerprint: str
    key: str


def prepare(
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    leader: Leader | None = None,
    shared: SharedData | None = None,
) -> DataFacts:
    """Write `paths.prepared`, or reuse a complete result there or in `shared`. Two processes at once prepare once.
    `leader` shares the work with the other pods of engine `job`.

    Raise StageError DATA, CONFIG, MODEL or HUB_UNAVAILABLE; an earlier result stays on failure. The result also stays
    when the job names a metric that its data do not have: with another metric it is the same job.
    """
    task = task_of(job)
    parts = parts_of(job, task.encoding, trains=job.training is not None)
    job = with_columns(job, shape_columns(parts))
    predicted = predict_part(job, task.encoding)
    if predicted is not None:
        # predict reads the rows themselves; an error that all of them share is reported before the training.
        rows = row_source(predicted.source, predicted.needs)
        check_first_rows(rows, lambda split: task.encoding.check(split, predicted.columns, predicted.setting))
    facts = _prepared(job, parts, paths, progress, leader, shared)
    for note in facts.notes:
        log.warning("%s", note)
    refuse_unknown_metrics(job, task.scoring.metrics[facts.label_form])
    return facts


def _prepared(
    job: TrainerJob,
    parts: Mapping[Role, Part],
    paths: JobPaths,
    progress: ProgressSink,
    leader: Leader | None,
    shared: SharedData | None,
) -> DataFacts:
    if (leader is not None) != (job.preparation.engine == "job"):
        raise StageError(
            FailureClass.CONFIG,
            "PodsMissing",
            f"preparation.engine is {job.preparation.engine!r}, and the stage runs "
            f"{'outside' if leader is None else 'in'} the pods of an Indexed Job.",
            "Set it to auto, or run stage prepare with launch --with index.",
        )
    paths.root.mkdir(parents=True, exist_ok=True)
    with locked(paths.root / ".prepare.lock"):
        order = _order(job, parts)
        done = _found(order, paths, progress)
        if done is not None:
            return done
        discard_leftovers(paths.root, _TEMPORARY)  # pods of the attempt that left one may still write into it
        # The effect of a repository's own code on a text is not in the key.
        if shared is None or job.model.trust_remote_code:
            return _made(order, paths, progress, leader)
        with shared.entry(order.key) as entry:
            if entry is None:
                return _made(order, paths, progress, leader)
            done = _taken(entry, order, paths, progress)
            if done is None:
                done = _made(order, paths, progress, leader)
                entry.give(paths.prepared)
    return done


def _found(order: _Order, paths: JobPaths, progress: ProgressSink) -> DataFacts | None:
    """Return a result that is already in place."""
    done = _same(paths, order.key)
    if done is not None:
        total = sum(split.rows for split in done.splits.values())
        progress.update(total, total)
    return done


def _taken(entry: Entry, order: _Order, paths: JobPaths, progress: ProgressSink) -> DataFacts | None:
    """Move another job's result into place; return None if there is no complete one."""
    with temporary_folder(paths.root, _TEMPORARY) as temporary:
        if not entry.take(temporary):
            return None
        _move(temporary, paths.prepared)
    return _found(order, paths, progress)


def _made(order: _Order, paths: JobPaths, progress: ProgressSink, leader: Leader | None) -> DataFacts:
    """Read, check, tokenise and write."""
    with temporary_folder(paths.root, _TEMPORARY) as temporary:
        with storage_errors_named(temporary, "preparing the data"):
            scratch = temporary / _SCRATCH
            scratch.mkdir()
            rows, targets, notes, from_train = _checked_rows(order, scratch)
            columns = order.job.dataset.columns if order.job.dataset else Columns()
            notes += order.task.encoding.remarks(columns, order.coding)
            facts = _write(temporary, order, rows, targets.labels, notes, from_train, progress, leader)
        discard(scratch, paths.root, _TEMPORARY)  # a pod that pod 0 has given up may still write into it
        _move(temporary, paths.prepared)
    return facts


def _same(paths: JobPaths, key: str) -> DataFacts | None:
    """Return the facts of a complete result with the same inputs."""
    if not (paths.prepared / COMPLETION_MARKER).is_file():
        return None
    try:
        inputs = PreparedInputs.model_validate_json((paths.prepared / INPUTS_FILE).read_bytes())
        facts = DataFacts.model_validate_json((paths.prepared / FACTS_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    names = [shard_name(role, number, of) for role, of in inputs.shards.items() for number in range(of)]
    whole = all((paths.prepared / name).is_file() for name in names)
    return facts if inputs.key == key and whole else None


def _move(temporary: Path, place: Path) -> None:
    """Move the folder into place. A folder cannot replace another in one step; the old one is renamed first."""
    (temporary / COMPLETION_MARKER).write_text("", encoding="utf-8")
    if place.exists():
        with temporary_folder(place.parent, _TEMPORARY) as scratch:
            place.replace(scratch / "old")
            temporary.replace(place)
    else:
        temporary.replace(place)


# -------------------------------------------------------------------------------------------------------- the order


def _order(job: TrainerJob, parts: Mapping[Role, Part]) -> _Order:
    task = task_of(job)
    config = load_config(job)
    known = None if job.training else labels_of_model(job, task.head, config)
    head = task.head.model_labels(config) if job.training and task.head.named_outputs else None
    if job.preparation.packing:
        task.head.refuse_packing(job, config)
    max_length = truncation_length(job, config)
    refuse_long_answers(job, config)
    stride = window_stride(job, max_length)
    tokenizer = load_tokenizer(job)
    separator = None if job.dataset is None else job.dataset.label_separator
    embedded = tokenizer_embedded(job, config, tokenizer)
    if job.training is not None:
        fetch_card(job.model)
    basis = {
        "format": _FORMAT,
        "task": job.task,
        "labels": None if known is None else [known.names, known.form],
        "tokenizer": _tokenizer_digest(tokenizer),
        "max_length": max_length,
        "stride": stride,
        "model_type": config.model_type,
        "packing": job.preparation.packing,
        "seed": job.seed,
        **({"chat": True} if job.preparation.chat_template == "always" else {}),
        **({} if head is None else {"head": [head.names, head.form]}),
        **({"label_names": job.dataset.labels} if job.dataset is not None and job.dataset.labels else {}),
        **({"label_separator": separator} if separator is not None else {}),
    }
    fingerprint = _digest({**basis, "splits": {role: _part_digest(part) for role, part in parts.items()}})
    coding = Coding(tokenizer, max_length, stride, config.model_type, embedded)
    key = {
        "basis": fingerprint,
        "parts": {role: [_part_digest(part), list(part.copies)] for role, part in parts.items()},
        "layout": _LAYOUT,
        "roles": _token_roles(tokenizer),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    return _Order(job, task, parts, known, head, coding, fingerprint, _digest(key))


def labels_of_model(job: TrainerJob, head: Head, config: PretrainedConfig) -> Labels:
    """Return the labels of the head of a model that is not trained. Raise StageError MODEL `NoHead`."""
    labels = head.model_labels(config)
    if labels is None:
        raise StageError(
            FailureClass.MODEL,
            "NoHead",
            f"training is not set, and model.uri {job.model.uri!r} has no head for {job.task}.",
            "Set training: {}, or use a model that was trained for this task.",
        )
    return labels


def parts_of(job: TrainerJob, encoding: Encoding, *, trains: bool) -> dict[Role, Part]:
    """Return the splits of `dataset` that a job uses. Without predict data and a test split, validation is predicted.

    StageErrors of the data sources, of the task's columns, and CONFIG `MissingSetting` when no data set is named.
    """
    parts: dict[Role, Part] = {}
    if job.dataset is None and (job.predict is None or job.predict.dataset is None):
        raise StageError(
            FailureClass.CONFIG,
            "MissingSetting",
            "The job has no dataset.",
            "Set dataset.uri or predict.dataset.uri.",
        )
    copies, copy_needs = _repeated(job.predict)
    if job.dataset is not None:
        sources = splits_by_role(job.dataset, trains=trains)
        # Validation may have to be split off from train.
        predicted: Role = next((role for role in ("test", "validation") if role in sources), "train")
        columns, shape = job.dataset.columns, None
        for role, source in sources.items():
            labelled = role in ("train", "validation")
            if not parts:
                columns, shape = _by_shape(job, source, columns, encoding, "dataset", labelled=labelled)
            needs = encoding.columns(columns, "dataset", labelled=labelled)
            copied = job.predict is not None and job.predict.dataset is None and role == predicted
            extra, names = (copy_needs, copies) if copied else ((), ())
            parts[role] = Part(shaped(source, shape), columns, "dataset", needs + extra, names, shape)
    return parts


def _by_shape(
    job: TrainerJob, source: SplitSource, columns: Columns, encoding: Encoding, setting: str, *, labelled: bool
) -> tuple[Columns, Shape | None]:
    """Return the columns of the rows, with their shape if the columns of the job are not there."""
    needs = encoding.columns(columns, setting, labelled=labelled)
    try:
        rows = source.head()
    except StageError:  # the whole split is read next, and reported with the problems of the others
        rows = []
    shape = recognised(rows, job.task, needs, labelled=labelled)
    return (columns, None) if shape is None else (shape.columns(columns), shape)


def shape_columns(parts: Mapping[Role, Part]) -> dict[str, str]:
    """Return role -> name of the columns of rows that have a shape; empty: they have those of the job."""
    part = next((part for part in parts.values() if part.shape is not None), None)
    return {} if part is None else part.columns.model_dump(exclude_none=True)


def predict_part(job: TrainerJob, encoding: Encoding) -> Part | None:
    """Return the data set that only predict reads; None where there is none. StageErrors as `parts_of`."""
    if job.predict is None or job.predict.dataset is None:
        return None
    columns = _inherited(job.predict.dataset.columns, job.dataset.columns if job.dataset else Columns())
    source, setting = predict_split(job.predict.dataset), "predict.dataset"
    columns, shape = _by_shape(job, source, _without_answers(columns), encoding, setting, labelled=False)
    columns = _without_answers(columns)
    copies, copy_needs = _repeated(job.predict)
    needs = encoding.columns(columns, setting, labelled=False) + copy_needs
    return Part(shaped(source, shape), columns, setting, needs, copies, shape)


def _without_answers(columns: Columns) -> Columns:
    return columns.model_copy(update=dict.fromkeys(_TARGETS))


def _repeated(predict: Prediction | None) -> tuple[tuple[str, ...], tuple[ColumnNeed, ...]]:
    """Return the columns copied to the predictions."""
    if predict is None:
        return (), ()
    needs = tuple(ColumnNeed("predict.columns", name) for name in predict.columns)
    if predict.id_column is not None:
        needs += (ColumnNeed("predict.idColumn", predict.id_column),)
    return tuple(dict.fromkeys(need.name for need in needs)), needs


def _inherited(own: Columns, base: Columns) -> Columns:
    """Return the columns of the predict data set; missing ones are named as in the training data."""
    return base.model_copy(update={name: value for name, value in own if value is not None})


def _part_digest(part: Part) -> list[object]:
    return [part.source.digest(), part.columns.model_dump(exclude_none=True)]


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        # Padding and truncation are set at every call, so their values in the file do not matter.
        content.pop("padding", None)
        content.pop("truncation", None)
    else:
        content = sorted(tokenizer.get_vocab().items())
    return _digest([type(tokenizer).__name__, content, tokenizer.model_input_names, tokenizer.truncation_side])


def _token_roles(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Return what decides the tokens of a row beside the vocabulary: its special tokens, and the chat template."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    settings = [getattr(tokenizer, name, None) for name in _TOKENIZER_SETTINGS]
    return [special, sorted(map(str, tokenizer.all_special_tokens)), settings, tokenizer.chat_template]


_TOKENIZER_SETTINGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens", "do_lower_case")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ reading, checking


def _checked_rows(order: _Order, scratch: Path) -> tuple[dict[Role, Rows], Targets, list[str], bool]:
    """Read all rows with their targets, notes on how they were read, and True if validation is split off train."""
    raw: dict[Role, RawSplit] = {}
    for role, part in order.parts.items():
        raw[role] = part.source.read(part.needs, scratch)
        order.task.encoding.check(raw[role], part.columns, part.setting)
    columns = order.job.dataset.columns if order.job.dataset else Columns()
    targets = order.task.encoding.targets(
        {str(role): split for role, split in raw.items()}, columns, order.known_labels
    )
    if order.head is not None:
        targets = in_head_order(targets, order.head)
    notes = list(dict.fromkeys(note for split in raw.values() for note in split.notes))
    used = {need.name for part in order.parts.values() for need in part.needs}
    notes += [*targets.notes, *unread_note((split.unread for split in raw.values()), used)]
    rows = {role: Rows(split.rows, np.arange(len(split.rows)), targets.of.get(role)) for role, split in raw.items()}
    if order.job.training is None:
        return rows, targets, notes, False
    from_train = "validation" not in rows
    if from_train:
        train, validation = split_validation(raw["train"], order.job.seed)
        rows["train"], rows["validation"] = (_only(rows["train"], index) for index in (train, validation))
    inputs = list(order.task.encoding.inputs(columns).values())
    hashes = {role: row_hashes(split.table, inputs) for role, split in raw.items()}
    notes += repeated_notes({role: hashes[role if role in raw else "train"][rows[role].index] for role in rows})
    return rows, targets, notes, from_train


def split_validation(train: RawSplit, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return train without, and validation of, a seeded share of its rows, both in the file's order. Raise StageError
    DATA `EmptySplit` for a single row.
    """
    count = len(train.rows)
    if count < 2:
        raise StageError(
            FailureClass.DATA,
            "EmptySplit",
            f"Split {train.name} ({train.origin}) has {count} row, too few to take validation rows from, and there is "
            "no validation split.",
            "Add rows, or a validation split.",
        )
    validation = np.zeros(count, bool)
    validation[np.random.default_rng(seed).permutation(count)[: max(1, round(count * _VALIDATION_SHARE))]] = True
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def _only(rows: Rows, index: NDArray[np.int64]) -> Rows:
    return Rows(rows.raw, index, None if rows.targets is None else rows.targets[index])


# ---------------------------------------------------------------------------------------------------------- writing


def _write(
    folder: Path,
    order: _Order,
    rows: Mapping[Role, Rows],
    labels: Labels,
    notes: Sequence[str],
    from_train: bool,
    progress: ProgressSink,
    leader: Leader | None,
) -> DataFacts:
    # Validation may have been split off from train.
    parts = {role: order.parts.get(role) or order.parts["train"] for role in rows}
    inputs = {str(role): _kept(order.task.encoding, part, rows[role]) for role, part in parts.items()}
    shards: list[Shard] = []
    for role, part in parts.items():
        shards += cut(role, rows[role], order.task.encoding.inputs(part.columns))
        if role != "train":
            kept = list(dict.fromkeys([*inputs[role].values(), *part.copies]))
            _keep(folder / raw_name(role), rows[role], kept)
    made: dict[str, ShardFacts] = {role: ShardFacts() for role in rows}
    done, total = 0, sum(len(row.index) for row in rows.values())

    def progressed(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done, total)

    for shard, shard_facts in zip(shards, _written(folder, order, shards, progressed, leader), strict=True):
        made[shard.role].add(shard_facts)
    for role in parts:
        if rows[role].targets is not None and not made[role].learnt:
            raise StageError(
                FailureClass.DATA,
                "NothingToLearn",
                f"Split {parts[role].source.name} has {made[role].rows} rows, and after tokenization none has a token "
                "to learn from or to evaluate.",
                "Add rows with text that the model's tokenizer can encode.",
            )
    facts = DataFacts(
        fingerprint=order.fingerprint,
        splits={role: shard_facts.of_split() for role, shard_facts in made.items()},
        labels=labels.names,
        label_form=labels.form,
        label_counts=_counts(order.task.encoding, rows, labels),
        validation_from_train=from_train,
        max_length=order.coding.max_length,
        notes=(*notes, *written_notes(made, order.coding.max_length)),
        shape=next((part.shape.name for part in parts.values() if part.shape is not None), None),
        columns=shape_columns(order.parts),
    )
    (folder / FACTS_FILE).write_text(facts.to_json(), encoding="utf-8")
    pad = order.coding.tokenizer.pad_token_id
    assert isinstance(pad, int)
    files = {shard.role: shard.of for shard in shards}
    given = PreparedInputs(key=order.key, pad_token_id=pad, task=order.job.task, inputs=inputs, shards=files)
    (folder / INPUTS_FILE).write_text(given.to_json(), encoding="utf-8")
    return facts


def _written(
    folder: Path,
    order: _Order,
    shards: Sequence[Shard],
    progressed: Callable[[int], None],
    leader: Leader | None,
) -> Iterator[ShardFacts]:
    """Write the shards by the job's engine."""
    coding = order.coding
    recipe = Recipe(order.job, coding.max_length, coding.stride, coding.model_type)
    workers = min(order.job.preparation.workers, len(shards))
    if order.job.preparation.engine == "spark":
        from finetune_trainer.prepare.spark_engine import write_by_spark

        return write_by_spark(folder, folder / _SCRATCH, shards, recipe, workers, progressed)
    encoder = Encoder(order.task, coding, order.job.preparation.packing)
    if leader is not None:
        return leader.write(folder, folder / _SCRATCH, shards, recipe, encoder, progressed)
    if workers < 2:
        return write_here(folder, shards, encoder, progressed)
    return write_in_processes(folder, shards, recipe, workers, progressed)


def _keep(path: Path, rows: Rows, columns: Sequence[str]) -> None:
    """Write the raw rows that results need."""
    count = len(rows.index)
    write_tables(
        path, (rows.table(start, min(start + CHUNK_ROWS, count), columns) for start in range(0, count, CHUNK_ROWS))
    )


def _kept(encoding: Encoding, part: Part, rows: Rows) -> dict[str, str]:
    """Return role of each column that results need and the split has -> its name."""
    named = {**encoding.inputs(part.columns), **encoding.judged(part.columns)}
    return {role: name for role, name in named.items() if name in rows.raw.column_names}


def _counts(encoding: Encoding, rows: Mapping[Role, Rows], labels: Labels) -> dict[str, int]:
    """Count the labels of train, else of test, else of validation."""
    for role in ("train", "test", "validation"):
        targets = rows[role].targets if role in rows else None
        if targets is not None:
            return encoding.count_labels(targets, labels)
    return {}
