"""Rules on metrics, gates and early stopping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from finetune_contract.choices import Task
from finetune_contract.metrics import GREATEST, LEAST, LOSS, LOWER_IS_BETTER, METRICS, metrics_of, stopping_metrics_of
from finetune_operator.spec.problems import describe_value
from finetune_operator.spec.rules.rule import Rule, chosen_cel, value_of
from finetune_operator.spec.types import FineTuneJobSpec


def _unknown_metrics(spec: FineTuneJobSpec) -> tuple[str, ...]:
    """Return names in spec.evaluation.metrics that neither the task has nor a program of the user's may have."""
    named = value_of(spec, "evaluation.metrics")
    if named in (None, "auto") or spec.script is not None:
        return ()
    return tuple(name for name in named if name not in metrics_of(spec.task))


def near_metric(name: str, known: Sequence[str]) -> str | None:
    """Return the task's metric that an unknown name means: `eval_accuracy`, `f1_macro` and the like."""
    from finetune_operator.spec.hints.foreign_table import other_metric_names

    names = {metric.lower(): metric for metric in known}
    bare = name.lower().removeprefix("eval_").replace("-", "_")
    bare = other_metric_names().get(bare, bare)
    candidates = [bare, *re.split(r"[_/@ ]", bare), *get_close_matches(bare, names, n=1)]
    return next((names[candidate] for candidate in candidates if candidate in names), None)


def _metric_advice(name: str, task: Task, known: Sequence[str]) -> str:
    near = near_metric(name, known)
    question = "" if near is None else f"did you mean {near}? "
    return f"{question}{task} has {', '.join(known)}"


def _metrics_advice(spec: FineTuneJobSpec) -> str:
    known = metrics_of(spec.task)
    meant = {name: near_metric(name, known) for name in _unknown_metrics(spec)}
    if not any(meant.values()):
        return f"leave it out: {spec.task} has {', '.join(known)}"
    edits = []
    for name, near in meant.items():
        shown = describe_value(name, limit=40).replace('"', "'")
        edits.append(f"leave {shown} out" if near is None else f"write {near} for {shown}")
    return f"{', '.join(edits)}; {spec.task} has {', '.join(known)}"


def _gate_is_measured(spec: FineTuneJobSpec) -> bool:
    """Return True if the metrics include that of the gate; unknown names break other rules."""
    gate, measured = value_of(spec, "evaluation.gate.metric"), value_of(spec, "evaluation.metrics")
    if gate in (None, LOSS) or measured == "auto" or gate not in metrics_of(spec.task):
        return True
    return gate in measured or bool(_unknown_metrics(spec))


_HIGHER_IS_BETTER = frozenset(name for task in METRICS for name in metrics_of(task)) - LOWER_IS_BETTER


def _cel_list(names: Iterable[str]) -> str:
    """Return CEL: a list of text."""
    return f"[{', '.join(repr(name) for name in sorted(names))}]"


def _metric_cel(path: str, names: Mapping[Task, Sequence[str]]) -> str:
    """Return CEL: `path`.metric is one of the task's, if there is such a block."""
    by_task = (f"(self.task != '{task}' || self.{path}.metric in {_cel_list(names[task])})" for task in names)
    return f"!({chosen_cel(path)}) || ({' && '.join(by_task)})"


def _limit_rules(
    limit: Literal["minimum", "maximum"], others: Iterable[str], better: str, bounds: Mapping[str, float]
) -> tuple[Rule, Rule]:
    """Return the rules on a gate's limit: its metric has such limits, those of `others` have not; and can reach it."""
    other, compared = ("maximum", "<=") if limit == "minimum" else ("minimum", ">=")
    path, gate = f"evaluation.gate.{limit}", "self.evaluation.gate"
    reached = " && ".join(
        f"(!({gate}.metric in {_cel_list(name for name in bounds if bounds[name] == bound)})"
        f" || {gate}.{limit} {compared} {bound})"
        for bound in sorted(set(bounds.values()))
    )

    def advice(spec: FineTuneJobSpec) -> str:
        """Return the bound, and the fraction that a percentage stands for."""
        metric, given = value_of(spec, "evaluation.gate.metric"), value_of(spec, path)
        percent = f"did you mean {given / 100:g}? " if bounds[metric] == 1 < given <= 100 else ""
        return f"{percent}{metric} is at {'most' if limit == 'minimum' else 'least'} {bounds[metric]:g}"

    return (
        Rule(
            f"gate-{limit}-suits-its-metric",
            path,
            f"!({chosen_cel(path)}) || has({gate}.{other}) || !({gate}.metric in {_cel_list(others)})",
            f"does not apply to a metric that is better when {better}",
            f"replace {limit} with {other}",
        ),
        Rule(
            f"gate-{limit}-can-be-met",
            path,
            f"!({chosen_cel(path)}) || ({reached})",
            "is out of the range of the metric",
            "write a value that the metric can have",
            advice=advice,
        ),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "preferences-are-judged-against-the-untrained-model",
        "evaluation",
        "self.task != 'preference-tuning' || !has(self.evaluation)"
        " || (has(self.training) && !has(self.training.script))",
        "compares a model of preference-tuning with its state before training by the built-in loop",
        "leave it out, or train with the built-in loop",
    ),
    Rule(
        "gate-is-measured",
        "evaluation.gate.metric",
        None,
        "must be one of spec.evaluation.metrics",
        "add it there, or set spec.evaluation.metrics to auto",
        test=_gate_is_measured,
        reads=("evaluation", "task"),
    ),
    Rule(
        "metrics-are-of-the-task",
        "evaluation.metrics",
        None,
        "must name metrics of spec.task",
        "write auto for all of them",
        test=lambda spec: not _unknown_metrics(spec),
        advice=_metrics_advice,
        reads=("evaluation", "task"),
    ),
    Rule(
        "gate-metric-is-of-the-task",
        "evaluation.gate.metric",
        "(has(self.training) && has(self.training.script)) || "
        + _metric_cel("evaluation.gate", {task: metrics_of(task) for task in METRICS}),
        "must be a metric of spec.task, or loss",
        "name one of them",
        advice=lambda spec: _metric_advice(value_of(spec, "evaluation.gate.metric"), spec.task, metrics_of(spec.task)),
    ),
    Rule(
        "early-stopping-metric-is-measured",
        "training.earlyStopping.metric",
        _metric_cel("training.earlyStopping", {task: stopping_metrics_of(task) for task in METRICS}),
        "must be a metric that spec.task measures during training",
        "set it to loss",
        advice=lambda spec: _metric_advice(
            value_of(spec, "training.earlyStopping.metric"), spec.task, stopping_metrics_of(spec.task)
        ),
    ),
    Rule(
        "gate-has-one-limit",
        "evaluation.gate",
        f"!({chosen_cel('evaluation.gate')}) || has(self.evaluation.gate.minimum) != has(self.evaluation.gate.maximum)",
        "needs exactly one of minimum and maximum",
        "set minimum for a metric that is better when higher, maximum for one that is better when lower",
    ),
    *_limit_rules("minimum", LOWER_IS_BETTER, "lower", GREATEST),
    *_limit_rules("maximum", _HIGHER_IS_BETTER, "higher", LEAST),
)
