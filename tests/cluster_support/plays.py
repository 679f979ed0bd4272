"""Scripts of the stand-in kubelet for the pods of an attempt, and the trainer's termination messages."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, ModelFacts, SplitFacts
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import FailureReport, MeasuredFacts, TrainerReport
from finetune_contract.trainer_job import TrainerJob

MODEL = ModelFacts(
    model_type="bert",
    parameters=22_700_000,
    embedding_parameters=11_900_000,
    block_parameters=1_780_000,
    layers=6,
    hidden_size=384,
    intermediate_size=1536,
    attention_heads=12,
    vocabulary_size=30_522,
    max_positions=512,
    parameter_bytes=90_800_000,
)
DATA = DataFacts(
    fingerprint="f" * 16,
    splits={
        "train": SplitFacts(rows=8192, tokens=204_800, length_histogram={32: 8192}, longest=32),
        "validation": SplitFacts(rows=512, tokens=12_800, length_histogram={32: 512}, longest=32),
        "test": SplitFacts(rows=512, tokens=12_800, length_histogram={32: 512}, longest=32),
    },
    max_length=128,
)
MEASURED = MeasuredFacts(model=MODEL, data=DATA)


@dataclass(frozen=True)
class Play:
    """Script of one pod once it has a node."""

    lasts: float | None = 0.1
    """Seconds from running to its end; None: until it is requested to end, or deleted."""
    exit_code: int = 0
    reason: str = "Completed"
    """Reason of the terminated container, as set by a kubelet."""
    failure: FailureReport | None = None
    """Failure in the report; None: success."""
    message: str | None = None
    """Termination message instead of a report."""
    metrics: dict[str, Any] = field(default_factory=dict)
    devices: MeasuredDevices | None = None
    """GPUs in the report."""
    log: str = ""
    waiting: tuple[str, str] | None = None
    """Reason and message of a container that never starts."""
    disruption: str | None = None
    """Reason of the condition DisruptionTarget that the pod gets before it ends."""
    pod_reason: str | None = None
    """`status.reason` of the pod."""
    address: str = "127.0.0.1"
    """IP address of the pod."""
    stops_after: float = 0.05
    """Seconds from the request to stop to its end."""

    def termination_message(self, job: TrainerJob, stage: Stage, rank: int, world_size: int) -> str:
        """Return the trainer's termination message."""
        if self.message is not None:
            return self.message
        return TrainerReport(
            job=job.name,
            stage=stage,
            rank=rank,
            world_size=world_size,
            outcome="failed" if self.failure else "succeeded",
            failure=self.failure,
            metrics={stage.value: self.metrics} if self.metrics else {},
            artifacts={} if self.failure else _ARTIFACTS.get(stage, {}),
            measured=MEASURED if stage is Stage.PREPARE and not self.failure else None,
            fingerprint=DATA.fingerprint if stage is Stage.PREPARE and not self.failure else None,
            devices=self.devices,
            seconds=1.0,
        ).to_termination_message()


_ARTIFACTS = {
    Stage.PREPARE: {"prepared": "prepared"},
    Stage.TRAIN: {"model": "model", "report": "report.html"},
    Stage.PREDICT: {"predictions": "predictions.jsonl"},
}

SUCCEEDS = Play()
RUNS = Play(lasts=None)
"""Runs until it is requested to end."""
PREEMPTED = Play(
    exit_code=EXIT_CODES[FailureClass.PREEMPTED],
    reason="Error",
    disruption="PreemptionByScheduler",
    failure=FailureReport(failure_class=FailureClass.PREEMPTED, reason="Sigterm", message="told to stop at step 40"),
)
KILLED_FOR_MEMORY = Play(exit_code=137, reason="OOMKilled", message="", log="Killed\n")


def fails(failure_class: FailureClass, reason: str, message: str, hint: str = "", log: str = "", **more: Any) -> Play:
    """Return the play of a trainer that ends with a report of this failure."""
    failure = FailureReport(failure_class=failure_class, reason=reason, message=message, hint=hint, time=time.time())
    return Play(exit_code=EXIT_CODES[failure_class], reason="Error", failure=failure, log=log, **more)


OUT_OF_MEMORY = fails(
    FailureClass.OUT_OF_MEMORY, "CudaOutOfMemory", "CUDA out of memory: tried to allocate 2.00 GiB", "a smaller batch"
)
WRONG_COLUMN = fails(
    FailureClass.DATA,
    "MissingColumn",
    "dataset.columns.text: 'text' is not a column; there are sentence, label",
    "set dataset.columns.text",
    log="reading rows\nKeyError: 'text'\n",
)


class Playbook:
    """Maps pods to plays; all other pods succeed."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[str, str, int | None, int | None], Play] = {}
        self.other = SUCCEEDS
        """Play of every pod without an entry."""

    def set(self, job: str, stage: str, play: Play, attempt: int | None = None, index: int | None = None) -> None:
        """Set the play of a job's stage; of one attempt, or of one pod of it."""
        self._scenes[job, stage, attempt, index] = play

    def clear(self) -> None:
        self._scenes.clear()
        self.other = SUCCEEDS

    def of(self, job: str, stage: str, attempt: int, index: int) -> Play:
        """Return the most specific play."""
        keys = [(attempt, index), (attempt, None), (None, index), (None, None)]
        found = (self._scenes.get((job, stage, number, pod)) for number, pod in keys)
        return next((play for play in found if play is not None), self.other)


def trainer_job(config_map: dict[str, Any]) -> TrainerJob:
    """Return the job in an attempt's ConfigMap, validated as by the trainer."""
    return TrainerJob.model_validate(json.loads(config_map["data"]["job.json"]))
