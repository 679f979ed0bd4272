"""Raw files of a dataset: their content as bytes, decompressed, and the failures that name them."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from typing import IO, Literal, Protocol, TypeAlias, cast

import pyarrow as pa

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

_BLOCK_BYTES = 1 << 20
"""Size of one read from a file."""
LINE_BYTES = 64 << 20
"""Largest line, in bytes; of CSV the largest record, in characters. A book has 1 MB of text, and the largest of
Wikipedia's articles 2 MB; parsing a line takes some ten times its length.
"""


class RawFile(Protocol):
    """A file that can be opened repeatedly."""

    @property
    def name(self) -> str:
        """Name in errors."""

    def open(self) -> IO[bytes]:
        """Open the content, from the start."""


def corrupt(file: RawFile, line: int, why: str) -> StageError:
    """Return the error for a line that cannot be read; lines count from 1."""
    return StageError(
        FailureClass.DATA,
        "CorruptLine",
        f"{file.name}, line {line}: {why}",
        "Correct or remove this line; no line is skipped silently.",
    )


def unreadable(file: RawFile, why: object) -> StageError:
    """Return the error for a file that cannot be read at all."""
    return StageError(FailureClass.DATA, "CorruptFile", f"{file.name} cannot be read: {why}", "Write the file again.")


@dataclass(frozen=True)
class Rejected:
    """A row of text that cannot be read."""

    line: int
    """Last line of the row, from 1."""
    why: str
    content: str
    """Excerpt for people."""
    size: int
    """Bytes in the file, approximately."""
    of: Literal["line", "encoding", "array"] = "line"


ReadRow: TypeAlias = tuple[int, dict[str, object], int]
"""Line, columns, and approximate number of bytes in the file."""


def open_decompressed(file: RawFile) -> IO[bytes]:
    ending, stream = compression_of(file.name), file.open()
    if not ending:
        # Files of remote file systems return only whole lines, however long they are.
        return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK_BYTES))
    if ending == ".xz":
        return cast(IO[bytes], lzma.open(stream))
    return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(stream, COMPRESSIONS[ending])))


def compression_of(name: str) -> str:
    return next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")


COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
"""Ending -> codec; all are pyarrow's but xz, which the standard library has."""
