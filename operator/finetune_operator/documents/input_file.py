"""Read files that a user names, up to the limit of `documents`, whatever the name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from finetune_operator.documents import MAX_BYTES


class UnreadableFileError(Exception):
    """Error of a file that cannot be read; the text has its name and the reason."""

    def __init__(self, name: object, error: OSError | ValueError) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        super().__init__(f"cannot read {name}: {reason or error}")


def read_input(file: Path) -> bytes:
    """Return the file's bytes, at most one more than `read_documents` takes: enough for it to refuse the file, also one
    that never ends. UnreadableFileError.
    """
    try:
        with file.open("rb") as stream:
            return read_stream(stream)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise UnreadableFileError(file, error) from error


def read_stream(stream: IO[bytes]) -> bytes:
    """Return the bytes of an open stream, up to the same limit."""
    return stream.read(MAX_BYTES + 1)


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path] | None:
    """Return a folder's files with one of these suffixes, by name; None if it is no folder. UnreadableFileError."""
    try:
        if not folder.is_dir():
            return None
        return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    except (OSError, ValueError) as error:
        raise UnreadableFileError(folder, error) from error
