"""Refuses a job whose choices do not go together: a plan of ours has none, an edited job.json may."""

from __future__ import annotations

from finetune_contract.combinations import broken, choices_of
from finetune_contract.job import TrainerJob, Training
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError


def refuse_combinations(job: TrainerJob, training: Training) -> None:
    """StageError CONFIG `NotCombined` that names every constraint which the job breaks."""
    found = broken(choices_of(job, training))
    if found:
        told = "; ".join(f"spec.{each.field} {each.rule}" for each in found)
        hints = "; ".join(dict.fromkeys(f"spec.{each.field}: {each.hint}" for each in found))
        raise StageError(FailureClass.CONFIG, "NotCombined", f"{told}.", f"{hints}.")
