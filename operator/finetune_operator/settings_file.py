"""The administrator's settings, from the one YAML file that the operator and the `finetune` command both read."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from finetune_operator.api.problems import format_path
from finetune_operator.api.settings import Settings
from finetune_operator.documents import read_documents


class SettingsError(Exception):
    """The file cannot be used; `problems` has every reason, each with its file and its line or field."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_settings_file(file: Path) -> Settings:
    """The settings in `file`; those that it leaves out are the defaults. SettingsError."""
    try:
        documents, problems = read_documents(file.read_bytes())
    except OSError as error:
        raise SettingsError((f"cannot read {file}: {error.strerror}",)) from error
    if problems:
        raise SettingsError(tuple(f"{file}:{problem.line}: {problem.rule}" for problem in problems))
    if len(documents) > 1:
        raise SettingsError((f"{file}: one document is expected, and there are {len(documents)}",))
    try:
        # Through JSON: strict models take a list for a tuple only there.
        return Settings.model_validate_json(json.dumps(documents[0].value if documents else {}))
    except ValidationError as error:
        wrong = ((format_path(each["loc"]), _in_words(each["type"], each["msg"])) for each in error.errors())
        raise SettingsError(
            tuple(f"{file}: {path}: {rule}" if path else f"{file}: {rule}" for path, rule in wrong)
        ) from error


def _in_words(kind: str, message: str) -> str:
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "there is no such setting"
        case _:
            return message[:1].lower() + message[1:]
