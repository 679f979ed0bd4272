"""Folders of LoRA adapters for `finetune serve`: their base model, their task, and their names in requests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_contract.choices import ADAPTER_NAME_PATTERN
from finetune_contract.hub import is_hub_name
from finetune_contract.layout import ADAPTER_CARD
from finetune_operator.cli.terminal.console import UsageError

_CONFIG = "adapter_config.json"
_TASKS = {
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "CAUSAL_LM": "text-generation",
}
"""Type in peft's config -> task. A model of SEQ_2_SEQ_LM may summarise or translate."""


@dataclass(frozen=True)
class AdapterFolder:
    """A folder as peft writes it."""

    folder: Path
    name: str
    """Name in requests."""
    config: dict[str, Any]

    @property
    def uri(self) -> str:
        """URI of the folder."""
        return f"file://{self.folder}"

    @property
    def task(self) -> str | None:
        """Task that it was trained for; None: unknown."""
        card = _json(self.folder / ADAPTER_CARD) if (self.folder / ADAPTER_CARD).is_file() else {}
        task = card.get("task") or _TASKS.get(str(self.config.get("task_type")))
        return None if task is None else str(task)

    def base(self) -> dict[str, Any]:
        """Return the source of its base model: that of the run beside it, else the one that it names.

        UsageError if that is neither a folder on this machine nor a name on the Hub.
        """
        run = self.folder.parent / "job.json"
        if run.is_file() and isinstance(source := _json(run).get("model"), dict) and "uri" in source:
            return source
        name = str(self.config.get("base_model_name_or_path") or "")
        for place in (Path(name).expanduser(), self.folder / name, self.folder.parent / name):
            if name and (place / "config.json").is_file():
                return {"uri": f"file://{place.resolve()}"}
        if is_hub_name(name):
            return {"uri": f"hf://{name}", "revision": str(self.config.get("revision") or "main")}
        raise UsageError(f"MODEL: {self.folder} is an adapter, and its base {name!r} is not here; name it with --base")


def is_adapter(text: str) -> bool:
    """Return True if `text` is the path of a folder with an adapter and without a model."""
    folder = Path(text).expanduser()
    return "://" not in text and (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def adapter_folder(text: str, name: str | None = None) -> AdapterFolder:
    """Read a folder; a run's folder stands for its `adapter`. `name`: name in requests, by default that of the folder
    or of its run. UsageError for a folder without an adapter.
    """
    given = Path(text.removeprefix("file://")).expanduser().resolve()
    folder = next((place for place in (given, given / "adapter") if (place / _CONFIG).is_file()), None)
    if folder is None:
        reason = f"has no {_CONFIG}" if given.is_dir() else "does not exist"
        raise UsageError(f"--adapter: {text} {reason}; name the folder of an adapter, such as adapter/ of a run")
    named = folder.parent if folder.name == "adapter" else folder
    usual = re.sub(r"[^A-Za-z0-9._-]+", "-", named.name)[:63].strip("-._") or "adapter"
    return AdapterFolder(folder, name or usual, _json(folder / _CONFIG))


def named_adapters(given: Sequence[str]) -> list[AdapterFolder]:
    """Read the values of --adapter, each NAME=FOLDER."""
    adapters = []
    for text in given:
        name, mark, folder = text.partition("=")
        if not mark or not folder or re.fullmatch(ADAPTER_NAME_PATTERN, name) is None:
            raise UsageError(f"--adapter: {text!r} must be NAME=FOLDER, with a NAME of letters, digits, -, _ and .")
        adapters.append(adapter_folder(folder, name))
    return adapters


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"MODEL: {file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
