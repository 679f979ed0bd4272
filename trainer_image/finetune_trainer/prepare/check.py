"""Checks the first rows of a job's data as `prepare` would, in seconds: columns, labels, texts and their lengths.

It uses the readers and tasks of `prepare`, so that both report the same. It imports neither torch nor transformers,
which take longer than the whole check: it reads only the model's `config.json` and `tokenizer.json`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune_contract.checked import CheckedData, CheckedSplit, TextLengths
from finetune_contract.data_settings import Columns
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.job_file import with_columns
from finetune_trainer.core.uris import Uri
from finetune_trainer.data.file_formats import python_values
from finetune_trainer.data.packing import best_fit
from finetune_trainer.data.sources import RawSplit, Role, source_of
from finetune_trainer.models.loading import (
    NEEDED_TOKENS,
    embedded_tokens,
    load_error,
    model_file,
    refuse_long_answers,
    tokens_error,
    truncation_length,
    window_stride,
)
from finetune_trainer.models.tokenizer_limits import is_panic, refuse_bomb, tokenizer_panics_named
from finetune_trainer.prepare.data_notes import repeated_notes, row_hashes, unread_note
from finetune_trainer.prepare.prepare import Part, parts_of, predict_part, shape_columns, split_validation
from finetune_trainer.tasks.conversations import BESIDE, ConversationError, messages_of
from finetune_trainer.tasks.head_labels import in_head_order
from finetune_trainer.tasks.metric_names import refuse_unknown_metrics, refuse_unmeasured_stopping
from finetune_trainer.tasks.row_checks import is_json, is_list, is_text
from finetune_trainer.tasks.task_protocol import Encoding, Labels, TaskParts
from finetune_trainer.tasks.task_registry import task_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

T = TypeVar("T")
MOST_ROWS = 10_000
"""Rows read of a split: a second of work."""
_NEED_ALL_ROWS = frozenset({"OneLabel", "LabelOutOfRange", "NoLabels", "LabelType"})
"""Reasons that rows which were not read could refute."""
_TOKENIZED_ROWS = 2_000
"""Rows that are tokenised, evenly out of those read: half a second of work."""


@dataclass(frozen=True)
class Trains:
    """Settings of the built-in loop that the data must suit; a `job` without a plan does not contain them."""

    batch: int = 1
    """Rows of a step."""
    stopping: str | None = None
    """Metric of early stopping."""


def check(job: TrainerJob, *, trains: Trains | None = None, script: bool = False, most: int = MOST_ROWS) -> CheckedData:
    """Check the data and return all problems at once. `trains`: the built-in loop trains; `script`: a program does, and
    reads the data itself.
    """
    findings = _Findings()
    model = findings.of(lambda: _Model.of(job))
    if script and job.evaluation is None and job.predict is None:
        _check_place(job, findings)
        splits: list[CheckedSplit] = []
    else:
        with tempfile.TemporaryDirectory(prefix="finetune-check-") as scratch:
            head = None if model is None or script else model.labels
            job, parts = findings.of(lambda: _parts(job, trains=trains is not None)) or (job, {})
            splits = _check_rows(job, parts, model, head, findings, Path(scratch), trains=trains, most=most)
    return CheckedData(
        splits=tuple(splits),
        max_length=None if model is None else model.max_length,
        long_rows="are read in windows that overlap" if task_of(job).encoding.in_windows(_columns(job)) else "are cut",
        notes=tuple(dict.fromkeys(findings.notes)),
        problems=tuple(findings.problems),
    )


def _columns(job: TrainerJob) -> Columns:
    return job.dataset.columns if job.dataset else Columns()


def _check_place(job: TrainerJob, findings: _Findings) -> None:
    """Check that the data exist, for a program that reads them itself."""
    source = job.dataset
    if source is not None:
        findings.of(lambda: source_of(source, "dataset").names())
    findings.notes.append("training.script reads the data itself: columns and labels are not checked.")


class _Findings:
    """Collected problems and notes."""

    def __init__(self) -> None:
        self.problems: list[FailureReport] = []
        self.notes: list[str] = []

    def of(self, step: Callable[[], T]) -> T | None:
        """Return the result of the step; None where it raises StageError."""
        with self.collected():
            return step()
        return None

    @contextmanager
    def collected(self, *, partial: bool = False, known: bool = True) -> Iterator[None]:
        """Collect a StageError as a problem; if rows that were not read could refute it, only as a note (`partial`), or
        not at all where only a model that is not loaded knows the labels.
        """
        try:
            yield
        except StageError as error:
            doubtful = error.reason in _NEED_ALL_ROWS
            if doubtful and not known:
                return
            if doubtful and partial:
                self.notes.append(f"In the rows that were read: {error.message} {error.hint}")
            elif all(problem.message != error.message for problem in self.problems):
                self.problems.append(classify(error))


# ---------------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class _Model:
    """Facts of a model from its files, without its libraries."""

    max_length: int | None
    tokenizer: Tokenizer | None
    labels: Labels | None = None
    """Labels of its head, if it has one for the task whose outputs they name."""
    embedded: int | None = None
    """Number of token ids that it has embeddings of; None: unknown."""

    @classmethod
    def of(cls, job: TrainerJob) -> _Model:
        """Read the files; StageError as `resolve_model`, `truncation_length`, `refuse_long_answers` and
        `embedded_tokens`.
        """
        config, file, names = _model_files(job)
        if config is None:
            return cls(job.preparation.max_length, None)
        try:
            content = {**_DEFAULTS, **json.loads(config.read_text(encoding="utf-8"))}
        except (ValueError, TypeError, RecursionError) as error:
            raise load_error(job.model, error) from error
        label_names = content["id2label"] or {i: f"LABEL_{i}" for i in range(content["num_labels"])}
        content["id2label"] = {int(number): name for number, name in label_names.items()}
        settings, head = cast("PretrainedConfig", SimpleNamespace(**content)), task_of(job).head
        length = truncation_length(job, settings)
        refuse_long_answers(job, settings)
        labels = head.model_labels(settings) if head.named_outputs else None
        tokenizer = None if file is None else _tokenizer(file)
        if tokenizer is None:
            return cls(length, None, labels)
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        special -= _needed_tokens(names)
        return cls(length, tokenizer, labels, embedded_tokens(job, content, tokenizer.get_vocab(), special))


_DEFAULTS: Mapping[str, object] = {
    "model_type": None,
    "is_encoder_decoder": False,
    "architectures": None,
    "id2label": None,
    "num_labels": 2,
    "problem_type": None,
}
"""Values of fields that `config.json` leaves out, as in transformers."""


def _model_files(job: TrainerJob) -> list[Path | None]:
    """Return `_MODEL_FILES`, where they are on this machine."""
    parsed = Uri.parse(job.model.uri, "model.uri")
    known = parsed.scheme in ("file", "pkg", "hf")
    return [model_file(job.model, name) if known else None for name in _MODEL_FILES]


_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def _tokenizer(file: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(file))
        refuse_bomb(made)
    except BaseException as error:  # the library raises nothing narrower; prepare reports files that it cannot read
        if isinstance(error, Exception) or is_panic(error):
            return None
        raise
    made.no_truncation()
    made.no_padding()
    return made


def _needed_tokens(file: Path | None) -> set[str]:
    """Return the tokens of `NEEDED_TOKENS` that `tokenizer_config.json` names."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # prepare reports files that it cannot read
        content = {} if file is None else json.loads(file.read_bytes())
        named = [content.get(name) for name in NEEDED_TOKENS]
        return {str(token["content"] if isinstance(token, dict) else token) for token in named if token}
    return set()


# ----------------------------------------------------------------------------------------------------------------- rows


def _check_rows(
    job: TrainerJob,
    parts: Mapping[Role, Part],
    model: _Model | None,
    head: Labels | None,
    findings: _Findings,
    scratch: Path,
    *,
    trains: Trains | None,
    most: int,
) -> list[CheckedSplit]:
    task = task_of(job)
    raw: dict[Role, RawSplit] = {}
    checked: list[Role] = []
    for role, part in parts.items():
        with findings.collected():
            split = part.source.read(part.needs, scratch, most)
            findings.notes.extend(split.notes)
            raw[role] = split
            task.encoding.check(split, part.columns, part.setting)
            checked.append(role)
    judged = {role: split for role, split in raw.items() if role != "predict"}
    used = {need.name for part in parts.values() for need in part.needs}
    notes = [*unread_note((split.unread for split in judged.values()), used)]
    if trains is not None and len(checked) == len(parts):
        inputs = list(task.encoding.inputs(_columns(job)).values())
        notes += repeated_notes({role: row_hashes(split.table, inputs) for role, split in judged.items()})
    whole = not any(split.partial for split in judged.values())
    findings.notes += notes if whole else [f"In the rows that were read: {note}" for note in notes]
    # Labels of one split are judged by those of another, and tasks read them in checked rows.
    suitable = len(checked) == len(parts)
    labels = _check_labels(job, task, raw, head, findings, trains=trains, model=model) if suitable else {}
    return [
        _described(task.encoding, parts[role], role, split, labels.get(role, {}), model, findings)
        for role, split in raw.items()
    ]


def _parts(job: TrainerJob, *, trains: bool) -> tuple[TrainerJob, dict[Role, Part]]:
    """Return the splits to check, and the job with the columns that their rows have by their shape."""
    encoding = task_of(job).encoding
    parts = parts_of(job, encoding, trains=trains)
    job = with_columns(job, shape_columns(parts))
    predicted = predict_part(job, encoding)
    return job, parts | ({} if predicted is None else {"predict": predicted})


def _check_labels(
    job: TrainerJob,
    task: TaskParts,
    raw: Mapping[Role, RawSplit],
    head: Labels | None,
    findings: _Findings,
    *,
    trains: Trains | None,
    model: _Model | None,
) -> dict[Role, dict[str, int]]:
    """Count the rows of each label in each split; empty where labels are refused. `head`: the labels of the model."""
    judged = {role: split for role, split in raw.items() if role != "predict"}
    counts: dict[Role, dict[str, int]] = {}
    if not judged:
        return counts
    partial, known = any(split.partial for split in judged.values()), head if trains is None else None
    with findings.collected(partial=partial and known is None, known=trains is not None or known is not None):
        targets = task.encoding.targets(cast(Mapping[str, RawSplit], judged), _columns(job), known)
        if head is not None and trains is not None:
            targets = in_head_order(targets, head)
        findings.notes.extend(targets.notes)
        for role in judged:
            if role in targets.of:
                counts[role] = task.encoding.count_labels(targets.of[role], targets.labels)
        measured = task.scoring.metrics[targets.labels.form]
        refuse_unknown_metrics(job, measured)
        if trains is not None and trains.stopping is not None:
            refuse_unmeasured_stopping(job, trains.stopping, measured)
    if trains is not None and "train" in raw and not raw["train"].partial:
        with findings.collected():
            rows = np.arange(len(raw["train"].rows))
            if "validation" not in raw:
                rows, _ = split_validation(raw["train"], job.seed)
            _refuse_few_rows(job, task.encoding, raw["train"], rows, trains.batch, model)
    return counts


def _refuse_few_rows(
    job: TrainerJob, encoding: Encoding, train: RawSplit, rows: NDArray[np.int64], batch: int, model: _Model | None
) -> None:
    """Raise StageError CONFIG `FewRows` if the train split does not fill a step, as the plan does after prepare."""
    made, unit, otherwise = len(rows), "rows", ""
    if job.preparation.packing:
        packs = _packs(job, train.table.take(pa.array(rows)), model)
        if packs is None:
            return
        made, unit = packs, f"packs of {made:,} rows"
        otherwise = ", or preparation.packing to never"
    elif encoding.in_windows(_columns(job)) and made < batch:
        return  # windows, whose number only prepare knows
    if made < batch:
        raise StageError(
            FailureClass.CONFIG,
            "FewRows",
            f"training.globalBatchSize is {batch}, and {made} {unit} are left for training.",
            f"Add rows, or set training.globalBatchSize to {max(made, 1)} or less{otherwise}.",
        )


def _packs(job: TrainerJob, train: pa.Table, model: _Model | None) -> int | None:
    """Return the packs of a training on plain texts, or a few more; None for others, without a tokenizer, and for so
    many rows that they fill a step anyway.
    """
    column = _columns(job).text
    if column is None or len(train) > _TOKENIZED_ROWS or model is None or model.max_length is None:
        return None
    room = model.max_length
    lengths: list[int] = []
    for ids in _token_ids(train, [column], model).values():
        length, stride = len(ids) + 1, window_stride(job, room)  # and an end token
        windows = 1 + max(0, -(-(length - room) // (room - stride)))
        lengths += [room] * (windows - 1) + [length - (windows - 1) * (room - stride)]
    return len(best_fit(np.array(lengths), room)) if lengths else None


def _described(
    encoding: Encoding,
    part: Part,
    role: Role,
    split: RawSplit,
    labels: Mapping[str, int],
    model: _Model | None,
    findings: _Findings,
) -> CheckedSplit:
    table = split.table
    words, characters = {}, {}
    for name in dict.fromkeys(encoding.inputs(part.columns).values()):
        if name not in table.column_names or name in BESIDE:
            continue
        texts = [_texts(value) for value in _values(table[name])] if _has_text(table[name].type) else []
        if texts:
            words[name] = _lengths([sum(len(text.split()) for text in cell) for cell in texts])
            characters[name] = _lengths([sum(map(len, cell)) for cell in texts])
    ids = _token_ids(table, [*words], model)
    with findings.collected():
        _refuse_unknown_tokens(ids, model)
    tokens = [len(row) for row in ids.values()]
    longer = sum(count > model.max_length for count in tokens) if tokens and model and model.max_length else None
    return CheckedSplit(
        role=role,
        name=split.name,
        origin=split.origin,
        rows=len(split.rows),
        whole=not split.partial,
        columns=split.has,
        labels=dict(Counter(labels).most_common()),
        words=words,
        characters=characters,
        tokens=_lengths(tokens) if tokens else None,
        longer=None if longer is None else round(longer * len(split.rows) / len(tokens)),
        estimated=len(tokens) < len(split.rows),
    )


def _has_text(kind: pa.DataType) -> bool:
    if is_list(kind):
        return _has_text(kind.value_type)
    return is_text(kind) or is_json(kind)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return Python's values of a column; of JSON the messages of a conversation."""
    values = python_values(column)
    if not is_json(column.type):
        return values
    try:
        return [list(messages_of(cell)) for cell in values]
    except ConversationError:  # `check` has found it
        return []


def _texts(value: Any) -> list[str]:
    """Return the texts of a cell: one, words, or the contents of messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _texts(value.get("content"))
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def _token_ids(table: pa.Table, columns: Sequence[str], model: _Model | None) -> dict[int, list[int]]:
    """Return the tokens of some rows by the row's index, special tokens included, over all columns that are read
    together.
    """
    if model is None or model.tokenizer is None or not columns or len(columns) > 2:
        return {}
    index = range(0, len(table), -(-len(table) // _TOKENIZED_ROWS))
    some = table.take(list(index))
    texts = [[" ".join(_texts(value)) for value in _values(some[name])] for name in columns]
    pairs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    with suppress(StageError), tokenizer_panics_named():  # prepare reports it
        return {row: encoding.ids for row, encoding in zip(index, model.tokenizer.encode_batch(pairs), strict=True)}
    return {}


def _refuse_unknown_tokens(ids: Mapping[int, Sequence[int]], model: _Model | None) -> None:
    """Raise StageError MODEL `TokensWithoutEmbedding` for the first row with a token that the model cannot read."""
    if model is None or model.tokenizer is None or model.embedded is None:
        return
    for row, tokens in ids.items():
        if max(tokens, default=0) >= model.embedded:
            token = str(model.tokenizer.id_to_token(max(tokens)))
            raise tokens_error(f"Row {row + 1} has the token {token!r}", token, max(tokens), model.embedded)


def _lengths(counts: Sequence[int]) -> TextLengths:
    return TextLengths(mean=round(sum(counts) / len(counts), 1), longest=max(counts))
