"""`finetune explain`, `crd`, `schema` and `completion`: the API and the command itself as documents."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from finetune_operator.cli.commands.options import DocumentForm, Form
from finetune_operator.cli.program_name import COMPLETE_VARIABLE
from finetune_operator.cli.terminal.console import DocumentOutput, Output, UsageError, emit


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
    from finetune_operator.spec.schema.crd import crd_yaml

    text = crd_yaml()
    if output is DocumentOutput.YAML:
        print(text, end="")
    else:
        import yaml

        emit([yaml.safe_load(text)], output)


def schema(output: DocumentForm = DocumentOutput.JSON) -> None:
    """Write the JSON schema of FineTuneJob.

    Editors use it to complete and check job files.

    \b
    Examples:
      finetune schema > finetunejob.schema.json
      (then start a job file with: # yaml-language-server: $schema=finetunejob.schema.json)
    """
    from finetune_operator.spec.schema.crd import json_schema

    emit([json_schema()], output)


def fields_like(incomplete: str) -> list[str]:
    """Return a shell's completions of FIELD: the fields of the object that is typed so far."""
    from finetune_operator.spec.schema.explain import NoSuchFieldError, find_field

    above = incomplete.rpartition(".")[0]
    try:
        parent = find_field(above or "spec")
    except NoSuchFieldError:
        return []
    names = [f"{above}.{field.name}" if above else field.name for field in parent.fields]
    return [name for name in (names if above else [*names, "spec", "status"]) if name.startswith(incomplete)]


def explain(
    field: Annotated[
        str | None,
        typer.Argument(metavar="FIELD", help="Path of a field, with or without spec.", autocompletion=fields_like),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", help="List all nested fields, without descriptions.")
    ] = False,
    output: Form = Output.TEXT,
) -> None:
    """Explain a field of FineTuneJob: type, meaning, nested fields.

    The output is that of `kubectl explain` in a cluster with this version's CRD; only the types of the objects
    `arguments` and `deepspeedConfig`, whose fields are free, are shorter.

    \b
    Examples:
      finetune explain
      finetune explain training.globalBatchSize
      finetune explain spec.resources --recursive
      finetune explain status.stages -o json
    """
    from finetune_operator.spec.schema.explain import NoSuchFieldError, as_text, find_field

    try:
        definition = find_field(field or "")
    except NoSuchFieldError as unknown:
        raise UsageError(str(unknown)) from unknown
    if output is Output.TEXT:
        print(as_text(definition, recursive=recursive), end="")
    else:
        emit([definition.data(recursive=recursive)], output)


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")]) -> None:
    """Write a shell completion script.

    The script completes commands, options and names of jobs.

    \b
    Examples:
      source <(finetune completion bash)
      finetune completion zsh > "${fpath[1]}/_finetune"
      finetune completion fish > ~/.config/fish/completions/finetune.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # documented, and not listed

    print(get_completion_script(prog_name="finetune", complete_var=COMPLETE_VARIABLE, shell=shell.value))
