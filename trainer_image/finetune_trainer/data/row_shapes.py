"""Shapes in which people keep their rows, known by their keys, and read as the columns of a task.

A shape is tried only where a column that the job did not name is missing, so named columns are always read as they are.
A conversion sees one row and never guesses: a row that does not have the shape of the first ones is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from finetune_contract.choices import Task
from finetune_contract.data_settings import Columns
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.file_formats import all_rows, json_column, rows_of
from finetune_trainer.data.folders import essays
from finetune_trainer.data.sources import ColumnNeed, FileSplit, HubSplit, RawSplit, SplitSource, Spool, check_columns

Row: TypeAlias = Mapping[str, Any]
_VERSION = 1
"""Increased when a conversion changes; part of the digest of the rows."""
_CHUNK_ROWS = 10_000
"""Rows converted at a time: some tens of MB of Python values."""


_TALKS = ("messages", "prompt", "chosen", "rejected")
"""Roles of columns that may hold conversations."""


class RowShapeError(ValueError):
    """A row without the shape of the first ones; its text is the reason."""


@dataclass(frozen=True)
class Shape:
    """A form of rows and its conversion."""

    name: str
    tasks: tuple[Task, ...]
    keys: tuple[str, ...]
    """Keys that each row has."""
    gives: Columns
    """Names of the columns that it makes, or, without `row`, of those that the task reads as they are."""
    answers: tuple[str, ...] = ()
    """Keys of the answers, which rows to predict need not have."""
    optional: tuple[str, ...] = ()
    """Further keys that it reads."""
    fits: Callable[[Row], bool] = lambda _row: True
    """True for values of the shape, in a row that has the keys."""
    row: Callable[[Row], dict[str, Any]] | None = None
    """Conversion of a row to the made columns; raises RowShapeError."""
    replaces: bool = False
    """True if the job's columns may all be there, with values of another form."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return all keys that it reads."""
        return (*self.keys, *self.answers, *self.optional)

    def columns(self, given: Columns) -> Columns:
        """Return the columns of rows in place of the `given` ones, which may be of another form of text-generation."""
        others = dict.fromkeys(("text", "messages") if "text-generation" in self.tasks else ())
        return given.model_copy(update=others | {role: name for role, name in self.gives if name is not None})

    def digest(self, rows: str) -> str:
        """Return a digest of the conversion and of the rows, by their own digest."""
        return hashlib.sha256(f"{_VERSION} {self.name} {self.reads} {rows}".encode()).hexdigest()

    def suits(self, rows: Sequence[Row], *, labelled: bool) -> bool:
        """Return whether first rows of a split have the shape."""
        needed = (*self.keys, *(self.answers if labelled else ()))
        whole = next((row for row in rows if all(row.get(key) is not None for key in needed)), None)
        return whole is not None and self.fits(whole)

    def note(self, has: Sequence[str]) -> str:
        """Return the sentence for people; `has`: all columns of the data."""
        read = [key for key in dict.fromkeys((*has, *self.keys)) if key in self.reads]
        roles = [role for role, name in self.gives if name is not None]
        return f"Rows have the shape {self.name}: {', '.join(read)} are read as {', '.join(roles)}."

    def needs(self, needs: Sequence[ColumnNeed]) -> tuple[ColumnNeed, ...]:
        """Return the columns to read of the data for `needs`, which the job has of the result."""
        if self.row is None:
            return tuple(needs)
        own = tuple(ColumnNeed(self._key, key, required=key in self.keys, nested=True) for key in self.reads)
        return (*own, *(need for need in needs if need.name not in self._made))

    def converted(self, table: pa.Table, needs: Sequence[ColumnNeed], place: str = "", first: int = 1) -> pa.Table:
        """Return the made columns, and those of `needs` that the shape does not make. `place`: the split in errors,
        empty for a single row, whose place callers report; `first`: number of the first row. Raise StageError DATA
        `WrongShape` or `MixedTypes`.
        """
        if self.row is None:
            return table
        made: list[dict[str, Any]] = []
        rows = rows_of(table.select([key for key in self.reads if key in table.column_names]))
        for number, row in enumerate(rows, start=first):
            try:
                absent = next((key for key in self.keys if row.get(key) is None), None)
                if absent is not None:
                    raise RowShapeError(f"it has no {absent}")
                made.append(self.row(row))
            except RowShapeError as error:
                where = f"{place}, row {number}: " if place else ""
                raise StageError(
                    FailureClass.DATA,
                    "WrongShape",
                    f"{where}the first rows have the shape {self.name}, and this one does not: {error}.",
                    "Correct the row, or name the columns in dataset.columns.",
                ) from None
        kept = [need.name for need in needs if need.name not in self._made and need.name in table.column_names]
        try:
            names = dict.fromkeys(chain(*made))
            columns = {name: self._column(name, [row.get(name) for row in made]) for name in names}
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise StageError(
                FailureClass.DATA,
                "MixedTypes",
                f"Rows of the shape {self.name} have values without a common type: {error}",
                "Use one type in all rows.",
            ) from error
        return pa.table(columns | {name: table[name] for name in dict.fromkeys(kept)})

    def _column(self, name: str, values: list[Any]) -> pa.Array:
        """Return made values: conversations, which are lists, as JSON."""
        talks = any(getattr(self.gives, role) == name for role in _TALKS)
        return json_column(values) if talks and any(isinstance(value, list) for value in values) else pa.array(values)

    @property
    def _key(self) -> str:
        """Return the name of a key in errors."""
        return f"a key of the shape {self.name}"

    @property
    def _made(self) -> frozenset[str]:
        return frozenset(name for _, name in self.gives if name is not None)


def shaped(source: SplitSource, shape: Shape | None) -> SplitSource:
    """Return the split with its rows as the shape gives them; without a shape the split itself. StageErrors of files
    that the rows name.
    """
    if shape is ESSAYS and isinstance(source, FileSplit):
        file = source.files[0]
        if not file.name.endswith(".csv"):
            return source
        rows = essays(file.filesystem, file.name.removesuffix(".csv"), all_rows(file, ESSAYS.keys))
        source = HubSplit(source.name, source.origin, rows)
    return source if shape is None else ShapedSplit(source, shape)


@dataclass(frozen=True)
class ShapedSplit:
    """A split whose rows have a shape."""

    inner: SplitSource
    shape: Shape

    @property
    def name(self) -> str:
        return self.inner.name

    def digest(self) -> str:
        """Return a digest of the rows and of their conversion."""
        return self.shape.digest(self.inner.digest())

    def head(self) -> list[dict[str, Any]]:
        """Return the first rows before their conversion."""
        return self.inner.head()

    def read(self, needs: Sequence[ColumnNeed], scratch: Path, most: int | None = None) -> RawSplit:
        """Read and convert the rows. StageErrors of the split and of `Shape.converted`."""
        raw = self.inner.read(self.shape.needs(needs), scratch, most)
        if not {*raw.has}.isdisjoint(self.shape.reads):
            raw = replace(raw, notes=(*raw.notes, self.shape.note(raw.has)))
        for key in self.shape.reads:
            raw.unread.filled.pop(key, None)
        if self.shape.row is None:
            return raw
        table, schemas, place = raw.table, [], f"Split {raw.name} ({raw.origin})"
        with Spool(scratch) as spool:
            for start in range(0, len(table), _CHUNK_ROWS):
                part = table.slice(start, _CHUNK_ROWS)
                schemas.append(spool.write(self.shape.converted(part, needs, place, start + 1)))
            rows = spool.close(pa.unify_schemas(schemas, promote_options="permissive"))
        check_columns(raw.name, raw.origin, [*rows.column_names, *raw.has], needs)
        return replace(raw, source=rows)


def recognised(rows: Sequence[Row], task: Task, needs: Sequence[ColumnNeed], *, labelled: bool) -> Shape | None:
    """Return the shape of first rows that lack columns of `needs`; None if they lack none, or one that the job names.
    `labelled`: their answers are needed.

    Raise StageError DATA `UnpairedPreference` for answers that are not pairs.
    """
    has = frozenset(chain(*rows))
    missing = [need for need in needs if need.required and need.name not in has]
    roles = {need.setting.rpartition(".")[2]: need.name for need in missing}
    if any(role != name for role, name in roles.items()) or roles.keys() & _NAMED_BY_JOB.get(task, frozenset()):
        return None
    shapes = (*_named_chats(needs), *SHAPES, *_flags(rows, needs))
    known = (shape for shape in shapes if task in shape.tasks and (missing or shape.replaces))
    shape = next((shape for shape in known if shape.suits(rows, labelled=labelled)), None)
    writes = task == "text-generation" if shape else task == "preference-tuning" and {"prompt", "completion"} <= has
    if missing and labelled and writes:
        _refuse_unpaired(rows)
    return shape


_NAMED_BY_JOB: Mapping[Task, frozenset[str]] = {"text-generation": frozenset(("source", "target"))}
"""Roles that a job has only if it names them; all others have default names."""


def _refuse_unpaired(rows: Sequence[Row]) -> None:
    """Refuse answers of which some are bad: each row says so in `label` (trl) or `kto_tag` (LLaMA-Factory)."""
    for key in ("label", "kto_tag"):
        if all(_flag(row.get(key)) is not None for row in rows):
            raise StageError(
                FailureClass.DATA,
                "UnpairedPreference",
                f"The rows have one answer each, and {key} says whether it is good; such unpaired preference is not "
                "supported.",
                f"Keep the rows whose {key} is true, and leave {key} out, for text-generation; or pair a good and a "
                "bad answer to each prompt as chosen and rejected, for preference-tuning.",
            )


# -------------------------------------------------------------------------------------------------------- conversations


def _messages(*, system: object = None, history: object = None) -> list[dict[str, Any]]:
    """Return the beginning of a conversation: the system's message and earlier pairs of question and answer."""
    made = [_message("system", system)] if system else []
    for pair in _list(history, "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowShapeError(f"its history has {pair!r}, not a question and an answer")
        made += [_message("user", pair[0]), _message("assistant", pair[1])]
    return made


def _message(role: str, content: object) -> dict[str, Any]:
    if not isinstance(content, str):
        raise RowShapeError(f"the {role} says {content!r}, which is no text")
    return {"role": role, "content": content}


def _list(value: object, name: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise RowShapeError(f"its {name} are {value!r}, not a list")
    return value or []


def _is_turns(value: object, *keys: str) -> bool:
    """Return whether it is a list of objects with these keys."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) for turn in value)
        and set(keys) <= (value[0].keys())
    )


def _is_messages(value: object) -> bool:
    return _is_turns(value, "role", "content")


def _alpaca(row: Row) -> list[dict[str, Any]]:
    """Return the conversation up to the answer. Instruction and input are joined by a line end, as in LLaMA-Factory."""
    asked = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    return [*_messages(system=row.get("system"), history=row.get("history")), _message("user", asked)]


def _alpaca_messages(row: Row) -> dict[str, Any]:
    reply = row.get("output")
    return {"messages": [*_alpaca(row), *([] if reply is None else [_message("assistant", reply)])]}


def _dolly_messages(row: Row) -> dict[str, Any]:
    return _alpaca_messages({**row, "input": row["context"], "output": row.get("response")})


_ALPACA = ("input", "system", "history")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
"""Sender in ShareGPT's rows -> role of the message."""


def _sharegpt_turn(turn: object) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowShapeError(f"a turn is {turn!r}, not an object")
    sender, value = turn.get("from"), turn.get("value")
    if sender == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(value)}
    if sender not in _ROLES:
        raise RowShapeError(f"a turn is from {sender!r}; known are {', '.join(_ROLES)}, function_call")
    return _message(_ROLES[sender], value)


def _tool_calls(value: object) -> list[dict[str, Any]]:
    try:
        called = json.loads(str(value))
        calls = called if isinstance(called, list) else [called]
        return [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}} for call in calls
        ]
    except (ValueError, TypeError, KeyError):
        raise RowShapeError(f"a function_call is {value!r}, not JSON with name and arguments") from None


def _sharegpt(row: Row, column: str = "conversations") -> list[dict[str, Any]]:
    turns = [_sharegpt_turn(turn) for turn in _list(row[column], column)]
    said = any(turn["role"] == "system" for turn in turns)
    return [*_messages(system=None if said else row.get("system")), *turns]


def _sharegpt_in(column: str, made: str) -> Shape:
    return Shape(
        "ShareGPT",
        ("text-generation",),
        (column,),
        Columns(messages=made),
        optional=("system",),
        fits=lambda row: _is_turns(row[column], "from", "value"),
        row=lambda row: {made: _sharegpt(row, column)},
        replaces=column == made,
    )


def _named_chats(needs: Sequence[ColumnNeed]) -> Iterator[Shape]:
    """Yield the shape of turns in the column that the job names for messages."""
    yield from (_sharegpt_in(need.name, need.name) for need in needs if need.setting.endswith(".columns.messages"))


def _is_reply(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _prompt_completion(row: Row) -> dict[str, Any]:
    """Join both sides. Replies of the prompt are not learnt, as in trl."""
    prompt, completion = _list(row["prompt"], "prompt"), _list(row.get("completion"), "completion")
    given = [{**message, "weight": 0} if _is_reply(message) else message for message in prompt]
    return {"messages": given + completion}


def _implicit_prompt(row: Row) -> dict[str, Any]:
    """Split the beginning that both answers share off as the prompt, as `extract_prompt` of trl does."""
    chosen, rejected = row["chosen"], row["rejected"]
    if type(chosen) is not type(rejected) or not chosen or not rejected:
        raise RowShapeError(f"chosen and rejected are {chosen!r} and {rejected!r}")
    shorter = min(len(chosen), len(rejected))
    shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter - 1)
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared and isinstance(chosen, list):
        raise RowShapeError("its answers share no message before the last one")
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _replies(row: Row, prompt: list[dict[str, Any]], reply: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    answers = {name: [reply(row[name])] for name in ("chosen", "rejected") if row.get(name) is not None}
    return {"prompt": prompt, **answers}


_PAIR = ("chosen", "rejected")
_PAIRED = Columns(prompt="prompt", chosen="chosen", rejected="rejected")

# ------------------------------------------------------------------------------------------------------------- entities

_WORD = re.compile(r"\w+|[^\w\s]")


def _words(text: str, borders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last character (exclusive) of each word, and of each sign; words are cut at `borders` too."""
    for match in _WORD.finditer(text):
        inside = [border for border in borders if match.start() < border < match.end()]
        yield from zip((match.start(), *inside), (*inside, match.end()), strict=True)


def _span(given: object) -> tuple[int, int, str]:
    """Return the span of Doccano ([start, end, label], or start_offset and end_offset), Prodigy or Label Studio."""
    if isinstance(given, dict):
        labels = given.get("labels") or [given.get("label")]
        start, end = (given.get(key, given.get(f"{key}_offset")) for key in ("start", "end"))
        given = [start, end, *labels]
    match given:
        case [int(start), int(end), str(label)]:
            return start, end, label
    raise RowShapeError(f"a span is {given!r}, not start, end and one label")


def _tagged(row: Row, column: str) -> dict[str, Any]:
    """Return words, and BIO tags where the row has spans, or an empty list of them."""
    text = row["text"]
    spans = sorted(_span(span) for span in _list(row.get(column), column))
    for before, (start, end, _) in zip([(0, 0, ""), *spans], spans, strict=False):
        if not 0 <= start < end <= len(text):
            raise RowShapeError(f"a span is from {start} to {end}, in a text of {len(text)} characters")
        if start < before[1]:
            raise RowShapeError(f"its spans overlap at character {start}, and a word has one tag")
    words = list(_words(text, sorted({border for start, end, _ in spans for border in (start, end)})))
    tokens = {"tokens": [text[start:end] for start, end in words]}
    if row.get(column) is None:
        return tokens
    if row.get("answer") in ("reject", "ignore"):
        raise RowShapeError(f"its answer is {row['answer']}; leave out rows that nobody accepted")
    tags = ["O"] * len(words)
    for start, end, label in spans:
        inside = [at for at, word in enumerate(words) if start <= word[0] and word[1] <= end]
        for place, at in enumerate(inside):
            tags[at] = f"{'I' if place else 'B'}-{label}"
    return tokens | {"tags": tags}


def _is_spans(value: object) -> bool:
    if not isinstance(value, list):
        return False
    try:
        return all(_span(span) for span in value)
    except RowShapeError:
        return False


def _spans(column: str) -> Shape:
    return Shape(
        "text with spans",
        ("token-classification",),
        ("text",),
        _TAGGED,
        answers=(column,),
        optional=("answer",),
        fits=lambda row: isinstance(row["text"], str) and (row.get(column) is None or _is_spans(row[column])),
        row=lambda row: _tagged(row, column),
    )


# --------------------------------------------------------------------------------------------------------------- labels

_FLAGS = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


_LABEL = re.compile("labels?|class|category|target", re.IGNORECASE)
"""Columns that hold the label by themselves, as their names say; the job has to name them."""


def _flag(value: object) -> bool | None:
    return _FLAGS.get(str(value).lower())


def _flags(rows: Sequence[Row], needs: Sequence[ColumnNeed]) -> Iterator[Shape]:
    """Yield the shape of rows whose labels are columns of 0 and 1, two or more."""
    used = {"id", "idx", "index", *(need.name for need in needs)}
    columns = [key for key in dict.fromkeys(chain(*rows)) if key not in used]
    names = tuple(key for key in columns if rows and all(_flag(row.get(key)) is not None for row in rows))

    def row(row: Row) -> dict[str, Any]:
        if not row.keys() & set(names):
            return {}
        flags = {name: _flag(row.get(name)) for name in names}
        wrong = next((name for name, flag in flags.items() if flag is None), None)
        if wrong is not None:
            raise RowShapeError(f"its {wrong} is {row.get(wrong)!r}, not 0 or 1")
        return {"label": [name for name, flag in flags.items() if flag]}

    if len(names) > 1 and not any(_LABEL.fullmatch(key) for key in columns if key not in names):
        yield Shape("columns of 0 and 1", ("text-classification",), (), Columns(label="label"), answers=names, row=row)


# ---------------------------------------------------------------------------------------------------------------- table

_CHAT = Columns(messages="messages")
_TAGGED = Columns(tokens="tokens", tags="tags")
ESSAYS = Shape(
    "essays with spans",
    ("token-classification",),
    ("id", "discourse_type", "predictionstring"),
    _TAGGED,
    fits=lambda row: bool(re.fullmatch(r"\d+( \d+)*", str(row["predictionstring"]).strip())),
)
"""Essays of the Feedback Prize: a table of spans beside a folder with a text for each `id`."""
SHAPES: tuple[Shape, ...] = (
    Shape(
        "messages",
        ("text-generation",),
        ("messages",),
        _CHAT,
    ),
    Shape(
        "messages in conversations",
        ("text-generation",),
        ("conversations",),
        Columns(messages="conversations"),
        fits=lambda row: _is_messages(row["conversations"]),
    ),
    _sharegpt_in("conversations", "messages"),
    Shape(
        "Alpaca",
        ("text-generation",),
        ("instruction",),
        _CHAT,
        answers=("output",),
        optional=_ALPACA,
        fits=lambda row: isinstance(row["instruction"], str),
        row=_alpaca_messages,
    ),
    Shape(
        "Dolly",
        ("text-generation",),
        ("instruction", "context"),
        _CHAT,
        answers=("response",),
        fits=lambda row: isinstance(row["instruction"], str),
        row=_dolly_messages,
    ),
    Shape(
        "prompt and completion",
        ("text-generation",),
        ("prompt",),
        Columns(source="prompt", target="completion"),
        answers=("completion",),
        fits=lambda row: isinstance(row["prompt"], str),
    ),
    Shape(
        "prompt and completion as messages",
        ("text-generation",),
        ("prompt",),
        _CHAT,
        answers=("completion",),
        fits=lambda row: _is_messages(row["prompt"]),
        row=_prompt_completion,
    ),
    Shape(
        "ShareGPT with two answers",
        ("preference-tuning",),
        ("conversations",),
        _PAIRED,
        answers=_PAIR,
        optional=("system",),
        fits=lambda row: _is_turns(row["conversations"], "from", "value"),
        row=lambda row: _replies(row, _sharegpt(row), _sharegpt_turn),
    ),
    Shape(
        "Alpaca with two answers",
        ("preference-tuning",),
        ("instruction",),
        _PAIRED,
        answers=_PAIR,
        optional=_ALPACA,
        fits=lambda row: isinstance(row["instruction"], str),
        row=lambda row: _replies(row, _alpaca(row), lambda text: _message("assistant", text)),
    ),
    Shape(
        "two conversations with one beginning",
        ("preference-tuning",),
        _PAIR,
        _PAIRED,
        fits=lambda row: (
            all(map(_is_messages, (row["chosen"], row["rejected"])))
            and not isinstance(row.get("prompt"), list)
            and min(len(row["chosen"]), len(row["rejected"])) > 1
        ),
        row=_implicit_prompt,
        replaces=True,
    ),
    Shape(
        "two texts with one beginning",
        ("preference-tuning",),
        _PAIR,
        _PAIRED,
        fits=lambda row: isinstance(row["chosen"], str) and isinstance(row["rejected"], str) and "prompt" not in row,
        row=_implicit_prompt,
    ),
    ESSAYS,
    *map(_spans, ("entities", "spans", "label", "labels")),
)
"""Shapes in the order in which they are tried."""
