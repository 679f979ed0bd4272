"""One pod of a preparation by an Indexed Job, as a process of a fork server that has imported the libraries."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from process_support.stage_forks import fork

Trouble = Literal["hangs before it orders", "hangs in a shard", "refuses a shard"]
SHARD_ROWS = 60
CHUNK_ROWS = 25
"""Rows of a chunk: several chunks in each of several files."""


@dataclass(frozen=True)
class Pod:
    """Settings of a pod to start."""

    index: int
    count: int
    arguments: Sequence[str]
    """Arguments of `finetune_trainer`."""
    folder: Path
    """Folder of its log, its report and the file that exists while it hangs."""
    attempt: str = "attempt-1"
    trouble: Trouble | None = None
    silent_seconds: float = 30.0
    start_seconds: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.attempt}-pod-{self.index}"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.report.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def hangs(self) -> Path:
        """Path of a file that exists while the pod hangs; deleting it lets the pod continue, and it hangs only once."""
        return self.folder / f"{self.name}.hangs"

    def start(self) -> BaseProcess:
        """Start the pod from a fork server, which saves the seconds of the imports."""
        return fork(_run, self)

    def other(self, **changes: Any) -> Pod:
        return replace(self, **changes)


def small_shards() -> None:
    """Cut data sets into several files of few rows."""
    from finetune_trainer.prepare import prepare

    prepare.cut = partial(prepare.cut, shard_rows=SHARD_ROWS, chunk_rows=CHUNK_ROWS)  # type: ignore[assignment]


def _run(pod: Pod) -> None:
    log = os.open(pod.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ours = {"RANK": pod.index, "WORLD_SIZE": pod.count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in ours.items()} if pod.count > 1 else {})
    os.environ.update({"FINETUNE_ATTEMPT": pod.attempt, "FINETUNE_REPORT": str(pod.report), **pod.environment})
    _settle(pod)
    from finetune_trainer.__main__ import run

    code = run(pod.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _settle(pod: Pod) -> None:
    """Set short intervals and small files, and install the pod's `trouble`."""
    from finetune_contract.layout import FailureClass
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.prepare import prepare, prepare_pods, shards

    small_shards()
    # A heartbeat waits for the disk, which others may keep busy for longer than a test waits.
    os.fsync = lambda _file: None
    prepare_pods.POLL_SECONDS, prepare_pods.BEAT_SECONDS = 0.05, 0.2
    prepare_pods.SILENT_SECONDS, prepare_pods.START_SECONDS = pod.silent_seconds, pod.start_seconds
    write, checked = shards.Encoder.write, prepare._checked_rows

    hung = False

    def hang() -> None:
        nonlocal hung
        if not hung:
            hung = True
            pod.hangs.touch()
        while pod.hangs.exists():
            time.sleep(0.02)

    def hangs_in_a_shard(self: Any, folder: Path, shard: Any, progressed: Any) -> Any:
        def hang_then(rows: int) -> None:
            hang()
            progressed(rows)

        return write(self, folder, shard, hang_then)

    def refuses(self: Any, folder: Path, shard: Any, progressed: Any) -> Any:
        raise StageError(FailureClass.DATA, "BadRow", "Row 77 cannot be encoded.", "Correct it.")

    def hangs_before(*given: Any) -> Any:
        hang()
        return checked(*given)

    match pod.trouble:
        case "hangs before it orders":
            prepare._checked_rows = hangs_before
        case "hangs in a shard":
            shards.Encoder.write = hangs_in_a_shard  # type: ignore[method-assign]
        case "refuses a shard":
            shards.Encoder.write = refuses  # type: ignore[method-assign]
        case None:
            pass
