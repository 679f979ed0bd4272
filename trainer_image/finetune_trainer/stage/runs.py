"""Ownership of the results in a job's folder, and reuse of completed stages.

In a cluster a folder outlives the job that filled it: a job that is deleted and created again under the same name finds
the other one's results. `TrainerJob.run` distinguishes them. The stage prepare, or the first of its processes, moves
another run's folder aside; nothing is ever deleted. Every other stage refuses such a folder. A stage that succeeded for
the same run with the same settings is not run again. Without a run (on a laptop) none of this happens: the finetune
command looks after the folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import locked, write_atomically

log = logging.getLogger(__name__)


class RunMarker(Message):
    """Content of `run.json`."""

    run: str


class RecordedSettings(Message):
    """Settings of a stage's run, kept in `state/<stage>.given.json` beside the completion marker."""

    job: TrainerJob
    deepspeed: JsonValue = None

    @classmethod
    def of(cls, job: TrainerJob, deepspeed: Path | None) -> RecordedSettings:
        """Return the settings of this attempt. An unreadable DeepSpeed file is left for the stage to report."""
        try:
            config = None if deepspeed is None else json.loads(deepspeed.read_bytes())
        except (OSError, ValueError):
            config = str(deepspeed)
        return cls(job=job, deepspeed=config)


def last_stage(job: TrainerJob) -> Stage:
    """Return the last stage for which `job` has settings."""
    if job.predict is not None:
        return Stage.PREDICT
    if job.evaluation is not None:
        return Stage.EVALUATE
    return Stage.TRAIN if job.trains else Stage.PREPARE


# -------------------------------------------------------------------------------------------- ownership of the folder


def claim(paths: JobPaths, stage: Stage, job: TrainerJob) -> None:
    """Ensure that the folder belongs to the job's run; raise StageError CONFIG `OtherRun` for a stage after prepare."""
    if job.run is None:
        return
    if stage is not Stage.PREPARE:
        _refuse_other_run(paths, job.run)
        return
    paths.root.parent.mkdir(parents=True, exist_ok=True)
    # The lock of the finetune command: it excludes that command and other attempts at prepare.
    with locked(paths.root.with_name(f".{paths.root.name}.lock")):
        marked = _marked(paths)
        if marked == job.run:
            return
        if paths.root.exists() and any(paths.root.iterdir()):
            place = _move_away(paths.root)
            owner = "an unknown run" if marked is None else f"run {marked}"
            log.warning("%s contained results of %s; moved them to %s.", paths.root, owner, place)
        write_atomically(paths.run, RunMarker(run=job.run).to_json())


def _refuse_other_run(paths: JobPaths, run: str) -> None:
    marked = _marked(paths)
    if marked == run:
        return
    problem = f"belongs to run {marked!r}" if marked is not None else f"has no marker of a run ({paths.run.name})"
    raise StageError(
        FailureClass.CONFIG,
        "OtherRun",
        f"{paths.root} {problem}; this is run {run!r} of job {paths.root.name}.",
        "Two jobs with one name must not share a workspace at the same time. Recreate the job: its stage prepare "
        "moves the other results away.",
    )


def _marked(paths: JobPaths) -> str | None:
    """Return the run that the folder belongs to; None without a marker, or with an unreadable one."""
    try:
        return RunMarker.model_validate_json(paths.run.read_bytes()).run
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _move_away(folder: Path) -> Path:
    """Rename the folder to the first free `<job>.previous-<n>`, in one step."""
    number = 1
    while (place := folder.with_name(f"{folder.name}.previous-{number}")).exists():
        number += 1
    return folder.rename(place)


# ----------------------------------------------------------------------------------------------------- completed stages


def finished(paths: JobPaths, stage: Stage, given: RecordedSettings) -> TrainerReport | None:
    """Return the stage's report if it succeeded in this run with exactly these settings; else None."""
    if given.job.run is None:
        return None
    try:
        report = TrainerReport.model_validate_json(_marker(paths, stage).read_bytes())
        earlier = RecordedSettings.model_validate_json(_record(paths, stage).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return report if report.outcome == "succeeded" and earlier == given else None


def mark_complete(paths: JobPaths, stage: Stage, given: RecordedSettings, report: TrainerReport) -> None:
    """Write the completion marker, as the stage's last file. In a run, it invalidates the results that later stages
    derived from an earlier one.
    """
    if given.job.run is not None:
        order = list(Stage)
        for stale in order[order.index(stage) :]:
            _marker(paths, stale).unlink(missing_ok=True)
        write_atomically(_record(paths, stage), given.to_json())
    write_atomically(_marker(paths, stage), report.to_json())


def _marker(paths: JobPaths, stage: Stage) -> Path:
    return paths.state / f"{stage}.json"


def _record(paths: JobPaths, stage: Stage) -> Path:
    return paths.state / f"{stage}.given.json"
