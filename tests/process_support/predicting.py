"""One worker of a prediction by an Indexed Job, as a process of a fork server that has imported the libraries."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from process_support.stage_forks import fork

Trouble = Literal["hangs in a shard", "hangs before the facts", "hangs while joining", "refuses a shard"]
SHARD_BYTES = 1500
"""Bytes of some 12 short rows."""


@dataclass(frozen=True)
class Predictor:
    """Settings of a worker to start."""

    index: int
    count: int
    arguments: Sequence[str]
    """Arguments of `finetune_trainer`."""
    folder: Path
    """Folder of its log, its report and the file that exists while it hangs."""
    attempt: str = "attempt-1"
    incarnation: int = 0
    trouble: Trouble | None = None
    after: int = 0
    """Shards that it answers before `trouble` sets in."""
    straggler_seconds: float = 600.0
    silent_seconds: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    storage: Path | None = None
    """Folder that does not respond while `away` exists."""

    @property
    def away(self) -> Path:
        """Path of the mark of an outage: files of `storage` cannot be opened, listed, renamed or removed."""
        return self.folder / "away"

    @property
    def missed(self) -> Path:
        """Path of a file with a line for each operation of this worker that an outage failed."""
        return self.folder / f"{self.name}.missed"

    @property
    def name(self) -> str:
        return f"{self.attempt}-worker-{self.index}.{self.incarnation}"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.report.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def hangs(self) -> Path:
        """Path of a file that exists while the worker hangs; deleting it ends the hang, the only one."""
        return self.folder / f"{self.name}.hangs"

    @property
    def claims(self) -> Path:
        """Path of a file with a line `worker key` for each shard that a worker of this folder has claimed."""
        return self.folder / "claims.txt"

    def start(self) -> BaseProcess:
        """Start the worker from a fork server, which saves the seconds of the imports."""
        return fork(_run, self)

    def other(self, **changes: Any) -> Predictor:
        return replace(self, **changes)


def _run(one: Predictor) -> None:
    log = os.open(one.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ours = {"RANK": one.index, "WORLD_SIZE": one.count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in ours.items()} if one.count > 1 else {})
    os.environ.update({"FINETUNE_ATTEMPT": one.attempt, "FINETUNE_REPORT": str(one.report), **one.environment})
    _settle(one)
    from finetune_trainer.__main__ import run

    code = run(one.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_FILE_EVENTS = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.link", "os.mkdir")


def _lose(one: Predictor, storage: str) -> None:
    """Fail Python's file operations below `storage` with EIO while the mark of an outage exists."""

    def refuse(event: str, given: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and str(given[0]).startswith(storage) and one.away.exists():
            missed = os.open(one.missed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(missed, f"{event}\n".encode())
            os.close(missed)
            raise OSError(errno.EIO, "the storage does not respond", str(given[0]))

    sys.addaudithook(refuse)


def _settle(one: Predictor) -> None:
    """Set short intervals and small shards, and install the worker's `trouble`."""
    import torch

    from finetune_contract.layout import FailureClass
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.data import row_shards
    from finetune_trainer.predict import answering, predict, prediction_parts, prediction_workers, shard_claims

    torch.set_num_threads(1)
    if one.storage is not None:
        _lose(one, str(one.storage))
    row_shards.LEAST_BYTES = SHARD_BYTES
    # A heartbeat waits for the disk, which others may keep busy for longer than a test waits.
    os.fsync = lambda _file: None
    predict.LOOK_SECONDS = 0.05
    shard_claims.POLL_SECONDS, shard_claims.MOST_POLL_SECONDS = 0.02, 0.1
    prediction_workers.BEAT_SECONDS = 0.2
    shard_claims.STRAGGLER_SECONDS, shard_claims.SILENT_SECONDS = one.straggler_seconds, one.silent_seconds
    claims, answers, joined = (
        shard_claims.ShardClaimer._claims,
        answering.Answerer.answers,
        prediction_parts.Parts.joined,
    )
    facts = prediction_parts.PartFacts.to_json
    answered = 0
    hung = False

    def counted(self: Any, name: str, generation: int) -> bool:
        taken = claims(self, name, generation)
        if taken:
            with one.claims.open("a") as file:
                file.write(f"{one.index} {name}\n")
        return taken

    def hang() -> None:
        nonlocal hung
        if not hung:
            hung = True
            one.hangs.touch()
        while one.hangs.exists():
            time.sleep(0.02)

    def after(trouble: Callable[[], None]) -> Callable[..., Any]:
        def answer(self: Any, *given: Any) -> Any:
            nonlocal answered
            if answered == one.after:
                trouble()
            answered += 1
            return answers(self, *given)

        return answer

    def refuse() -> None:
        raise StageError(FailureClass.DATA, "BadRow", "Row 77 cannot be encoded.", "Correct it.")

    def late_facts(self: Any) -> str:
        if answered > one.after:
            hang()
        return facts(self)

    def late_rows(self: Any, *given: Any) -> Any:
        hang()
        return joined(self, *given)

    shard_claims.ShardClaimer._claims = counted  # type: ignore[method-assign]
    match one.trouble:
        case "hangs in a shard":
            answering.Answerer.answers = after(hang)  # type: ignore[method-assign]
        case "refuses a shard":
            answering.Answerer.answers = after(refuse)  # type: ignore[method-assign]
        case "hangs before the facts":
            answering.Answerer.answers = after(lambda: None)  # type: ignore[method-assign]
            prediction_parts.PartFacts.to_json = late_facts  # type: ignore[method-assign]
        case "hangs while joining":
            prediction_parts.Parts.joined = late_rows  # type: ignore[method-assign]
        case None:
            pass
