"""Notes on data that are valid but may not be what a user meant: columns that nothing reads, rows of train that are
judged again, rows that lose text or teach nothing.

Each fact is one sentence, so that all of them are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune_trainer.data.file_formats import MOST_COUNTED, Unread
from finetune_trainer.prepare.shards import CHUNK_ROWS, ShardFacts


def unread_note(unread: Iterable[Unread], used: Collection[str]) -> Iterator[str]:
    """Yield the note on columns that are in none of the `used` ones, with the share of rows that fill them. `unread`:
    those of each split; in one split a column may be read that is not in another.
    """
    whole = Unread()
    for split in unread:
        whole.add(split)
    # A path such as `answer.text` reads its first column.
    others = {name: filled for name, filled in whole.filled.items() if not _is_used(name, used)}
    shown = [f"{name!r}{_filled(filled, whole.rows)}" for name, filled in others.items()]
    if shown:
        more = f" and {len(shown) - MOST_COUNTED:,} more" if len(shown) > MOST_COUNTED else ""
        columns, are = ("Column", "is") if len(shown) == 1 else ("Columns", "are")
        yield f"{columns} {', '.join(shown[:MOST_COUNTED])}{more} {are} not read."


def _is_used(name: str, used: Collection[str]) -> bool:
    return any(name == other or other.startswith(f"{name}.") for other in used)


def _filled(count: int | None, rows: int) -> str:
    if count is None or not rows:
        return ""
    share = "all" if count == rows else "no" if not count else f"{100 * count / rows:.3g} % of"
    return f" (filled in {share} rows)"


def row_hashes(table: pa.Table, columns: Sequence[str]) -> NDArray[np.int64]:
    """Return a hash of the columns' values for each row, which is the same within this process; shape (rows,).

    Eight bytes a row, whatever its length; two different rows of 10 million share one with a chance of 3 in a million.
    """
    hashes = np.empty(len(table), np.int64)
    at = 0
    there = [name for name in columns if name in table.column_names]
    for batch in table.select(there).to_batches(max_chunksize=CHUNK_ROWS):
        values = [_hashable(column) for column in batch.columns]
        rows = values[0] if len(values) == 1 else zip(*values, strict=True)
        hashes[at : at + len(batch)] = np.fromiter(map(hash, rows), np.int64, count=len(batch))
        at += len(batch)
    return hashes


def _hashable(column: pa.Array) -> Iterable[object]:
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        column = pc.binary_join(column, "\0")  # in a fifth of the time of Python's lists
    values: list[object] = column.to_pylist()
    return map(repr, values) if pa.types.is_nested(column.type) else values


def repeated_notes(hashes: Mapping[str, NDArray[np.int64]]) -> Iterator[str]:
    """Yield a note for each role whose rows stand in train, too. `hashes`: role -> those of its rows."""
    for role in ("validation", "test"):
        if "train" in hashes and role in hashes:
            count = int(np.isin(hashes[role], hashes["train"]).sum())
            if count:
                yield (
                    f"{_share(count, len(hashes[role]), role)} have the same inputs as rows of train, so that metrics "
                    "are better than for new rows."
                )


def written_notes(made: Mapping[str, ShardFacts], max_length: int) -> Iterator[str]:
    """Yield notes on rows that lost text, and on rows without anything to learn."""
    for role, facts in made.items():
        if facts.truncated:
            parts = ", ".join(f"{count:,} lost {part}" for part, count in facts.lost.items())
            yield (
                f"{_share(facts.truncated, facts.rows, role)} exceed {max_length} tokens and are truncated"
                f"{f' ({parts})' if parts else ''}; preparation.maxLength sets the limit."
            )
        if facts.unlearnt:
            yield f"{_share(facts.unlearnt, facts.rows, role)} have no token to learn from or to evaluate."


def _share(count: int, rows: int, role: str) -> str:
    return f"{count:,} of {rows:,} rows of {role} ({100 * count / rows:.1f} %)"
