"""Checks the metric names in a job against the metrics measured on its data: they depend on the form of the labels,
which a job file does not contain.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_contract.layout import FailureClass
from finetune_contract.metrics import JUDGED_AFTER_TRAINING, LOSS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError


def refuse_unknown_metrics(job: TrainerJob, measured: Sequence[str]) -> None:
    """Check all names of metrics. `measured`: the metrics of the job's task and form of labels, without the loss.

    Raise StageError CONFIG `UnknownMetric` for the first one that is not measured.
    """
    named: dict[str, Sequence[str]] = {}
    if job.evaluation is not None:
        named["evaluation.metrics"] = job.evaluation.metrics or ()
        named["evaluation.gate.metric"] = [job.evaluation.gate.metric] if job.evaluation.gate else ()
    for path, names in named.items():
        _refuse(path, names, [*measured, LOSS], job)
    stopping = job.training.early_stopping if job.training else None
    if stopping is not None:
        refuse_unmeasured_stopping(job, stopping.metric, measured)


def refuse_unmeasured_stopping(job: TrainerJob, metric: str, measured: Sequence[str]) -> None:
    """Raise StageError CONFIG `UnknownMetric` if evaluations during the training do not measure the metric of early
    stopping; `measured` as above.
    """
    in_training = [LOSS] if job.task in JUDGED_AFTER_TRAINING else [*measured, LOSS]
    _refuse("training.earlyStopping.metric", [metric], in_training, job)


def _refuse(path: str, names: Sequence[str], known: Sequence[str], job: TrainerJob) -> None:
    for name in names:
        if name not in known:
            raise StageError(
                FailureClass.CONFIG,
                "UnknownMetric",
                f"{path} is {name!r}; {job.task} with these labels has {', '.join(known)}.",
                f"Set {path} to one of them.",
            )
