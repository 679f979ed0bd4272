"""Work orders for other processes: JSON that assigns rows to files.

An order lies in a folder, or passes through a cluster, that others may be able to write to. So it holds data alone,
every part of it has a type, and it never names code to run: the receiver brings the job. Rows are not in it; they stay
in Arrow files of one folder, which an order names without a path.

Targets keep their exact types, as the task's encoding depends on them: arrays by their bytes, tuples and lists apart.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from finetune_contract.contract_models import Order
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import EntryName
from finetune_trainer.data.prepared import write_tables
from finetune_trainer.data.sources import Role
from finetune_trainer.prepare.shards import CHUNK_ROWS, Recipe, Rows, Shard, ShardFacts

_NumberType: TypeAlias = Literal["bool", "int32", "int64", "float64"]
"""Number types of targets and indices."""
_RECIPE = TypeAdapter(Recipe)
_FACTS = TypeAdapter(ShardFacts)


class StoredNumbers(Order):
    """An array of numbers by its bytes, in the writing machine's byte order; nodes of one job are alike."""

    type: _NumberType
    shape: tuple[int, ...] = Field(min_length=1, max_length=2)
    content: str
    """Bytes in Base64."""


class StoredObjects(Order):
    """A one-dimensional array of objects; see `_plain`."""

    objects: tuple[JsonValue, ...]


class StoredShard(Order):
    """A `Shard` without its rows."""

    role: Role
    number: int = Field(ge=0)
    of: int = Field(gt=0)
    first: int = Field(ge=0)
    inputs: dict[str, str]
    chunk_rows: int = Field(gt=0)
    file: EntryName
    """Raw split, an Arrow stream in the folder of rows."""
    rows: int = Field(ge=0)
    """Number of rows of the raw split."""
    index: StoredNumbers
    targets: StoredNumbers | StoredObjects | None


class PodOrder(Order):
    """Shards assigned to one pod, and the settings to encode them."""

    format: Literal[1] = 1
    revision: str
    """Revision of the model, as pinned by pod 0."""
    max_length: int = Field(gt=0)
    stride: int = Field(ge=0)
    model_type: str
    packing: bool
    """True if rows share sequences, as pod 0 decided when it read them."""
    shards: dict[int, StoredShard]
    """Shards by their place among all shards."""


class StoredFailure(Order):
    """A serialized StageError."""

    failure_class: FailureClass
    reason: str
    message: str
    hint: str


def broken_order(path: Path, why: object) -> StageError:
    """Return the error for an exchange file that is damaged or was not written by a pod. Another attempt writes it
    again. Of a ValidationError only the first fault is reported.
    """
    if isinstance(why, ValidationError):
        first = why.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return StageError(
        FailureClass.STORAGE_LOST,
        "BrokenOrder",
        f"{path} is damaged, or was not written by a pod of this job: {why}",
        "Check for other processes that write to the job's folder; the next attempt rewrites the file.",
    )


# ---------------------------------------------------------------------------------------------------------------- rows


class RowFolder:
    """Folder with the Arrow files that orders name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, tuple[datasets.Dataset, str]] = {}
        """File names by identity; the data set is kept so that no other one takes its place in memory."""
        self._opened: dict[str, datasets.Dataset] = {}

    def name_of(self, raw: datasets.Dataset) -> str:
        """Return the file of these rows. Rows elsewhere, such as those of the Hub, are copied into the folder once."""
        if id(raw) not in self._names:
            self._names[id(raw)] = raw, self._in_place(raw) or self._copied(raw)
        return self._names[id(raw)][1]

    def _in_place(self, raw: datasets.Dataset) -> str | None:
        """Return the one file of the folder that holds these rows and no others; None when there is none."""
        files, folder = [Path(file["filename"]).absolute() for file in raw.cache_files], self._folder.absolute()
        if len(files) != 1 or raw._indices is not None or not files[0].is_relative_to(folder):
            return None
        name = str(files[0].relative_to(folder))
        return name if len(datasets.Dataset.from_file(str(files[0]))) == len(raw) else None

    def _copied(self, raw: datasets.Dataset) -> str:
        name, rows = f"rows-{len(self._names)}.arrow", raw.with_format("arrow")
        tables: Iterator[pa.Table] = (
            rows[start : min(start + CHUNK_ROWS, len(raw))] for start in range(0, len(raw), CHUNK_ROWS)
        )
        write_tables(self._folder / name, tables)
        return name

    def open(self, name: str, rows: int) -> datasets.Dataset:
        """Map the rows of a file. Raise ValueError for another number of rows, and for a symbolic link."""
        if name not in self._opened:
            path = self._folder / name
            if path.is_symlink() or not path.is_file():
                raise ValueError(f"{path} is not a file")
            try:
                self._opened[name] = datasets.Dataset.from_file(str(path))
            except pa.ArrowInvalid as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        dataset = self._opened[name]
        if len(dataset) != rows:
            raise ValueError(f"{self._folder / name} has {len(dataset)} rows instead of {rows}")
        return dataset


# -------------------------------------------------------------------------------------------------------------- shards


def stored_shard(shard: Shard, folder: RowFolder) -> StoredShard:
    """Return the shard without its rows, which then are in `folder`."""
    return StoredShard(
        role=shard.role,  # type: ignore[arg-type]  # which pydantic checks
        number=shard.number,
        of=shard.of,
        first=shard.first,
        inputs=dict(shard.inputs),
        chunk_rows=shard.chunk_rows,
        file=folder.name_of(shard.rows.raw),
        rows=len(shard.rows.raw),
        index=_stored_numbers(shard.rows.index),
        targets=_stored_targets(shard.rows.targets),
    )


def read_shard(stored: StoredShard, folder: RowFolder) -> Shard:
    """Return the shard with its rows from `folder`. Raise ValueError for an inconsistent one."""
    raw = folder.open(stored.file, stored.rows)
    index = _numbers(stored.index)
    targets = None if stored.targets is None else _targets(stored.targets)
    if stored.index.type != "int64" or index.ndim != 1 or not len(index):
        raise ValueError("its index is not a list of rows")
    if index[0] < 0 or index[-1] >= stored.rows or (np.diff(index) <= 0).any():
        raise ValueError(f"its index does not ascend within the {stored.rows} rows of {stored.file}")
    if targets is not None and len(targets) != len(index):
        raise ValueError(f"it has {len(targets)} targets for {len(index)} rows")
    rows = Rows(raw, index, targets)
    return Shard(stored.role, stored.number, stored.of, stored.first, rows, stored.inputs, stored.chunk_rows)


def _stored_targets(targets: NDArray[Any] | None) -> StoredNumbers | StoredObjects | None:
    if targets is None:
        return None
    if targets.dtype == object:
        return StoredObjects(objects=tuple(_plain(target) for target in targets))
    return _stored_numbers(targets)


def _targets(stored: StoredNumbers | StoredObjects) -> NDArray[Any]:
    if isinstance(stored, StoredNumbers):
        return _numbers(stored)
    targets = np.empty(len(stored.objects), object)
    for at, target in enumerate(stored.objects):
        targets[at] = _object(target)
    return targets


def _stored_numbers(values: NDArray[Any]) -> StoredNumbers:
    content = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return StoredNumbers(type=values.dtype.name, shape=values.shape, content=content)  # type: ignore[arg-type]


def _numbers(stored: StoredNumbers) -> NDArray[Any]:
    try:
        content = base64.b64decode(stored.content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an array is not base64: {error}") from error
    if min(stored.shape) < 0 or len(content) != math.prod(stored.shape) * np.dtype(stored.type).itemsize:
        raise ValueError(f"an array of shape {stored.shape} has {len(content)} bytes")
    if stored.type == "bool" and content.strip(b"\0\1"):
        raise ValueError("a boolean array has values other than 0 and 1")
    return np.frombuffer(content, stored.type).reshape(stored.shape).copy()


def _plain(value: object) -> JsonValue:
    """Convert a task's target to JSON: lists as they are, types that JSON lacks as an object with one key, the type."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case tuple():
            return {"tuple": [_plain(item) for item in value]}
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {"dict": [[str(key), _plain(item)] for key, item in value.items()]}
        case np.ndarray():
            return {"array": _stored_numbers(value).model_dump(mode="json")}
        case _:
            raise TypeError(f"a target of type {type(value).__name__} cannot be sent to another process")


def _object(stored: JsonValue) -> Any:
    """Invert `_plain`. Raise ValueError for other values."""
    match stored:
        case None | bool() | int() | str():
            return stored
        case list():
            return [_object(item) for item in stored]
        case {"float": str(text), **others} if not others:
            return float.fromhex(text)
        case {"tuple": list(items), **others} if not others:
            return tuple(_object(item) for item in items)
        case {"dict": list(items), **others} if not others:
            return dict(_pair(item) for item in items)
        case {"array": dict(array), **others} if not others:
            return _numbers(StoredNumbers.model_validate(array))
        case _:
            raise ValueError(f"a target is {str(stored)[:80]}")


def _pair(stored: JsonValue) -> tuple[str, Any]:
    match stored:
        case [str(key), value]:
            return key, _object(value)
        case _:
            raise ValueError(f"an entry of a target is {str(stored)[:80]}")


# ---------------------------------------------------------------------------------------------------------------- pods


def pod_order(recipe: Recipe, shards: Mapping[int, Shard], folder: RowFolder) -> str:
    """Return the order of one pod, as JSON."""
    return PodOrder(
        revision=recipe.job.model.revision,
        max_length=recipe.max_length,
        stride=recipe.stride,
        model_type=recipe.model_type,
        packing=recipe.job.preparation.packing,
        shards={number: stored_shard(shard, folder) for number, shard in shards.items()},
    ).model_dump_json()


def read_pod_order(path: Path) -> PodOrder:
    """Read the order in a file. Raise StageError STORAGE_LOST `BrokenOrder` for other content."""
    if path.is_symlink():
        raise broken_order(path, "it is a symbolic link")
    try:
        return PodOrder.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise broken_order(path, error) from error


def read_shards(path: Path, order: PodOrder, folder: RowFolder) -> dict[int, Shard]:
    """Return the shards of the order in `path`. Raise StageError STORAGE_LOST `BrokenOrder` for an inconsistent one."""
    try:
        return {number: read_shard(stored, folder) for number, stored in order.shards.items()}
    except ValueError as error:
        raise broken_order(path, error) from error


# --------------------------------------------------------------------------------------------------------------- Spark


def shard_text(shard: Shard, folder: RowFolder) -> bytes:
    """Return one shard as JSON."""
    return stored_shard(shard, folder).model_dump_json().encode()


def read_shard_text(text: bytes, folder: RowFolder) -> Shard:
    """Return the shard of `shard_text`. Raise ValueError for another text."""
    return read_shard(StoredShard.model_validate_json(text), folder)


def recipe_text(recipe: Recipe) -> bytes:
    """Return the recipe, with its job, as JSON: for channels that only Spark itself can write to."""
    return _RECIPE.dump_json(recipe)


def read_recipe_text(text: bytes) -> Recipe:
    """Return the recipe of `recipe_text`. Raise ValueError for another text."""
    return _RECIPE.validate_json(text)


def result_text(result: ShardFacts | StageError) -> bytes:
    """Return the result of a shard, as JSON."""
    if isinstance(result, ShardFacts):
        return _FACTS.dump_json(result)
    return (
        StoredFailure(
            failure_class=result.failure_class, reason=result.reason, message=result.message, hint=result.hint
        )
        .model_dump_json()
        .encode()
    )


_RESULT: TypeAdapter[StoredFailure | ShardFacts] = TypeAdapter(
    Annotated[StoredFailure | ShardFacts, Field(union_mode="left_to_right")]
)


def read_result_text(text: bytes) -> ShardFacts | StageError:
    """Return the result of `result_text`. Raise ValueError for another text."""
    result = _RESULT.validate_json(text)
    if isinstance(result, ShardFacts):
        return result
    return StageError(result.failure_class, result.reason, result.message, result.hint)
