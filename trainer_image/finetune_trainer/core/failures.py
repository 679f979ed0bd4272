"""The trainer's own errors, and the failure class of any other exception.

Every foreseen error is a `StageError` with a class that the operator acts upon. All others are classified once, here,
by type first and by text only where a library raises nothing better than `RuntimeError`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport


class StageError(Exception):
    """A failure with an explanation: the cause (path, value, rule) and a hint."""

    def __init__(self, failure_class: FailureClass, reason: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.failure_class = failure_class
        self.reason = reason
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all arguments, for errors of worker processes: by default only `args` are pickled, the message."""
        return StageError, (self.failure_class, self.reason, self.message, self.hint)


@contextmanager
def needed_library(package: str, reason: str, needed_by: str, hint: str) -> Iterator[None]:
    """Wrap an import: raise StageError CONFIG where `package` is not installed. `needed_by` names its use."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise StageError(FailureClass.CONFIG, reason, f"{needed_by}, is not installed.", hint) from error


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names of a long list and the number of the others, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def other_settings(subject: str, theirs: Mapping[str, object], ours: Mapping[str, object]) -> StageError:
    """Return the error for checkpoints (`subject`) written with other settings; it names the differing ones."""
    changed = [
        f"{name} was {_shown(theirs, name)}, is {_shown(ours, name)}"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    return StageError(
        FailureClass.CHECKPOINT,
        "CheckpointOfAnotherJob",
        f"{subject} written with other settings: {'; '.join(changed)}.",
        "Train from the beginning (checkpoints.resume: never), or rename the job.",
    )


def _shown(settings: Mapping[str, object], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, outermost first; ends at a repeated link."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


# Texts that identify errors of torch, its collectives and the allocator: they raise plain RuntimeError.
_COLLECTIVE_MARKS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "nccl",
    "gloo",
    "timed out waiting",
)
_COLLECTIVE_ERRORS = ("DistNetworkError", "DistStoreError", "DistBackendError")
"""Error types of torch.distributed, by name, so that it need not be imported."""
_MEMORY_MARKS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def classify(error: BaseException) -> FailureReport:
    """Return the failure report for `error`; searches the chain of causes for the first known one."""
    for link in chain(error):
        known = _known(link)
        if known is not None:
            return known
    return _report(
        FailureClass.PROGRAM,
        "UnexpectedError",
        f"{type(error).__name__}: {error}",
        "The log above has the traceback.",
    )


def classify_text(kind: str, text: str) -> FailureClass:
    """Classify an exception of another program by its type's name and message."""
    low = text.lower()
    if kind in ("MemoryError", "OutOfMemoryError") or any(mark in low for mark in _MEMORY_MARKS):
        return FailureClass.OUT_OF_MEMORY
    if _is_loss_of_a_worker(kind, low):
        return FailureClass.KILLED
    if "no space left on device" in low or "disk quota exceeded" in low:
        return FailureClass.STORAGE_FULL
    if kind in _COLLECTIVE_ERRORS or (kind == "RuntimeError" and any(mark in low for mark in _COLLECTIVE_MARKS)):
        return FailureClass.COLLECTIVE
    return FailureClass.PROGRAM


def _is_loss_of_a_worker(kind: str, text: str) -> bool:
    """Return whether an error says that a process was killed that prepares rows (concurrent.futures) or loads batches
    (torch's DataLoader); `text` is in lower case.
    """
    return kind == "BrokenProcessPool" or "is killed by signal: killed" in text


def _known(error: BaseException) -> FailureReport | None:
    text = str(error).lower()
    if isinstance(error, StageError):
        return _report(error.failure_class, error.reason, error.message, error.hint)
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(m in text for m in _MEMORY_MARKS)
    ):
        return _report(
            FailureClass.OUT_OF_MEMORY,
            "OutOfMemory",
            str(error) or "The process could not allocate the memory that it needs.",
            "Lower training.microBatchSize (the global batch size stays the same), or shard or offload more under "
            "parallelism.",
        )
    if _is_loss_of_a_worker(type(error).__name__, text):
        return _report(
            FailureClass.KILLED,
            "Killed",
            f"A process that reads rows was killed from outside: {error}",
            "Nothing shows that memory ran out. Look for who killed it: a person, or a watchdog of the node.",
        )
    if (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    ) or "no space left on device" in text:
        return _report(
            FailureClass.STORAGE_FULL,
            "NoSpaceLeft",
            f"The storage of the job is full: {error}",
            "Free space or enlarge the workspace; checkpoints.keep limits the space of checkpoints.",
        )
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return _report(
            FailureClass.STORAGE_LOST, "StorageUnavailable", f"The storage did not respond: {error}", "Try again."
        )
    if isinstance(error, RuntimeError) and (
        type(error).__name__ in _COLLECTIVE_ERRORS or any(mark in text for mark in _COLLECTIVE_MARKS)
    ):
        return _report(
            FailureClass.COLLECTIVE,
            "CollectiveFailed",
            f"Another process ended during a step: {error}",
            "See the report of another rank for the first cause.",
        )
    return None


def _report(failure_class: FailureClass, reason: str, message: str, hint: str) -> FailureReport:
    return FailureReport(failure_class=failure_class, reason=reason, message=message, hint=hint, time=time.time())
