"""`finetune crd`, `schema` and `completion`: the API and the command itself as documents."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from finetune_operator.cli.commands.options import DocumentForm
from finetune_operator.cli.console import DocumentOutput, emit
from finetune_operator.cli.program import COMPLETE_VARIABLE


class Shell(StrEnum):
    """Shells that a script for completion can be written for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


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


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")]) -> None:
    """Write a script that completes what is typed in a shell.

    Commands, options and names of jobs.

    \b
    Examples:
      source <(finetune completion bash)
      finetune completion zsh > "${fpath[1]}/_finetune"
      finetune completion fish > ~/.config/fish/completions/finetune.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # documented, and not listed

    print(get_completion_script(prog_name="finetune", complete_var=COMPLETE_VARIABLE, shell=shell.value))
