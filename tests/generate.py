"""Writes every generated file anew; the drift tests compare them. Run by `make generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finetune_operator.api.crd import crd_yaml
from finetune_operator.api.docs import api_reference, settings_reference
from finetune_operator.cli.main import COMMANDS, app
from finetune_trainer.training.arguments import known_arguments_json


def command_reference() -> str:
    """What `--help` says of each command."""
    from typer.testing import CliRunner

    runner = CliRunner(env={"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"})
    parts = ["# The `finetune` command\n\nAlso `kubectl finetune`. What `--help` says, command by command.\n"]
    for command in COMMANDS:
        said = runner.invoke(app, [command.__name__, "--help"], prog_name="finetune").output
        text = "\n".join(line.rstrip() for line in said.strip().splitlines())
        parts.append(f"## finetune {command.__name__}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


ROOT = Path(__file__).parents[1]
GENERATED: dict[str, Callable[[], str]] = {
    "manifests/crd/finetune.dev_finetunejobs.yaml": crd_yaml,
    "docs/api.md": api_reference,
    "docs/settings.md": settings_reference,
    "docs/commands.md": command_reference,
    "trainer_image/contract/finetune_contract/training_arguments.json": known_arguments_json,
}


def main() -> None:
    for path, content in GENERATED.items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
