"""The administrator's settings, from the one YAML file that the operator and the `finetune` command both read."""

from __future__ import annotations

from pathlib import Path

from finetune_operator.documents import read_documents
from finetune_operator.documents.input_file import UnreadableFileError, read_input
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import Settings


class SettingsError(Exception):
    """Error of a file that cannot be used; `problems` has every reason, each with its file and its line or field."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_settings_file(file: Path) -> Settings:
    """Return the settings in `file`; those that it leaves out are the defaults. SettingsError."""
    try:
        documents, problems = read_documents(read_input(file))
    except UnreadableFileError as error:
        raise SettingsError((str(error),)) from error
    if problems:
        raise SettingsError(tuple(f"{file}:{problem.line}: {problem.rule}" for problem in problems))
    if len(documents) > 1:
        raise SettingsError((f"{file}: must have one document, not {len(documents)}",))
    settings, setting_problems = check_settings(documents[0].value if documents else None)
    if settings is None:
        raise SettingsError(tuple(_format_problem(file, problem) for problem in setting_problems))
    return settings


def _format_problem(file: Path, problem: Problem) -> str:
    where = " ".join(part for part in (problem.path, problem.value) if part)
    return f"{file}: {where}: {problem.rule}; {problem.hint}"
