"""Places of the parts of a tensor that tensor ranks divide first, and data ranks then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from finetune_trainer.strategies.parallel.sharded_tensors import Position, blocks


def slice_of(whole: torch.Tensor, split: Any, at: Position) -> torch.Tensor:
    """Return what a tensor rank has, by torch's own division."""
    if split is None:
        return whole
    parts, _ = split._split_tensor(whole, at.ranks, with_padding=False)
    return parts[at.rank]


def part_of(mine: torch.Tensor, at: Position) -> torch.Tensor:
    """Return what a data rank has of the slice of its tensor rank, as FSDP cuts it."""
    chunks = torch.chunk(mine, at.ranks)
    return chunks[at.rank] if at.rank < len(chunks) else mine[:0]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], Any, int, int]:
    """Draw a shape, its division among tensor ranks, and the number of tensor and data ranks."""
    tensor, data = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shape = [draw(st.integers(1, 12)) for _ in range(draw(st.integers(1, 3)))]
    dimension = draw(st.integers(0, len(shape) - 1))
    packed = draw(st.sampled_from([None, 1, 2, 3]))
    if packed is None:
        return tuple(shape), None, 1, data
    if packed == 1:
        return tuple(shape), Shard(dimension), tensor, data
    shape[dimension] = packed * tensor * draw(st.integers(1, 4))
    return tuple(shape), _StridedShard(dimension, split_factor=packed), tensor, data


@given(divisions())
def test_blocks_are_where_torch_and_fsdp_put_them(division):
    shape, split, tensor, data = division
    whole = torch.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    for slice_rank in range(tensor):
        mine = slice_of(whole, split, Position(tensor, slice_rank))
        for data_rank in range(data):
            local = part_of(mine, Position(data, data_rank))
            for block in blocks(shape, split, Position(tensor, slice_rank), Position(data, data_rank)):
                there = tuple(slice(at, at + size) for at, size in zip(block.local_offsets, block.sizes, strict=True))
                here = tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True))
                assert local[there].equal(whole[here])
                seen += whole[here].flatten().tolist()
    assert sorted(seen) == list(range(math.prod(shape)))


def test_packed_matrices_that_do_not_divide_evenly_are_refused():
    with pytest.raises(ValueError, match="30 columns of 3 matrices are not divided evenly among 4"):
        blocks((30,), _StridedShard(0, split_factor=3), Position(4, 0), Position(1, 0))


def test_a_number_is_one_block():
    (block,) = blocks((), None, Position(1, 0), Position(1, 0))
    assert (block.offsets, block.local_offsets, block.sizes) == ((), (), ())
