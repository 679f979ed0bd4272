"""`python -m finetune_trainer launch STAGE ...`: the first process of a pod, and of a stage of `finetune run`.

It starts the stage's ranks, passes SIGTERM on, waits, kills remaining processes, and merges the ranks' reports into one
TrainerReport: the pod's termination message and its exit code. The ranks write their own reports elsewhere: with mpirun
they run in other pods, so into the shared workspace.

Modules that only judge their end are imported after the ranks are started, while these import their own libraries:
pydantic alone takes longer than all the work of a launcher before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_ATTEMPT, ENV_INDEX, ENV_NCCL, ENV_REPORT, EXIT_OK, FailureClass, JobPaths
from finetune_contract.python_command import module_command
from finetune_trainer.core.oom_kills import oom_kills
from finetune_trainer.launching.child_supervisor import MARGIN_SECONDS, ChildSupervisor, End, grace_seconds

if TYPE_CHECKING:
    from finetune_contract.report import FailureReport, TrainerReport


@dataclass(frozen=True)
class Ranks:
    """Ends of the ranks, as known to their launcher."""

    end: End
    reports: Sequence[TrainerReport]
    ends: Mapping[int, int]
    trouble: FailureReport | None
    expected: int
    world_size: int
    first: int = 0
    """Lowest rank of this pod, as far as known without its report."""
    killed_for_memory: bool = False
    """True if the kernel's out-of-memory killer ended a process where a rank was killed."""


def launch(argv: Sequence[str]) -> int:
    """Run the stage in `argv`, report, and return the exit code."""
    started = time.monotonic()
    kills_before = oom_kills()
    arguments = _parse(argv)
    try:
        ranks: Ranks | BaseException = _LAUNCHERS[arguments.launcher](arguments)
    except BaseException as error:
        ranks = error
    from finetune_contract.report import TrainerReport
    from finetune_trainer.core.failures import classify
    from finetune_trainer.core.final_report import report_path, write_report
    from finetune_trainer.launching.verdict import verdict

    stage, name, seconds = Stage(arguments.stage), _job_name(arguments.job), time.monotonic() - started
    if isinstance(ranks, Ranks):
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
            seconds=seconds,
            killed_for_memory=ranks.killed_for_memory or oom_kills() > kills_before,
        )
    else:
        report = TrainerReport(job=name, stage=stage, outcome="failed", failure=classify(ranks), seconds=seconds)
    write_report(report, report_path(report.rank, os.environ))
    if report.failure is None:
        return EXIT_OK
    failure = report.failure
    if isinstance(ranks, Ranks) and ranks.expected == 1 and failure in [report.failure for report in ranks.reports]:
        return failure.exit_code  # the one rank has logged it
    sys.stderr.write(f"{failure.failure_class} ({failure.reason}): {failure.message} {failure.hint}\n")
    return failure.exit_code


def _job_name(file: Path) -> str:
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.core.job_file import read_job

    try:
        return read_job(file).name
    except StageError:  # code that needs more than the name has reported it
        return file.stem


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer launch", description="Run one stage.")
    parser.add_argument("stage", choices=[str(stage) for stage in Stage if stage is not Stage.SERVE])
    parser.add_argument("--job", type=Path, required=True, help="path of job.json")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--deepspeed", type=Path, help="path of deepspeed.json, with strategy deepspeed")
    parser.add_argument(
        "--with", dest="launcher", choices=list(_LAUNCHERS), required=True, help="how to start the ranks"
    )
    parser.add_argument("--attached", action="store_true", help="kill all processes when standard input ends")
    parser.add_argument("--hostfile", type=Path, help="with mpirun: the hosts of the ranks")
    return parser.parse_args(argv)


def _program(arguments: argparse.Namespace) -> list[str]:
    """Return the command with which one rank runs the stage."""
    program = module_command("finetune_trainer", arguments.stage, "--job", str(arguments.job))
    program += ["--workspace", str(arguments.workspace)]
    return program if arguments.deepspeed is None else [*program, "--deepspeed", str(arguments.deepspeed)]


def _environment(reports: Path, stage: str) -> dict[str, str]:
    """Return the ranks' environment. DeepSpeed compiles with the ninja beside the interpreter, even without a venv."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ours = {"PATH": path, "PYTHONUNBUFFERED": "1", ENV_REPORT: str(reports / f"{stage}-{{rank}}.json")}
    return {ENV_NCCL: str(reports), **os.environ, **ours}


def _run(
    arguments: argparse.Namespace,
    command: Sequence[str],
    reports: Path,
    environment: Mapping[str, str] | None = None,
    request_stop: Callable[[int], None] | None = None,
) -> tuple[End, list[TrainerReport]]:
    """Run `command`, which starts the ranks, to its end; `environment` and the returned reports are the ranks'."""
    supervisor = ChildSupervisor(request_stop, grace_seconds() + MARGIN_SECONDS, arguments.attached)
    supervisor.start(command, environment or _environment(reports, arguments.stage))
    from finetune_trainer.launching.verdict import reports_in  # while the ranks import theirs

    end = supervisor.wait()
    if end.code != EXIT_OK:
        from finetune_trainer.launching.nccl_remains import remains

        sys.stderr.writelines(f"{line}\n" for line in remains(reports))
    return end, reports_in(reports, Stage(arguments.stage))


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="finetune-launch-") as folder:
        yield Path(folder)


# -------------------------------------------------------------------------------------------------------- launchers


def _process(arguments: argparse.Namespace) -> Ranks:
    """Run the only rank as a child process."""
    return _child(arguments, 0, 1)


def _child(arguments: argparse.Namespace, rank: int, size: int) -> Ranks:
    with _scratch() as scratch:
        environment = _environment(scratch, arguments.stage)
        if size > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        end, reports = _run(arguments, _program(arguments), scratch, environment)
    # If a process ended by itself without a report, its stderr is more informative than the exit code.
    ends = {rank: end.code} if end.code < 0 else {}
    return Ranks(end, reports, ends, None, expected=1, world_size=size, first=rank)


def _index(arguments: argparse.Namespace) -> Ranks:
    """Run one rank, numbered by this pod's index in an Indexed Job, as a child process."""
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.core.job_file import read_job

    text, job = os.environ.get(ENV_INDEX, ""), read_job(arguments.job)
    sizes = {Stage.PREPARE: job.preparation.pods, Stage.PREDICT: job.predict.workers if job.predict else 1}
    size = sizes.get(Stage(arguments.stage))
    if size is None or not text.isdecimal():
        raise StageError(
            FailureClass.CONFIG,
            "BadProcessVariable",
            f"--with {arguments.launcher} is for pods of an Indexed Job that prepare or predict; this is stage "
            f"{arguments.stage}, and the environment variable {ENV_INDEX} is {text!r}.",
            "Use --with process.",
        )
    return _child(arguments, int(text), size)


def _torchrun(arguments: argparse.Namespace) -> Ranks:
    """Run torch's elastic agent, which starts this pod's ranks, as many as the job has."""
    # Ranks that predict together share files, which have to differ from those of an earlier attempt.
    os.environ.setdefault(ENV_ATTEMPT, uuid.uuid4().hex)
    with _scratch() as scratch:
        agent_report = scratch / "agent.json"
        command = module_command("finetune_trainer.launching.elastic", "--job", str(arguments.job))
        command += ["--stage", arguments.stage]
        command += ["--grace", str(grace_seconds()), "--report", str(agent_report), "--logs", str(scratch / "logs")]
        end, reports = _run(arguments, [*command, "--", *_program(arguments)], scratch)
        from finetune_trainer.core.job_file import read_job, world_of
        from finetune_trainer.launching.elastic import AgentReport

        agent = AgentReport.read(agent_report)
    world = world_of(read_job(arguments.job), arguments.stage)
    return Ranks(end, reports, agent.ends, agent.failure, world.processes_per_node, world.size)


def _mpirun(arguments: argparse.Namespace) -> Ranks:
    """Run mpirun, which starts the ranks of all pods, and read all their reports."""
    import shutil
    import socket

    from finetune_trainer.core.job_file import read_job, world_of
    from finetune_trainer.launching import mpi
    from finetune_trainer.launching.verdict import killed_ranks

    job = read_job(arguments.job)
    world = world_of(job, arguments.stage)
    file, hosts = mpi.hosts_of(arguments.hostfile, os.environ, world)
    mpi.wait_for_names(hosts)
    # A folder for this attempt alone, as an earlier one may have left reports.
    attempt = f"{arguments.stage}-{socket.gethostname()}-{uuid.uuid4().hex}"
    reports = JobPaths.of(arguments.workspace, job.name).reports / attempt
    reports.mkdir(parents=True)
    try:
        environment = mpi.mpirun_environment(_environment(reports, arguments.stage), hosts)
        command = mpi.mpirun_command(file, world, environment, _program(arguments))
        end, rank_reports = _run(arguments, command, reports, environment, mpi.signal_to_stop)
    finally:
        shutil.rmtree(reports, ignore_errors=True)
    ends, trouble = mpi.ends_of_ranks(end.last_output), mpi.launcher_failure(end.last_output)
    killed = {hosts[rank // world.processes_per_node] for rank in killed_ranks(rank_reports, ends)}
    for_memory = any(mpi.has_oom_kills(host, environment) for host in killed)
    return Ranks(end, rank_reports, ends, trouble, world.size, world.size, killed_for_memory=for_memory)


_LAUNCHERS = {"process": _process, "index": _index, "torchrun": _torchrun, "mpirun": _mpirun}
