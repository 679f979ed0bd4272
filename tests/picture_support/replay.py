"""Recorded trainings for pods without machines: their reports with times, and their ends.

A run is the output folder of `finetune run`. Its progress reports, termination messages, measured facts and times are
used unchanged; only names, and the time of day, are those of the job that replays it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster_support.plays import Play
from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, ModelFacts
from finetune_contract.layout import EXIT_CODES
from finetune_contract.report import FailureReport, MeasuredFacts, Progress, TrainerReport


@dataclass(frozen=True)
class Run:
    """One recorded training."""

    strategy: str
    progress: dict[Stage, tuple[Progress, ...]]
    reports: dict[Stage, TrainerReport]
    measured: MeasuredFacts

    @classmethod
    def read(cls, folder: Path) -> Run:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        progress, reports = {}, {}
        for stage in Stage:
            report, lines = folder / "reports" / f"{stage}-0.json", folder / "logs" / f"{stage}.progress.jsonl"
            if report.is_file() and lines.is_file():
                reports[stage] = TrainerReport.model_validate_json(report.read_text(encoding="utf-8"))
                text = lines.read_text(encoding="utf-8")
                progress[stage] = tuple(Progress.model_validate_json(line) for line in text.splitlines())
        measured = MeasuredFacts(
            model=ModelFacts.model_validate(plan["model"]), data=DataFacts.model_validate(plan["data"])
        )
        return cls(plan["strategy"], progress, reports, measured)


@dataclass(frozen=True)
class Attempt:
    """Reports of one attempt at a stage, and its end."""

    play: Play
    lines: Sequence[tuple[float, Progress]] = ()
    """Reports with the seconds since their pod started to run."""

    def newest(self, seconds: float) -> Progress | None:
        """Return the last report `seconds` after the start."""
        return next((line for at, line in reversed(self.lines) if at <= seconds), None)


def attempt(run: Run, job: str, stage: Stage, after_step: int = 0, failure: FailureReport | None = None) -> Attempt:
    """Return the stage as recorded in `run`, from the step of an earlier attempt's checkpoint; `failure` replaces its
    success.
    """
    report, progress = run.reports[stage], run.progress[stage]
    # Before its first report a process loads its libraries and the model: a resuming attempt does that again.
    load = max(0.0, report.seconds - (progress[-1].time - progress[0].time))
    rest = [line for line in progress if line.step >= after_step]
    lines = [(load + line.time - rest[0].time, line) for line in rest]
    update: dict[str, object] = {"job": job, "measured": run.measured if stage is Stage.PREPARE else None}
    if failure is not None:
        update |= {"outcome": "failed", "failure": failure}
    message = report.model_copy(update=update).to_termination_message()
    play = Play(
        lasts=lines[-1][0],
        message=message,
        exit_code=0 if failure is None else EXIT_CODES[failure.failure_class],
        reason="Completed" if failure is None else "Error",
    )
    return Attempt(play, lines)


def cut(whole: Attempt, seconds: float, end: Play) -> tuple[Attempt, int]:
    """Return the attempt cut after `seconds`, with the end `end`; and its last step."""
    lines = [(at, line) for at, line in whole.lines if at <= seconds]
    return Attempt(replace(end, lasts=seconds), lines), lines[-1][1].step if lines else 0
