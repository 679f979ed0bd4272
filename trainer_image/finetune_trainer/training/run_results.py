"""Figures of a finished training, for metrics.json and the model card."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.plan_check import MeasuredTraining, PlannedTraining, check_plan
from finetune_contract.report import Communication
from finetune_trainer.checkpoint.checkpoints import CheckpointStore
from finetune_trainer.report.history import RunFigures
from finetune_trainer.report.model_card import write_model_card
from finetune_trainer.report.reporting import merge_metrics, training_environment, write_environment
from finetune_trainer.strategies.strategy_protocol import Strategy
from finetune_trainer.training.measured_run import PeakMemory
from finetune_trainer.training.run_inputs import TrainingRun
from finetune_trainer.training.stopping import EarlyStopper, NeverStop
from finetune_trainer.training.timing import PartClock, time_split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Data that the stage adds to the report."""

    metrics: dict[str, Any]
    artifacts: dict[str, str]
    fingerprint: str


def measured_surroundings(devices: MeasuredDevices | None, communication: Communication | None) -> dict[str, Any]:
    """Return what was measured of the processes' GPUs and of the transports between them, for metrics.json."""
    surroundings: dict[str, Any] = {}
    if devices is not None:
        surroundings["devices"] = {"text": devices.text, **devices.model_dump(mode="json")}
    if communication is not None:
        surroundings["communication"] = communication.model_dump(mode="json")
    return surroundings


@dataclass(frozen=True)
class Measurements:
    """Measurements of an attempt, and the estimates of its plan."""

    measured: MeasuredTraining
    planned: PlannedTraining | None

    def check(self) -> dict[str, Any]:
        """Return the entries of metrics.json with the plan's estimates and their comparison, and log what was off;
        none without a plan.
        """
        if self.planned is None:
            return {}
        check = check_plan(self.planned, self.measured)
        for sentence in check.off():
            log.warning("%s", sentence)
        planned = self.planned.model_dump(mode="json", exclude_none=True)
        return {"plan_check": check.model_dump(mode="json", exclude_none=True), "planned": planned}


def measured_training(
    lines: Sequence[Mapping[str, Any]],
    first_step: int,
    strategy: Strategy,
    peaks: list[PeakMemory],
    *,
    machine_shared: bool,
) -> MeasuredTraining:
    """Return the measurements of an attempt that began after `first_step`: time of its steps by the history's lines,
    and memory of its fullest process.
    """
    of_attempt = RunFigures([line for line in lines if line["step"] > first_step])
    fullest = max(peaks, key=lambda peak: peak.device)
    step = of_attempt.median_step()
    return MeasuredTraining(
        steps=step.steps,
        memory_bytes=fullest.device,
        memory_terms=fullest.terms,
        step_seconds=step.seconds,
        step_parts=step.parts,
        with_communication=tuple(part for part in strategy.communicates_in if part in step.parts),
        machine_shared=machine_shared,
    )


def write_outcome(
    run: TrainingRun,
    run_figures: RunFigures,
    done: Mapping[str, Any],
    peaks: list[PeakMemory],
    measurements: Measurements,
    stopper: EarlyStopper | NeverStop,
    clock: PartClock,
    surroundings: Mapping[str, Any],
) -> Outcome:
    """Write the figures of the training to metrics.json and the model card."""
    paths, training = run.paths, run.training
    kept = CheckpointStore(paths.checkpoints, training.checkpoints.keep).size_bytes()
    figures = {
        **run_figures.losses(),
        **run_figures.rates(),
        "peak_memory_bytes": max(peak.allocated for peak in peaks),
        **done,
        "measured": measurements.measured.model_dump(mode="json"),
        "strategy": training.strategy.label,
        "world_size": run.world.size,
        **({"checkpoint_bytes": kept} if kept else {}),
        **({} if stopper.best_step is None else {"best_step": stopper.best_step}),
        **run_figures.validation(stopper.best_step),
    }
    details = {
        "peak_memory_bytes_by_rank": [peak.allocated for peak in peaks],
        "time": time_split(run_figures.seconds(), run.strategy, clock).model_dump(mode="json"),
        **measurements.check(),
        **surroundings,
    }
    write_environment(paths, training_environment(training.world))
    # Metrics of an earlier model do not apply to this one.
    metrics = merge_metrics(paths, {"train": {**figures, **details}}, without=("evaluate", "majority"))
    write_model_card(paths, run.job, run.prepared.facts, metrics)
    folders = (paths.model, paths.adapter, *((paths.checkpoints,) if kept else ()))
    artifacts = {folder.name: folder.name for folder in folders if folder.exists()}
    return Outcome({"train": figures}, artifacts, run.prepared.facts.fingerprint)
