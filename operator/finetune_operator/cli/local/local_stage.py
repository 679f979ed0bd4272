"""A stage of a local run, started as in a pod: by `finetune_trainer launch`.

The launcher starts the ranks, leaves none behind, and reports their combined result. Its standard input is one end of a
pipe: when the other end closes, because this command stops the stage or has itself died, the launcher kills everything
at once.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from pydantic import ValidationError

from finetune_contract import causes
from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.python_command import module_command
from finetune_contract.report import TrainerReport
from finetune_operator.cli.local.measure import TRAINER
from finetune_operator.jobs.render.contract import Starter, launch_arguments
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.types import FailureStatus

KILL_SECONDS = 10
LOG_LINES = 15
LOG_BYTES = 4096


def stage_command(stage: Stage, paths: JobPaths, planned: JobPlan) -> list[str]:
    """Return the command line of a stage: its launcher, with torchrun for several processes."""
    starter: Starter = "torchrun" if processes_of(stage, planned) > 1 else "process"
    deepspeed = str(paths.deepspeed) if stage is Stage.TRAIN and paths.deepspeed.exists() else None
    arguments = launch_arguments(stage, str(paths.job), str(paths.root.parent), starter, deepspeed)
    return module_command(TRAINER, *arguments, "--attached")


def processes_of(stage: Stage, planned: JobPlan) -> int:
    """Return the processes that run `stage`."""
    world = planned.trainer.world
    if stage is Stage.TRAIN and world is not None:
        return world.size
    return planned.trainer.inference(stage).processes


class StageProcess:
    """A running stage; all output goes to one log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            # A session of its own: a terminal's Ctrl-C reaches only this command, which then stops the stage.
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Return the exit code: None while it runs; minus the signal if the launcher was killed."""
        return self._process.poll()

    def request_stop(self) -> None:
        """Send SIGTERM: the stage saves its state if it can, and ends."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the stage and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def failure_of(stage: Stage, exit_code: int, reports: Path, log: Path) -> FailureStatus:
    """Return the failure of a stage whose launcher ended with `exit_code`: its report, else based on that code."""
    report = _report(stage, reports)
    if report is not None and report.failure is not None:
        rank, failure = report.rank, report.failure
    else:
        rank, failure = None, causes.of_exit(exit_code, subject="The launcher")
    return FailureStatus(
        failure_class=failure.failure_class.value,
        reason=failure.reason,
        message=failure.message,
        hint=failure.hint or None,
        stage=stage,
        rank=rank,
        exit_code=failure.exit_code,
        log_tail=_tail(log),
    )


def _report(stage: Stage, reports: Path) -> TrainerReport | None:
    """Return the launcher's report, the only one of the stage; None if it was killed or could not write it whole."""
    for file in reports.glob(f"{stage}-*.json"):
        with contextlib.suppress(OSError, ValidationError):
            return TrainerReport.model_validate_json(file.read_bytes())
    return None


def _tail(log: Path) -> str | None:
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()[-LOG_LINES:]
    except OSError:
        return None
    return "\n".join(lines).encode()[-LOG_BYTES:].decode(errors="ignore") or None


class Interrupts:
    """Counter of Ctrl-C, SIGTERM and SIGHUP while stages run, in place of the default that would kill the command."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in self.SIGNALS:
            # An ignored signal (nohup ignores SIGHUP) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal accepts its own return value

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """Exit code: 130 for Ctrl-C, 143 for SIGTERM, 129 for a terminal that was closed."""
        return 128 + (self.first or signal.SIGINT)
