"""Rules on columns and labels: which task reads them, and in which form."""

from __future__ import annotations

from collections.abc import Mapping

from finetune_contract.choices import Task
from finetune_operator.spec.problems import describe_value
from finetune_operator.spec.rules.cel import predicate
from finetune_operator.spec.rules.pair_rules import is_for
from finetune_operator.spec.rules.rule import Rule, chosen_cel, value_of
from finetune_operator.spec.types import FineTuneJobSpec

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
    "text-generation": (("source", "target"),),
}
"""Task -> pairs of roles (input, target) that must not share one column."""


def _role_pairs() -> tuple[tuple[str, str, str], ...]:
    """Return the pairs of roles in `TARGETS`, each with CEL: the two have different columns, or the task is another."""

    def name(role: str) -> str:
        field = f"self.dataset.columns.{role}"
        return f"(has({field}) ? {field} : '{'' if role == 'textPair' else role}')"

    def apart(task: str, one: str, other: str) -> tuple[str, str, str]:
        # Rows of text-generation have a source only if it is named.
        named = " || !has(self.dataset.columns.source)" if task == "text-generation" else ""
        return one, other, f"self.task != '{task}'{named} || {name(one)} != {name(other)}"

    return tuple(apart(task, one, other) for task, pairs in TARGETS.items() for one, other in pairs)


def columns_differ() -> str:
    """Return CEL: no input of the task has the column of its target."""
    return f"!has(self.dataset) || ({' && '.join(f'({cel})' for _, _, cel in _role_pairs())})"


def leak_advice(spec: FineTuneJobSpec) -> str:
    """Return the hint for an input and a target that share a column."""
    shared = next(f"{one} and {other}" for one, other, cel in _role_pairs() if not predicate(cel)(spec))
    return f"name two columns: {shared} are the same"


def _column_advice(spec: FineTuneJobSpec, column: str, tasks: tuple[Task, ...], block: str) -> str:
    """Return the hint for a column of another task: this task's own name for it, unless that is given as well."""
    from finetune_operator.spec.hints.foreign_table import column_called

    written = column in ("prompt", "source", "target") and value_of(spec, f"{block}.columns.context") is None
    if spec.task == "question-answering" and written:
        return "set spec.task to text-generation: question-answering extracts answers from a column context"
    read = f"{spec.task} reads {', '.join(name for name, readers in COLUMN_TASKS.items() if spec.task in readers)}"
    counterpart, given = column_called(spec.task, column), value_of(spec, f"{block}.columns.{column}")
    if counterpart in (None, column) or value_of(spec, f"{block}.columns.{counterpart}") is not None:
        return f"leave it out, or set spec.task to {' or '.join(tasks)}; {read}"
    name = describe_value(given, (column,)).strip('"')
    return f"set spec.{block}.columns.{counterpart} to {name}, and leave spec.{block}.columns.{column} out: {read}"


def _column_rule(column: str, tasks: tuple[Task, ...], block: str) -> Rule:
    """Return the rule that a column needs a task that reads it; `block`: `dataset` or `predict.dataset`."""
    return is_for(f"{block}.columns.{column}", tasks, advice=lambda spec: _column_advice(spec, column, tasks, block))


_FORMS = {"text": ("text",), "source": ("source", "target"), "messages": ("messages",)}
"""Columns of text-generation by the form of its rows; a data set has one form, `text` by default."""


def _form_rule(block: str) -> Rule:
    """Return the rule that rows of text-generation have one form, and rows to predict that of the training rows."""

    def cel(block: str, form: str) -> str:
        return "(" + " || ".join(f"has(self.{block}.columns.{role})" for role in _FORMS[form]) + ")"

    checked = f"[{', '.join(cel(block, form) for form in _FORMS)}].filter(named, named).size() < 2"
    if block != "dataset":
        plain = f"({cel('dataset', 'text')} || (!{cel('dataset', 'source')} && !{cel('dataset', 'messages')}))"
        trained = {form: cel("dataset", form) for form in _FORMS} | {"text": plain}
        same = " && ".join(f"(!{cel(block, form)} || {trained[form]})" for form in _FORMS)
        checked += f" && (!has(self.dataset) || ({same}))"
    return Rule(
        f"{block}-rows-have-one-form",
        f"{block}.columns",
        f"self.task != 'text-generation' || !({chosen_cel(block)}) || ({checked})",
        "mixes row formats; text-generation reads text, or source and target, or messages"
        + ("" if block == "dataset" else ", as in spec.dataset"),
        "name the columns of one format, and leave the rest out",
        reads=("task", *dict.fromkeys(("dataset", block))),
    )


BLOCKS = ("dataset", "predict.dataset")
RULES: tuple[Rule, ...] = (
    *(
        is_for(f"{block}.{field}", ("text-classification",))
        for field in ("labels", "labelSeparator")
        for block in BLOCKS
    ),
    *map(_form_rule, BLOCKS),
    *(_column_rule(column, tasks, block) for block in BLOCKS for column, tasks in COLUMN_TASKS.items()),
)
