"""Rules on columns and labels: which task reads them, and in which form."""

from __future__ import annotations

from collections.abc import Mapping

from finetune_contract.choices import Task
from finetune_operator.spec.problems import describe_value
from finetune_operator.spec.rules.rule import Rule, is_one_of
from finetune_operator.spec.types import ColumnsSpec, FineTuneJobSpec

COLUMN_TASKS: Mapping[str, tuple[Task, ...]] = {
    "text": ("text-classification", "text-generation", "masked-lm"),
    "textPair": ("text-classification",),
    "label": ("text-classification",),
    "tokens": ("token-classification",),
    "tags": ("token-classification",),
    "question": ("question-answering",),
    "context": ("question-answering",),
    "answers": ("question-answering",),
    "source": ("text-generation", "summarization", "translation"),
    "target": ("text-generation", "summarization", "translation"),
    "messages": ("text-generation",),
    "prompt": ("preference-tuning",),
    "chosen": ("preference-tuning",),
    "rejected": ("preference-tuning",),
}
"""Column role -> tasks that read it. A column that no stage reads would be accepted and ignored."""
TARGETS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "text-classification": (("text", "label"), ("textPair", "label")),
    "token-classification": (("tokens", "tags"),),
    "question-answering": (("question", "answers"), ("context", "answers")),
    "preference-tuning": (("prompt", "chosen"), ("prompt", "rejected"), ("chosen", "rejected")),
    "summarization": (("source", "target"),),
    "translation": (("source", "target"),),
}
"""Task -> pairs of roles (input, target) that must not share one column."""


def columns_differ(spec: FineTuneJobSpec) -> bool:
    """Return True if no input of the task has the column of its target."""
    return not _leaks(spec)


def _leaks(spec: FineTuneJobSpec) -> tuple[tuple[str, str], ...]:
    """Return the pairs of roles for which the data set has one column."""
    if spec.dataset is None:
        return ()
    given = spec.dataset.columns.model_dump(by_alias=True, exclude_none=True)
    pairs = TARGETS.get(spec.task, (("source", "target"),) if "source" in given else ())
    names = {role: given.get(role, "" if role == "textPair" else role) for pair in pairs for role in pair}
    return tuple(pair for pair in pairs if names[pair[0]] == names[pair[1]])


def leak_advice(spec: FineTuneJobSpec) -> str:
    """Return the hint for an input and a target that share a column."""
    (source, target), *_ = _leaks(spec)
    return f"name two columns: {source} and {target} are the same"


def columns_cel() -> str:
    """Return CEL of `columns_differ`."""

    def name(role: str) -> str:
        field = f"self.dataset.columns.{role}"
        return f"(has({field}) ? {field} : '{'' if role == 'textPair' else role}')"

    tasks = [
        f"self.task != '{task}' || ({' && '.join(f'{name(one)} != {name(other)}' for one, other in pairs)})"
        for task, pairs in TARGETS.items()
    ]
    written = (
        f"self.task != 'text-generation' || !has(self.dataset.columns.source) || {name('source')} != {name('target')}"
    )
    return f"!has(self.dataset) || ({' && '.join(f'({each})' for each in (*tasks, written))})"


def _columns_read(task: Task) -> str:
    return ", ".join(column for column, tasks in COLUMN_TASKS.items() if task in tasks)


def _column_advice(spec: FineTuneJobSpec, column: str, tasks: tuple[Task, ...], block: str) -> str:
    """Return the hint for a column of another task: this task's own name for it, unless that is given as well."""
    dataset = spec.dataset if block == "dataset" else spec.predict.dataset if spec.predict else None
    given = {} if dataset is None else dataset.columns.model_dump(by_alias=True, exclude_none=True)
    if spec.task == "question-answering" and "context" not in given and column in ("prompt", "source", "target"):
        return (
            "set spec.task to text-generation, and name the columns source and target: question-answering extracts "
            "the answer from a column context"
        )
    from finetune_operator.spec.hints.foreign_table import column_called

    own = column_called(spec.task, column)
    if own is not None and own not in given and own != column:
        name = describe_value(given[column], (column,)).strip('"')
        return (
            f"set spec.{block}.columns.{own} to {name}, and leave spec.{block}.columns.{column} out: {spec.task} reads "
            f"{_columns_read(spec.task)}"
        )
    return f"leave it out, or set spec.task to {' or '.join(tasks)}; {spec.task} reads {_columns_read(spec.task)}"


def _column_rule(column: str, tasks: tuple[Task, ...], block: str) -> Rule:
    """Return the rule that a column needs a task that reads it; `block`: `dataset` or `predict.dataset`."""

    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    return Rule(
        name=f"{block}-{column}-is-read",
        path=f"{block}.columns.{column}",
        cel=f"!({present} && has(self.{block}.columns.{column})) || {is_one_of(tasks)}",
        text=f"is read by {', '.join(tasks)} only",
        hint=f"leave it out, or set spec.task to {' or '.join(tasks)}",
        advice=lambda spec: _column_advice(spec, column, tasks, block),
    )


_FORMS = {"text": ("text",), "source": ("source", "target"), "messages": ("messages",)}
"""Columns of text-generation by the form of its rows; a data set has one form, `text` by default."""


def _forms(columns: ColumnsSpec) -> tuple[str, ...]:
    given = columns.model_dump(exclude_none=True)
    return tuple(form for form, roles in _FORMS.items() if given.keys() & set(roles))


def _form_rule(block: str) -> Rule:
    """Return the rule that rows of text-generation have one form, and rows to predict that of the training rows."""

    def advice(spec: FineTuneJobSpec) -> str:
        own = spec.dataset if block == "dataset" else spec.predict.dataset if spec.predict else None
        named = () if own is None else _forms(own.columns)
        if len(named) == 1 and spec.dataset is not None:
            return f"name {' and '.join(_FORMS[(*_forms(spec.dataset.columns), 'text')[0]])} here, or leave it out"
        if own is not None and named == ("text", "source") and own.columns.source is None:
            return "rename text to source, or leave target out to train on the whole text"
        return f"keep {', or '.join(' and '.join(_FORMS[form]) for form in named)}, and leave the rest out"

    def cel(block: str, form: str) -> str:
        return "(" + " || ".join(f"has(self.{block}.columns.{role})" for role in _FORMS[form]) + ")"

    named = f"[{', '.join(cel(block, form) for form in _FORMS)}].filter(named, named).size()"
    checked = f"{named} < 2"
    if block != "dataset":
        plain = f"({cel('dataset', 'text')} || (!{cel('dataset', 'source')} && !{cel('dataset', 'messages')}))"
        trained = {form: cel("dataset", form) for form in _FORMS} | {"text": plain}
        same = " && ".join(f"(!{cel(block, form)} || {trained[form]})" for form in _FORMS)
        checked += f" && (!has(self.dataset) || ({same}))"
    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    return Rule(
        name=f"{block}-rows-have-one-form",
        path=f"{block}.columns",
        cel=f"self.task != 'text-generation' || !({present}) || ({checked})",
        text="mixes row formats; text-generation reads text, or source and target, or messages"
        + ("" if block == "dataset" else ", as in spec.dataset"),
        hint="name the columns of one format",
        advice=advice,
        reads=("task", *dict.fromkeys(("dataset", block))),
    )


def _labels_rule(block: str) -> Rule:
    """Return the rule that label names need a task with such labels; `block`: `dataset` or `predict.dataset`."""
    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    named = f"{present} && has(self.{block}.labels) && size(self.{block}.labels) > 0"
    return Rule(
        name=f"{block}-labels-are-read",
        path=f"{block}.labels",
        cel=f"!({named}) || self.task == 'text-classification'",
        text="is read by text-classification only",
        hint="leave it out, or set spec.task to text-classification",
    )


RULES: tuple[Rule, ...] = (
    *(_labels_rule(block) for block in ("dataset", "predict.dataset")),
    *(_form_rule(block) for block in ("dataset", "predict.dataset")),
    *(
        _column_rule(column, tasks, block)
        for block in ("dataset", "predict.dataset")
        for column, tasks in COLUMN_TASKS.items()
    ),
)
