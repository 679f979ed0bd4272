"""Display of a stage's progress, read from its progress file and log: a bar on a terminal, else occasional lines."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from finetune_contract.choices import Stage
from finetune_contract.report import Progress
from finetune_operator.cli.terminal.progress_text import figures

LINE_SECONDS = 10.0
LINE_PERCENT = 10
NAME_WIDTH = max(len(stage) for stage in Stage)


class Tail:
    """Reader of lines added to a file since the last call; an incomplete line waits."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return new whole lines; none if the file does not exist."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def latest(lines: list[str]) -> Progress | None:
    """Return the newest progress in these lines; unreadable lines are ignored, as it is only for display."""
    for line in reversed(lines):
        try:
            return Progress.model_validate_json(line)
        except ValidationError:
            continue
    return None


def duration(seconds: float) -> str:
    """Format seconds as `1:05` or `2:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """Display that shows one stage after the other."""

    def start(self, stage: Stage) -> None:
        """Show that a stage starts."""

    def update(self, progress: Progress) -> None:
        """Show the progress."""

    def log(self, line: str) -> None:
        """Show a line of the stage's own log."""

    def end(self, stage: Stage, seconds: float, result: str) -> None:
        """Show that the stage has ended; `result` is done, failed or stopped."""


class Lines:
    """Display for a file or a pipe: one line when a stage starts, every 10 s or 10 percent, and when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at = 0.0
        self._printed_percent = 0

    def start(self, stage: Stage) -> None:
        """Print one line."""
        self._printed_at, self._printed_percent = time.monotonic(), 0
        self._print(stage, "started")

    def update(self, progress: Progress) -> None:
        """Print one line if it is due."""
        now = time.monotonic()
        if now - self._printed_at >= LINE_SECONDS or progress.percent - self._printed_percent >= LINE_PERCENT:
            self._printed_at, self._printed_percent = now, progress.percent
            self._print(progress.stage, f"{progress.percent:3d} %  {figures(progress, progress.stage)}")

    def log(self, line: str) -> None:
        """Print the line."""
        self._console.print(line, soft_wrap=True)

    def end(self, stage: Stage, seconds: float, result: str) -> None:
        """Print one line."""
        self._print(stage, f"{result} in {duration(seconds)}")

    def _print(self, stage: Stage, text: str) -> None:
        self._console.print(f"{stage:<{NAME_WIDTH}}  {text}", soft_wrap=True)


class Terminal:
    """Display for a person: one bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, stage: Stage) -> None:
        """Show an indeterminate bar, until the stage reports its total."""
        self._task = self._bars.add_task(f"{stage:<{NAME_WIDTH}}", total=None, figures="starting")

    def update(self, progress: Progress) -> None:
        """Update the bar."""
        if self._task is not None:
            self._bars.update(
                self._task,
                completed=progress.step,
                total=progress.total_steps or None,
                figures=figures(progress, progress.stage),
            )

    def log(self, line: str) -> None:
        """Print the line above the bars."""
        self._bars.console.print(line, style="dim")

    def end(self, stage: Stage, seconds: float, result: str) -> None:
        """Leave the bar as it is; fill that of a finished stage."""
        if self._task is None:
            return
        if result == "done":
            task = self._bars.tasks[self._bars.task_ids.index(self._task)]
            total = task.total or 1
            self._bars.update(self._task, total=total, completed=total)
        else:
            self._bars.update(self._task, figures=result, total=self._bars.tasks[-1].total or 1)
        self._bars.stop_task(self._task)
        self._task = None


class Shown:
    """Context manager that chooses the display for the console and ends it in any case."""

    def __init__(self, console: Console) -> None:
        self._bars = (
            Bars(
                SpinnerColumn(finished_text=" "),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
                refresh_per_second=5,
            )
            if console.is_terminal
            else None
        )
        self._console = console

    def __enter__(self) -> Display:
        if self._bars is None:
            return Lines(self._console)
        self._bars.start()
        return Terminal(self._bars)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
