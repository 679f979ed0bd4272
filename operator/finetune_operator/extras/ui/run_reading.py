"""Read one run's folder for a page: its files may be missing, incomplete, or written at this moment."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_contract.report import Progress, TrainerReport
from finetune_operator.cli.local.workspace import FAILURE_FILE, LOCAL_STAGES
from finetune_operator.cli.terminal.display import latest
from finetune_operator.extras.ui.reading import Content, UnreadableError, read, stamp
from finetune_operator.spec.json_text import loads
from finetune_operator.spec.kubernetes_objects import Raw
from finetune_operator.spec.types import FailureStatus

RunState: TypeAlias = Literal["running", "succeeded", "failed", "interrupted", "not started", "damaged", "set aside"]
DOCUMENT_BYTES = 4 << 20
HISTORY_BYTES = 64 << 20
"""Maximum bytes of a history, about 200,000 steps; of a longer one the last are shown."""
HISTORY_LINES = 3000
"""Maximum lines read of a history, at equal distances: a curve has about half as many points."""
PROGRESS_BYTES = 16 << 10
MOST_FIGURES = 40
"""Maximum figures of a history: the trainer writes about ten, and those of the task's metrics."""
_EARLIER_RUN = re.compile(r"\.previous-\d+\Z")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class _Gate(Raw):
    """Metric that a job has to reach."""

    metric: str
    minimum: float | None = None
    maximum: float | None = None


class _Evaluation(Raw):
    gate: _Gate | None = None


class _Uri(Raw):
    uri: str = ""


class _Trainer(Raw):
    task: str = ""
    model: _Uri = _Uri()
    dataset: _Uri | None = None
    evaluation: _Evaluation | None = None


class _PlanGlance(Raw):
    """Fields of a plan for the list. They can also be read of a plan of another version, which may be no JobPlan."""

    stages: tuple[str, ...] = ()
    strategy: str = ""
    trainer: _Trainer = _Trainer()


@dataclass(frozen=True)
class Gate:
    """Gate of the job, and its result."""

    text: str
    met: bool | None
    """True if the gate was met; None: not measured yet."""


@dataclass(frozen=True)
class StageRow:
    """A stage of a run."""

    name: str
    state: Literal["done", "running", "failed", "stopped", "waiting"]
    seconds: float | None


@dataclass(frozen=True)
class Metric:
    """A measured value, and that of the best answer that ignores the rows."""

    name: str
    value: float
    majority: float | None = None


@dataclass(frozen=True)
class Run:
    """A folder of the workspace."""

    name: str
    state: RunState
    task: str
    model: str
    dataset: str
    strategy: str
    stages: tuple[StageRow, ...]
    stage: str | None
    """Stage that is running, failed or was stopped."""
    progress: Progress | None
    """Progress of that stage."""
    metrics: tuple[Metric, ...]
    gate: Gate | None
    started: datetime | None
    stage_started: datetime | None
    seconds: float | None
    """Duration of all stages that have ended."""
    failure: FailureStatus | None
    has_report: bool
    problems: tuple[str, ...] = ()


def read_run(root: Path, name: str, running: bool) -> Run:
    problems: list[str] = []
    glance = _glance(root, problems)
    finished = {stage: report for stage in LOCAL_STAGES if (report := _finished(root, stage, problems)) is not None}
    started_stages = [stage for stage in LOCAL_STAGES if stamp(root, "logs", f"{stage}.log")]
    planned = [stage for stage in LOCAL_STAGES if stage in glance.stages] or [
        stage for stage in LOCAL_STAGES if stage in finished or stage in started_stages
    ]
    failure, metrics = _failure(root, problems), _metrics(root, problems)
    open_stages = [stage for stage in planned if stage not in finished]
    current = _current(root, open_stages, failure)
    state: RunState
    if _EARLIER_RUN.search(name):
        state = "set aside"
    elif running:
        state = "running"
    elif failure is not None:
        state = "failed"
    elif planned and not open_stages:
        state = "succeeded"
    elif started_stages or finished:
        state = "interrupted"
    else:
        state = "not started" if planned else "damaged"
    if state in ("succeeded", "not started"):
        current = None
    firsts = [moment for stage in planned if (moment := _began(root, stage)) is not None]
    return Run(
        name=name,
        state=state,
        task=glance.trainer.task,
        model=glance.trainer.model.uri,
        dataset=glance.trainer.dataset.uri if glance.trainer.dataset else "",
        strategy=glance.strategy,
        stages=tuple(
            StageRow(
                stage.value,
                _stage_state(stage in finished, stage is current, stage in started_stages, state),
                finished[stage].seconds if stage in finished else None,
            )
            for stage in planned
        ),
        stage=current.value if current else None,
        progress=_progress(root, current) if current else None,
        metrics=metrics,
        gate=_gate(glance, metrics),
        started=min(firsts, default=None),
        stage_started=_began(root, current) if current else None,
        seconds=sum(report.seconds for report in finished.values()) if finished else None,
        failure=failure,
        has_report=stamp(root, "report.html") is not None,
        problems=tuple(problems),
    )


def _current(root: Path, open_stages: Sequence[Stage], failure: FailureStatus | None) -> Stage | None:
    """Return, of the stages that are not done, the failed one, else the last to write, else the first."""
    named = [stage for stage in open_stages if failure is not None and stage == failure.stage]
    written = [(log_stamp[2], stage) for stage in open_stages if (log_stamp := stamp(root, "logs", f"{stage}.log"))]
    return named[0] if named else max(written)[1] if written else next(iter(open_stages), None)


def _stage_state(
    done: bool, current: bool, started_stages: bool, run: RunState
) -> Literal["done", "running", "failed", "stopped", "waiting"]:
    if done:
        return "done"
    if current and run == "running":
        return "running"
    if current and run == "failed":
        return "failed"
    return "stopped" if started_stages else "waiting"


def json_of(root: Path, name: str, problems: list[str]) -> JsonValue:
    """Return a document; None if it cannot be read, with a problem unless it is missing."""
    try:
        content = read(root, *name.split("/"), limit=DOCUMENT_BYTES)
        if content is None:
            return None
        if content.cut:
            raise UnreadableError(f"{name} is larger than {DOCUMENT_BYTES >> 20} MiB")
        return loads(content.data)
    except UnreadableError as error:
        problems.append(str(error))
    except (ValueError, RecursionError):
        problems.append(f"{name} is damaged: it is not JSON")
    return None


def object_of(root: Path, name: str, problems: list[str]) -> dict[str, Any]:
    """Return an object whose numbers are usable in arithmetic; empty if it cannot be read."""
    value = json_of(root, name, problems)
    return {key: _finite(one) for key, one in value.items()} if isinstance(value, dict) else {}


def _finite(value: JsonValue) -> JsonValue:
    match value:
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list():
            return [_finite(one) for one in value]
        case int() | float() if not isinstance(value, bool) and _number(value) is None:
            return None
        case _:
            return value


def _glance(root: Path, problems: list[str]) -> _PlanGlance:
    value = json_of(root, "plan.json", problems)
    if value is None:
        return _PlanGlance()
    try:
        return _PlanGlance.model_validate(value)
    except ValidationError:
        problems.append("plan.json is damaged or of another version of finetune")
        return _PlanGlance()


def _finished(root: Path, stage: Stage, problems: list[str]) -> TrainerReport | None:
    name = f"state/{stage}.json"
    value = json_of(root, name, problems)
    if value is None:
        return None
    try:
        report = TrainerReport.model_validate_json(json.dumps(value))
    except ValidationError:
        problems.append(f"{name} is damaged or of another version of finetune")
        return None
    return report if report.outcome == "succeeded" else None


def _failure(root: Path, problems: list[str]) -> FailureStatus | None:
    value = json_of(root, FAILURE_FILE, problems)
    if value is None:
        return None
    try:
        return FailureStatus.model_validate_json(json.dumps(value))
    except ValidationError:
        problems.append(f"{FAILURE_FILE} is damaged or of another version of finetune")
        return None


def _metrics(root: Path, problems: list[str]) -> tuple[Metric, ...]:
    value = json_of(root, "metrics.json", problems)
    evaluated, majority = (
        (section if isinstance(section := value.get(name), dict) else {}) if isinstance(value, dict) else {}
        for name in ("evaluate", "majority")
    )
    return tuple(
        Metric(name, number, _number(majority.get(name)))
        for name, one in evaluated.items()
        if (number := _number(one)) is not None and not isinstance(one, int)
    )


def _number(value: object) -> float | None:
    """Return a finite number; Python's JSON has NaN, infinities, and integers larger than any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def _gate(glance: _PlanGlance, metrics: Sequence[Metric]) -> Gate | None:
    gate = glance.trainer.evaluation.gate if glance.trainer.evaluation else None
    if gate is None:
        return None
    value = next((metric.value for metric in metrics if metric.name == gate.metric), None)
    at_least = gate.minimum is not None
    limit = gate.minimum if gate.minimum is not None else gate.maximum
    text = f"{gate.metric} at {'least' if at_least else 'most'} {limit if limit is None else f'{limit:g}'}"
    if value is None or limit is None:
        return Gate(text, None)
    return Gate(f"{text}, is {value:.4g}", value >= limit if at_least else value <= limit)


def _progress(root: Path, stage: Stage) -> Progress | None:
    try:
        content = read(root, "logs", f"{stage}.progress.jsonl", limit=PROGRESS_BYTES, end=True)
    except UnreadableError:
        return None
    news = None if content is None else latest(content.text.splitlines())
    return news if news is not None and _number(news.time) is not None and math.isfinite(news.time) else None


def _began(root: Path, stage: Stage) -> datetime | None:
    try:
        content = read(root, "logs", f"{stage}.progress.jsonl", limit=PROGRESS_BYTES)
    except UnreadableError:
        return None
    first = None if content is None else latest(content.text.splitlines()[:1])
    try:
        return None if first is None else datetime.fromtimestamp(first.time, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def history_of(root: Path) -> tuple[list[dict[str, float]], bool]:
    try:
        content = read(root, "history.jsonl", limit=HISTORY_BYTES, end=True)
    except UnreadableError:
        return [], False
    if content is None:
        return [], False
    lines = content.data.split(b"\n")
    names: set[str] = set()
    rows = []
    for line in _sample(lines[1:] if content.cut else lines):
        try:
            value: Any = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue  # cut off in the middle, or damaged: only for display
        if isinstance(value, dict):
            names.update(list(value)[: MOST_FIGURES - len(names)])
            rows.append(
                {name: number for name in value if name in names and (number := _number(value[name])) is not None}
            )
    return rows, content.cut


def _sample(lines: Sequence[bytes]) -> list[bytes]:
    """Return steps and evaluations, each at equal distances, with the very last one."""
    if len(lines) <= HISTORY_LINES:
        return list(lines)
    evaluations = [at for at, line in enumerate(lines) if b'"eval_' in line]
    positions = {*_thinned(range(len(lines)), HISTORY_LINES), *_thinned(evaluations, HISTORY_LINES // 10)}
    return [lines[at] for at in sorted(positions)]


def _thinned(places: Sequence[int], most: int) -> Sequence[int]:
    every = -(-len(places) // most) or 1
    return [*places[::every], *places[-2:]]


def readable_lines(content: Content) -> list[str]:
    """Return a log's lines as a terminal shows them: no escape sequences, only a progress bar's last state."""
    lines = content.text.split("\n")
    if content.cut:
        lines = lines[1:]
    if lines and not lines[-1]:
        lines.pop()
    return [_final_text(line) for line in lines]


def _final_text(line: str) -> str:
    last = next((part for part in reversed(line.split("\r")) if part), "")
    return _CONTROL.sub("\ufffd", _ANSI.sub("", last))


def shown_name(name: str) -> str:
    """Return the name of a folder as text, also of one that is not UTF-8."""
    return os.fsencode(name).decode(errors="replace")
