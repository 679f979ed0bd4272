"""Key-value cache of a batch whose rows come and go.

All rows end in the last column, as with padding on the left, so that each pass appends one column for every row. A
cache without sliding or recurrent layers is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

ENDED = -1
"""Row of a slot whose text has ended."""
ROOM = 32
"""Columns that a layer allocates ahead. `DynamicLayer` copies the whole layer for each token."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' base class is untyped
    """Layer that appends in place, in buffers of shape (rows, heads, columns and room, width)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._used = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns; return all keys and values."""
        if self._buffers is None:
            return self.hold(key_states, value_states, key_states.shape[2])
        keys, values = self._buffers
        end = self._used + key_states.shape[2]
        if end > keys.shape[2]:
            keys, values = (_wider(buffer[:, :, : self._used], end + ROOM) for buffer in self._buffers)
        keys[:, :, self._used : end] = key_states
        values[:, :, self._used : end] = value_states
        return self.hold(keys, values, end)

    def hold(self, keys: torch.Tensor, values: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Use these buffers, whose first `columns` are filled; return the filled part."""
        self._buffers, self._used = (keys, values), columns
        filled = keys[:, :, :columns], values[:, :, :columns]
        self.keys, self.values = filled
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return filled

    def reset(self) -> None:
        """Release the buffers."""
        self._buffers, self._used = None, 0
        self.keys = self.values = None
        self.is_initialized = False


def _wider(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    rows, heads, used, width = tensor.shape
    whole = tensor.new_zeros(rows, heads, columns, width)
    whole[:, :, :used] = tensor
    return whole


@dataclass
class Slots:
    """Rows in progress. The last token of each is not in the cache yet."""

    cache: Cache
    rows: list[int]
    """Row of each slot; `ENDED` once its text has ended."""
    mask: torch.Tensor
    """1 at the columns of the cache that a slot uses, else 0; shape (slots, columns)."""
    last: torch.Tensor
    """Last token of each slot, shape (slots, 1)."""

    @property
    def live(self) -> list[int]:
        """Slots whose texts go on."""
        return [slot for slot, row in enumerate(self.rows) if row != ENDED]


def unsupported_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's kinds of cache layers whose rows cannot be moved."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return sorted(kind.__name__ for kind in kinds if kind is not DynamicLayer)


def empty_cache(model: PreTrainedModel) -> Cache:
    """Return a cache without rows."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def merged(parts: Sequence[Slots], cache: Cache) -> Slots:
    """Move the live slots of all parts into `cache`, without columns that none of them uses. At least one must be
    live; the parts' own caches are emptied.
    """
    kept = [(part, live) for part in parts if (live := part.live)]
    masks = [part.mask[live] for part, live in kept]
    columns = max(int(mask.sum(1).max()) for mask in masks)
    for number, layer in enumerate(cast(Any, cache).layers):
        layers = [(cast(Any, part.cache).layers[number], live) for part, live in kept]
        keys = _at_the_end(((part_layer.keys, live) for part_layer, live in layers), columns, ROOM)
        values = _at_the_end(((part_layer.values, live) for part_layer, live in layers), columns, ROOM)
        layer.hold(keys, values, columns)
        for part_layer, _ in layers:
            part_layer.reset()
    mask = _at_the_end(((part.mask[:, None, :, None], live) for part, live in kept), columns, 0)[:, 0, :, 0]
    last = torch.cat([part.last[live] for part, live in kept])
    return Slots(cache, [part.rows[slot] for part, live in kept for slot in live], mask, last)


def _at_the_end(parts: Iterable[tuple[torch.Tensor, list[int]]], columns: int, room: int) -> torch.Tensor:
    """Return the rows of all parts, with their last columns before the room, shape (rows, heads, columns + room,
    width); zeros elsewhere.
    """
    pieces = list(parts)
    _, heads, _, width = pieces[0][0].shape
    whole = pieces[0][0].new_zeros(sum(len(live) for _, live in pieces), heads, columns + room, width)
    first = 0
    for tensor, live in pieces:
        used = min(columns, tensor.shape[2])
        whole[first : first + len(live), :, columns - used : columns] = tensor[live, :, tensor.shape[2] - used :]
        first += len(live)
    return whole
