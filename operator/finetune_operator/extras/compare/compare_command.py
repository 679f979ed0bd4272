"""`finetune compare`: runs of this machine side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.cli.commands.options import Form, Workspace
from finetune_operator.cli.terminal.console import Output, UsageError, emit, note, out


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Folders of runs, or jobs of the workspace; two or more."),
    ],
    workspace: Workspace = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="Also show settings that are equal in all runs.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write an HTML page with the tables and curves of all runs."),
    ] = None,
    output: Form = Output.TEXT,
) -> None:
    """Compare runs on this machine: settings, metrics, time, cost.

    Show the settings that differ, beside throughput and memory. The best value of a row is marked if the better
    direction is known. Runs that are unfinished, have failed or lack a file are compared as far as possible, with
    notes on the missing parts.

    \b
    Examples:
      finetune compare baseline lora
      finetune compare runs/baseline runs/baseline.previous-1 --all
      finetune compare baseline lora --html comparison.html
      finetune compare baseline lora -o json
    """
    from finetune_operator.cli.local.local_files import write_atomically
    from finetune_operator.extras.compare import comparing
    from finetune_operator.extras.compare.runfolders import NoRunError, find_runs

    try:
        selected = find_runs(runs, workspace)
    except NoRunError as error:
        raise UsageError(str(error)) from error
    if len({run.folder for run in selected}) < max(2, len(selected)):
        raise UsageError("name two or more different runs, such as: finetune compare runs/first runs/second")
    comparison = comparing.compare(selected)
    if html is not None:
        try:
            write_atomically(html, comparing.page(comparison, every=every))
        except OSError as error:
            raise UsageError(f"--html {html}: cannot be written: {error.strerror}") from error
    for text in comparison.notes:
        note(text)
    if output is Output.TEXT:
        comparing.print_comparison(out(), comparison, every=every)
    else:
        emit([comparison.data(every=every)], output)
