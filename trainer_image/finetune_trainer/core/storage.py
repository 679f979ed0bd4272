"""Report a full volume: the path, the size to be written, and the space that was left."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_contract.byte_text import human_bytes
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
_TORCH_WORDS = re.compile("write|inline_container|iostream")
_FULL_BELOW_BYTES = 1 << 20
"""Free space below which a failed write of torch counts as a full volume: torch reports no reason."""


@contextmanager
def storage_errors_named(folder: Path, content: str, needed: int = 0, *, shared: bool = False) -> Iterator[None]:
    """Turn the errors of a full volume, whichever library raises them, into StageError STORAGE_FULL `NoSpaceLeft`.

    `folder` is where the block writes, and must still exist when it fails; `shared`: other processes have files in it
    as well. `content` names the data, and `needed` their size in bytes; 0: not known.
    """
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        disk = shutil.disk_usage(place)
        if not _is_full(error, disk.free):
            raise
        # Data written by now are deleted with the folder, or overwritten by the next attempt.
        left = disk.free + (0 if shared else _size_of(folder))
        much = f"{human_bytes(needed)}, and" if needed > left else "more than the"
        of = f"{human_bytes(left)} of {human_bytes(disk.total)} {'were' if needed > left else 'that were'} left for it"
        raise StageError(
            FailureClass.STORAGE_FULL,
            "NoSpaceLeft",
            f"The volume of {folder} is full: {content} needs {much} {of}.",
            "Free space or enlarge the workspace; checkpoints.keep limits the space of checkpoints.",
        ) from error


def _is_full(error: Exception, free: int) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if _WORDS.search(str(error)):
        return True
    by_torch = isinstance(error, RuntimeError) and _TORCH_WORDS.search(str(error)) is not None
    return by_torch and free < _FULL_BELOW_BYTES


def _size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
