"""Shards written by Spark, for data that one machine would tokenise too slowly.

The driver reads, checks and cuts as the built-in engine does; the executors take shards, map the driver's rows in the
job's folder, and write the same files there as any other engine. So they must see that folder under the same path.
Without a Spark cluster, this runs on this machine in processes of Spark's own.

Shards and results are sent as JSON. Spark pickles the function that it sends to executors, over its own connections and
never through the job's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from finetune_trainer.core.failures import StageError
from finetune_trainer.core.spark_session import SparkRequest, spark_session
from finetune_trainer.prepare.orders import (
    RowFolder,
    read_recipe_text,
    read_result_text,
    read_shard_text,
    recipe_text,
    result_text,
    shard_text,
)
from finetune_trainer.prepare.shards import Encoder, Recipe, Shard, ShardFacts

_COLUMNS = "number long, value binary"


def write_by_spark(
    folder: Path,
    scratch: Path,
    shards: Sequence[Shard],
    recipe: Recipe,
    partitions: int,
    progressed: Callable[[int], None],
) -> Iterator[ShardFacts]:
    """Write the shards in so many partitions, with their rows in `scratch`; yields their facts when all are done.

    A running session, of a notebook or a larger program, is used and left running. Raise StageError CONFIG
    `SparkMissing` without pyspark or Java; those of the task as they are.
    """
    kept = RowFolder(scratch)
    request = SparkRequest(
        "finetune-prepare",
        "preparation.engine",
        "set preparation.engine to auto",
        f"local[{partitions}]",
        {"spark.sql.execution.arrow.maxRecordsPerBatch": "1"},
    )
    with spark_session(request) as session:
        orders = [(number, shard_text(shard, kept)) for number, shard in enumerate(shards)]
        cut = [orders[start::partitions] for start in range(partitions)]
        rows = session.sparkContext.parallelize(cut, partitions).flatMap(lambda part: part)
        written = session.createDataFrame(rows, _COLUMNS).mapInArrow(
            _Writer(folder, scratch, recipe_text(recipe)), _COLUMNS
        )
        results = {row["number"]: read_result_text(bytes(row["value"])) for row in written.collect()}
    for number, shard in enumerate(shards):
        result = results[number]
        if isinstance(result, StageError):
            raise result
        progressed(len(shard.rows.index))
        yield result


class _Writer:
    """Function of a partition: shards in, facts or the stage's own error out. A StageError raised here would reach the
    driver as text.
    """

    def __init__(self, folder: Path, scratch: Path, recipe: bytes) -> None:
        self._folder = folder
        self._scratch = scratch
        self._recipe = recipe

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept = RowFolder(self._scratch)
        for batch in batches:
            for order in batch.to_pylist():
                value = result_text(self._write(read_shard_text(order["value"], kept)))
                yield pa.RecordBatch.from_pylist([{"number": order["number"], "value": value}])

    def _write(self, shard: Shard) -> ShardFacts | StageError:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the partitions are the parallelism
        try:
            return _encoder(self._recipe).write(self._folder, shard, lambda _rows: None)
        except StageError as error:
            return error


@lru_cache(maxsize=1)
def _encoder(recipe: bytes) -> Encoder:
    """Create the encoder once: Spark keeps its Python processes from task to task."""
    return read_recipe_text(recipe).encoder()
