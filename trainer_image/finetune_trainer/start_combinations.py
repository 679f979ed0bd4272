"""Refuses a job whose choices do not go together: our plans have no such job, an edited job.json may."""

from __future__ import annotations

from finetune_contract.combinations import broken
from finetune_contract.constraints import Constraint, choices_of
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.failures import StageError


def refuse_combinations(job: TrainerJob, training: Training) -> None:
    """Raise StageError CONFIG `NotCombined` that names every constraint which the job breaks."""
    choices = choices_of(job, training)
    found = broken(choices)
    if found:
        rules = "; ".join(_rule_text(each, each.value(choices)) for each in found)
        hints = "; ".join(dict.fromkeys(f"spec.{each.field}: {each.hint}" for each in found))
        raise StageError(FailureClass.CONFIG, "NotCombined", f"{rules}.", f"{hints}.")


def _rule_text(constraint: Constraint, value: object) -> str:
    shown = "" if value is None or isinstance(value, bool) else f" ({value})"
    return f"spec.{constraint.field}{shown} {constraint.rule}"
