"""Encoding of rows to features: each shard, some consecutive rows of a role, becomes one file.

A file's content depends on its rows alone, not on its writer; so processes share the work without communication, and
every engine writes the same bytes. A file is written a chunk of rows at a time: memory does not grow with the data.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune_contract.facts import SplitFacts
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.data.file_formats import python_values
from finetune_trainer.data.packing import packed
from finetune_trainer.data.prepared import POSITION, ROW, FeatureBatch, FeatureSet, shard_name, write_tables
from finetune_trainer.models.loading import load_config, load_tokenizer, tokenizer_embedded, tokens_error
from finetune_trainer.models.tokenizer_limits import tokenizer_panics_named
from finetune_trainer.tasks.task_protocol import Coding, Encoded, TaskParts
from finetune_trainer.tasks.task_registry import task_of

SHARD_ROWS = 50_000
"""Rows of one file: some seconds of work for one process, which tokenises 10,000 to 20,000 short rows a second. With
fewer, the start of a worker would cost more than it saves.
"""
CHUNK_ROWS = 10_000
"""Limit of rows tokenised at a time; paces progress."""
_NO_IDS = np.empty(0, np.int32), np.empty(0, np.int32)
CHUNK_BYTES = 4 << 20
"""Bytes of text tokenised at a time: limits memory, as a token of some 4 bytes takes about 100 while it is encoded."""


@dataclass(frozen=True)
class Rows:
    """Raw rows with a role."""

    raw: datasets.Dataset
    """The whole raw split."""
    index: NDArray[np.int64]
    """Index of each row in the raw split; ascending."""
    targets: NDArray[Any] | None
    """One target for each row, as `encode` takes them."""

    def table(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return some columns of some rows."""
        index = self.index[start:stop]
        first, end = int(index[0]), int(index[-1]) + 1
        span = self.raw.select_columns(list(columns)).with_format("arrow")[first:end]
        if end - first == len(index):
            return span
        mask = np.zeros(end - first, bool)
        mask[index - first] = True
        return span.filter(pa.array(mask))

    def part(self, start: int, stop: int) -> Rows:
        """Return some of the rows."""
        return Rows(self.raw, self.index[start:stop], None if self.targets is None else self.targets[start:stop])


@dataclass(frozen=True)
class Shard:
    """Input of one file."""

    role: str
    number: int
    of: int
    """Number of shards of this role."""
    first: int
    """Position of its first row among those of its role."""
    rows: Rows
    inputs: Mapping[str, str]
    """Role of a column to encode -> its name."""
    chunk_rows: int


@dataclass
class ShardFacts:
    """Counts of one shard, or of several."""

    rows: int = 0
    features: int = 0
    truncated: int = 0
    learnt: int = 0
    """Items of the loss; features for rows without targets."""
    unlearnt: int = 0
    """Rows without any item of the loss, of those with targets."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a feature, or of a pack of them -> number of these."""
    lost: Counter[str] = field(default_factory=Counter)
    """Part of a row that was left out -> number of rows that lost it."""

    def add(self, other: ShardFacts) -> None:
        """Add the other's counts."""
        self.rows += other.rows
        self.features += other.features
        self.truncated += other.truncated
        self.learnt += other.learnt
        self.unlearnt += other.unlearnt
        self.lengths.update(other.lengths)
        self.lost.update(other.lost)

    def of_split(self) -> SplitFacts:
        """Return them as the facts of a whole split."""
        made = self.lengths.total()
        histogram: Counter[int] = Counter()
        for length, count in sorted(self.lengths.items()):
            histogram[_bucket_edge(length)] += count
        return SplitFacts(
            rows=made,
            windows_of=None if self.features == self.rows else self.rows,
            packs_of=None if self.features == made else self.features,
            tokens=sum(length * count for length, count in self.lengths.items()),
            truncated_rows=self.truncated,
            length_histogram=dict(histogram),
            longest=max(self.lengths),
        )


def _bucket_edge(length: int) -> int:
    """Return the next multiple of 8 up to 128 tokens, then of an eighth of the power of two below: fine enough to plan
    memory.
    """
    width = max(8, (1 << max(length - 1, 1).bit_length() - 1) // 8)
    return -(-max(length, 1) // width) * width


def cut(
    role: str, rows: Rows, inputs: Mapping[str, str], *, shard_rows: int = SHARD_ROWS, chunk_rows: int = CHUNK_ROWS
) -> list[Shard]:
    """Return all shards of one role."""
    starts = range(0, len(rows.index), shard_rows)
    return [
        Shard(role, number, len(starts), start, rows.part(start, start + shard_rows), inputs, chunk_rows)
        for number, start in enumerate(starts)
    ]


# --------------------------------------------------------------------------------------------------------- one shard


@dataclass(frozen=True)
class Encoder:
    """Encodes rows to features, alike in each process."""

    task: TaskParts
    coding: Coding
    packing: bool

    def write(self, folder: Path, shard: Shard, progressed: Callable[[int], None]) -> ShardFacts:
        """Write the shard's file. `progressed` is called with the number of rows done since its last call."""
        facts, name = ShardFacts(), shard_name(shard.role, shard.number, shard.of)
        # A shard may be given to a second process while the first one is only slow.
        partial = folder / f".{name}.{uuid.uuid4().hex}"
        try:
            write_tables(partial, self._tables(shard, facts, progressed))
            partial.replace(folder / name)
        finally:
            partial.unlink(missing_ok=True)
        return facts

    def features(self, rows: pa.Table, inputs: Mapping[str, str]) -> tuple[FeatureSet, int]:
        """Return the features of rows without targets, and the number of rows that lost text."""
        index = np.arange(len(rows))
        parts = [
            (self._encoded(part, inputs, None), index[start : start + len(part)], start)
            for start, part in _bounded(0, rows)
        ]
        features = FeatureSet.of(self._readable(_batch(*part), whole=False) for part in parts)
        return features, sum(encoded.truncated for encoded, _, _ in parts)

    def _encoded(self, rows: pa.Table, inputs: Mapping[str, str], targets: NDArray[Any] | None) -> Encoded:
        given = {role: python_values(rows[name]) for role, name in inputs.items() if name in rows.column_names}
        with tokenizer_panics_named():
            return self.task.encoding.encode(given, targets, self.coding)

    def _readable(self, batch: FeatureBatch, *, whole: bool) -> FeatureBatch:
        """Return the batch; raise StageError MODEL `TokensWithoutEmbedding` for a token that the model cannot read.
        `whole`: True if its numbers of rows are those of the raw split.
        """
        coding = self.coding
        for name in ("input_ids", *(("labels",) if self.task.head.label_place == "decoder" else ())):
            ids, starts = batch.lists.get(name, _NO_IDS)
            if coding.embedded is not None and ids.max(initial=0) >= coding.embedded:
                at = int(ids.argmax())
                row = batch.numbers[ROW][np.searchsorted(starts, at, "right") - 1]
                place = f"Row {row + 1}" if whole else "A row"
                token = str(coding.tokenizer.convert_ids_to_tokens(int(ids[at])))
                raise tokens_error(f"{place} has the token {token!r}", token, int(ids[at]), coding.embedded)
        return batch

    def _tables(self, shard: Shard, facts: ShardFacts, progressed: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield the chunks in the order of the rows; adds to `facts`."""
        for start, chunk in _chunks(shard):
            stop = start + len(chunk)
            targets = None if shard.rows.targets is None else shard.rows.targets[start:stop]
            index = shard.rows.index[start:stop]
            encoded = self._encoded(chunk, shard.inputs, targets)
            table = _table(encoded, self._readable(_batch(encoded, index, shard.first + start), whole=True))
            features = len(table)
            if self.packing and shard.role == "train":
                table = packed(table, self.task.encoding.packed, self.coding.max_length)
            lengths = np.diff(table["input_ids"].chunk(0).offsets.to_numpy())
            learnt, unlearnt = (features, 0) if encoded.learnt is None else _learnt(encoded, encoded.learnt, len(chunk))
            lost, counted = Counter(encoded.lost), Counter(lengths.tolist())
            facts.add(ShardFacts(len(chunk), features, encoded.truncated, learnt, unlearnt, counted, lost))
            yield table
            progressed(len(chunk))


def _learnt(encoded: Encoded, learnt: Sequence[int], rows: int) -> tuple[int, int]:
    """Return the items of the loss, and the number of rows without one."""
    of_row = range(rows) if encoded.rows is None else encoded.rows
    teaching = np.bincount(np.asarray(of_row, np.int64)[np.asarray(learnt, np.int64) > 0], minlength=rows)
    return sum(learnt), rows - int(np.count_nonzero(teaching))


def _chunks(shard: Shard) -> Iterator[tuple[int, pa.Table]]:
    """Yield the inputs of its rows in pieces, each with the number of rows before it."""
    columns = [name for name in dict.fromkeys(shard.inputs.values()) if name in shard.rows.raw.column_names]
    for start in range(0, len(shard.rows.index), shard.chunk_rows):
        table = shard.rows.table(start, min(start + shard.chunk_rows, len(shard.rows.index)), columns)
        yield from _bounded(start, table)


def _bounded(start: int, table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    if table.nbytes <= CHUNK_BYTES or len(table) == 1:
        yield start, table
        return
    half = len(table) // 2
    yield from _bounded(start, table.slice(0, half))
    yield from _bounded(start + half, table.slice(half))


def _batch(encoded: Encoded, index: NDArray[np.int64], before: int) -> FeatureBatch:
    """Return the features of rows at `index` in the raw split, with `before` rows of their role before them."""
    lists, numbers = {}, {}
    for name, values in encoded.features.items():
        if isinstance(values[0], Sequence):
            lists[name] = _flat(values)
        else:
            numbers[name] = np.array(values, np.float64 if isinstance(values[0], float) else np.int64)
    of = np.arange(len(index)) if encoded.rows is None else np.asarray(encoded.rows, np.int64)
    return FeatureBatch(lists, {**numbers, POSITION: of + before, ROW: index[of]})


def _flat(values: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return all values of lists of token ids, and the start of each list; ten times faster than Arrow's look at every
    Python int.
    """
    offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int64)
    return np.fromiter(chain.from_iterable(values), np.int32, count=int(offsets[-1])), offsets.astype(np.int32)


def _table(encoded: Encoded, batch: FeatureBatch) -> pa.Table:
    """Return the features in the file's layout."""
    columns = {}
    for name in (*encoded.features, POSITION, ROW):
        if name in batch.lists:
            values, starts = batch.lists[name]
            columns[name] = pa.ListArray.from_arrays(pa.array(starts), pa.array(values))
        else:
            columns[name] = pa.array(batch.numbers[name])
    return pa.table(columns)


# -------------------------------------------------------------------------------------------------------- all shards


@dataclass(frozen=True)
class Recipe:
    """Data from which another process creates the same Encoder."""

    job: TrainerJob
    max_length: int
    stride: int
    model_type: str

    def encoder(self) -> Encoder:
        """Create the Encoder with a tokenizer of its own."""
        tokenizer = load_tokenizer(self.job)
        embedded = tokenizer_embedded(self.job, load_config(self.job), tokenizer)
        coding = Coding(tokenizer, self.max_length, self.stride, self.model_type, embedded)
        return Encoder(task_of(self.job), coding, self.job.preparation.packing)


def write_here(
    folder: Path, shards: Sequence[Shard], encoder: Encoder, progressed: Callable[[int], None]
) -> Iterator[ShardFacts]:
    """Write all shards in this process, whose tokenizer uses all cores."""
    for shard in shards:
        yield encoder.write(folder, shard, progressed)


def write_in_processes(
    folder: Path, shards: Sequence[Shard], recipe: Recipe, workers: int, progressed: Callable[[int], None]
) -> Iterator[ShardFacts]:
    """Write the shards in processes on this machine, one shard each at a time; yields their facts in order."""
    # Forked from a process that has done the slow imports, and, unlike this one, has no threads.
    context = get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.auto.tokenization_auto", __name__])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(folder, recipe)) as pool:
        for shard, facts in zip(shards, pool.map(_write_in_worker, shards), strict=True):
            progressed(len(shard.rows.index))
            yield facts


_worker: tuple[Path, Encoder] | None = None


def _start_worker(folder: Path, recipe: Recipe) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = (folder, recipe.encoder())


def _write_in_worker(shard: Shard) -> ShardFacts:
    assert _worker is not None
    folder, encoder = _worker
    return encoder.write(folder, shard, lambda _rows: None)
