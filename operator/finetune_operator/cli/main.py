"""The `finetune` command, also `kubectl finetune`: its subcommands and their modules.

Exit codes: 0; 1 when a job is refused or fails; 2 for a wrong call; 124 at a timeout; 128 + signal when interrupted.

A module is imported when its command is called: a list of the commands or shell completion should appear at once.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from finetune_operator.cli.program_name import COMPLETE_VARIABLE, program_name


class _Listed(NamedTuple):
    """Module of a command, and the first line of its help."""

    module: str
    """Its name in `cli.commands`; with a folder: in `extras`."""
    summary: str


COMMANDS = {
    "validate": _Listed("file_commands", "Check job files, without model or data."),
    "plan": _Listed("file_commands", "Show a job's plan, with a reason for each decision."),
    "render": _Listed("file_commands", "Write the Kubernetes objects of a job."),
    "review": _Listed("review.review_command", "Write a Markdown summary of job files for a code review."),
    "run": _Listed("run_command", "Run a job on this machine: prepare, train, evaluate, predict."),
    "predict": _Listed("predict_command", "Predict with a model on this machine."),
    "serve": _Listed("serve_command", "Serve a model on this machine over HTTP."),
    "compare": _Listed("compare.compare_command", "Compare runs on this machine: settings, metrics, time, cost."),
    "ui": _Listed("ui.ui_command", "Show runs and jobs in a browser."),
    "status": _Listed("cluster_commands", "Show the status of a job in a cluster, or a table of all jobs."),
    "logs": _Listed("cluster_commands", "Show the logs of all pods of a stage."),
    "watch": _Listed("cluster_commands", "Watch a job until it ends."),
    "wait": _Listed("steering_commands", "Wait until jobs reach a state."),
    "suspend": _Listed("steering_commands", "Save a checkpoint and stop jobs until they are resumed."),
    "resume": _Listed("steering_commands", "Resume suspended jobs from their last checkpoint."),
    "restart": _Listed("steering_commands", "Restart jobs from their last checkpoint; run ended jobs again."),
    "cancel": _Listed("steering_commands", "Cancel jobs by deleting them."),
    "rollback": _Listed("rollback_command", "Roll a job's endpoint back to an earlier revision."),
    "prune": _Listed("prune_command", "List the claims of deleted jobs, or delete them with --yes."),
    "cost": _Listed("steering_commands", "Show the resource usage and cost of jobs."),
    "debug": _Listed("steering_commands", "Collect diagnostics of a job in an archive."),
    "doctor": _Listed("doctor_command", "Check whether a cluster is ready for jobs."),
    "images": _Listed("installation", "List every image that an installation and its jobs can pull."),
    "explain": _Listed("documents", "Explain a field of FineTuneJob: type, meaning, nested fields."),
    "crd": _Listed("documents", "Write the CustomResourceDefinition of FineTuneJob."),
    "schema": _Listed("documents", "Write the JSON schema of FineTuneJob."),
    "completion": _Listed("documents", "Write a shell completion script."),
}


def load(name: str) -> Any:
    """Return the command `name` of COMMANDS, as an object of the library that parses the command line."""
    listed = COMMANDS[name].module
    callback = getattr(
        import_module(f"finetune_operator.{'extras' if '.' in listed else 'cli.commands'}.{listed}"), name
    )
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name, help=(getdoc(callback) or "").replace("  finetune ", f"  {program_name()} "))(callback)
    return typer.main.get_command(single)


class _Commands(TyperGroup):
    """All commands; reports a wrong option value without the wording of the library that checked it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=listed.summary) for name, listed in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the named command; return it with its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(command.name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the named command."""
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


def main() -> NoReturn:
    """Run the console script."""
    if sys.getfilesystemencoding() != "utf-8":
        from finetune_contract.utf8_mode import utf8_command

        if (command := utf8_command()) is not None:
            # Processes that this one starts inherit the mode.
            os.execve(command[0], command, {**os.environ, "PYTHONUTF8": "1"})
    gc.set_threshold(100_000)  # imports create objects, not garbage: with Python's 700, collections take 7 % of a start
    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # the classes that answer a shell

        completion_init()
    try:
        app(prog_name=program_name())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        gc.freeze()  # at its exit Python would collect once more over everything imported, a sixth of a short command
    sys.exit(0)


def _show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"finetune {version('finetune-operator')}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tune Hugging Face models from one FineTuneJob file, on this machine or in a cluster."""
