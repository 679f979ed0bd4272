"""Code of a user's own program, which prepare fetches into the job's folder for every rank.

`code/` appears whole or not at all, and belongs to one commit: a branch that moves during the job does not change the
code of a restarted attempt. An entry point that is missing, or outside the repository through a link, is refused before
any accelerator is taken.
"""

from __future__ import annotations

import difflib
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import COMPLETION_MARKER, FailureClass, JobPaths
from finetune_contract.trainer_job import Script
from finetune_trainer.core.failures import StageError, first_of
from finetune_trainer.core.files import write_synced
from finetune_trainer.scripts.git import fetch

log = logging.getLogger(__name__)

CODE_FILE = "code.json"
REPOSITORY = "repository"
_SHOWN = 8


class Fetched(Message):
    """`code.json`: origin of the files in `repository/`."""

    url: str
    ref: str
    commit: str


@dataclass(frozen=True)
class Program:
    """A fetched program."""

    folder: Path
    """Working directory of the program."""
    file: Path
    commit: str


def fetch_code(script: Script, paths: JobPaths) -> Program:
    """Return the program, fetched if missing. StageError as `git.fetch` and `open_code`."""
    fetched = _fetched(paths)
    if fetched is None or (fetched.url, fetched.ref) != (script.url, script.ref):
        _fetch(script, paths)
    program = open_code(script, paths)
    log.info("%s at %s is commit %s.", script.url, script.ref, program.commit)
    return program


def _fetch(script: Script, paths: JobPaths) -> None:
    partial = paths.code.with_name(f"{paths.code.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / REPOSITORY).mkdir(parents=True)
        commit = fetch(script.url, script.ref, partial / REPOSITORY)
        write_synced(partial / CODE_FILE, Fetched(url=script.url, ref=script.ref, commit=commit).to_json())
        write_synced(partial / COMPLETION_MARKER, "")
        shutil.rmtree(paths.code, ignore_errors=True)
        os.replace(partial, paths.code)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def open_code(script: Script, paths: JobPaths) -> Program:
    """Return the program that prepare fetched. StageError CONFIG `NotPrepared`, `FolderNotFound`, `EntryPointNotFound`,
    `LeadsOut`.
    """
    fetched = _fetched(paths)
    if fetched is None or (fetched.url, fetched.ref) != (script.url, script.ref):
        message = f"{paths.code} does not hold {script.url} at {script.ref}."
        raise StageError(FailureClass.CONFIG, "NotPrepared", message, "Run the stage prepare first.")
    root = paths.code / REPOSITORY
    folder = root / (script.path or ".")
    _stay_inside(folder, root, "training.script.git.path", script.path or ".")
    if not folder.is_dir():
        folders = _there(root, root.rglob("*/"))
        raise _missing("training.script.git.path", "FolderNotFound", script.path or ".", fetched, folders)
    file = folder / script.entry_point
    _stay_inside(file, root, "training.script.entryPoint", script.entry_point)
    if not file.is_file():
        files = _there(folder, folder.rglob("*.py"))
        raise _missing("training.script.entryPoint", "EntryPointNotFound", script.entry_point, fetched, files)
    return Program(folder, file, fetched.commit)


def _fetched(paths: JobPaths) -> Fetched | None:
    """Return the origin of complete code; None if there is none."""
    if not (paths.code / COMPLETION_MARKER).is_file():
        return None
    try:
        return Fetched.model_validate_json((paths.code / CODE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _stay_inside(path: Path, root: Path, field: str, value: str) -> None:
    if path.resolve().is_relative_to(root.resolve()):
        return
    raise StageError(
        FailureClass.CONFIG,
        "LeadsOut",
        f"{field} is {value!r}, which leads out of the repository.",
        "Use a path inside it; links must stay inside, too.",
    )


def _there(root: Path, paths: Iterable[Path]) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in paths if not path.is_symlink() and path != root)


def _missing(field: str, reason: str, value: str, fetched: Fetched, there: list[str]) -> StageError:
    near = difflib.get_close_matches(value, there, n=1)
    return StageError(
        FailureClass.CONFIG,
        reason,
        f"{field} is {value!r}, and commit {fetched.commit} of {fetched.url} does not have it. "
        f"It has {first_of(there, _SHOWN)}.",
        f"Did you mean {near[0]}?" if near else "Use one of them.",
    )
