"""`python -m finetune_trainer launch STAGE ...`: the first process of a pod.

It starts the stage's ranks, passes SIGTERM on, waits, ends what is left, and makes one TrainerReport of what the ranks
said: the pod's termination message and its exit code. The ranks write their own reports elsewhere: with mpirun they run
in other pods, so there into the shared workspace.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.job import TrainerJob, World
from finetune_contract.layout import (
    DEFAULT_GRACE_SECONDS,
    ENV_GRACE_SECONDS,
    ENV_INDEX,
    ENV_REPORT,
    EXIT_OK,
    FailureClass,
    JobPaths,
)
from finetune_contract.report import FailureReport, TrainerReport
from finetune_trainer.console import settle_console
from finetune_trainer.failures import StageError, classify
from finetune_trainer.jobs import read_job
from finetune_trainer.launching import mpi
from finetune_trainer.launching.below import Below, End
from finetune_trainer.launching.elastic import AgentReport
from finetune_trainer.launching.verdict import reports_in, verdict
from finetune_trainer.outcome import report_path, write_report
from finetune_trainer.stages import STAGES

_MARGIN_SECONDS = 5
"""What each layer keeps of the grace period for its own end: the agent of the launcher's, the launcher of the pod's."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks ended, as their launcher knows it."""

    end: End
    reports: Sequence[TrainerReport]
    ends: Mapping[int, int]
    trouble: FailureReport | None
    expected: int
    world_size: int
    first: int = 0
    """The lowest rank of this pod, as far as that is known without its word."""


def launch(argv: Sequence[str]) -> int:
    """Runs what `argv` says, reports, and returns the exit code."""
    started = time.monotonic()
    arguments = _parse(argv)
    settle_console(0)
    stage, name = Stage(arguments.stage), arguments.job.stem
    try:
        job = read_job(arguments.job)
        name = job.name
        ranks = _LAUNCHERS[arguments.launcher](arguments, job)
        report = verdict(
            name,
            stage,
            ranks.reports,
            end=ranks.end,
            ends=ranks.ends,
            trouble=ranks.trouble,
            expected=ranks.expected,
            world_size=ranks.world_size,
            first=ranks.first,
            seconds=time.monotonic() - started,
        )
    except BaseException as error:
        seconds = time.monotonic() - started
        report = TrainerReport(job=name, stage=stage, outcome="failed", failure=classify(error), seconds=seconds)
    write_report(report, report_path(report.rank, os.environ))
    if report.failure is None:
        return EXIT_OK
    failure = report.failure
    sys.stderr.write(f"{failure.failure_class} ({failure.reason}): {failure.message} {failure.hint}\n")
    return failure.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer launch", description="Runs one stage in a pod.")
    parser.add_argument("stage", choices=[str(stage) for stage in STAGES])
    parser.add_argument("--job", type=Path, required=True, help="the job.json to obey")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--deepspeed", type=Path, help="the deepspeed.json to obey, with strategy deepspeed")
    parser.add_argument("--with", dest="launcher", choices=list(_LAUNCHERS), required=True, help="how ranks start")
    parser.add_argument("--hostfile", type=Path, help="with mpirun: the hosts of the ranks")
    return parser.parse_args(argv)


def _program(arguments: argparse.Namespace) -> list[str]:
    """The stage as one rank runs it, behind the interpreter."""
    program = ["-m", "finetune_trainer", arguments.stage, "--job", str(arguments.job)]
    program += ["--workspace", str(arguments.workspace)]
    return program if arguments.deepspeed is None else [*program, "--deepspeed", str(arguments.deepspeed)]


def _environment(reports: Path, stage: str) -> dict[str, str]:
    """What ranks are started with; tools that libraries call (ninja) lie beside the interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ours = {"PATH": path, "PYTHONUNBUFFERED": "1", ENV_REPORT: str(reports / f"{stage}-{{rank}}.json")}
    return {**os.environ, **ours}


def grace_seconds() -> int:
    """What the ranks have to save and end; the pod's own grace period is two margins longer."""
    text = os.environ.get(ENV_GRACE_SECONDS, str(DEFAULT_GRACE_SECONDS))
    if not text.isdecimal():
        raise StageError(
            FailureClass.CONFIG,
            "BadProcessVariable",
            f"The environment variable {ENV_GRACE_SECONDS} is {text!r}; it must be a number of seconds.",
            "Correct it, or leave it out.",
        )
    return max(1, int(text) - 2 * _MARGIN_SECONDS)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="finetune-launch-") as folder:
        yield Path(folder)


# -------------------------------------------------------------------------------------------------------- launchers


def _process(arguments: argparse.Namespace, job: TrainerJob) -> Ranks:
    """One child process is the one rank."""
    return _child(arguments, 0, 1)


def _child(arguments: argparse.Namespace, rank: int, size: int) -> Ranks:
    with _scratch() as scratch:
        environment = _environment(scratch, arguments.stage)
        if size > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        below = Below(grace_seconds=grace_seconds() + _MARGIN_SECONDS)
        end = below.run([sys.executable, *_program(arguments)], environment)
        reports = reports_in(scratch, Stage(arguments.stage))
    # Of a process that ended by itself without a report its last words say more than the exit code.
    ends = {rank: end.code} if end.code < 0 else {}
    return Ranks(end, reports, ends, None, expected=1, world_size=size, first=rank)


def _index(arguments: argparse.Namespace, job: TrainerJob) -> Ranks:
    """One child process is the rank that this pod's number in an Indexed Job says."""
    text, size = os.environ.get(ENV_INDEX, ""), job.preparation.pods
    if arguments.stage != Stage.PREPARE or not text.isdecimal():
        raise StageError(
            FailureClass.CONFIG,
            "BadProcessVariable",
            f"--with {arguments.launcher} is for pods of an Indexed Job that prepare; this is stage "
            f"{arguments.stage}, and the environment variable {ENV_INDEX} is {text!r}.",
            "Use --with process.",
        )
    return _child(arguments, int(text), size)


def _torchrun(arguments: argparse.Namespace, job: TrainerJob) -> Ranks:
    """torch's elastic agent starts this pod's ranks."""
    world = _world(arguments, job)
    grace = grace_seconds()
    with _scratch() as scratch:
        told = scratch / "agent.json"
        command = [sys.executable, "-m", "finetune_trainer.launching.elastic"]
        command += ["--nodes", str(world.nodes), "--processes", str(world.processes_per_node)]
        command += ["--grace", str(grace), "--report", str(told), "--logs", str(scratch / "logs")]
        below = Below(grace_seconds=grace + _MARGIN_SECONDS)
        end = below.run([*command, "--", *_program(arguments)], _environment(scratch, arguments.stage))
        reports = reports_in(scratch, Stage(arguments.stage))
        try:
            agent = AgentReport.model_validate_json(told.read_bytes())
        except (OSError, ValidationError):  # it was killed itself; its exit code tells
            agent = AgentReport()
    return Ranks(end, reports, agent.ends, agent.failure, world.processes_per_node, world.size)


def _mpirun(arguments: argparse.Namespace, job: TrainerJob) -> Ranks:
    """mpirun starts the ranks of all pods, so all reports are read here."""
    world = _world(arguments, job)
    file, hosts = mpi.hosts_of(arguments.hostfile, os.environ, world)
    mpi.wait_for_names(hosts)
    stage = Stage(arguments.stage)
    # Of this attempt alone: an earlier one may have left its own.
    reports = JobPaths.of(arguments.workspace, job.name).reports / f"{stage}-{socket.gethostname()}-{uuid.uuid4().hex}"
    reports.mkdir(parents=True)
    try:
        environment = mpi.mpirun_environment(_environment(reports, arguments.stage), hosts)
        command = mpi.mpirun_command(file, world, environment, [sys.executable, *_program(arguments)])
        end = Below(mpi.signal_to_stop, grace_seconds() + _MARGIN_SECONDS).run(command, environment)
        found = reports_in(reports, stage)
    finally:
        shutil.rmtree(reports, ignore_errors=True)
    words = end.last_words
    return Ranks(end, found, mpi.ends_told(words), mpi.trouble_told(words), world.size, world.size)


_LAUNCHERS = {"process": _process, "index": _index, "torchrun": _torchrun, "mpirun": _mpirun}


def _world(arguments: argparse.Namespace, job: TrainerJob) -> World:
    if arguments.stage != Stage.TRAIN or job.world is None:
        raise StageError(
            FailureClass.CONFIG,
            "OneProcessOnly",
            f"Stage {arguments.stage} of job {job.name} is one process; --with {arguments.launcher} is for training.",
            "Use --with process.",
        )
    return job.world
