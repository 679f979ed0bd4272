"""The `finetune` command, also `kubectl finetune`: what can be typed, and which module answers.

Exit codes: 0; 1 when a job is refused or fails; 2 for a call that is wrong; 128 + signal when interrupted.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version as distribution_version
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from finetune_contract.choices import Stage
from finetune_contract.facts import HardwareFacts
from finetune_contract.layout import JobPaths
from finetune_operator.api.problems import Problem
from finetune_operator.api.settings import LOCAL_SETTINGS, Settings
from finetune_operator.cli.console import (
    DocumentOutput,
    Output,
    UsageError,
    complain,
    emit,
    err,
    note,
    out,
    problem_data,
    program_name,
    report,
)
from finetune_operator.cli.inputs import Inputs, JobEntry, located, read_inputs, read_settings
from finetune_operator.planning.types import Facts, JobPlan, PlanRefused


class _Commands(TyperGroup):
    """All commands; says what is wrong with an option's value without the words of the library that checked it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

Files = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="Job files or folders; - reads standard input.")
]
Filenames = Annotated[
    list[str] | None, typer.Option("--filename", "-f", metavar="FILE", help="The same, as kubectl has it; repeatable.")
]
Form = Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")]
DocumentForm = Annotated[DocumentOutput, typer.Option("--output", "-o", help="Form of the result.")]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="An administrator's settings (allow-lists, prices). Left out: those of a local run.",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="KEY=VALUE,...",
        help="Plan for one such node: gpu, memory, gpus, bf16, cpu, hostMemory, cpuBf16.",
    ),
]
Workspace = Annotated[
    Path, typer.Option("--workspace", metavar="DIR", help="Folder for results, one folder a job in it.")
]
Measure = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Ask the trainer for the model's size, or assume it.")
]


def main() -> NoReturn:
    """The console script."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.help = (getdoc(command.callback) or "").replace("  finetune ", f"  {program_name()} ")
    try:
        app(prog_name=program_name())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"finetune {distribution_version('finetune-operator')}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tune Hugging Face models from one FineTuneJob file, on this machine or in a cluster."""


# ------------------------------------------------------------------------------------------------------------- validate


@app.command()
def validate(
    files: Files = None, filename: Filenames = None, settings: SettingsFile = None, output: Form = Output.TEXT
) -> None:
    """Check job files; needs no network, no model and no data.

    All problems are reported at once, each with its line, field, value, rule and way out.

    \b
    Examples:
      finetune validate job.yaml
      finetune validate -f jobs/ -f extra.json
      finetune validate job.yaml -o json
      cat job.yaml | finetune validate -
    """
    inputs = read_inputs([*(files or []), *(filename or [])], _settings(settings))
    if output is Output.TEXT:
        _tell_notes(inputs)
        report(inputs.problems)
        for entry in inputs.entries:
            out().print(f"{entry.source}:{entry.document.line}: {entry.job.name} is valid", soft_wrap=True)
    else:
        emit([_validation(inputs)], output)
    raise typer.Exit(1 if inputs.problems else 0)


def _validation(inputs: Inputs) -> dict[str, Any]:
    return {
        "valid": not inputs.problems,
        "jobs": [{"file": e.source, "line": e.document.line, "name": e.job.name} for e in inputs.entries],
        "problems": [problem_data(source, problem) for source, problem in inputs.problems],
        "notes": list(inputs.notes),
    }


# ----------------------------------------------------------------------------------------------------------------- plan


@app.command()
def plan(
    files: Files = None,
    filename: Filenames = None,
    hardware: Hardware = None,
    settings: SettingsFile = None,
    workspace: Workspace = Path("runs"),
    measure: Measure = True,
    output: Form = Output.TEXT,
) -> None:
    """Show what would run, and why.

    Strategy, processes, batch, memory, time, and a reason for each decision. Plans for this machine, or for
    the one that --hardware describes. Data that an earlier run prepared in --workspace are taken into account.

    \b
    Examples:
      finetune plan job.yaml
      finetune plan job.yaml --hardware gpu=H100,memory=80Gi,gpus=8
      finetune plan job.yaml --hardware cpu=32,hostMemory=128Gi -o yaml
      finetune plan job.yaml --no-measure -o json
    """
    limits, node = _settings(settings), _hardware(hardware)
    entries = _jobs([*(files or []), *(filename or [])], limits, output)
    plans = []
    for entry in entries:
        here = node is None and entry.job.spec.resources.nodes == 1
        facts = _facts(entry, node, workspace, measure, this_machine=node is None, local=here)
        plans.append(_planned(entry, facts, limits, output))
    if output is not Output.TEXT:
        emit([json.loads(planned.to_json()) for planned in plans], output)
        return
    from finetune_operator.cli.results import print_plan

    for planned in plans:
        print_plan(out(), planned)


# --------------------------------------------------------------------------------------------------------------- render


@app.command()
def render(
    files: Files = None,
    filename: Filenames = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the objects.")] = "default",
    hardware: Hardware = None,
    settings: SettingsFile = None,
    workspace: Workspace = Path("runs"),
    measure: Measure = True,
    output: DocumentForm = DocumentOutput.YAML,
) -> None:
    """Write a job's Kubernetes objects.

    These are now the ConfigMap with job.json and deepspeed.json, as the trainer gets them; the objects that
    start pods (PyTorchJob, MPIJob, TrainJob, JobSet, Job) come in a later version. The node is the one that
    the job asks for, or that --hardware describes.

    \b
    Examples:
      finetune render job.yaml
      finetune render job.yaml -n team-a --hardware gpu=A100,memory=80Gi,gpus=8
      finetune render job.yaml -o json
    """
    from finetune_operator.rendering.contract import config_map

    limits, node = _settings(settings), _hardware(hardware)
    manifests = []
    for entry in _jobs([*(files or []), *(filename or [])], limits, output):
        facts = _facts(entry, node, workspace, measure, this_machine=False, local=False)
        planned = _planned(entry, facts, limits, output)
        try:
            manifests.append(config_map(planned, entry.job.metadata.namespace or namespace))
        except PlanRefused as refused:
            _refuse([(entry.source, located(entry.document, problem)) for problem in refused.problems], output)
    note("this is the trainer's configuration only; objects that start pods come in a later version.")
    emit(manifests, output)


# ------------------------------------------------------------------------------------------------------------------ run


@app.command()
def run(
    files: Files = None,
    filename: Filenames = None,
    workspace: Workspace = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run stopped. The default, spelled out.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew; earlier results are moved to <job>.previous-<n>.")
    ] = False,
    stage: Annotated[
        list[Stage] | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="Run only prepare, train, evaluate or predict; repeatable. Its inputs must be there.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Which job, when the files hold several.")] = None,
    settings: SettingsFile = None,
    measure: Measure = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the stages, and start nothing.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the stages' own log too.")] = False,
    output: Form = Output.TEXT,
) -> None:
    """Run a job on this machine: prepare, train, evaluate, predict.

    Results go to DIR/<job name>/. Finished stages of the same job are kept and an unfinished training goes on
    from its last checkpoint; results of a different job under the same name are refused unless --restart is
    given. Ctrl-C saves a checkpoint first.

    \b
    Examples:
      finetune run job.yaml
      finetune run job.yaml --workspace results --restart
      finetune run job.yaml --stage evaluate --stage predict
      finetune run jobs.yaml --name reviews -v
    """
    if resume and restart:
        raise UsageError("--resume and --restart exclude each other")
    if stage and Stage.SERVE in stage:
        raise UsageError("--stage serve: serving comes in a later version")
    names = [*(files or []), *(filename or [])]
    limits = _settings(settings)
    entry = _one(_jobs(names, limits, output), name)

    from finetune_operator.cli.local import CannotRunError, RunRequest, planned_run, result_data
    from finetune_operator.cli.local import run as run_locally
    from finetune_operator.cli.workspace import BusyError, DifferentJobError, UnusableWorkspaceError

    request = RunRequest(
        job=entry.job,
        workspace=workspace.resolve(),
        settings=limits,
        stages=tuple(stage or ()),
        restart=restart,
        measure=measure,
        verbose=verbose,
    )
    try:
        if dry_run:
            _show_dry_run(*planned_run(request), output)
            return
        result = run_locally(request)
    except PlanRefused as refused:
        _refuse([(entry.source, located(entry.document, problem)) for problem in refused.problems], output)
    except DifferentJobError as different:
        complain(
            f"{request.paths.root} holds results of a different job named {entry.job.name} (stage {different.stage}): "
            f"{'; '.join(different.differences)}. Give the job another name or another --workspace, or begin anew "
            "with --restart, which moves the earlier results aside."
        )
        raise typer.Exit(1) from None
    except BusyError as busy:
        complain(f"{busy}. Wait for it, or stop it.")
        raise typer.Exit(1) from None
    except (CannotRunError, UnusableWorkspaceError) as cannot:
        complain(f"{cannot}.")
        raise typer.Exit(1) from None
    data = result_data(request, result)
    if output is not Output.TEXT:
        emit([data], output)
    elif result.exit_code == 0:
        from finetune_operator.cli.results import print_result

        print_result(out(), data)
    if result.failure is not None:
        from finetune_operator.cli.results import print_failure

        print_failure(err(), result.failure, str(request.paths.logs / f"{result.failure.stage}.log"))
    elif result.interrupted is not None:
        note(f"stopped in {result.interrupted}. Go on with: {_resume_command(names, workspace, entry, name)}")
    raise typer.Exit(result.exit_code)


def _one(entries: Sequence[JobEntry], name: str | None) -> JobEntry:
    chosen = [entry for entry in entries if name is None or entry.job.name == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(entry.job.name for entry in entries)
    if name is None:
        raise UsageError(f"there are {len(entries)} jobs ({names}); choose one with --name")
    raise UsageError(f"--name {name}: no such job; there are {names}")


def _show_dry_run(planned: JobPlan, stages: dict[Stage, str], output: Output) -> None:
    if output is not Output.TEXT:
        emit(
            [{"stages": {stage.value: word for stage, word in stages.items()}, "plan": json.loads(planned.to_json())}],
            output,
        )
        return
    from finetune_operator.cli.results import print_plan

    print_plan(out(), planned)
    for does, word in (("keep", "kept"), ("run", "run")):
        named = ", ".join(stage for stage, state in stages.items() if state == word)
        if named:
            out().print(f"Would {does}: {named}", soft_wrap=True)


def _resume_command(names: Sequence[str], workspace: Path, entry: JobEntry, name: str | None) -> str:
    words = [*program_name().split(), "run", *names, "--workspace", str(workspace)]
    words += ["--name", entry.job.name] if name is not None else []
    return shlex.join([*words, "--resume"])


# ------------------------------------------------------------------------------------------------------------ documents


@app.command()
def crd(output: DocumentForm = DocumentOutput.YAML) -> None:
    """Write the CustomResourceDefinition of FineTuneJob.

    \b
    Examples:
      finetune crd > crd.yaml
      finetune crd | kubectl apply --server-side -f -
    """
    from finetune_operator.api.crd import crd_yaml

    text = crd_yaml()
    if output is DocumentOutput.YAML:
        print(text, end="")
    else:
        import yaml

        emit([yaml.safe_load(text)], output)


@app.command()
def schema(output: DocumentForm = DocumentOutput.JSON) -> None:
    """Write the JSON schema of FineTuneJob.

    Editors complete and check with it while you type.

    \b
    Examples:
      finetune schema > finetunejob.schema.json
      (then begin a job file with: # yaml-language-server: $schema=finetunejob.schema.json)
    """
    from finetune_operator.api.crd import json_schema

    emit([json_schema()], output)


# --------------------------------------------------------------------------------------------------------- shared steps


def _settings(file: Path | None) -> Settings:
    return LOCAL_SETTINGS if file is None else read_settings(file)


def _hardware(text: str | None) -> HardwareFacts | None:
    if text is None:
        return None
    from finetune_operator.planning.facts import HardwareError, parse_hardware

    try:
        return parse_hardware(text)
    except HardwareError as error:
        raise UsageError(f"--hardware: {error}") from error


def _tell_notes(inputs: Inputs) -> None:
    for text in inputs.notes:
        note(text)


def _jobs(names: Sequence[str], settings: Settings, output: Output | DocumentOutput) -> tuple[JobEntry, ...]:
    """The checked jobs; ends the command with 1 when anything in the files is refused."""
    inputs = read_inputs(names, settings)
    _tell_notes(inputs)
    if inputs.problems:
        _refuse(inputs.problems, output)
    return inputs.entries


def _refuse(problems: Sequence[tuple[str, Problem]], output: Output | DocumentOutput) -> NoReturn:
    """End with 1: the problems for a person, and as data where the result would have been data for a program.

    In place of Kubernetes objects nothing is written, as what reads those would take the problems for one.
    """
    report(problems)
    if isinstance(output, Output) and output is not Output.TEXT:
        emit([{"problems": [problem_data(source, problem) for source, problem in problems]}], output)
    raise typer.Exit(1)


def _facts(
    entry: JobEntry, node: HardwareFacts | None, workspace: Path, ask_trainer: bool, *, this_machine: bool, local: bool
) -> Facts:
    """What is known about the job: measured, prepared earlier, or given with --hardware."""
    from finetune_operator.cli.measure import Measured, measure, own_hardware
    from finetune_operator.cli.workspace import prepared_facts

    measured = measure(entry.job) if ask_trainer else Measured(None, own_hardware())
    return Facts(
        model=measured.model,
        data=prepared_facts(JobPaths.of(workspace.resolve(), entry.job.name), entry.job),
        hardware=measured.hardware if this_machine else node,
        local=local,
    )


def _planned(entry: JobEntry, facts: Facts, settings: Settings, output: Output | DocumentOutput) -> JobPlan:
    from finetune_operator.planning.plan import plan as make_plan

    try:
        return make_plan(entry.job, facts, settings)
    except PlanRefused as refused:
        _refuse([(entry.source, located(entry.document, problem)) for problem in refused.problems], output)
