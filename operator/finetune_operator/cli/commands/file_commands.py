"""`finetune validate`, `plan` and `render`: the problems of a job file, its plan, and its Kubernetes objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from finetune_operator.cli.commands.options import (
    ClusterSettings,
    Context,
    DocumentForm,
    EarlierWorkspace,
    Filenames,
    Files,
    ForCluster,
    Form,
    Hardware,
    Kubeconfig,
    LocalSettings,
    Measure,
    Namespace,
)
from finetune_operator.cli.terminal.console import (
    DocumentOutput,
    Output,
    UsageError,
    described,
    emit,
    list_of,
    note,
    note_misfits,
    out,
    print_line,
    problem_data,
    report,
    sentence,
)
from finetune_operator.spec.launcher_rows import TRAINING

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.files.checking import EntryCheck
    from finetune_operator.cli.files.job_files import Inputs, JobEntry
    from finetune_operator.plan.hardware.gpu_nodes import Node
    from finetune_operator.plan.types.plan_types import Facts, JobPlan, NodesFacts
    from finetune_operator.spec.problems import Problem
    from finetune_operator.spec.settings.settings import Settings

    Launcher: TypeAlias = StrEnum
else:
    Launcher = StrEnum("Launcher", {name: name for name in TRAINING})
    """Launchers that can be rendered; Typer reads the choices of an option from an enum."""

DEFAULT_NAMESPACE = "default"


class Goal(StrEnum):
    """Figures that compared hardware is ordered by."""

    TIME = "time"
    COST = "cost"


# ------------------------------------------------------------------------------------------------------------- validate


def validate(
    files: Files = None,
    filename: Filenames = None,
    cluster: ForCluster = False,
    data: Annotated[
        bool,
        typer.Option("--data", help="Also check columns, labels and text lengths in the first rows of the data."),
    ] = False,
    settings: LocalSettings = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Check job files, without model or data.

    Report all problems at once, each with its line, field, value, rule and hint. With -o json, a hint that leaves
    no choice is also data, as the change of the file. With --cluster, also report URIs that only a local run can
    use (file:// and pkg://). If a kubeconfig is there, --cluster also looks up the claims, Secret keys, ConfigMaps,
    service accounts, classes and images that the jobs name: with your rights, one request each. A claim that the
    job's pods cannot share is a problem; what does not exist yet, or cannot be read, is a note. With --data, also
    read the first 10,000 rows of each split as the prepare stage does, which takes some seconds.

    \b
    Examples:
      finetune validate job.yaml
      finetune validate job.yaml --data
      finetune validate -f jobs/ -f extra.json
      finetune validate job.yaml --cluster
      finetune validate job.yaml -o json
      cat job.yaml | finetune validate -
    """
    from finetune_operator.cli.commands.steps import print_notes, settings_of
    from finetune_operator.cli.files.job_files import read_inputs

    limits = settings_of(settings, cluster=cluster)
    inputs = read_inputs([*(files or []), *(filename or [])], limits)
    checked: dict[str, EntryCheck] = {}
    if data:
        from finetune_operator.cli.files.checking import check_entry

        checked = {entry.job.name: check_entry(entry) for entry in inputs.entries}
    if cluster:
        from finetune_operator.cli.cluster.cluster_jobs import Connection

        inputs = _with_lookups(inputs, limits, Connection(kubeconfig, context, namespace), settings)
    problems = [*inputs.problems, *(problem for check in checked.values() for problem in check.problems)]
    if output is Output.TEXT:
        print_notes(inputs)
        report(inputs.problems)
        for entry in inputs.entries:
            _print_result(entry, checked.get(entry.job.name))
    else:
        emit([_validation(inputs, problems, checked)], output)
    raise typer.Exit(1 if problems else 0)


def _with_lookups(inputs: Inputs, limits: Settings, connection: Connection, settings: Path | None) -> Inputs:
    """Return the inputs with problems and notes on what their jobs name in the cluster; a job with a problem is no
    entry any more.
    """
    from dataclasses import replace

    from finetune_operator.cli.commands.cluster_lookups import image_states, look_up_if_configured
    from finetune_operator.cli.files.job_files import located
    from finetune_operator.jobs.missing_objects import named_by

    jobs = [entry.job for entry in inputs.entries]
    found, unknown = look_up_if_configured(jobs, limits, connection)
    if unknown is not None:
        named = any(not one.created for job in jobs for one in named_by(job, limits))
        text = f"The objects that the jobs name were not looked up: {unknown}"
        return replace(inputs, notes=(*inputs.notes, sentence(text))) if named else inputs
    entries, problems, notes = [], [*inputs.problems], [*inputs.notes]
    for entry, one in zip(inputs.entries, found, strict=True):
        problems += [(entry.source, located(entry.document, problem)) for problem in one.conflicts]
        entries += [] if one.conflicts else [entry]
        notes += [described(located(entry.document, problem), entry.source) for problem in one.absent]
        notes += [
            f"{entry.source}:{entry.document.line}: {entry.job.name}: not looked up: {each}." for each in one.unread
        ]
    # Without a settings file, the image of jobs that name none is not known.
    default = None if settings is None else limits.defaults.image
    for image, (state, reason) in image_states(filter(None, (job.spec.image or default for job in jobs))).items():
        if state == "absent":
            notes.append(f"Image {image}: its registry does not have it. Build and push it (images/README.md).")
        elif state is None:
            notes.append(f"Image {image} was not looked up: {reason}.")
    return replace(inputs, entries=tuple(entries), problems=tuple(problems), notes=tuple(notes))


def _print_result(entry: JobEntry, checked: EntryCheck | None) -> None:
    if checked is not None:
        from finetune_operator.cli.files.checking import print_check

        for text in checked.data.notes:
            note(f"{entry.source}:{entry.document.line}: {entry.job.name}: {text}")
        report(checked.problems)
        print_check(out(), entry, checked.data)
    if checked is None or not checked.problems:
        print_line(f"{entry.source}:{entry.document.line}: {entry.job.name} is valid")


def _validation(
    inputs: Inputs, problems: Sequence[tuple[str, Problem]], checked: Mapping[str, EntryCheck]
) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = []
    for entry in inputs.entries:
        job: dict[str, Any] = {"file": entry.source, "line": entry.document.line, "name": entry.job.name}
        if entry.job.name in checked:
            data = checked[entry.job.name].data
            job["data"] = data.model_dump(mode="json", by_alias=True, exclude={"problems": {"__all__": {"time"}}})
        jobs.append(job)
    return {
        "valid": not problems,
        "jobs": jobs,
        "problems": [problem_data(source, problem) for source, problem in problems],
        "notes": list(inputs.notes),
    }


# ----------------------------------------------------------------------------------------------------------------- plan


MeasureModel: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Measure the model's size with the trainer, or assume it. Default: measure, except with --cluster.",
    ),
]
ReadNodes: TypeAlias = Annotated[
    bool, typer.Option("--nodes", help="With --cluster: read the GPUs of the cluster's nodes, as the operator does.")
]
CompareForms: TypeAlias = Annotated[
    bool, typer.Option("--alternatives", help="Compare all forms of the training: memory, time, cost, and why not.")
]
WhatIf: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if", metavar="KEY=VALUE,...", help="Compare hardware: the keys of --hardware, and nodes. Repeatable."
    ),
]
DrawMemory: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--picture/--no-picture", help="Draw the memory by term against the device. Default: on a terminal only."
    ),
]
GoalOfRows: TypeAlias = Annotated[Goal, typer.Option("--goal", help="Order of the rows of --what-if.")]
Deadline: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--deadline", min=0, metavar="HOURS", help="Most hours of the training: slower rows of --what-if last."
    ),
]
MostCost: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--max-cost", min=0, metavar="AMOUNT", help="Most cost of the training: dearer rows of --what-if last."
    ),
]


def plan(
    files: Files = None,
    filename: Filenames = None,
    cluster: ForCluster = False,
    hardware: Hardware = None,
    settings: LocalSettings = None,
    workspace: EarlierWorkspace = None,
    measure: MeasureModel = None,
    nodes: ReadNodes = False,
    others: CompareForms = False,
    what_if: WhatIf = None,
    picture: DrawMemory = None,
    goal: GoalOfRows = Goal.TIME,
    deadline: Deadline = None,
    max_cost: MostCost = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Show a job's plan, with a reason for each decision.

    The plan lists strategy, processes, batch, memory and time. It is made for this machine, or for nodes that
    --hardware describes, and uses data that an earlier run prepared in --workspace (default: runs). With
    --cluster, show the operator's first plan: until prepare has measured the model and the data, it is based on
    the job alone and lists its assumptions. With --alternatives, list all strategies, micro-batches and degrees
    that the job leaves open; with --what-if, plans for other hardware, ended with 1 if none keeps --deadline and
    --max-cost. On a terminal, or with --picture, bars show which terms fill the device.

    \b
    Examples:
      finetune plan job.yaml
      finetune plan job.yaml --cluster
      finetune plan job.yaml --cluster --nodes
      finetune plan job.yaml --hardware gpu=H100,memory=80Gi,gpus=8
      finetune plan job.yaml --hardware cpu=32,hostMemory=128Gi -o yaml
      finetune plan job.yaml --no-measure -o json
      finetune plan job.yaml --hardware gpu=H100,gpus=8,network=3200 --alternatives
      finetune plan job.yaml --what-if gpu=H100,gpus=8,nodes=2 --what-if gpu=A100-80GB,gpus=8,nodes=4 --goal cost
    """
    from finetune_operator.cli.commands import steps

    _check_options(others, what_if, nodes=nodes, cluster=cluster, hardware=hardware)
    if (deadline, max_cost) != (None, None) and not what_if:
        raise UsageError("--deadline and --max-cost bound the rows of --what-if, and there is none; add one")
    limits = steps.settings_of(settings, cluster=cluster)
    node = steps.hardware_of(hardware, limits)
    compare = _comparison(others, what_if or (), goal, (deadline, max_cost), limits, output)
    entries = steps.checked_jobs([*(files or []), *(filename or [])], limits, output)
    if not cluster and measure is not False:
        steps.refuse_absent(entries, output)
    listed_nodes = steps.cluster_nodes(kubeconfig, context) if nodes else None
    plans = []
    for entry in entries:
        if cluster:
            gpus = _facts_of_nodes(listed_nodes, entry, limits)
            facts = steps.cluster_facts(entry, node, workspace, measure is True, gpus)
        else:
            facts = steps.local_facts(entry, node, workspace or Path("runs"), measure is not False)
        if compare is None:
            plans.append(steps.planned(entry, facts, limits, output, as_known=True))
        else:
            compare(entry, facts)
    if compare is None:
        _print_plans(plans, output, picture)


def _check_options(
    others: bool, what_if: Sequence[str] | None, *, nodes: bool, cluster: bool, hardware: str | None
) -> None:
    """Raise UsageError for options of `plan` that exclude each other."""
    if others and what_if:
        raise UsageError("--alternatives: it compares forms on one hardware, and --what-if hardware; leave one out")
    if nodes and (not cluster or hardware is not None):
        raise UsageError("--nodes requires --cluster, and excludes --hardware")


def _comparison(
    others: bool,
    what_if: Sequence[str],
    goal: Goal,
    bounds: tuple[float | None, float | None],
    limits: Settings,
    output: Output,
) -> Callable[[JobEntry, Facts], None] | None:
    """Return the function that compares a job's plans and prints them; None if one plan is requested."""
    if not others and not what_if:
        return None
    from finetune_operator.cli.commands.plan_comparison import Wanted, compare_forms, compare_hardware, described

    if not what_if:
        return lambda entry, facts: compare_forms(entry, facts, limits, output)
    asked = [described(text, limits) for text in what_if]
    wanted = Wanted(goal is Goal.COST, *bounds)
    return lambda entry, facts: compare_hardware(entry, facts, limits, asked, wanted, output)


def _facts_of_nodes(listed: tuple[Node, ...] | None, entry: JobEntry, limits: Settings) -> NodesFacts | None:
    """Return the GPUs of the listed nodes; None if none were listed, or the job needs none."""
    from finetune_operator.plan.hardware.gpu_nodes import facts_of_nodes

    if listed is None or not entry.job.spec.resources.gpus_per_node:
        return None
    return facts_of_nodes(listed, entry.job.spec, limits)


def _print_plans(plans: Sequence[JobPlan], output: Output, picture: bool | None) -> None:
    if output is not Output.TEXT:
        emit([json.loads(job_plan.to_json()) for job_plan in plans], output)
        return
    from finetune_operator.cli.terminal.result_tables import print_plan

    for job_plan in plans:
        print_plan(out(), job_plan, picture=picture)


# --------------------------------------------------------------------------------------------------------------- render


def render(
    files: Files = None,
    filename: Filenames = None,
    launcher: Annotated[
        Launcher | None,
        typer.Option("--launcher", help="Launcher to use instead of spec.launcher; assumed to be installed."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace of the objects. Default: that of the file, else default."),
    ] = None,
    hardware: Hardware = None,
    settings: ClusterSettings = None,
    workspace: EarlierWorkspace = None,
    measure: Measure = False,
    output: DocumentForm = DocumentOutput.YAML,
) -> None:
    """Write the Kubernetes objects of a job.

    Write the claim for the workspace and, for the first attempt of each stage, its ConfigMap and the object that
    runs it, in the order of creation. The owner reference and the address for progress are omitted, as only a
    cluster has them. The operator plans again after prepare, so the objects of later stages may change;
    --measure, --workspace and --hardware give the plan more facts from the start. JSON output is one List.

    \b
    Examples:
      finetune render job.yaml
      finetune render job.yaml --launcher pytorchjob -n team-a
      finetune render job.yaml --settings settings.yaml -o json
      finetune render job.yaml | kubectl apply --dry-run=server -f -
    """
    from finetune_operator.cli.commands.steps import checked_jobs, cluster_facts, hardware_of, planned, settings_of
    from finetune_operator.plan.plan import misfits

    limits = settings_of(settings, cluster=True)
    node = hardware_of(hardware, limits)
    manifests: list[Any] = []
    for entry in checked_jobs([*(files or []), *(filename or [])], limits, output):
        if launcher is not None:
            entry = _with_launcher(entry, launcher)
        facts = cluster_facts(entry, node, workspace, measure)
        job_plan = planned(entry, facts, limits, output)
        note_misfits(misfits(entry.job, facts, limits))
        manifests.extend(_rendered(entry, job_plan, namespace, limits, output))
    if output is DocumentOutput.JSON:
        emit([list_of(manifests)], output)
    else:
        emit(manifests, output)


def _with_launcher(entry: JobEntry, launcher: Launcher) -> JobEntry:
    from dataclasses import replace

    spec = entry.job.spec.model_copy(update={"launcher": launcher.value})
    return replace(entry, job=entry.job.model_copy(update={"spec": spec}))


def objects_of(entry: JobEntry, job_plan: JobPlan, settings: Settings, namespace: str | None = None) -> tuple[Any, ...]:
    """Return the job's objects, in `namespace` or in that of its file. Raise PlanRefused."""
    from finetune_operator.jobs.launchers.launcher_registry import render as render_plan
    from finetune_operator.jobs.render.render_types import RenderContext

    place = namespace or entry.job.metadata.namespace or DEFAULT_NAMESPACE
    return render_plan(job_plan, RenderContext(place, entry.job.spec, settings))


def _rendered(
    entry: JobEntry, job_plan: JobPlan, namespace: str | None, settings: Settings, output: DocumentOutput
) -> tuple[Any, ...]:
    from finetune_operator.cli.commands.steps import refuse_plan
    from finetune_operator.plan.types.plan_types import PlanRefused

    written = entry.job.metadata.namespace
    if namespace is not None and written is not None and namespace != written:
        raise UsageError(
            f"--namespace {namespace}: {entry.job.name} has metadata.namespace {written}; change one of them"
        )
    try:
        return objects_of(entry, job_plan, settings, namespace)
    except PlanRefused as refused:
        refuse_plan(entry, refused, output)
