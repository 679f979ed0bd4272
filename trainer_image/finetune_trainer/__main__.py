"""`python -m finetune_trainer STAGE --job job.json --workspace DIR`: runs one stage, reports, and exits with the
contract's code.

A table of contents: what a stage does is in `stages.py`, what its end means in `failures.py` and `outcome.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.job import TrainerJob
from finetune_contract.layout import EXIT_OK, FailureClass, JobPaths
from finetune_contract.report import TrainerReport
from finetune_trainer.console import settle_console
from finetune_trainer.distributed import ProcessWorld, current, disconnect
from finetune_trainer.failures import StageError, chain, classify
from finetune_trainer.files import write_atomically
from finetune_trainer.outcome import report_path, write_report
from finetune_trainer.progress import progress_for
from finetune_trainer.stages import STAGES, StageInput, StageResult
from finetune_trainer.training.interruption import Interruption

log = logging.getLogger("finetune_trainer")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    code = run(sys.argv[1:] if argv is None else argv)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code != EXIT_OK:
        # A process group whose peers are gone, or a thread inside a collective, can hold up an orderly end for minutes.
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Runs what `argv` says and returns the exit code."""
    arguments = _parse(argv)
    try:
        world = current()
    except StageError as error:
        return _fail(error, arguments, ProcessWorld(), "unknown", time.monotonic())
    settle_console(world.rank)
    if arguments.stage == "facts":
        return _print_facts(arguments, world)
    if arguments.stage == "report":
        return _write_html(arguments, world)
    return _run_stage(arguments, world)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer", description="Runs one stage of a fine-tuning job.")
    parser.add_argument(
        "stage",
        choices=[*(str(stage) for stage in STAGES), "facts", "report"],
        help="facts: prints what a plan needs to know; report: writes report.html",
    )
    parser.add_argument("--job", type=Path, required=True, help="the job.json to obey")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--deepspeed", type=Path, help="the deepspeed.json to obey, with strategy deepspeed")
    return parser.parse_args(argv)


def _run_stage(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    started = time.monotonic()
    stage, name = Stage(arguments.stage), arguments.job.stem
    progress = progress_for(stage, world.rank)
    interruption = Interruption()
    try:
        interruption.install()
        job = read_job(arguments.job)
        name = job.name
        paths = JobPaths.of(arguments.workspace, job.name)
        paths.root.mkdir(parents=True, exist_ok=True)
        result = STAGES[stage](StageInput(job, paths, progress, world, arguments.deepspeed, interruption))
        interruption.defer()
        progress.close()
        report = _success(result, job, stage, world, started)
        if world.is_main:
            _mark_complete(paths, stage, report)
        if stage is Stage.TRAIN:
            disconnect()
    except BaseException as error:
        progress.close()
        return _fail(error, arguments, world, name, started)
    write_report(report, report_path(world.rank, os.environ))
    log.info("%s done in %.1f s.", stage, report.seconds)
    return EXIT_OK


def read_job(path: Path) -> TrainerJob:
    """The job in `path`; StageError CONFIG for a file, a field or a schema version that this trainer does not know."""
    try:
        return TrainerJob.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StageError(
            FailureClass.CONFIG, "JobNotReadable", f"{path} cannot be read: {error}", "Check --job."
        ) from error
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        where = [(".".join(map(str, each["loc"])) or "job.json", each) for each in found]
        version = any(each["loc"] in (("schemaVersion",), ("schema_version",)) for each in found)
        raise StageError(
            FailureClass.CONFIG,
            "UnknownSchemaVersion" if version else "JobNotUnderstood",
            f"{path}: "
            + "; ".join(f"{field}: {each['msg']} (found {str(each['input'])[:60]})" for field, each in where[:5]),
            "Operator and trainer image must be of versions that fit each other.",
        ) from error


def _success(result: StageResult, job: TrainerJob, stage: Stage, world: ProcessWorld, started: float) -> TrainerReport:
    return TrainerReport(
        job=job.name,
        stage=stage,
        rank=world.rank,
        world_size=world.size,
        outcome="succeeded",
        metrics=dict(result.metrics),
        artifacts=dict(result.artifacts),
        fingerprint=result.fingerprint,
        seconds=time.monotonic() - started,
    )


def _mark_complete(paths: JobPaths, stage: Stage, report: TrainerReport) -> None:
    """The completion marker, last of all that the stage writes."""
    write_atomically(paths.state / f"{stage}.json", report.to_json())


def _fail(error: BaseException, arguments: argparse.Namespace, world: ProcessWorld, job: str, started: float) -> int:
    """Reports the failure and returns its exit code.

    Frees first what the failed frames hold: memory may be used up, or the disk by a file that is deleted and still
    open.
    """
    failure = classify(error)
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
            seconds=time.monotonic() - started,
        )
        write_report(report, report_path(world.rank, os.environ))
    log.error("%s (%s): %s %s", failure.failure_class, failure.reason, failure.message, failure.hint)
    return failure.exit_code


def _print_facts(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    started = time.monotonic()
    try:
        from finetune_trainer.facts import trainer_facts

        facts = trainer_facts(read_job(arguments.job))
    except BaseException as error:
        return _fail(error, arguments, world, arguments.job.stem, started)
    sys.stdout.write(facts.to_json())
    return EXIT_OK


def _write_html(arguments: argparse.Namespace, world: ProcessWorld) -> int:
    """report.html and environment.json from what the stages left in the job's folder."""
    started = time.monotonic()
    try:
        from finetune_trainer import reporting

        job = read_job(arguments.job)
        paths = JobPaths.of(arguments.workspace, job.name)
        plan = json.loads(paths.plan.read_text(encoding="utf-8")) if paths.plan.exists() else None
        reporting.write_environment(paths)
        reporting.write_report(job, plan, paths)
    except BaseException as error:
        return _fail(error, arguments, world, arguments.job.stem, started)
    return EXIT_OK


if __name__ == "__main__":
    main()
