"""`finetune review`: a change of job files, reviewed before it is merged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_operator.cli.commands.file_commands import objects_of
from finetune_operator.cli.commands.options import ClusterSettings, Filenames, Files, Form, Hardware
from finetune_operator.cli.terminal.console import Output, UsageError, emit, print_error

if TYPE_CHECKING:
    from finetune_contract.facts import HardwareFacts
    from finetune_operator.cli.files.job_files import JobEntry
    from finetune_operator.extras.review.reviewing import Reviewed
    from finetune_operator.spec.settings.settings import Settings


def review(
    files: Files = None,
    filename: Filenames = None,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", metavar="FILE", help="Write the Markdown to this file instead of standard output."),
    ] = None,
    rendered: Annotated[
        Path | None,
        typer.Option("--render", metavar="DIR", help="Write the Kubernetes objects of each job to DIR/NAME.yaml."),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost", min=0, metavar="AMOUNT", help="Reject jobs whose training is expected to cost more."
        ),
    ] = None,
    hardware: Hardware = None,
    settings: ClusterSettings = None,
    output: Form = Output.TEXT,
) -> None:
    """Write a Markdown summary of job files for a code review.

    Validate, plan and render the jobs as the operator does.

    The command needs no cluster, model, data or network: a step of any CI can run it in the operator's image.
    Exit code 0 if all jobs pass, 1 if not; the summary is written in both cases.

    \b
    Examples:
      finetune review jobs/
      finetune review jobs/ --settings settings.yaml --max-cost 200 --summary review.md
      finetune review jobs/ --hardware gpu=H100,memory=80Gi,gpus=8 --render rendered/
      finetune review jobs/*.yaml -o json
    """
    from finetune_operator.cli.commands.steps import hardware_of, print_notes, settings_of
    from finetune_operator.cli.files.job_files import read_inputs
    from finetune_operator.extras.review.reviewing import Review, markdown

    limits = settings_of(settings, cluster=True)
    node = hardware_of(hardware, limits)
    inputs = read_inputs([*(files or []), *(filename or [])], limits)
    print_notes(inputs)
    jobs = tuple(_reviewed(entry, node, limits, rendered, max_cost) for entry in inputs.entries)
    result = Review(jobs, tuple(inputs.problems))
    if output is not Output.TEXT:
        emit([result.data()], output)
    if summary is not None:
        _write(summary, markdown(result), "--summary")
    elif output is Output.TEXT:
        print(markdown(result), end="")
    if not result.passes:
        if summary is not None:
            print_error(f"these jobs do not pass the review: see {summary}.")
        raise typer.Exit(1)


def _reviewed(
    entry: JobEntry, node: HardwareFacts | None, limits: Settings, rendered: Path | None, max_cost: float | None
) -> Reviewed:
    """Plan a job, and write its objects to the folder `rendered`."""
    from finetune_operator.cli.commands.steps import cluster_facts
    from finetune_operator.cli.files.job_files import located
    from finetune_operator.cli.terminal.yaml_text import documents
    from finetune_operator.extras.review.reviewing import Reviewed, over_budget
    from finetune_operator.plan.plan import plan
    from finetune_operator.plan.types.plan_types import PlanRefused

    try:
        job_plan = plan(entry.job, cluster_facts(entry, node, None, False), limits)
        if rendered is not None:
            text = documents(objects_of(entry, job_plan, limits))
            _write(rendered / f"{entry.job.name}.yaml", text, "--render")
    except PlanRefused as refused:
        return Reviewed(entry, None, tuple(located(entry.document, one) for one in refused.problems))
    return Reviewed(entry, job_plan, budget_problem=over_budget(job_plan, max_cost))


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written: {error.strerror or error}") from error
