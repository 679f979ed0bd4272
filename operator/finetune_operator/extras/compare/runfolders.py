"""Read the folder of a run on this machine, finished or not.

Nothing here fails because of a folder's content: a file that is missing, cut off or malformed is reported as a problem
of the run, and the other files count. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_operator.cli.local.workspace import FAILURE_FILE, LOCAL_STAGES, finished
from finetune_operator.spec.redaction import Redactor
from finetune_operator.spec.types import FailureStatus

NO_SETTINGS = ("schemaVersion", "name", "run")
"""Fields of job.json that differ between any two runs and change nothing."""


class NoRunError(Exception):
    """Error of a folder without a run, or of no folder at all."""


@dataclass(frozen=True)
class Run:
    """A run, read from its folder."""

    name: str
    """Name that distinguishes it from the other runs."""
    folder: Path
    job: Mapping[str, Any]
    """job.json, or its record in plan.json; empty if neither can be read."""
    plan: Mapping[str, Any]
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    seconds: Mapping[Stage, float]
    """Duration of the stages that have succeeded."""
    state: str
    """`finished`, or the last progress."""
    problems: tuple[str, ...]
    """Unreadable files, and the reasons."""

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of metrics.json; empty if it does not exist."""
        section = self.metrics.get(name)
        return section if isinstance(section, Mapping) else {}


def find_runs(named: Sequence[str], workspace: Path) -> list[Run]:
    """Return the runs by folder or by name of a job in `workspace`; raise NoRunError for the first that is none."""
    folders = [_folder(name, workspace) for name in named]
    names = [folder.name for folder in folders]
    return [
        read_run(folder, folder.name if names.count(folder.name) == 1 else str(given).rstrip("/"))
        for folder, given in zip(folders, named, strict=True)
    ]


def _folder(named: str, workspace: Path) -> Path:
    direct, in_workspace = Path(named), workspace / named
    for folder in (direct, in_workspace):
        if _is_run(folder):
            return folder.resolve()
    if direct.is_dir():
        inside = _runs_in(direct)
        hint = f"it contains the runs {', '.join(inside)}: name those" if inside else "name a folder DIR/JOB"
        raise NoRunError(f"{named} is not the folder of a run (it has no job.json, plan.json or metrics.json); {hint}.")
    known = _runs_in(workspace)
    listed = f"which has {', '.join(known)}" if known else "which has none"
    raise NoRunError(f"{named} is neither a folder nor a run in --workspace {workspace}, {listed}.")


def _is_run(folder: Path) -> bool:
    paths = JobPaths(folder)
    return any(file.is_file() for file in (paths.job, paths.plan, paths.metrics))


_NAMED = 8
"""Maximum runs in a message."""


def _runs_in(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _is_run(entry))
    except OSError:
        return []
    return names if len(names) <= _NAMED else [*names[:_NAMED], f"{len(names) - _NAMED} more"]


# ------------------------------------------------------------------------------------------------------------- reading


def read_run(folder: Path, name: str) -> Run:
    """Read everything that can be read, without secrets."""
    paths, problems = JobPaths(folder), list[str]()
    job, plan = _read(paths.job, problems, needed=True), _read(paths.plan, problems)
    redactor = Redactor()
    for document in (job, plan):
        redactor.learn(document)
    job = job or plan.get("trainer") or {}
    seconds = {stage: report.seconds for stage in LOCAL_STAGES if (report := finished(paths, stage)) is not None}
    history = _read_history(paths.history, problems)
    return Run(
        name=name,
        folder=folder,
        job=redactor.value(job) if isinstance(job, Mapping) else {},
        plan=redactor.value(plan),
        metrics=_read(paths.metrics, problems),
        environment=_read(paths.environment, problems),
        history=history,
        seconds=seconds,
        state=_state(paths, job, seconds, history),
        problems=tuple(problems),
    )


def _read(path: Path, problems: list[str], *, needed: bool = False) -> dict[str, Any]:
    """Return a JSON object; if it cannot be read, an empty one, and the reason among the problems."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if needed:
            problems.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return content


def _read_history(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the whole lines; a last line cut off by an interruption is no problem."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return []
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            if number < len(texts):
                problems.append(f"{path.name}: line {number} is not a JSON object; only the lines before it are read")
            break
        lines.append(line)
    return lines


def _state(
    paths: JobPaths, job: Mapping[str, Any], seconds: Mapping[Stage, float], history: Sequence[Mapping[str, Any]]
) -> str:
    missing = [stage for stage in _stages(job) if stage not in seconds]
    if job and not missing:
        return "finished"
    failure = _failure(paths)
    if failure is not None:
        return f"failed: {failure.failure_class} in {failure.stage or 'an unknown stage'}"
    at = max((line["step"] for line in history if isinstance(line.get("step"), int)), default=None)
    if Stage.TRAIN in missing and at is not None:
        training = job.get("training")
        steps = training.get("maxSteps") if isinstance(training, Mapping) else None
        return f"unfinished: train at step {at}" + (f" of {steps}" if steps else "")
    if not missing:
        return "unknown"
    return f"unfinished: {missing[0]} has not ended" if seconds else "unfinished: no stage has ended"


def _failure(paths: JobPaths) -> FailureStatus | None:
    try:
        return FailureStatus.model_validate_json((paths.root / FAILURE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _stages(job: Mapping[str, Any]) -> list[Stage]:
    """Return the stages that a job has settings for."""
    settings_of = {
        Stage.PREPARE: True,
        Stage.TRAIN: job.get("training") or job.get("script"),
        Stage.EVALUATE: job.get("evaluation"),
        Stage.PREDICT: job.get("predict"),
    }
    return [stage for stage, settings in settings_of.items() if settings]
