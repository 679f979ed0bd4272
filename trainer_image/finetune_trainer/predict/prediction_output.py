"""Output of predictions: one file, or a folder of parts (`predict.output` that ends in `/`), on this machine or behind
fsspec.

A file appears whole or not at all. A folder gets one part for each shard with predictions, `part-00000.jsonl` and so
on, and last `_manifest.json`, which names them: other files are not part of the result. Rows without a prediction go to
a side file.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import EntryName, replaced, sha256_of
from finetune_trainer.core.uris import Uri, local_path
from finetune_trainer.data.file_formats import python_values

Format: TypeAlias = Literal["jsonl", "parquet"]
MANIFEST = "_manifest.json"
_BAD_ROWS = "bad-rows.jsonl"


class PartEntry(Message):
    """One part of a folder."""

    name: EntryName
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str


class FolderManifest(Message):
    """`_manifest.json`: the parts of a folder in the order of the rows."""

    format: Format
    rows: int = Field(ge=0)
    parts: tuple[PartEntry, ...]


# -------------------------------------------------------------------------------------------------------------- places


class Place(Protocol):
    """Place of a file, which may not exist."""

    @property
    def name(self) -> str:
        """Path or URI, for people."""

    def sibling(self, name: str) -> Place:
        """Return the place of that name in the same folder."""

    def put(self, write: Callable[[Path], None]) -> tuple[int, str]:
        """Let `write` fill a file, put that here in one step, and return its bytes and sha256."""

    def text(self) -> str | None:
        """Return the content; None if there is no file."""

    def discard(self) -> None:
        """Remove the file if it is there."""


@dataclass(frozen=True)
class _LocalPlace:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def sibling(self, name: str) -> _LocalPlace:
        return _LocalPlace(self.path.with_name(name))

    def put(self, write: Callable[[Path], None]) -> tuple[int, str]:
        with replaced(self.path) as temporary:
            write(temporary)
            return temporary.stat().st_size, sha256_of(temporary)

    def text(self) -> str | None:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _RemotePlace:
    """An object behind fsspec; object stores show an upload only once it is complete."""

    uri: str
    scratch: Path

    @property
    def name(self) -> str:
        return self.uri

    def sibling(self, name: str) -> _RemotePlace:
        return _RemotePlace(f"{self.uri.rpartition('/')[0]}/{name}", self.scratch)

    def put(self, write: Callable[[Path], None]) -> tuple[int, str]:
        temporary = self.scratch / f".predictions.{uuid.uuid4().hex}"
        try:
            write(temporary)
            filesystem, path = fsspec.core.url_to_fs(self.uri)
            filesystem.put_file(str(temporary), path)
            return temporary.stat().st_size, sha256_of(temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def text(self) -> str | None:
        filesystem, path = fsspec.core.url_to_fs(self.uri)
        try:
            content: bytes = filesystem.cat_file(path)
        except FileNotFoundError:
            return None
        return content.decode("utf-8", errors="replace")

    def discard(self) -> None:
        filesystem, path = fsspec.core.url_to_fs(self.uri)
        with suppress(FileNotFoundError):
            filesystem.rm_file(path)


# ------------------------------------------------------------------------------------------------------------- outputs


class JoinedRows(Protocol):
    """Predictions with all parts present."""

    def joined(self) -> Iterator[pa.Table]:
        """Yield all rows with their numbers, in tables of one schema, at least one."""

    def apart(self) -> Iterator[pa.Table]:
        """Yield the rows of each shard that has some, with their file and position, in tables of one schema."""


@dataclass(frozen=True)
class FileOutput:
    """One file."""

    place: Place
    format: Format

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def bad_rows(self) -> Place:
        """Place for rows without a prediction: `<stem>.bad-rows.jsonl`."""
        base = self.place.name.rpartition("/")[2]
        stem = base.rpartition(".")[0] or base
        return self.place.sibling(f"{stem}.{_BAD_ROWS}")

    def write(self, rows: JoinedRows) -> Mapping[str, Any]:
        """Write all rows; return nothing to add to the report."""
        self.place.put(lambda path: write_rows(path, rows.joined(), self.format))
        return {}


@dataclass(frozen=True)
class FolderOutput:
    """A folder of parts."""

    manifest: Place
    format: Format

    @property
    def name(self) -> str:
        return self.manifest.name.removesuffix(MANIFEST)

    @property
    def bad_rows(self) -> Place:
        """Place for rows without a prediction: `_bad-rows.jsonl`. Readers of folders skip names with `_`."""
        return self.manifest.sibling(f"_{_BAD_ROWS}")

    def write(self, rows: JoinedRows) -> Mapping[str, Any]:
        """Write the parts, then the manifest, then remove parts that only an earlier manifest names; return `parts`,
        their number.
        """
        earlier = self._earlier()
        entries = [self._put(number, table) for number, table in enumerate(rows.apart())]
        manifest = FolderManifest(format=self.format, rows=sum(entry.rows for entry in entries), parts=tuple(entries))
        self.manifest.put(lambda path: _write_text(path, manifest.to_json() + "\n"))
        for name in earlier - {entry.name for entry in entries}:
            self.manifest.sibling(name).discard()
        return {"parts": len(entries)}

    def _put(self, number: int, table: pa.Table) -> PartEntry:
        name = f"part-{number:05}.{self.format}"
        size, digest = self.manifest.sibling(name).put(lambda path: write_rows(path, [table], self.format))
        return PartEntry(name=name, rows=len(table), bytes=size, sha256=digest)

    def _earlier(self) -> set[str]:
        text = self.manifest.text()
        if text is None:
            return set()
        try:
            manifest = FolderManifest.model_validate_json(text)
        except ValidationError:
            return set()
        # Others may write into the folder, and into its manifest: remove parts only.
        return {entry.name for entry in manifest.parts if entry.name.startswith("part-") and "/" not in entry.name}


Output: TypeAlias = FileOutput | FolderOutput


def output_of(job: TrainerJob, paths: JobPaths) -> Output:
    """Return the output; called before the model is loaded, so that a bad URI fails early. StageError CONFIG."""
    prediction = job.predict
    text = prediction.output if prediction else None
    file_format = prediction.format if prediction else None
    if text is None:
        default = paths.predictions_parquet if file_format == "parquet" else paths.predictions_jsonl
        return FileOutput(_LocalPlace(default), file_format or "jsonl")
    uri = Uri.parse(text, "predict.output")
    if text.endswith("/"):
        return FolderOutput(_place(uri, uri.text + MANIFEST, paths), file_format or "jsonl")
    return FileOutput(_place(uri, text, paths), file_format or _by_ending(uri))


def _by_ending(uri: Uri) -> Format:
    if uri.rest.endswith(".jsonl"):
        return "jsonl"
    if uri.rest.endswith(".parquet"):
        return "parquet"
    raise StageError(
        FailureClass.CONFIG,
        "OutputFormat",
        f"predict.output is {uri.text!r}; the ending sets the format, and it is neither .jsonl nor .parquet.",
        "End it in .jsonl or .parquet, in / for a folder of parts, or set predict.format.",
    )


def _place(uri: Uri, text: str, paths: JobPaths) -> Place:
    if uri.scheme == "file":
        return _LocalPlace(local_path(Uri.parse(text, "predict.output")).absolute())
    try:
        fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise StageError(
            FailureClass.CONFIG,
            "DriverMissing",
            f"predict.output is {uri.text!r}, but no installed driver writes to {uri.scheme}://: {error}",
            "Install the fsspec driver of this scheme, or use file://.",
        ) from error
    return _RemotePlace(text, paths.root)


# ------------------------------------------------------------------------------------------------------------- content


def write_rows(path: Path, rows: Iterable[pa.Table], form: Format) -> None:
    """Write tables of one schema."""
    if form == "jsonl":
        write_lines(path, (row for table in rows for row in _objects(table)))
        return
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for table in rows:
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, table.schema))
            writer.write_table(table)


def _objects(table: pa.Table) -> Iterator[dict[str, object]]:
    columns = [python_values(column) for column in table.columns]
    return (dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True))


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        # default=str: for dates and the like, which only Parquet input can hold.
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
