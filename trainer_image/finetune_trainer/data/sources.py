"""Finds and reads the raw splits that a `dataset` names.

A source is a folder, a file or a glob behind a scheme, or a data set of the Hub. `splits` name files by their stem
(`train` is `train.jsonl` or `train-*.jsonl`) or splits of the Hub. A named split that does not exist is an error that
lists the existing ones; no other split replaces it.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, Literal, Protocol, TypeAlias, cast

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from finetune_contract.data_settings import DataSource
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.uris import Uri, hub_name, local_path, package_path
from finetune_trainer.data.file_formats import (
    ENDINGS,
    SUFFIXES,
    Unread,
    first_rows,
    format_of,
    read,
    rows_of,
    with_json,
)
from finetune_trainer.data.folders import Loader, label_folder, label_splits, saved_splits
from finetune_trainer.data.prepared import arrow_table, batches, dataset_of, write_tables
from finetune_trainer.models.loading import hub_error

Role: TypeAlias = Literal["train", "validation", "test", "predict"]
SPLIT_ROLES: tuple[Role, ...] = ("train", "validation", "test")
_REMOTE = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""Scheme -> the distribution with its fsspec driver."""
_GLOB_CHARACTERS = frozenset("*?[")
HEAD_ROWS = 100
"""Rows by which the shape of the data is known."""


@dataclass(frozen=True)
class ColumnNeed:
    """A column of the raw data that the job uses."""

    setting: str
    """Path of the field that names it, e.g. `dataset.columns.text`."""
    name: str
    required: bool = True
    nested: bool = False
    """True to keep lists and objects of the column as JSON (`pa.json_()`), as people wrote them."""


def nested_columns(needs: Sequence[ColumnNeed]) -> frozenset[str]:
    """Return the columns whose lists and objects are kept as JSON."""
    return frozenset(need.name for need in needs if need.nested)


@dataclass(frozen=True)
class RawSplit:
    """The used columns of one split, in the order of its rows."""

    name: str
    """Name of the split, from the user or its file."""
    origin: str
    """Origin, for errors."""
    source: datasets.Dataset | pa.Table
    """Rows; a table is kept as such: a `Dataset` takes longer to create than a small model takes for a row."""
    notes: tuple[str, ...] = ()
    """Sentences for people on how its files were read."""
    partial: bool = False
    """True if it has more rows than were read."""
    has: tuple[str, ...] = ()
    """All its columns."""
    unread: Unread = field(default_factory=Unread)
    """Its columns that were not read."""
    one_row: bool = False
    """True for a single row of its own, whose place callers report."""

    @cached_property
    def rows(self) -> datasets.Dataset:
        """Return the rows as a `Dataset`, with its features of their columns."""
        return dataset_of(self.source) if isinstance(self.source, pa.Table) else self.source

    @property
    def table(self) -> pa.Table:
        """Return the rows as an Arrow table; not kept, as a selection of rows would be a copy of them."""
        return self.source if isinstance(self.source, pa.Table) else arrow_table(self.source)


class SplitSource(Protocol):
    """One existing split, not read yet."""

    @property
    def name(self) -> str:
        """Name of the split, from the user or its file."""

    def digest(self) -> str:
        """Return a digest of the content: equal digest, equal rows."""

    def head(self) -> list[dict[str, Any]]:
        """Return the first `HEAD_ROWS` readable rows with all their columns."""

    def read(self, needs: Sequence[ColumnNeed], scratch: Path, most: int | None = None) -> RawSplit:
        """Read its rows, or the first `most` of them, to disk: new files go into the folder `scratch`, which must be
        kept while rows are used.

        Raise StageError DATA `MissingColumn`, `EmptySplit` and those of the readers.
        """


class Source(Protocol):
    """A data set whose splits are known by name."""

    def named(self, name: str) -> SplitSource | None:
        """Return the split called `name`."""

    def names(self) -> tuple[str, ...]:
        """Return the existing names, for errors and for the choice of the only split."""

    def whole(self) -> SplitSource | None:
        """Return everything as one split, when no file is named after a split; None for a folder and for the Hub."""


# --------------------------------------------------------------------------------------------------- splits by role


def source_of(source: DataSource, setting: str) -> Source:
    """Return the files or Hub data set behind `source.uri`; `setting` is the path of the DataSource in the job file."""
    uri = Uri.parse(source.uri, f"{setting}.uri")
    if uri.scheme == "hf":
        return HubSource(uri, source.config, setting)
    if source.config is not None:
        raise StageError(
            FailureClass.CONFIG,
            "ConfigWithoutHub",
            f"{setting}.config is {source.config!r}, but {source.uri} is not on the Hub; "
            "only Hub data sets have configurations.",
            f"Leave {setting}.config out, or use hf://.",
        )
    return _file_source(uri, setting)


def splits_by_role(source: DataSource, *, trains: bool = True) -> dict[Role, SplitSource]:
    """Return the splits that a job uses, by role: all three when it trains, else validation and test.

    A file or a glob without names of splits is the train split, or the test split when nothing trains. Raise StageError
    DATA `SplitNotFound`.
    """
    data = source_of(source, "dataset")
    roles = SPLIT_ROLES if trains else SPLIT_ROLES[1:]
    explicit = {role: getattr(source.splits, role) for role in SPLIT_ROLES}
    whole = None if any(explicit.values()) else data.whole()
    if whole is not None:
        return {"train" if trains else "test": whole}
    splits: dict[Role, SplitSource] = {}
    for role in roles:
        split = data.named(explicit[role] or role)
        if split is not None:
            splits[role] = split
        elif explicit[role] or role == "train":
            raise _split_not_found(source, "dataset", role, explicit[role], data.names())
    if not splits:
        raise _split_not_found(source, "dataset", "test", None, data.names())
    return splits


def predict_split(source: DataSource) -> SplitSource:
    """Return the one split to predict: the named one, else everything, else `test`, else the only existing split.

    Of several named ones test is used, then validation: a data set that is written once for the whole job (by a YAML
    anchor) names all three.
    """
    data = source_of(source, "predict.dataset")
    for role in ("test", "validation", "train"):
        name = getattr(source.splits, role)
        if name is not None:
            split = data.named(name)
            if split is None:
                raise _split_not_found(source, "predict.dataset", role, name, data.names())
            return split
    names = data.names()
    split = data.whole() or data.named("test") or (data.named(names[0]) if len(names) == 1 else None)
    if split is None:
        raise _split_not_found(source, "predict.dataset", "test", None, names)
    return split


def _split_not_found(source: DataSource, setting: str, role: str, name: str | None, names: Sequence[str]) -> StageError:
    there = ", ".join(names) or "no data files"
    problem = (
        f"{setting}.splits.{role} is {name!r}"
        if name
        else f"{setting}.splits.{role} is not set and there is no split {role!r}"
    )
    return StageError(
        FailureClass.DATA,
        "SplitNotFound",
        f"{problem}: {source.uri} has {there}.",
        f"Set {setting}.splits.{role} to one of them. Supported file endings: {ENDINGS}.",
    )


def check_columns(split: str, origin: str, has: Sequence[str], needs: Sequence[ColumnNeed]) -> None:
    """Raise StageError DATA `MissingColumn` for a required column that is missing."""
    for need in needs:
        if need.required and need.name not in has:
            near = _near(need.name, has)
            named = (
                f"Set {need.setting} to the column that holds it; docs/data-shapes.md has the rows that tasks read."
                if "." in need.setting
                else "Write all splits in one shape."
            )
            raise StageError(
                FailureClass.DATA,
                "MissingColumn",
                f"{need.setting} is {need.name!r}, but split {split} ({origin}) has the columns {', '.join(has)}.",
                named if near is None else f"Did you mean {near!r}?",
            )


_NEAR = 0.75
"""Least similarity of a name that is proposed: above it are slips (`txt`, `labels`), below it other words (`output` for
`text` has 0.4, `version` for `question` 0.53, `context` for `text` 0.73).
"""


def _near(name: str, names: Sequence[str]) -> str | None:
    """Return the name that differs from `name` by a slip, by capitals or by signs between words; None without one."""
    plain = {re.sub(r"[\W_]", "", other.casefold()): other for other in reversed(names)}
    close = difflib.get_close_matches(re.sub(r"[\W_]", "", name.casefold()), plain, n=1, cutoff=_NEAR)
    return plain[close[0]] if close else None


def _empty(split: str, origin: str) -> StageError:
    return StageError(
        FailureClass.DATA,
        "EmptySplit",
        f"Split {split} ({origin}) has no rows.",
        "Add rows, or leave the split out.",
    )


# ------------------------------------------------------------------------------------------------------------ files


_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime")
"""Keys of `info` in the file systems of fsspec that change with the content."""


@dataclass(frozen=True)
class FsFile:
    """A file of an fsspec file system."""

    filesystem: Any = field(repr=False, compare=False)
    name: str

    @property
    def stem(self) -> str:
        """Return the file's name without folder and ending."""
        base = PurePosixPath(self.name).name
        return base[: -len(next(suffix for suffix in SUFFIXES if base.endswith(suffix)))]

    def open(self) -> IO[bytes]:
        """Open the content, from the start."""
        stream: IO[bytes] = self.filesystem.open(self.name, "rb")
        return stream

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return int(self.filesystem.size(self.name))

    @property
    def version(self) -> str:
        """Return name, size and the fields that the file system changes on a write: a digest of the content without
        reading it.
        """
        info = self.filesystem.info(self.name)
        changes = [info[key] for key in _VERSION_KEYS if info.get(key) is not None]
        return f"{self.name} {info.get('size')} {' '.join(map(str, changes))}"


@dataclass(frozen=True)
class FileSplit:
    """One or more files that hold one split, in the order of their names."""

    name: str
    files: tuple[FsFile, ...]

    @property
    def origin(self) -> str:
        """Return the file, or the first and the number of the others."""
        more = len(self.files) - 1
        return self.files[0].name + (f" and {more} more" if more else "")

    def digest(self) -> str:
        """Return the sha256 over the formats and the contents of the files; their names do not matter."""
        whole = hashlib.sha256()
        for file in self.files:
            with file.open() as stream:
                content = hashlib.file_digest(cast(io.BufferedReader, stream), "sha256").hexdigest()
                whole.update(f"{format_of(file.name)} {content}\n".encode())
        return whole.hexdigest()

    def head(self) -> list[dict[str, Any]]:
        """Return the first rows of the first file that has rows."""
        return next(filter(None, (first_rows(file, HEAD_ROWS) for file in self.files)), [])

    def read(self, needs: Sequence[ColumnNeed], scratch: Path, most: int | None = None) -> RawSplit:
        """Read the rows of all files; a file without rows beside others with rows is fine."""
        wanted = list(dict.fromkeys(need.name for need in needs))
        has: dict[str, None] = {}
        schemas: list[pa.Schema] = []
        notes: list[str] = []
        partial = False
        unread = Unread()
        with Spool(scratch) as spool:
            for file in self.files:
                if partial:
                    break
                seen: dict[str, None] = {}
                of_file: list[pa.Schema] = []
                for table in read(file, wanted, seen, notes, nested_columns(needs), unread):
                    if most is not None and spool.rows + table.num_rows > most:
                        table, partial = table.slice(0, most - spool.rows), True
                    schema = spool.write(table)
                    if table.num_rows and schema not in of_file:
                        of_file.append(schema)
                    if partial:
                        break
                if not seen:
                    continue
                check_columns(self.name, file.name, list(seen), needs)
                has.update(seen)
                if of_file:
                    with _one_type(f"{file.name}: the type of a column changes"):
                        schemas.append(pa.unify_schemas(of_file, promote_options="permissive"))
            if not spool.rows:
                raise _empty(self.name, self.origin)
            with _one_type(f"The files of split {self.name} ({self.origin}) give a column different types"):
                rows = spool.close(pa.unify_schemas(schemas, promote_options="permissive"))
        used = rows.select_columns([name for name in wanted if name in has])
        return RawSplit(self.name, self.origin, used, tuple(notes), partial, tuple(has), unread)


@contextmanager
def _one_type(otherwise: str) -> Iterator[None]:
    """Raise StageError DATA `MixedTypes` for columns for which Arrow finds no common type."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise StageError(
            FailureClass.DATA, "MixedTypes", f"{otherwise}: {error}", "Use one type in all rows of the column."
        ) from error


@dataclass(frozen=True)
class FileSource:
    """Files found by a path or a glob."""

    uri: str
    files: tuple[FsFile, ...]
    folder: bool
    setting: str

    def named(self, name: str) -> SplitSource | None:
        """Return the files `name.*`, or the shards `name-*.*`."""
        exact = tuple(file for file in self.files if file.stem == name)
        if len(exact) > 1:
            raise StageError(
                FailureClass.DATA,
                "AmbiguousSplit",
                f"{self.setting}.uri {self.uri} has split {name} more than once: "
                f"{', '.join(file.name for file in exact)}.",
                "Keep one of them, or set the URI to one file.",
            )
        files = exact or tuple(file for file in self.files if file.stem.startswith(f"{name}-"))
        return FileSplit(name, files) if files else None

    def names(self) -> tuple[str, ...]:
        """Return the stems of all files."""
        return tuple(dict.fromkeys(file.stem for file in self.files))

    def whole(self) -> SplitSource | None:
        """Return all files as one split, unless they are in a folder or one is named after a split's role."""
        if self.folder or (len(self.files) > 1 and any(file.stem in SPLIT_ROLES for file in self.files)):
            return None
        return FileSplit(self.files[0].stem, self.files)


@dataclass(frozen=True)
class FolderSource:
    """A folder that is a data set as a whole (see `folders.py`)."""

    path: str
    splits: Mapping[str, Loader]
    form: str
    """Description of its files."""
    only: bool = False
    """True if it is one split, without a name of its own."""

    def named(self, name: str) -> SplitSource | None:
        """Return the split."""
        load = self.splits.get(name)
        path = self.path if self.only else f"{self.path}/{name}"
        return None if load is None else HubSplit(name, path, load(), (f"{self.path}: read as {self.form}.",))

    def names(self) -> tuple[str, ...]:
        """Return the splits."""
        return tuple(self.splits)

    def whole(self) -> SplitSource | None:
        """Return the only split."""
        return self.named(next(iter(self.splits))) if self.only else None


def _folder_source(filesystem: Any, path: str) -> FolderSource | None:
    saved = saved_splits(filesystem, path)
    splits = saved or label_splits(filesystem, path, SPLIT_ROLES)
    if splits:
        form = "a data set that save_to_disk wrote" if saved else _LABEL_FOLDERS
        return FolderSource(path, splits, form, only=bool(saved) and filesystem.exists(f"{path}/state.json"))
    labelled = label_folder(filesystem, path)
    if labelled is None:
        return None
    return FolderSource(path, {PurePosixPath(path).name: labelled}, _LABEL_FOLDERS, only=True)


_LABEL_FOLDERS = "texts in a folder for each label"


def _file_source(uri: Uri, setting: str) -> Source:
    filesystem, path = _filesystem(uri, setting)
    if filesystem.isdir(path):
        folder_source = _folder_source(filesystem, path)
        if folder_source is not None:
            return folder_source
        names = [name for name in filesystem.ls(path, detail=False) if not PurePosixPath(name).name.startswith(".")]
    elif filesystem.isfile(path):
        names = [path]
    elif _GLOB_CHARACTERS & set(path):
        names = [name for name in filesystem.glob(path) if filesystem.isfile(name)]
    else:
        raise StageError(
            FailureClass.DATA,
            "DataNotFound",
            f"{setting}.uri is {uri.text!r}, but {path} does not exist.",
            "Name a folder, a file or a glob; file:// without a third slash is relative to the job file's folder.",
        )
    files = tuple(FsFile(filesystem, name) for name in sorted(names) if format_of(name))
    folder = bool(filesystem.isdir(path))
    if not files:
        raise StageError(
            FailureClass.DATA,
            "DataNotFound",
            f"{setting}.uri is {uri.text!r}, and no file there ends in one of {ENDINGS}.",
            _folder_hint(filesystem, path, setting) if folder else "Give the files one of these endings.",
        )
    return FileSource(uri.text, files, folder, setting)


def _folder_hint(filesystem: Any, path: str, setting: str) -> str:
    """Return the hint to name a folder inside that holds data, as repositories of the Hub do; else to rename files."""
    folders = sorted(entry["name"] for entry in filesystem.ls(path, detail=True) if entry["type"] == "directory")
    inside = next((one for one in folders if any(map(format_of, filesystem.ls(one, detail=False)))), None)
    return "Give the files one of these endings." if inside is None else f"Set {setting}.uri to its folder {inside}."


def _filesystem(uri: Uri, setting: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path in it."""
    if uri.scheme == "file":
        return fsspec.filesystem("file"), str(local_path(uri).absolute())
    if uri.scheme == "pkg":
        return fsspec.filesystem("file"), str(package_path(uri, f"{setting}.uri", FailureClass.DATA, "DataNotFound"))
    driver = _REMOTE.get(uri.scheme)
    if driver is None:
        raise StageError(
            FailureClass.CONFIG,
            "SchemeNotSupported",
            f"{setting}.uri is {uri.text!r}; supported schemes are hf, file, pkg, {', '.join(_REMOTE)}.",
            "Use one of them.",
        )
    try:
        return fsspec.filesystem(uri.scheme), uri.rest
    except ImportError as error:
        raise StageError(
            FailureClass.CONFIG,
            "DriverMissing",
            f"{setting}.uri is {uri.text!r}, but the driver for {uri.scheme}:// is not installed ({driver}).",
            f"Install {driver} in the trainer's environment, or use file://.",
        ) from error


class Spool:
    """Writer of tables whose columns may turn out to have another type than in the first rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._parts: list[Path] = []
        self._schemas: list[pa.Schema] = []
        self._writer: pa.RecordBatchStreamWriter | None = None
        self.rows = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, table: pa.Table) -> pa.Schema:
        """Append the rows and return the schema they are kept with: categories (dictionaries) become their values,
        views plain text.
        """
        table = plain_table(table)
        if table.num_rows:
            if self._writer is None or not self._schemas[-1].equals(table.schema):
                self._finish()
                self._parts.append(self._folder / f"{len(self._parts)}.arrow")
                self._schemas.append(table.schema)
                self._writer = pa.ipc.new_stream(self._parts[-1], table.schema)
            self._writer.write_table(table)
            self.rows += table.num_rows
        return table.schema

    def close(self, schema: pa.Schema) -> datasets.Dataset:
        """Return all rows; columns of `schema` that rows lack are null. Raise pa.ArrowInvalid for a value that does not
        fit its type.
        """
        self._finish()
        if any(not part_schema.equals(schema) for part_schema in self._schemas):
            whole = self._folder / "whole.arrow"
            write_tables(whole, (_promoted(batch, schema) for part in self._parts for batch in batches(part)))
            for part in self._parts:
                part.unlink()
            self._parts = [whole]
        return datasets.Dataset.from_file(str(self._parts[0]))


def plain_table(table: pa.Table) -> pa.Table:
    """Return the table without dictionaries and views, which not every function supports."""
    fields = [f.with_type(_plain_type(f.type)) for f in table.schema]
    huggingface = {k: v for k, v in (table.schema.metadata or {}).items() if k == b"huggingface"}
    columns = [c.cast(f.type) if c.type != f.type else c for c, f in zip(table.columns, fields, strict=True)]
    return pa.table(columns, schema=pa.schema(fields, huggingface or None))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries and views, which not every function supports."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) and (plain := _plain_type(kind.value_type)) != kind.value_type:
        return pa.list_(plain)
    return kind


def _promoted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    table = pa.Table.from_batches([batch])
    has = table.column_names
    columns = [table[f.name] if f.name in has else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, names=schema.names).cast(schema)


# -------------------------------------------------------------------------------------------------------------- Hub


@dataclass(frozen=True)
class HubSplit:
    """One split of a Hub data set."""

    name: str
    repository: str
    rows: datasets.Dataset
    notes: tuple[str, ...] = ()
    """Sentences for people on how it is read."""

    def digest(self) -> str:
        """Return the fingerprint by which `datasets` identifies the content of a loaded split."""
        return str(self.rows._fingerprint)

    def head(self) -> list[dict[str, Any]]:
        """Return the first rows, with values as they are stored."""
        return rows_of(self.rows.with_format("arrow")[:HEAD_ROWS])

    def read(self, needs: Sequence[ColumnNeed], scratch: Path, most: int | None = None) -> RawSplit:
        """Map the used columns from the Hub's cache; types and class names stay as on the Hub."""
        has = self.rows.column_names
        if not len(self.rows):
            raise _empty(self.name, self.repository)
        check_columns(self.name, self.repository, has, needs)
        wanted = [name for name in dict.fromkeys(need.name for need in needs) if name in has]
        used = self.rows.select_columns(wanted)
        partial = most is not None and len(used) > most
        if most is not None:
            used = used.select(range(min(most, len(used))))
        return RawSplit(
            self.name,
            self.repository,
            _with_json(used, nested_columns(needs), scratch),
            self.notes,
            partial,
            tuple(has),
            self._unread([name for name in has if name not in wanted]),
        )

    def _unread(self, names: Sequence[str]) -> Unread:
        """Count by the columns' bitmaps and offsets, which are a small part of a file of text."""
        unread = Unread(len(self.rows))
        for name in names:
            # Selected rows have places in the table, which counting would have to follow.
            unread.count(name, None if self.rows._indices is not None else _filled(self.rows.data.column(name)))
        return unread


def _filled(column: pa.ChunkedArray) -> int:
    """Return the number of cells that are neither null nor empty."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return int(pc.sum(pc.greater(pc.list_value_length(column), 0)).as_py() or 0)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return int(pc.sum(pc.greater(pc.binary_length(column), 0)).as_py() or 0)
    return int(len(column) - column.null_count)


def _with_json(rows: datasets.Dataset, nested: Collection[str], scratch: Path) -> datasets.Dataset:
    """Return the rows with nested columns as JSON, from a new file in `scratch`."""
    if not any(pa.types.is_nested(field.type) for field in rows.features.arrow_schema if field.name in nested):
        return rows
    path = Path(tempfile.mkdtemp(dir=scratch)) / "json.arrow"
    starts = range(0, len(rows), _JSON_ROWS)
    arrow = rows.with_format("arrow")
    write_tables(path, (with_json(arrow[start : start + _JSON_ROWS], nested) for start in starts))
    return datasets.Dataset.from_file(str(path))


_JSON_ROWS = 1024


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hub: `hf://org/name`, with a revision as `hf://org/name@revision`."""

    uri: Uri
    config: str | None
    setting: str

    @property
    def repository(self) -> str:
        """Return `org/name`. Raise StageError CONFIG for any other form."""
        name = self.uri.rest.partition("@")[0].rstrip("/").removeprefix("datasets/")
        return hub_name(name, self.uri, f"{self.setting}.uri")

    @cached_property
    def _all(self) -> Mapping[str, datasets.Dataset]:
        loaded = self._load(None)
        assert isinstance(loaded, datasets.DatasetDict)
        return {str(name): rows for name, rows in loaded.items()}

    def _load(self, split: str | None) -> datasets.Dataset | datasets.DatasetDict:
        revision = self.uri.rest.partition("@")[2] or None
        try:
            return datasets.load_dataset(self.repository, self.config, split=split, revision=revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError, RuntimeError) as error:
            known = hub_error(self.uri.text, f"{self.setting}.uri", FailureClass.DATA, "DataNotFound", error)
            if known is not None:
                raise known from error
            raise StageError(
                FailureClass.DATA,
                "HubDatasetUnreadable",
                f"{self.setting}.uri is {self.uri.text!r}, config {self.config!r}: {error}",
                f"Check {self.setting}.uri, {self.setting}.config and {self.setting}.splits.",
            ) from error

    def named(self, name: str) -> SplitSource | None:
        """Return the split, or a slice of one such as `train[:10%]`."""
        if "[" in name or "+" in name:
            rows = self._load(name)
            assert isinstance(rows, datasets.Dataset)
            return HubSplit(name, self.repository, rows)
        return HubSplit(name, self.repository, self._all[name]) if name in self._all else None

    def names(self) -> tuple[str, ...]:
        """Return all splits of the configuration."""
        return tuple(self._all)

    def whole(self) -> SplitSource | None:
        """Return None: splits of the Hub have names."""
        return None
