"""Tasks and columns of a data set under the names of other tools, or of another task."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_value

_COLUMN_ALIASES = (
    frozenset({
        "text", "source", "input", "inputs", "sentence", "document", "article", "dialogue", "prompt", "instruction",
        "question", "query", "tokens", "words", "content", "feature", "features", "x",
    }),
    frozenset({
        "label", "labels", "target", "targets", "output", "outputs", "summary", "response", "completion", "answer",
        "answers", "tags", "nertags", "class", "category", "y", "translation",
    }),
)  # fmt: skip
"""Names of the input column, and of the target column."""
_COLUMNS_OF_TASK: Mapping[str, tuple[str, str]] = {
    "text-classification": ("text", "label"),
    "token-classification": ("tokens", "tags"),
    "question-answering": ("question", "answers"),
    "text-generation": ("source", "target"),
    "summarization": ("source", "target"),
    "translation": ("source", "target"),
    "preference-tuning": ("prompt", "chosen"),
}
_ANSWERS: Mapping[str, str] = {
    **dict.fromkeys(("accepted", "preferred", "winner", "positive", "better", "good", "chosenresponse"), "chosen"),
    **dict.fromkeys(("dispreferred", "loser", "negative", "worse", "bad", "refused", "rejectedresponse"), "rejected"),
}
"""Names of the two answers of a pair."""
_TEXTS_OF_PAIRS: Mapping[str, str] = {
    **dict.fromkeys(("text1", "sentence1", "texta", "sentencea", "input1", "question1", "premise"), "text"),
    **dict.fromkeys(
        ("text2", "sentence2", "textb", "sentenceb", "input2", "question2", "hypothesis", "pair", "secondtext"),
        "textPair",
    ),
}
"""Names of the two texts of a pair."""
_CONVERSATIONS = ("conversations", "conversation", "chat", "chats", "dialog", "dialogs", "turns")
_TEXT_TASKS = ("masked-lm", "text-generation")
"""Tasks that can learn from one column."""


def meant_task(task: JsonValue) -> JsonValue:
    """Return the task that a misspelt or foreign one means; the same value if it is neither."""
    row = find_value("spec.task", task)
    if row is not None:
        return row.instead.get("spec.task", task)
    near = difflib.get_close_matches(task.lower(), _COLUMNS_OF_TASK, n=1) if isinstance(task, str) else []
    return near[0] if near else task_by_words(task) or task


def task_by_words(task: JsonValue) -> str | None:
    """Return the one task that words of a name stand for, such as `llm-finetuning`; None: there is none, or several."""
    words = re.split(r"[^a-z0-9]+", task.lower()) if isinstance(task, str) else []
    rows = [find_value("spec.task", word) for word in words]
    tasks = {str(row.instead["spec.task"]) for row in rows if row is not None and row.instead}
    return tasks.pop() if len(tasks) == 1 else None


def column_of(task: JsonValue, name: str) -> str | None:
    """Return the column of a task that another tool, or another task, calls `name`; None: there is none."""
    if task == "preference-tuning" and (answer := _ANSWERS.get(plain(name))) is not None:
        return answer
    columns = _COLUMNS_OF_TASK.get(task) if isinstance(task, str) else None
    if columns is None:
        return None
    if task == "text-classification" and (text := _TEXTS_OF_PAIRS.get(plain(name))) is not None:
        return text
    if task == "text-generation" and plain(name) in _CONVERSATIONS:
        return "messages"
    bare = re.sub(r"(?:column|columnname|field)$", "", plain(name))
    return next((column for aliases, column in zip(_COLUMN_ALIASES, columns, strict=True) if bare in aliases), None)


def columns_of(task: JsonValue) -> tuple[str, ...]:
    """Return the input and target columns of a task; empty: it is none."""
    return _COLUMNS_OF_TASK.get(task, ()) if isinstance(task, str) else ()


def columns_in_order(value: JsonValue, task: JsonValue) -> list[tuple[str, str]]:
    """Return the task's columns with the names of a list, input first; empty: they do not correspond."""
    columns: tuple[str, ...] = _COLUMNS_OF_TASK.get(task, ()) if isinstance(task, str) else ()
    given = [value] if isinstance(value, str) else value
    if task in _TEXT_TASKS and isinstance(given, list) and len(given) == 1:
        columns = ("text",)
    elif task not in ("text-classification", "token-classification", "summarization", "translation", "text-generation"):
        return []
    if not isinstance(given, list) or len(given) != len(columns):
        return []
    return [(column, each) for column, each in zip(columns, given, strict=True) if isinstance(each, str)]
