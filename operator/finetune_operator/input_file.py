"""Files that a user names: read up to what `documents` takes, whatever the name stands for."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from finetune_operator.documents import MAX_BYTES


class UnreadableFileError(Exception):
    """It cannot be read; says the file and why."""

    def __init__(self, name: object, error: OSError | ValueError) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        super().__init__(f"cannot read {name}: {why or error}")


def read_input(file: Path) -> bytes:
    """The file's bytes, at most one more than `read_documents` takes: enough for it to refuse the file, also one that
    never ends. UnreadableFileError.
    """
    try:
        with file.open("rb") as stream:
            return read_stream(stream)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise UnreadableFileError(file, error) from error


def read_stream(stream: IO[bytes]) -> bytes:
    """The same for a stream that is open."""
    return stream.read(MAX_BYTES + 1)


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path] | None:
    """The files of a folder with one of these suffixes, by name; None when it is no folder. UnreadableFileError."""
    try:
        if not folder.is_dir():
            return None
        return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    except (OSError, ValueError) as error:
        raise UnreadableFileError(folder, error) from error
