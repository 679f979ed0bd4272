"""Entry point of `python -m finetune_trainer` except `launch`: one rank of a stage runs, reports, and ends with the
contract's exit code; `facts`, `check` and `report` answer the finetune command.

A table of contents: the stages are in `stages.py`, ownership of a folder's results in `runs.py`, and the outcome of a
stage in `failures.py` and `outcome.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from finetune_contract.choices import Stage
from finetune_contract.layout import (
    CHECKPOINTS_DELETED,
    ENV_DELETE_CHECKPOINTS,
    ESTIMATE_FILE,
    EXIT_OK,
    FailureClass,
    JobPaths,
)
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.distributed import ProcessWorld, current, disconnect
from finetune_trainer.core.failures import StageError, chain, classify
from finetune_trainer.core.final_report import report_path, write_report
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.core.job_file import as_prepared, read_job
from finetune_trainer.core.library_patches import patches_removed
from finetune_trainer.core.progress import Findings, progress_for
from finetune_trainer.core.stage_console import quiet_libraries, settle_console
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.core.unused_libraries import leave_out_unused
from finetune_trainer.launching.child_supervisor import end_with_parent
from finetune_trainer.stage import runs
from finetune_trainer.stage.stacks import as_rank, with_stacks
from finetune_trainer.stage.stages import STAGES, StageInput, StageResult

log = logging.getLogger("finetune_trainer")


@patches_removed()
def run(argv: Sequence[str]) -> int:
    """Run the command of `argv` and return the exit code."""
    arguments = _parse(argv)
    try:
        world = current()
    except StageError as error:
        return _fail(error, arguments, ProcessWorld(), "unknown", time.monotonic())
    settle_console(world.rank)
    if arguments.stage == "check":
        return _print_check(arguments, world)
    if arguments.stage in ("facts", "report"):
        quiet_libraries()
        return (_print_facts if arguments.stage == "facts" else _write_html)(arguments, world)
    return as_rank(world.rank, world.size, lambda: _run_stage(arguments, world))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer", description="Run one stage of a fine-tuning job.")
    parser.add_argument(
        "stage",
        choices=[*(str(stage) for stage in STAGES), "facts", "report", "check"],
        help="facts: print the facts that a plan needs; report: write report.html; check: read the first rows of the "
        "data, and print their content and faults",
    )
    parser.add_argument("--trains", action="store_true", help="for check: the built-in loop trains")
    parser.add_argument("--batch", type=int, default=1, help="for check, with --trains: rows of a step")
    parser.add_argument("--stopping", help="for check, with --trains: metric of early stopping")
    parser.add_argument("--script", action="store_true", help="for check: a program trains, and reads the data itself")
    parser.add_argument("--job", type=Path, required=True, help="path of job.json")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--command", help="for report: the command that runs the job again")
    parser.add_argument("--deepspeed", type=Path, help="path of deepspeed.json, with strategy deepspeed")
    return parser.parse_args(argv)


def _run_stage(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    started = time.monotonic()
    stage, name = Stage(arguments.stage), arguments.job.stem
    interruption, findings = Interruption(), Findings()
    progress = with_stacks(progress_for(stage, world.rank, findings=findings), world.rank)
    if world.launcher == "torchrun":
        end_with_parent()  # the agent, which starts the ranks, may be killed
    try:
        interruption.install()
        job = read_job(arguments.job)
        name = job.name
        if stage is not Stage.TRAIN or job.script is None:
            garbage_collection.put_off()
            quiet_libraries()
            leave_out_unused(job)
        paths = JobPaths.of(arguments.workspace, job.name)
        given = runs.RecordedSettings.of(job, arguments.deepspeed)
        if world.is_main or stage is not Stage.PREPARE:
            runs.claim(paths, stage, job)
        done = runs.finished(paths, stage, given)
        if done is not None:
            progress.close()
            return _report_again(_without_checkpoints(done, paths, world), world)
        paths.root.mkdir(parents=True, exist_ok=True)
        with storage_errors_named(paths.root, f"stage {stage}", shared=True):
            estimate = arguments.job.with_name(ESTIMATE_FILE)
            if stage is not Stage.PREPARE:
                job = as_prepared(job, paths)
            order = StageInput(job, paths, progress, world, arguments.deepspeed, interruption, findings, estimate)
            result = STAGES[stage](order)
        interruption.defer()
        progress.close()
        report = _success(result, findings, job, stage, world, started)
        if world.is_main:
            if stage is runs.last_stage(job):
                _leave_pages(job, paths)
            runs.mark_complete(paths, stage, given, report)
        if stage is Stage.TRAIN and job.script is None:
            disconnect()
    except BaseException as error:
        progress.close()
        if isinstance(error, StageError) and error.failure_class is FailureClass.GATE_NOT_MET:
            _leave_pages(job, paths)  # the last stage after all: its measurements explain the failure
        return _fail(error, arguments, world, name, started, findings)
    report = _without_checkpoints(report, paths, world)
    write_report(report, report_path(world.rank, os.environ))
    log.info("%s done in %.1f s.", stage, report.seconds)
    return EXIT_OK


def _report_again(done: TrainerReport, world: ProcessWorld) -> int:
    """Report a completed stage again: the caller has missed the report of the earlier attempt."""
    report = done.model_copy(update={"rank": world.rank, "world_size": world.size})
    write_report(report, report_path(world.rank, os.environ))
    log.info("Skipping %s: it is done with the same settings.", done.stage)
    return EXIT_OK


def _without_checkpoints(report: TrainerReport, paths: JobPaths, world: ProcessWorld) -> TrainerReport:
    """Delete the checkpoints if this pod is to do so, as nothing reads them after the last stage; return the report
    that says so. They stay if they cannot be deleted: the stage has succeeded.
    """
    if ENV_DELETE_CHECKPOINTS not in os.environ or not world.is_main:
        return report
    try:
        if paths.checkpoints.exists():
            shutil.rmtree(paths.checkpoints)
            log.info("Deleted %s: all stages have succeeded.", paths.checkpoints)
    except OSError as error:
        log.warning("%s could not be deleted: %s", paths.checkpoints, error)
        return report
    others = {name: place for name, place in report.artifacts.items() if name != paths.checkpoints.name}
    return report.model_copy(update={"artifacts": {**others, CHECKPOINTS_DELETED: paths.checkpoints.name}})


def _success(
    result: StageResult, findings: Findings, job: TrainerJob, stage: Stage, world: ProcessWorld, started: float
) -> TrainerReport:
    return TrainerReport(
        job=job.name,
        stage=stage,
        rank=world.rank,
        world_size=world.size,
        outcome="succeeded",
        metrics=dict(result.metrics),
        artifacts=dict(result.artifacts),
        fingerprint=result.fingerprint,
        model_revision=result.model_revision,
        measured=result.measured,
        devices=findings.devices,
        communication=findings.communication,
        note=findings.note,
        seconds=time.monotonic() - started,
    )


def _fail(
    error: BaseException,
    arguments: argparse.Namespace,
    world: ProcessWorld,
    job: str,
    started: float,
    findings: Findings | None = None,
) -> int:
    """Report the failure and return its exit code.

    First release everything that the failed frames hold: memory may be used up, or the disk by a deleted file that is
    still open.
    """
    failure, facts = classify(error), findings or Findings()
    if failure.failure_class is FailureClass.PROGRAM:
        log.error("%s", "".join(traceback.format_exception(error)))
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    if arguments.stage in STAGES:
        report = TrainerReport(
            job=job,
            stage=Stage(arguments.stage),
            rank=world.rank,
            world_size=world.size,
            outcome="failed",
            failure=failure,
            devices=facts.devices,
            communication=facts.communication,
            note=facts.note,
            seconds=time.monotonic() - started,
        )
        write_report(report, report_path(world.rank, os.environ))
    log.error("%s (%s): %s %s", failure.failure_class, failure.reason, failure.message, failure.hint)
    return failure.exit_code


def _print_facts(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    started = time.monotonic()
    try:
        from finetune_trainer.report.measured_facts import trainer_facts

        facts = trainer_facts(read_job(arguments.job))
    except BaseException as error:
        return _fail(error, arguments, world, arguments.job.stem, started)
    sys.stdout.write(facts.to_json())
    return EXIT_OK


def _print_check(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    started = time.monotonic()
    try:
        from finetune_trainer.prepare.check import Trains, check

        trains = Trains(arguments.batch, arguments.stopping) if arguments.trains else None
        checked = check(read_job(arguments.job), trains=trains, script=arguments.script)
    except BaseException as error:
        return _fail(error, arguments, world, arguments.job.stem, started)
    sys.stdout.write(checked.to_json())
    return EXIT_OK


def _write_html(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    """Write report.html and environment.json from the stages' results in the job's folder."""
    started = time.monotonic()
    try:
        from finetune_trainer.report import reporting

        job = read_job(arguments.job)
        reporting.write_pages(job, JobPaths.of(arguments.workspace, job.name), arguments.command)
    except BaseException as error:
        return _fail(error, arguments, world, arguments.job.stem, started)
    return EXIT_OK


def _leave_pages(job: TrainerJob, paths: JobPaths) -> None:
    """Write the pages in a cluster, where the last stage does it itself; on a laptop the finetune command does it."""
    if job.run is None:
        return
    try:
        from finetune_trainer.report import reporting

        reporting.write_pages(job, paths)
    except Exception as error:  # the results stand without it
        log.warning("report.html could not be written: %s", error)
