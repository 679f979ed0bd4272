"""Rows with labels, on which a model is measured."""

from __future__ import annotations

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.prepared import PreparedData, PreparedSplit
from finetune_trainer.tasks.task_protocol import Scoring


def labelled_split(scoring: Scoring, prepared: PreparedData) -> PreparedSplit:
    """Return the test split, or validation if test is missing or has no labels. StageError DATA `NoLabels`."""
    for role in ("test", "validation"):
        if role in prepared.facts.splits and scoring.labelled(split := prepared.of(role)):
            return split
    raise StageError(
        FailureClass.DATA,
        "NoLabels",
        f"Neither test nor validation has labels; the prepared splits are {', '.join(prepared.facts.splits)}.",
        "Set dataset.columns.label and a split with labels, or leave evaluation out.",
    )
