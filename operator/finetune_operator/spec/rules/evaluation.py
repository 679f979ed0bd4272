"""Rules on metrics, gates and early stopping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

from finetune_contract.choices import Task
from finetune_contract.metrics import GREATEST, LEAST, LOSS, LOWER_IS_BETTER, METRICS, metrics_of, stopping_metrics_of
from finetune_operator.spec.problems import describe_value
from finetune_operator.spec.rules.rule import Rule
from finetune_operator.spec.types import FineTuneJobSpec, GateSpec


def _gate(spec: FineTuneJobSpec) -> GateSpec | None:
    return spec.evaluation.gate if spec.evaluation else None


def _gate_of(spec: FineTuneJobSpec) -> GateSpec:
    """Return the gate of a job that breaks a rule on it."""
    gate = _gate(spec)
    assert gate is not None
    return gate


def _watched(spec: FineTuneJobSpec) -> str | None:
    """Return the metric that early stopping watches."""
    stopping = spec.training.early_stopping if spec.training else None
    return None if stopping is None else stopping.metric


def _unknown_metrics(spec: FineTuneJobSpec) -> tuple[str, ...]:
    """Return names in spec.evaluation.metrics that neither the task has nor a program of the user's may have."""
    if spec.evaluation is None or spec.evaluation.metrics == "auto" or spec.script is not None:
        return ()
    return tuple(name for name in spec.evaluation.metrics if name not in metrics_of(spec.task))


_OTHER_METRIC_NAMES: Mapping[str, str] = {
    "acc": "accuracy", "em": "exact_match", "exact": "exact_match", "ppl": "perplexity", "sacrebleu": "bleu",
    "f": "f1", "fscore": "f1", "f_score": "f1", "sensitivity": "recall", "rouge": "rougel", "r_l": "rougel",
    "rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "pearsonr": "pearson", "spearman": "spearmanr",
    "r_squared": "r2", "mean_squared_error": "mse", "mean_absolute_error": "mae", "chrf++": "chrf",
}  # fmt: skip
"""Common name of a metric -> its name in Hugging Face's `evaluate`."""


def near_metric(name: str, known: Sequence[str]) -> str | None:
    """Return the task's metric that an unknown name means: `eval_accuracy`, `f1_macro` and the like."""
    names = {each.lower(): each for each in known}
    bare = name.lower().removeprefix("eval_").replace("-", "_")
    bare = _OTHER_METRIC_NAMES.get(bare, bare)
    candidates = [bare, *re.split(r"[_/@ ]", bare), *get_close_matches(bare, names, n=1)]
    return next((names[each] for each in candidates if each in names), None)


_FAMILIES: Mapping[str, tuple[str, ...]] = {"rouge": ("rouge1", "rouge2", "rougeL")}
"""Name of several metrics -> these."""


def _metric_advice(name: str, task: Task, known: Sequence[str]) -> str:
    near = near_metric(name, known)
    question = "" if near is None else f"did you mean {near}? "
    return f"{question}{task} has {', '.join(known)}"


def _meant_metrics(spec: FineTuneJobSpec) -> tuple[str, ...]:
    """Return the task's metrics that spec.evaluation.metrics means."""
    known = metrics_of(spec.task)
    named = known if spec.evaluation is None or spec.evaluation.metrics == "auto" else spec.evaluation.metrics
    return tuple(near for name in named if (near := near_metric(name, known)) is not None)


def _gate_metric_advice(spec: FineTuneJobSpec) -> str:
    """Return the metric that a gate means, and the minimum that it then needs."""
    gate, task = _gate_of(spec), spec.task
    advice = _metric_advice(gate.metric, task, metrics_of(task))
    near = near_metric(gate.metric, metrics_of(task))
    if near not in (None, LOSS, *_meant_metrics(spec)):
        advice = f"{advice}; add {near} to spec.evaluation.metrics"
    most = None if near is None else GREATEST.get(near)
    if most == 1 and gate.minimum is not None and 1 < gate.minimum <= 100:
        return f"{advice}; {near} is at most 1, so minimum is {gate.minimum / 100:g}"
    if near in LOWER_IS_BETTER and gate.minimum is not None and gate.maximum is None:
        return f"{advice}; {near} is better when lower: replace minimum with maximum"
    percent = [name for name in metrics_of(task) if GREATEST.get(name) == 100]
    return f"{advice}; {' and '.join(percent)} are at most 100" if percent and near is None else advice


def _metrics_advice(spec: FineTuneJobSpec) -> str:
    known = metrics_of(spec.task)
    found = {name: near_metric(name, known) for name in _unknown_metrics(spec)}
    shown = {name: describe_value(name, limit=40).replace('"', "'") for name in found}
    several = {name: [each for each in _FAMILIES.get(name.lower(), ()) if each in known] for name in found}
    edits = [
        f"leave {shown[name]} out" if near is None else f"write {', '.join(several[name] or [near])} for {shown[name]}"
        for name, near in found.items()
    ]
    named = spec.evaluation.metrics if spec.evaluation else ()
    if not any(found.values()) and len(found) == len(named):
        return f"leave it out: {spec.task} has {', '.join(known)}"
    return f"{', '.join(edits)}; {spec.task} has {', '.join(known)}"


def _limit_advice(spec: FineTuneJobSpec) -> str:
    """Return which of the two limits the metric takes, or the one that it means."""
    gate = _gate_of(spec)
    metric = near_metric(gate.metric, metrics_of(spec.task))
    if metric is None:
        return _EITHER_LIMIT
    right, other = ("maximum", "minimum") if metric in LOWER_IS_BETTER else ("minimum", "maximum")
    better = "lower" if right == "maximum" else "higher"
    return f"{metric} is better when {better}: " + (
        f"set {right}" if gate.minimum is None else f"leave spec.evaluation.gate.{other} out"
    )


def _minimum_advice(gate: GateSpec) -> str:
    """Return the fraction that a percentage stands for."""
    most = GREATEST[gate.metric]
    assert gate.minimum is not None
    if most == 1 and gate.minimum <= 100:
        return f"did you mean {gate.minimum / 100:g}? {gate.metric} is at most 1"
    return f"{gate.metric} is at most {most:g}"


def _gate_is_measured(spec: FineTuneJobSpec) -> bool:
    evaluation = spec.evaluation
    if evaluation is None or evaluation.gate is None or evaluation.metrics == "auto":
        return True
    measured = _meant_metrics(spec)
    other_rule = evaluation.gate.metric not in metrics_of(spec.task) or not measured
    return other_rule or evaluation.gate.metric in (*measured, LOSS)


_EITHER_LIMIT = "set minimum for a metric that is better when higher, maximum for one that is better when lower"
_HIGHER_IS_BETTER = frozenset(name for task in METRICS for name in metrics_of(task)) - LOWER_IS_BETTER


def _cel_list(names: Iterable[str]) -> str:
    """Return CEL: a list of text."""
    return f"[{', '.join(repr(name) for name in sorted(names))}]"


def _metric_cel(path: str, names_of: Callable[[Task], Sequence[str]]) -> str:
    """Return CEL: `path`.metric is one of the task's, if there is such a block."""
    block, _ = path.split(".")
    by_task = " && ".join(
        f"(self.task != '{task}' || self.{path}.metric in {_cel_list(names_of(task))})" for task in METRICS
    )
    return f"!has(self.{block}) || !has(self.{path}) || ({by_task})"


def _gate_cel(limit: str, holds: str) -> str:
    """Return CEL: if the gate has that limit, `holds` is true."""
    gate = "self.evaluation.gate"
    return f"!has(self.evaluation) || !has({gate}) || !has({gate}.{limit}) || {holds}"


def _limit_cel(limit: str, compared: str, bounds: Mapping[str, float]) -> str:
    """Return CEL: the limit is one that its metric can reach."""
    gate = "self.evaluation.gate"
    by_bound = " && ".join(
        f"(!({gate}.metric in {_cel_list(name for name in bounds if bounds[name] == bound)})"
        f" || {gate}.{limit} {compared} {bound})"
        for bound in sorted(set(bounds.values()))
    )
    return _gate_cel(limit, f"({by_bound})")


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
        f"(has(self.training) && has(self.training.script)) || {_metric_cel('evaluation.gate', metrics_of)}",
        "must be a metric of spec.task, or loss",
        "name one of them",
        advice=_gate_metric_advice,
    ),
    Rule(
        "early-stopping-metric-is-measured",
        "training.earlyStopping.metric",
        _metric_cel("training.earlyStopping", stopping_metrics_of),
        "must be a metric that spec.task measures during training",
        "set it to loss",
        advice=lambda spec: _metric_advice(_watched(spec) or "", spec.task, stopping_metrics_of(spec.task)),
    ),
    Rule(
        "gate-has-one-limit",
        "evaluation.gate",
        "!has(self.evaluation) || !has(self.evaluation.gate)"
        " || has(self.evaluation.gate.minimum) != has(self.evaluation.gate.maximum)",
        "needs exactly one of minimum and maximum",
        _EITHER_LIMIT,
        advice=_limit_advice,
    ),
    Rule(
        "gate-minimum-is-of-what-grows",
        "evaluation.gate.minimum",
        _gate_cel(
            "minimum",
            f"has(self.evaluation.gate.maximum) || !(self.evaluation.gate.metric in {_cel_list(LOWER_IS_BETTER)})",
        ),
        "does not apply to a metric that is better when lower",
        "replace minimum with maximum",
    ),
    Rule(
        "gate-maximum-is-of-what-shrinks",
        "evaluation.gate.maximum",
        _gate_cel(
            "maximum",
            f"has(self.evaluation.gate.minimum) || !(self.evaluation.gate.metric in {_cel_list(_HIGHER_IS_BETTER)})",
        ),
        "does not apply to a metric that is better when higher",
        "replace maximum with minimum",
    ),
    Rule(
        "gate-minimum-can-be-met",
        "evaluation.gate.minimum",
        _limit_cel("minimum", "<=", GREATEST),
        "exceeds the highest possible value of the metric",
        "lower it",
        advice=lambda spec: _minimum_advice(_gate_of(spec)),
    ),
    Rule(
        "gate-maximum-can-be-met",
        "evaluation.gate.maximum",
        _limit_cel("maximum", ">=", LEAST),
        "is below the lowest possible value of the metric",
        "raise it",
        advice=lambda spec: f"the metric is at least {LEAST[_gate_of(spec).metric]:g}",
    ),
)
