"""Tensors that the tensor ranks divide first, and the data ranks then: FSDP over the slices of split layers.

A weight is a DTensor on the mesh of its tensor ranks, or no DTensor where they all have it whole; FSDP cuts what a
process has of it in its first dimension, into a DTensor on the mesh data x tensor. Here the divisions are undone in the
reverse order, and the place of each part is computed: torch's checkpoints (2.15) misplace parts of matrices that lie
side by side in one weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from finetune_trainer.strategies.parallel.mesh import DATA, TENSOR


@dataclass(frozen=True)
class Span:
    """Indices of one dimension of a tensor that a process has side by side."""

    start: int
    """First index in the whole tensor."""
    local: int
    """First index in the part of this process."""
    length: int


@dataclass(frozen=True)
class LocalBlock:
    """Block of a whole tensor that lies in one piece in the part of this process."""

    offsets: tuple[int, ...]
    """First index of each dimension in the whole tensor."""
    local_offsets: tuple[int, ...]
    """First index of each dimension in the part of this process."""
    sizes: tuple[int, ...]


def placement_of(value: torch.Tensor, dimension: str) -> Placement | None:
    """Return the placement of `value` over the mesh dimension `dimension`; None if it is not spread over it."""
    if not isinstance(value, DTensor):
        return None
    names = value.device_mesh.mesh_dim_names or ()
    return value.placements[names.index(dimension)] if dimension in names else None


def is_sharded(value: torch.Tensor, dimension: str) -> bool:
    """Return whether the processes of the mesh dimension `dimension` have different parts of `value`."""
    placement = placement_of(value, dimension)
    # Packed matrices are divided by a placement of another class than Shard.
    return placement is not None and not placement.is_replicate()


@dataclass(frozen=True)
class Position:
    """Place of a process among those that divide a tensor."""

    ranks: int
    rank: int


def blocks_of(value: DTensor) -> tuple[LocalBlock, ...]:
    """Return the blocks of `value` that this process has; none if it has no element of it.

    Raise ValueError for packed matrices that the tensor ranks cannot share equally.
    """
    among_data = _position(value, DATA) if is_sharded(value, DATA) else Position(1, 0)
    split = placement_of(value, TENSOR)
    if not isinstance(split, Shard | _StridedShard):
        return blocks(tuple(value.shape), None, Position(1, 0), among_data)
    return blocks(tuple(value.shape), split, _position(value, TENSOR), among_data)


def blocks(
    shape: tuple[int, ...], split: Shard | _StridedShard | None, tensor: Position, data: Position
) -> tuple[LocalBlock, ...]:
    """Return the blocks of a tensor that the process at these positions has. `split`: division among the tensor ranks,
    whose parts the data ranks divide in the first dimension.
    """
    spans = [[Span(0, 0, size)] for size in shape]
    if split is not None:
        dimension = split.dim % len(shape)
        spans[dimension] = list(_spans(shape[dimension], split, tensor))
    if spans:
        spans[0] = list(_cut(spans[0], data))
    return tuple(_products(spans))


def _spans(size: int, split: Shard | _StridedShard, at: Position) -> Iterator[Span]:
    """Yield what the tensor rank at that position has of `size` indices."""
    ranks, rank = at.ranks, at.rank
    if isinstance(split, Shard):
        start, length = _chunk(size, at)
        yield Span(start, 0, length)
        return
    packed = int(split.split_factor)
    width = size // packed // ranks
    if width * packed * ranks != size:
        raise ValueError(f"{size} columns of {packed} matrices are not divided evenly among {ranks}.")
    for number in range(packed):
        yield Span(number * (size // packed) + rank * width, number * width, width)


def _cut(spans: list[Span], at: Position) -> Iterator[Span]:
    """Yield what the data rank at that position has of the indices `spans`, which follow each other in a process."""
    start, length = _chunk(sum(span.length for span in spans), at)
    for span in spans:
        first, end = max(span.local, start), min(span.local + span.length, start + length)
        if first < end:
            yield Span(span.start + first - span.local, first - start, end - first)


def _chunk(size: int, at: Position) -> tuple[int, int]:
    """Return first index and length of a chunk as torch.chunk cuts them: the last ones are smaller, or empty."""
    most = -(-size // at.ranks)
    start = min(size, at.rank * most)
    return start, min(size - start, most)


def _products(spans: list[list[Span]]) -> Iterator[LocalBlock]:
    """Yield the blocks of all combinations of spans, one of each dimension."""
    blocks: list[tuple[Span, ...]] = [()]
    for of_dimension in spans:
        blocks = [(*block, span) for block in blocks for span in of_dimension]
    for block in blocks:
        yield LocalBlock(
            tuple(span.start for span in block),
            tuple(span.local for span in block),
            tuple(span.length for span in block),
        )


def _position(value: DTensor, dimension: str) -> Position:
    """Return the position of this process in the mesh dimension."""
    mesh = value.device_mesh
    at = (mesh.mesh_dim_names or ()).index(dimension)
    return Position(mesh.size(at), mesh.get_local_rank(at))


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return the part of `value` that this process has, in the same memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole_of(value: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor. Every process with a part must call it."""
    if not isinstance(value, DTensor):
        return value
    if not is_sharded(value, DATA) or TENSOR not in (value.device_mesh.mesh_dim_names or ()):
        return value.full_tensor()
    slices = _shard_of_tensor_rank(value)
    split = placement_of(value, TENSOR)
    assert split is not None
    again = DTensor.from_local(
        slices, value.device_mesh[TENSOR], [split], run_check=False, shape=value.shape, stride=value.stride()
    )
    whole: torch.Tensor = again.full_tensor()
    return whole


def _shard_of_tensor_rank(value: DTensor) -> torch.Tensor:
    """Gather what the data ranks have of the slice of this tensor rank."""
    local = value.to_local().detach()
    split = placement_of(value, TENSOR)
    rows = value.shape[0]
    if isinstance(split, Shard | _StridedShard) and split.dim % value.dim() == 0:
        rows = sum(span.length for span in _spans(rows, split, _position(value, TENSOR)))
    ranks = _position(value, DATA).ranks
    most = -(-rows // ranks)
    padded = local.new_zeros((most, *local.shape[1:]))
    padded[: local.shape[0]] = local
    gathered = local.new_empty((ranks * most, *local.shape[1:]))
    distributed.all_gather_into_tensor(gathered, padded, group=value.device_mesh[DATA].get_group())
    return gathered[:rows].contiguous()


def sharded_like(
    value: torch.Tensor,
    model: torch.Tensor,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `value`, which every process has whole, divided like `model`: on `device`, by default that of `model`, in
    `dtype`, by default that of `value`. No other part of `value` is read. Raise ValueError as `blocks_of`.
    """
    if not isinstance(model, DTensor):
        return value
    like = model.to_local()
    local: Any = torch.empty(like.shape, dtype=dtype or value.dtype, device=device or like.device)
    for block in blocks_of(model):
        there = tuple(slice(at, at + size) for at, size in zip(block.local_offsets, block.sizes, strict=True))
        here = tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True))
        local[there] = value[here].to(local.device)
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
