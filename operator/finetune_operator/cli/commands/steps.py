"""Steps that several commands share: settings, checked jobs, facts, a plan, and the exit after a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from finetune_operator.cli.files.job_files import Inputs, JobEntry, absent_inputs, located, read_inputs, read_settings
from finetune_operator.cli.terminal.console import DocumentOutput, Output, UsageError, emit, note, problem_data, report
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings

if TYPE_CHECKING:
    from finetune_contract.facts import DataFacts, HardwareFacts
    from finetune_operator.plan.hardware.gpu_nodes import Node
    from finetune_operator.plan.types.plan_types import Facts, JobPlan, NodesFacts, PlanRefused
    from finetune_operator.spec.problems import Problem


def settings_of(file: Path | None, *, cluster: bool) -> Settings:
    """Return the administrator's settings; without a file, the defaults of the operator or of a local run."""
    if file is not None:
        return read_settings(file)
    return CLUSTER_SETTINGS if cluster else LOCAL_SETTINGS


def hardware_of(
    text: str | None, settings: Settings = LOCAL_SETTINGS, option: str = "--hardware"
) -> HardwareFacts | None:
    """Return the node that an option describes."""
    if text is None:
        return None
    from finetune_operator.plan.hardware.assumed_hardware import HardwareError, parse_hardware

    try:
        return parse_hardware(text, settings.hardware)
    except HardwareError as error:
        raise UsageError(f"{option}: {error}") from error


def print_notes(inputs: Inputs) -> None:
    """Print notes on documents that were ignored, and on accepted jobs."""
    for text in inputs.notes:
        note(text)


def checked_jobs(names: Sequence[str], settings: Settings, output: Output | DocumentOutput) -> tuple[JobEntry, ...]:
    """Return the checked jobs; exit with 1 if anything in the files is refused."""
    inputs = read_inputs(names, settings)
    print_notes(inputs)
    if inputs.problems:
        refuse(inputs.problems, output)
    return inputs.entries


def refuse(problems: Sequence[tuple[str, Problem]], output: Output | DocumentOutput) -> NoReturn:
    """Exit with 1: print the problems, and write them as data if the result would have been data.

    Nothing is written in place of Kubernetes objects, as their reader would take the problems for one.
    """
    report(problems)
    if isinstance(output, Output) and output is not Output.TEXT:
        emit([{"problems": [problem_data(source, problem) for source, problem in problems]}], output)
    raise typer.Exit(1)


def refuse_absent(entries: Sequence[JobEntry], output: Output | DocumentOutput) -> None:
    """Exit with 1 if a model or data that a job names on this machine does not exist."""
    problems = [(entry.source, problem) for entry in entries for problem in absent_inputs(entry)]
    if problems:
        refuse(problems, output)


def refuse_plan(entry: JobEntry, refused: PlanRefused, output: Output | DocumentOutput) -> NoReturn:
    """Exit with 1 after printing the plan's problems, with the lines of their fields."""
    refuse([(entry.source, located(entry.document, problem)) for problem in refused.problems], output)


def local_facts(entry: JobEntry, node: HardwareFacts | None, workspace: Path, measure_model: bool) -> Facts:
    """Return the facts for a plan without a cluster: measured here, prepared earlier, or given with --hardware."""
    from finetune_operator.cli.local.measure import Measured, free_part, measure, own_hardware
    from finetune_operator.plan.types.plan_types import Facts

    measured = measure(entry.job) if measure_model else Measured(None, own_hardware())
    return Facts(
        model=measured.model,
        data=_earlier_data(entry, workspace),
        hardware=free_part(measured.hardware) if node is None else node,
        local=node is None and entry.job.spec.resources.nodes == 1,
    )


def cluster_facts(
    entry: JobEntry,
    node: HardwareFacts | None,
    workspace: Path | None,
    measure_model: bool,
    nodes: NodesFacts | None = None,
) -> Facts:
    """Return the facts of the operator before the first stage, which come from the job alone, and those of the options.

    The cluster's operators are unknown here: those that the job names are assumed to be installed.
    """
    from finetune_operator.cli.local.measure import measure
    from finetune_operator.plan.types.plan_types import Facts
    from finetune_operator.spec.launcher_rows import SUPPORTED

    spec = entry.job.spec
    engines = {spec.preparation.engine, *([] if spec.predict is None else [spec.predict.engine])}
    requested = [
        launcher.name for launcher in SUPPORTED if launcher.name == spec.launcher or launcher.engine in engines
    ]
    facts = Facts(
        model=measure(entry.job, "Connect, or omit --measure").model if measure_model else None,
        data=None if workspace is None else _earlier_data(entry, workspace),
        hardware=node,
        nodes=nodes,
        served=tuple(dict.fromkeys([*Facts().served, *requested])),
        kserve=spec.endpoint is not None and spec.endpoint.runtime == "kserve",
        custom_metrics=spec.endpoint is not None and spec.endpoint.target_requests_in_flight is not None,
        http_routes=spec.endpoint is not None and spec.endpoint.traffic is not None,
        http_scaled_objects=spec.endpoint is not None and spec.endpoint.idle is not None,
    )
    given = [name for name in ("model", "data", "hardware") if getattr(facts, name) is not None]
    if given:
        note(
            f"{entry.job.name} is planned with facts about its {' and '.join(given)} that the operator does not have "
            "before prepare, so the operator's first plan may differ."
        )
    return facts


def cluster_nodes(kubeconfig: Path | None, context: str | None) -> tuple[Node, ...]:
    """Return the cluster's nodes, as the operator reads them; exit with 1 if they cannot be read."""
    from finetune_operator.cli.cluster.cluster_jobs import Cluster, Connection
    from finetune_operator.cli.commands.cluster_commands import in_cluster
    from finetune_operator.kubernetes_api.resources import NODE
    from finetune_operator.plan.hardware.gpu_nodes import read_node

    async def listed(cluster: Cluster) -> tuple[Node, ...]:
        return tuple(map(read_node, await cluster.listed(NODE)))

    return in_cluster(Connection(kubeconfig, context), listed)


def _earlier_data(entry: JobEntry, workspace: Path) -> DataFacts | None:
    from finetune_contract.layout import JobPaths
    from finetune_operator.cli.local.workspace import prepared_facts

    return prepared_facts(JobPaths.of(workspace.resolve(), entry.job.name), entry.job)


def planned(
    entry: JobEntry, facts: Facts, settings: Settings, output: Output | DocumentOutput, *, as_known: bool = False
) -> JobPlan:
    """Return the job's plan; exit with 1 if it is refused. `as_known`: also refuse a job that does not fit by the known
    facts, although prepare may find that it does.
    """
    from finetune_operator.plan.plan import plan
    from finetune_operator.plan.types.plan_types import PlanRefused

    try:
        return plan(entry.job, facts, settings, as_known=as_known)
    except PlanRefused as refused:
        refuse_plan(entry, refused, output)
