"""The runs of a workspace as values: the output of `finetune run` in each folder, also of a run that is in progress,
was killed, or has damaged files.

Each unreadable file is a line in `Run.problems`; the rest is shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.cli.local.workspace import FAILURE_FILE, INPUTS_FILE, LOCAL_STAGES
from finetune_operator.extras.compare import runfolders
from finetune_operator.extras.ui.reading import Content, Stamp, UnreadableError, folders, read, stamp
from finetune_operator.extras.ui.run_reading import (
    DOCUMENT_BYTES,
    Run,
    history_of,
    json_of,
    object_of,
    read_run,
    readable_lines,
    shown_name,
)
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.redaction import Redactor

Value = TypeVar("Value")

LOG_BYTES = 64 << 10
LOG_LINES = 400
WHOLE_LOG_BYTES = 4 << 20
REPORT_BYTES = 64 << 20
MOST_RUNS = 200
"""Maximum folders listed, the last changed ones; the others are counted."""
_RUN_FILES = ("plan.json", "job.json", INPUTS_FILE, "metrics.json", "history.jsonl", FAILURE_FILE)


@dataclass(frozen=True)
class Log:
    """End of a stage's log, without escape sequences of terminals."""

    stage: str
    lines: tuple[str, ...]
    cut: bool


@dataclass(frozen=True)
class Runs:
    """All runs that are listed."""

    runs: tuple[Run, ...]
    more: int = 0
    """Number of further folders, which changed earlier."""
    problem: str | None = None


class _Cache(Generic[Value]):
    """Cache of values by key, valid until their sources change; the oldest are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, tuple[Hashable, Value]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, stamps: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, computed again if the stamps differ."""
        with self._lock:
            held = self._values.get(key)
        if held is not None and held[0] == stamps:
            return held[1]
        value = make()
        with self._lock:
            self._values[key] = (stamps, value)
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


class Workspace:
    """Folder that `finetune run --workspace` writes to. It may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: _Cache[Run] = _Cache(2 * MOST_RUNS)
        self._histories: _Cache[tuple[list[dict[str, float]], bool]] = _Cache(16)

    def runs(self) -> Runs:
        """Return all runs: running ones first, then by their start, the latest first."""
        try:
            by_time = sorted(folders(self.folder), key=lambda folder: folder[1], reverse=True)
        except UnreadableError as error:
            return Runs((), problem=str(error))
        names = [name for name, _ in by_time if self._is_run(name)]
        runs = [self._run(name) for name in names[:MOST_RUNS]]
        earliest = datetime.min.replace(tzinfo=UTC)
        runs.sort(key=lambda run: (run.state == "running", run.started or earliest), reverse=True)
        return Runs(tuple(runs), more=len(names) - len(runs))

    def run(self, name: str) -> Run | None:
        """Return the run of this name; None if the workspace has no such folder."""
        return self._run(name) if self._has(name) and self._is_run(name) else None

    def plan(self, name: str) -> JobPlan | str | None:
        """Return the plan; the reason why it cannot be shown; None if there is none."""
        try:
            content = read(self._root(name), "plan.json", limit=DOCUMENT_BYTES)
        except UnreadableError as error:
            return str(error)
        if content is None:
            return None
        try:
            return JobPlan.model_validate_json(content.data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            return f"plan.json is damaged or of another version of finetune ({place or 'plan.json'}: {first['msg']})"

    def job_file(self, name: str) -> JsonValue:
        """Return the trainer's job.json; None if it cannot be read."""
        return json_of(self._root(name), "job.json", [])

    def compared(self, run: Run) -> runfolders.Run:
        """Return the run as the input of `finetune compare`, without secrets."""
        root, problems = self._root(run.name), list[str]()
        job, plan, metrics, environment = (
            object_of(root, file, problems) for file in ("job.json", "plan.json", "metrics.json", "environment.json")
        )
        redactor = Redactor()
        for document in (job, plan):
            redactor.learn(document)
        return runfolders.Run(
            name=shown_name(run.name),
            folder=root,
            job=redactor.value(job or plan.get("trainer") or {}),
            plan=redactor.value(plan),
            metrics=metrics,
            environment=environment,
            history=self.history(run.name)[0],
            seconds={Stage(stage.name): stage.seconds for stage in run.stages if stage.seconds is not None},
            state="finished" if run.state == "succeeded" else run.state,
            problems=tuple(problems),
        )

    def history(self, name: str) -> tuple[list[dict[str, float]], bool]:
        """Return the finite numbers of each line of the training's history, and whether earlier lines are left out."""
        root = self._root(name)
        return self._histories.get(name, stamp(root, "history.jsonl"), lambda: history_of(root))

    def log(self, name: str, stage: str) -> Log | None:
        """Return the end of a stage's log; None if there is none."""
        content = self._log(name, stage, LOG_BYTES)
        if content is None:
            return None
        lines = readable_lines(content)
        return Log(stage, tuple(lines[-LOG_LINES:]), content.cut or len(lines) > LOG_LINES)

    def whole_log(self, name: str, stage: str) -> str | None:
        """Return the log as text, the end of a very long one; None if there is none."""
        content = self._log(name, stage, WHOLE_LOG_BYTES)
        return None if content is None else "\n".join(readable_lines(content)) + "\n"

    def report(self, name: str) -> bytes | None:
        """Return report.html; None if it does not exist or is too large."""
        if not self._has(name):
            return None
        try:
            content = read(self._root(name), "report.html", limit=REPORT_BYTES)
        except UnreadableError:
            return None
        return None if content is None or content.cut else content.data

    def _log(self, name: str, stage: str, limit: int) -> Content | None:
        if not self._has(name) or stage not in LOCAL_STAGES:
            return None
        try:
            return read(self._root(name), "logs", f"{stage}.log", limit=limit, end=True)
        except UnreadableError as error:
            return Content(str(error).encode())

    def _has(self, name: str) -> bool:
        """Return True if the folder lists the name: names are looked up before they become paths."""
        try:
            return any(name == there for there, _ in folders(self.folder))
        except UnreadableError:
            return False

    def _root(self, name: str) -> Path:
        return self.folder / name

    def _is_run(self, name: str) -> bool:
        root = self._root(name)
        return any(stamp(root, file) for file in _RUN_FILES) or any(
            stamp(root, "logs", f"{stage}.log") for stage in LOCAL_STAGES
        )

    def _run(self, name: str) -> Run:
        root = self._root(name)
        running = is_locked(self.folder, name)
        files: list[Stamp] = [stamp(root, file) for file in (*_RUN_FILES, "report.html")]
        for stage in LOCAL_STAGES:
            files += [stamp(root, "logs", f"{stage}.progress.jsonl"), stamp(root, "logs", f"{stage}.log")]
            files.append(stamp(root, "state", f"{stage}.json"))
        return self._runs.get(name, (running, *files), lambda: read_run(root, name, running))


# -------------------------------------------------------------------------------------------------------------- reading


def is_locked(workspace: Path, name: str) -> bool:
    """Return True if a `finetune run` works on this job: the process that wrote its id into the lock file still holds
    that file open. Taking the lock to find out would refuse a run that starts in that moment.
    """
    import psutil

    file = f".{name}.lock"
    try:
        content = read(workspace, file, limit=32)
        process = psutil.Process(int(content.text)) if content is not None else None
    except (UnreadableError, ValueError, OverflowError, psutil.Error):
        return False
    if process is None:
        return False
    path = (workspace / file).resolve()
    try:
        return any(Path(opened.path) == path for opened in process.open_files())
    except psutil.AccessDenied:  # another user's: it wrote the id, unless the id was reused
        return bool(process.create_time() <= path.stat().st_mtime)
    except (psutil.Error, OSError):
        return False
