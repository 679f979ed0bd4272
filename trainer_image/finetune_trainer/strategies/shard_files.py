"""State in shards: each process writes its part into a file of its own, and reads the parts that it needs.

torch.distributed.checkpoint (DCP) plans which process writes which part (one of those that have a copy) and which parts
it reads, for any number of processes and any division. This module is the storage below it. DCP's own storage is not
used: it unpickles `.metadata` and all values that are not tensors, which runs any code that a file names, and its
writer for safetensors puts a process's whole part into host memory, twice. Here tensors are in files of safetensors,
which hold numbers only, and are written in pieces; all else is JSON. An index says where each part of a tensor is.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future

from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.checkpoint.tensor_files import (
    TensorForm,
    storage_order,
    type_name_of,
    type_of_name,
    write_tensors,
)
from finetune_trainer.core.distributed import patiently_gathered, waiting_group
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import EntryName, FileEntry, write_hashed
from finetune_trainer.strategies.parallel.sharded_tensors import blocks_of
from finetune_trainer.strategies.staging_memory import StagingMemory

_FROM_GPU = StagingMemory()
"""Memory of copies of this process's GPU; a process has one training."""
INDEX = "index.json"
"""File that lists all tensors of the state, and in which files their parts are."""


Extents = Annotated[tuple[NonNegativeInt, ...], Field(max_length=64)]
"""Indices or sizes of a block, one a dimension; torch has at most 64 dimensions."""


class StoredPart(Message):
    """A part of a tensor, a block of it in all its dimensions."""

    file: EntryName
    """Path relative to the index."""
    name: str
    """Name of the part in that file."""
    offsets: Extents
    """First index of the part in each dimension of the tensor."""
    sizes: Extents


class StoredTensor(Message):
    """A tensor in parts that cover it."""

    dtype: str
    """safetensors' name of the type."""
    shape: Extents
    parts: tuple[StoredPart, ...]

    @property
    def form(self) -> TensorForm:
        """Type and shape of the whole. Raise ValueError for an unknown type."""
        return TensorForm(type_of_name(self.dtype), self.shape)


class StateIndex(Message):
    """Content of a folder with state in shards."""

    tensors: dict[str, StoredTensor]
    rest: dict[str, Any]
    """Values that are not tensors, as JSON."""


@dataclass(frozen=True)
class StagedState:
    """Files that this process writes: its parts of the state, divided among all processes."""

    file: str
    """Name of the file with the tensors."""
    forms: Mapping[str, TensorForm]
    tensors: Sequence[torch.Tensor]
    """Tensors in the `storage_order` of `forms`: the model's own, or copies in host memory."""
    index: str | None
    """Content of the index, on rank 0."""

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(form.size for form in self.forms.values())

    def write(self, folder: Path) -> Mapping[str, FileEntry]:
        """Write the files of all processes, and return those of this one, hashed meanwhile, by their names. Every rank
        must call it. Raise the error of the first process that has one, on all of them.
        """
        entries: dict[str, FileEntry] = {}
        mine: Exception | None = None
        try:
            if self.forms:
                entries[self.file] = write_tensors(folder / self.file, self.forms, self.tensors)
            if self.index is not None:
                entries[INDEX] = write_hashed(folder / INDEX, self.index)
        except Exception as error:  # goes to all processes
            mine = error
        failed = next((outcome for outcome in patiently_gathered(mine) if outcome is not None), None)
        if failed is not None:
            raise mine or failed
        return entries


def stage_state(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any], *, copied: bool) -> StagedState:
    """Divide the state of all processes, and return the part of this one. Every rank must call it.

    A name stands for the same tensor on all processes, of which each has all or a part. `rest`, of rank 0, must be
    JSON. `copied`: as a copy in host memory, so that the training can go on. Raise the error of the first process that
    has one, on all of them.
    """
    writer = _ShardStager(rest, copied)
    with _own_errors():
        save(
            {name: _checkpointable(tensor) for name, tensor in tensors.items()},
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=waiting_group(),
            no_dist=not torch.distributed.is_initialized(),
        )
    return StagedState(writer.file, writer.forms, writer.tensors, writer.index)


def read_index(part: CheckpointPart) -> StateIndex:
    """Return the index of the state in that folder. Raise StageError CHECKPOINT if there is none that can be read, or
    for tensors larger than the checkpoint's files: readers allocate what the index says.
    """
    path = part.folder / INDEX
    try:
        index = StateIndex.model_validate_json(part.checked(path).read_bytes())
        size = sum(tensor.form.size for tensor in index.tensors.values())
    except (ValueError, OSError) as error:
        raise unreadable(path, "cannot be read") from error
    stored = sum(entry.size for entry in part.checkpoint.manifest.files.values())
    if size > stored:
        raise unreadable(path, f"lists tensors of {size:,} bytes, and all files have {stored:,}")
    return index


def read_state(part: CheckpointPart, index: StateIndex, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` in place, each process what it has of them. Every rank must call it, also with other names.

    Raise StageError CHECKPOINT for a tensor that the state does not have in that shape, or does not have wholly.
    """
    for name, tensor in tensors.items():
        _expect_stored(part, index, name, tuple(tensor.shape))
    with _own_errors(), torch.no_grad():
        load(
            {name: _checkpointable(tensor) for name, tensor in tensors.items()},
            storage_reader=_ShardReader(part, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=waiting_group(),
            no_dist=not torch.distributed.is_initialized(),
        )


def _checkpointable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in a form whose parts DCP knows. A process has several parts of a packed matrix, one of each of
    the matrices side by side, and data ranks cut what tensor ranks have; DCP computes wrong places for both (torch
    2.15).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    several = sum(not placement.is_replicate() for placement in tensor.placements) > 1
    if not several and not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return tensor
    given: Any = tensor.detach()
    blocks = blocks_of(given)
    local = given.to_local()
    local = local.view_as(local)  # DCP finds the places as attributes, which the model's own tensor must not get
    local.global_shape = tuple(tensor.shape)
    local.global_offsets = tuple(block.offsets for block in blocks)
    local.local_offsets = tuple(block.local_offsets for block in blocks)
    local.local_sizes = tuple(block.sizes for block in blocks)
    return local  # type: ignore[no-any-return]


def _expect_stored(part: CheckpointPart, index: StateIndex, name: str, shape: tuple[int, ...]) -> None:
    stored = index.tensors.get(name)
    if stored is None:
        raise unreadable(part.folder / INDEX, f"lacks {name}")
    if stored.shape != shape:
        raise unreadable(part.folder / INDEX, f"has {name} in shape {stored.shape}, needed is {shape}")
    if sum(math.prod(piece.sizes) for piece in stored.parts) != math.prod(shape):
        raise unreadable(part.folder / INDEX, f"lacks parts of {name}")


def unreadable(path: Path, problem: str) -> StageError:
    """Return the error for a state that cannot be loaded."""
    message = f"The state of the checkpoint is not usable: {path} {problem}."
    return StageError(
        FailureClass.CHECKPOINT, "UnreadableState", message, "Delete this checkpoint to use an older one."
    )


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error that a process had, in place of DCP's, which is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        rank = min(failed.failures)
        error, _ = failed.failures[rank]
        raise error from failed


@contextmanager
def _opened(part: CheckpointPart, name: str) -> Iterator[Any]:
    """Open a file of tensors, which must be one that the manifest lists."""
    path = part.listed(part.folder / name)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise unreadable(path, f"cannot be read: {error}") from error


# ------------------------------------------------------------------------------------------------------------- storage


@dataclass(frozen=True)
class _Place:
    """Place of a part."""

    file: str
    name: str


@dataclass
class _ShardStager(StorageWriter):
    """DCP's storage, to which it gives the parts that a process is to write."""

    rest: Mapping[str, Any]
    copied: bool
    file: str = ""
    forms: Mapping[str, TensorForm] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    index: str | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the folder is a new one."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True; there is no choice of storage."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return None."""
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Name the file by the rank."""
        self.file = f"shard-{kwargs.get('rank', 0):05}.safetensors"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor."""
        for item in plan.items:
            if item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is not a tensor.")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep the parts of this process, or copies."""
        items = _by_part_name(plan)
        forms = {part: TensorForm(_properties(item).dtype, tuple(_chunk(item).sizes)) for part, item in items.items()}
        parts: Any = [planner.resolve_data(items[part]) for part in storage_order(forms)]
        self.forms, self.tensors = forms, _host_copies(parts) if self.copied else parts
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [WriteResult(item.index, forms[part].size, _Place(self.file, part)) for part, item in items.items()]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Compose the index, on rank 0."""
        parts: dict[str, list[StoredPart]] = defaultdict(list)
        chunks = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
            if math.prod(chunk.sizes)
        }
        for result in (written for of_rank in results for written in of_rank):
            assert result.index.offset is not None
            offsets = tuple(result.index.offset)
            sizes = chunks[result.index.fqn, offsets]
            place: _Place = result.storage_data
            parts[result.index.fqn].append(StoredPart(file=place.file, name=place.name, offsets=offsets, sizes=sizes))
        tensors = {
            name: StoredTensor(
                dtype=type_name_of(tensor.properties.dtype), shape=tuple(tensor.size), parts=tuple(parts[name])
            )
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        rest = json.loads(json.dumps(self.rest))
        self.index = StateIndex(tensors=tensors, rest=rest).model_dump_json(by_alias=True)


def _host_copies(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in host memory. Those of a GPU's tensors are overwritten by the next call, which waits until they
    are written.
    """
    moved = iter(_FROM_GPU.copies([part for part in parts if part.is_cuda]))
    return [
        next(moved) if part.is_cuda else torch.empty(part.shape, dtype=part.dtype).copy_(part.detach())
        for part in parts
    ]


def _by_part_name(plan: SavePlan) -> dict[str, WriteItem]:
    """Return the parts that a process writes by their names in its file: the tensor's, and a number if it has several.
    Parts without elements, of tensors with fewer rows than processes, are left out.
    """
    items: dict[str, WriteItem] = {}
    for item in plan.items:
        if math.prod(_chunk(item).sizes):
            # The index is DCP's hint, the number of the part among those of this process.
            hint = item.index.index or 0
            items[f"{item.index.fqn}#{hint}" if hint else item.index.fqn] = item
    return items


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _properties(item: WriteItem) -> TensorProperties:
    assert item.tensor_data is not None
    return item.tensor_data.properties


@dataclass
class _ShardReader(StorageReader):
    """DCP's storage while it reads."""

    part: CheckpointPart
    index: StateIndex

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True; there is no choice of storage."""
        return True

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the index in DCP's form."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=tensor.form.dtype),
                    size=torch.Size(tensor.shape),
                    chunks=[ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts],
                )
                for name, tensor in self.index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the index is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts that the plan names into their tensors, file after file."""
        places = {
            MetadataIndex(name, part.offsets): _Place(part.file, part.name)
            for name, tensor in self.index.tensors.items()
            for part in tensor.parts
        }
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[places[item.storage_index].file].append(item)
        for name, items in sorted(wanted.items()):
            with _opened(self.part, name) as file:
                for item in items:
                    self._copy(file, places[item.storage_index].name, item, planner.resolve_tensor(item).detach())
        read: Future[None] = Future()
        read.set_result(None)
        return read

    def _copy(self, file: Any, name: str, item: ReadItem, target: torch.Tensor) -> None:
        if target.dim():
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            value = file.get_slice(name)[tuple(slice(at, at + length) for at, length in ranges)]
        else:
            value = file.get_tensor(name)
        if value.shape != target.shape:
            raise unreadable(self.part.folder / INDEX, f"has parts of {name} in another shape than their files")
        target.copy_(value)
