"""Packing of short features of the train split, several to a sequence: a *pack*. Rows of a pack never attend to each
other; the task tells the model how.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune_trainer.data.prepared import POSITION, ROW

SIZES = "sizes"
"""Column: tokens of each feature of a pack, in order."""


def best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return the indices of the features of each pack: the longest first, each to the pack that it fills best.

    Best-fit decreasing: at most one pack more for every nine than the best packing needs (Johnson 1973, "Near-optimal
    bin packing algorithms": 11/9 of it). Raises ValueError for a feature that is longer than `capacity` tokens.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a feature of {int(lengths.max())} tokens is longer than a pack of {capacity}")
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> packs
    rooms = 0  # bit n is set when a pack has n tokens left
    for at in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[at])
        fitting = rooms >> length
        if fitting:
            room = length + ((fitting & -fitting).bit_length() - 1)
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            packs[pack].append(at)
        else:
            room, pack = capacity, len(packs)
            packs.append([at])
        left = room - length
        if left:
            with_room.setdefault(left, []).append(pack)
            rooms |= 1 << left
    return packs


def packed(features: pa.Table, columns: Sequence[str], capacity: int) -> pa.Table:
    """Return one row for each pack: `columns`, concatenated lists as long as `input_ids`, `sizes`, and the `row` and
    `position` of its first feature.
    """
    lists = {name: features[name].combine_chunks() for name in columns}
    lengths = np.asarray(lists["input_ids"].value_lengths().to_numpy(), np.int64)
    packs = best_fit(lengths, capacity)
    order = pa.array(np.concatenate([np.asarray(pack, np.int64) for pack in packs]))
    ends = np.cumsum([int(lengths[pack].sum()) for pack in packs])
    starts = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    joined = {name: pa.ListArray.from_arrays(starts, column.take(order).flatten()) for name, column in lists.items()}
    counts = pa.array(np.concatenate([[0], np.cumsum([len(pack) for pack in packs])]).astype(np.int32))
    sizes = pa.array(lengths.astype(np.int32)).take(order)
    firsts = features.select([POSITION, ROW]).take(pa.array([pack[0] for pack in packs]))
    return pa.table(
        {
            **joined,
            SIZES: pa.ListArray.from_arrays(counts, sizes),
            **dict(zip(firsts.column_names, firsts.columns, strict=True)),
        }
    )
