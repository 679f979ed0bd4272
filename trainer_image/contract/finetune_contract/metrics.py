"""Metrics of each task, for the API that checks their names and for the trainer that measures them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from finetune_contract.choices import LabelForm, Task

Forms: TypeAlias = Mapping[LabelForm | None, tuple[str, ...]]

LOSS = "loss"
"""Metric that every task measures in addition to its own."""
BASELINE = "baseline"
"""Key beside the metrics in metrics.json, with the answer in words whose metrics are in the section `majority`."""
METRICS: Mapping[Task, Forms] = {
    "text-classification": {
        "single_label_classification": ("accuracy", "f1", "precision", "recall"),
        "multi_label_classification": ("f1", "precision", "recall", "accuracy"),
        "regression": ("pearson", "spearmanr", "r2", "mse", "mae"),
    },
    "token-classification": {None: ("f1", "precision", "recall", "accuracy")},
    "question-answering": {None: ("exact_match", "f1")},
    "text-generation": {None: ("perplexity", "accuracy")},
    "preference-tuning": {None: ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")},
    "summarization": {None: ("rouge1", "rouge2", "rougeL")},
    "translation": {None: ("bleu", "chrf")},
    "masked-lm": {None: ("perplexity", "accuracy")},
}
"""Task -> form of its labels (None: it has one) -> Hugging Face's names, without `eval_`. The first is the headline:
results begin with it.
"""
JUDGED_AFTER_TRAINING: tuple[Task, ...] = ("summarization", "translation")
"""Tasks whose metrics are of generated text, which takes too long for evaluations during training."""
WRITING: tuple[Task, ...] = (*JUDGED_AFTER_TRAINING, "text-generation", "preference-tuning")
"""Tasks whose predictions are generated text."""
LOWER_IS_BETTER = frozenset({LOSS, "mse", "mae", "perplexity", "rewards/rejected"})
"""Metrics that improve downwards; all others improve upwards."""
_SHARES = ("accuracy", "f1", "precision", "recall", "exact_match", "rouge1", "rouge2", "rougeL", "rewards/accuracies")
GREATEST: Mapping[str, float] = {
    **dict.fromkeys(_SHARES, 1.0),
    **dict.fromkeys(("pearson", "spearmanr", "r2"), 1.0),
    **dict.fromkeys(("bleu", "chrf"), 100.0),
}
"""Greatest value of a metric that has one."""
LEAST: Mapping[str, float] = {LOSS: 0.0, "mse": 0.0, "mae": 0.0, "perplexity": 1.0}
"""Least value of a metric that is better when lower and has one."""


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return the metrics of a task, whatever the form of its labels, and the loss."""
    return tuple(dict.fromkeys([*(name for names in METRICS[task].values() for name in names), LOSS]))


def headline_first(figures: Mapping[str, float], task: str) -> dict[str, float]:
    """Return the figures with the task's own in the order of METRICS before all others: a cluster's API sorts them by
    name. `task`: maybe one that only a later version knows.
    """
    own = next((metrics_of(known) for known in METRICS if known == task), ())
    return {name: figures[name] for name in dict.fromkeys([*own, *figures]) if name in figures}


def stopping_metrics_of(task: Task) -> tuple[str, ...]:
    """Return the metrics that evaluations during training measure, which early stopping can watch."""
    return (LOSS,) if task in JUDGED_AFTER_TRAINING else metrics_of(task)
