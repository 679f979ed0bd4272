"""`finetune crd` and `finetune schema`: the API itself as documents."""

from __future__ import annotations

from finetune_operator.cli.commands.options import DocumentForm
from finetune_operator.cli.console import DocumentOutput, emit


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
