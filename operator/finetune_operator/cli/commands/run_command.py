"""`finetune run`: a job on this machine."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from finetune_operator.cli.commands.options import (
    Filenames,
    Files,
    Form,
    LocalSettings,
    Measure,
    RunStage,
    Workspace,
)
from finetune_operator.cli.program_name import program_name
from finetune_operator.cli.terminal.console import Output, UsageError, emit, err, note, out, print_error, print_line

if TYPE_CHECKING:
    from finetune_contract.choices import Stage
    from finetune_operator.cli.files.job_files import JobEntry
    from finetune_operator.cli.local.local_request import RunRequest, RunResult
    from finetune_operator.plan.types.plan_types import JobPlan
    from finetune_operator.spec.settings.settings import Settings
    from finetune_operator.spec.types import FailureStatus

Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Resume an earlier run that was stopped. This is the default.")
]
Restart: TypeAlias = Annotated[
    bool, typer.Option("--restart", help="Start over; earlier results are moved to <job>.previous-<n>.")
]
Stages: TypeAlias = Annotated[
    list[RunStage] | None,
    typer.Option(
        "--stage",
        metavar="STAGE",
        help="Run only prepare, train, evaluate or predict; repeatable. Its inputs must exist.",
    ),
]
OneName: TypeAlias = Annotated[str | None, typer.Option("--name", help="Job to run, if the files contain several.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan and the stages without running them.")
]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Also show the logs of the stages.")]


def run(
    files: Files = None,
    filename: Filenames = None,
    workspace: Workspace = Path("runs"),
    resume: Resume = False,
    restart: Restart = False,
    stage: Stages = None,
    name: OneName = None,
    settings: LocalSettings = None,
    measure: Measure = True,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    output: Form = Output.TEXT,
) -> None:
    """Run a job on this machine: prepare, train, evaluate, predict.

    Write the results to DIR/<job name>/. Finished stages of the same job are kept, and an unfinished training
    resumes from its last checkpoint; results of a different job with the same name are refused unless --restart
    is given. Ctrl-C saves a checkpoint first. Checkpoints are deleted after all stages have succeeded, unless
    checkpoints.afterSuccess is keep.

    \b
    Examples:
      finetune run job.yaml
      finetune run job.yaml --workspace results --restart
      finetune run job.yaml --stage evaluate --stage predict
      finetune run jobs.yaml --name reviews -v
    """
    if resume and restart:
        raise UsageError("--resume and --restart exclude each other")
    from finetune_contract.choices import Stage
    from finetune_operator.cli.commands.steps import settings_of

    names = [*(files or []), *(filename or [])]
    limits = settings_of(settings, cluster=False)
    entry = _entry_to_run(names, name, limits, output)

    from finetune_operator.cli.local.local_request import RunRequest
    from finetune_operator.cli.local.local_run import planned_run
    from finetune_operator.cli.local.local_run import run as run_locally

    options = _options_again(workspace, name, settings, measure)
    request = RunRequest(
        job=entry.job,
        workspace=workspace.resolve(),
        settings=limits,
        stages=tuple(Stage(one) for one in stage or ()),
        restart=restart,
        measure=measure,
        verbose=verbose,
        command=_command(names, [*options, "--restart"]),
    )
    with refusals_reported(request, entry, output, "Rename the job, choose another --workspace, or start over"):
        if dry_run:
            _show_dry_run(*planned_run(request), output)
            return
        result = run_locally(request)
    only = [part for one in stage or () for part in ("--stage", one.value)]
    _show_result(request, result, output, _command(names, [*options, *only, "--resume"]))
    raise typer.Exit(result.exit_code)


def _entry_to_run(names: Sequence[str], name: str | None, limits: Settings, output: Output) -> JobEntry:
    """Return the one job to run, checked; note which of its fields have no effect on this machine."""
    from finetune_operator.cli.commands.steps import checked_jobs
    from finetune_operator.plan.hardware.capacity import NO_SPOT_HERE
    from finetune_operator.plan.inference.inference_processes import PROCESSES_HERE

    entry = _one(checked_jobs(names, limits, output), name)
    if entry.job.spec.spot.enabled:
        note(f"{entry.job.name}: {NO_SPOT_HERE}.")
    if entry.job.spec.predict is not None and entry.job.spec.predict.workers != 1:
        note(f"{entry.job.name}: {PROCESSES_HERE}.")
    variables = [str(variable.get("name")) for variable in entry.job.spec.template.env]
    absent = [name for name in variables if name not in os.environ]
    if absent:
        note(f"{entry.job.name}: spec.template.env is for pods. Set {', '.join(absent)} in your shell for this run.")
    return entry


def _options_again(workspace: Path, name: str | None, settings: Path | None, measure: bool) -> list[str]:
    """Return the options that run the job again by the same limits and with the same facts."""
    options = ["--workspace", str(workspace)]
    options += ["--name", name] if name is not None else []
    options += ["--settings", str(settings)] if settings is not None else []
    options += [] if measure else ["--no-measure"]
    return options


def _show_result(request: RunRequest, result: RunResult, output: Output, resume_command: str) -> None:
    """Print the results, why a stage failed, or how to go on where the run was stopped."""
    from finetune_operator.cli.local.local_request import result_data

    data = result_data(request, result)
    if output is not Output.TEXT:
        emit([data], output)
    elif result.exit_code == 0:
        from finetune_operator.cli.terminal.result_tables import print_result

        print_result(out(), data)
    if result.failure is not None:
        from finetune_contract.layout import FailureClass

        show_failure(request, result.failure)
        if "report" in data["artifacts"] and result.failure.failure_class == FailureClass.GATE_NOT_MET:
            note(f"the measured metrics are in {data['artifacts']['report']}")
    elif result.interrupted is not None:
        note(f"stopped in {result.interrupted}. Resume with: {resume_command}")


@contextmanager
def refusals_reported(request: RunRequest, entry: JobEntry, output: Output, hint: str) -> Iterator[None]:
    """Exit with 1 and print the reason if the run in the block is refused. `hint`: remedy, completed by --restart, for
    results of a different job.
    """
    from finetune_operator.cli.commands.steps import refuse_plan
    from finetune_operator.cli.local.local_request import CannotRunError
    from finetune_operator.cli.local.workspace import BusyError, DifferentJobError, UnusableWorkspaceError
    from finetune_operator.plan.types.plan_types import PlanRefused

    try:
        yield
    except PlanRefused as refused:
        refuse_plan(entry, refused, output)
    except DifferentJobError as different:
        print_error(
            f"{request.paths.root} holds results of a different job named {entry.job.name} (stage {different.stage}): "
            f"{'; '.join(different.differences)}. {hint} with --restart, which moves the earlier results aside."
        )
        raise typer.Exit(1) from None
    except BusyError as busy:
        print_error(f"{busy}. Wait for it, or stop it.")
        raise typer.Exit(1) from None
    except (CannotRunError, UnusableWorkspaceError) as cannot:
        print_error(f"{cannot}.")
        raise typer.Exit(1) from None


def show_failure(request: RunRequest, failure: FailureStatus) -> None:
    """Print the failure of a stage and the path of its log."""
    from finetune_operator.cli.terminal.result_tables import print_failure

    print_failure(err(), failure, str(request.paths.logs / f"{failure.stage}.log"))


def _one(entries: Sequence[JobEntry], name: str | None) -> JobEntry:
    matching = [entry for entry in entries if name is None or entry.job.name == name]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(entry.job.name for entry in entries)
    if name is None:
        raise UsageError(f"the files contain {len(entries)} jobs ({names}); select one with --name")
    raise UsageError(f"--name {name}: no such job; the files contain {names}")


def _show_dry_run(planned: JobPlan, stages: dict[Stage, str], output: Output) -> None:
    if output is not Output.TEXT:
        emit(
            [
                {
                    "stages": {stage.value: state for stage, state in stages.items()},
                    "plan": json.loads(planned.to_json()),
                }
            ],
            output,
        )
        return
    from finetune_operator.cli.terminal.result_tables import print_plan

    print_plan(out(), planned)
    for action, wanted in (("keep", "kept"), ("run", "run")):
        named = ", ".join(stage for stage, state in stages.items() if state == wanted)
        if named:
            print_line(f"Would {action}: {named}")


def _command(names: Sequence[str], options: Sequence[str]) -> str:
    return shlex.join([*program_name().split(), "run", *names, *options])
