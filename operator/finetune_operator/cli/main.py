"""The `finetune` command, also `kubectl finetune`: what can be typed, and which module answers.

Exit codes: 0; 1 when a job is refused or fails; 2 for a call that is wrong; 124 when a time is over; 128 + signal when
interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import version as distribution_version
from inspect import getdoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from finetune_operator.cli.commands.cluster import logs, status, watch
from finetune_operator.cli.commands.compare import compare
from finetune_operator.cli.commands.documents import COMPLETE_VARIABLE, completion, crd, schema
from finetune_operator.cli.commands.files import plan, render, validate
from finetune_operator.cli.commands.installation import images
from finetune_operator.cli.commands.local import run
from finetune_operator.cli.commands.review import review
from finetune_operator.cli.commands.steering import cancel, cost, debug, restart, resume, suspend, wait
from finetune_operator.cli.commands.ui import ui
from finetune_operator.cli.console import program_name


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
COMMANDS = (
    validate, plan, render, review, run, compare, ui,
    status, logs, watch, wait, suspend, resume, restart, cancel, cost, debug,
    images, crd, schema, completion,
)  # fmt: skip
for _command in COMMANDS:
    app.command()(_command)


def main() -> NoReturn:
    """The console script."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.help = (getdoc(command.callback) or "").replace("  finetune ", f"  {program_name()} ")
    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # the classes that answer a shell

        completion_init()
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
