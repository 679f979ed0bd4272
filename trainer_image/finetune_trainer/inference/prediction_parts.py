"""Parts of the predictions: one for each shard of the rows, in a folder that outlives attempts.

A part is written beside its place and moved there, and its facts are written after it: where the facts are, the part is
whole, and nobody computes it again. When all parts are there they are joined in the order of the rows, which get their
numbers then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass
from finetune_trainer.data.row_shards import RowShard, ShardKey, ShardRows
from finetune_trainer.data.spool import batches, write_tables
from finetune_trainer.failures import StageError
from finetune_trainer.files import replaced, write_atomically
from finetune_trainer.inference.answering import ROW, ShardAnswers


class PartFacts(Message):
    """Facts of a part that is whole."""

    origin: str
    rows: int = Field(ge=0)
    """Rows of the shard, answered or not."""
    answered: int = Field(ge=0)
    truncated: int = Field(ge=0)
    lines: int = Field(ge=0)
    """Lines of text that the shard has."""
    weight: int = Field(ge=0)


@dataclass(frozen=True)
class Parts:
    """Parts of the predictions of one job over one set of rows."""

    folder: Path

    def facts(self, key: ShardKey) -> PartFacts | None:
        """Facts of a part; None when it is not there, or not whole."""
        try:
            return PartFacts.model_validate_json(self._facts(key).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, shard: RowShard, rows: ShardRows, answers: ShardAnswers) -> PartFacts:
        """Writes the part, and then its facts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replaced(self._table(shard.key), folder=False) as place:
            write_tables(place, [answers.table])
        told = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in answers.aside]
        write_atomically(self._aside(shard.key), "".join(told), folder=False)
        facts = PartFacts(
            origin=shard.origin,
            rows=rows.count,
            answered=len(answers.table),
            truncated=answers.truncated,
            lines=rows.last_line,
            weight=shard.weight,
        )
        write_atomically(self._facts(shard.key), facts.to_json(), folder=False)
        return facts

    def schema(self, keys: Sequence[ShardKey]) -> pa.Schema:
        """Schema that all parts fit. StageError DATA `MixedTypes` when a copied column has several types."""
        found: list[pa.Schema] = []
        for key in keys:
            with pa.memory_map(str(self._table(key))) as file, pa.ipc.open_stream(file) as reader:
                if reader.schema.names and reader.schema not in found:
                    found.append(reader.schema)
        try:
            return pa.unify_schemas(found, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise StageError(
                FailureClass.DATA,
                "MixedTypes",
                f"A column of predict.columns has different types in the rows: {error}",
                "Give all rows of the column one type, or do not copy it.",
            ) from error

    def joined(
        self, keys: Sequence[ShardKey], numbered: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> Iterator[pa.Table]:
        """Tables of one schema, at least one, in the order of `keys`; `numbered` makes a row's number of its position
        among all of them.
        """
        schema, first = self.schema(keys), 0
        yield schema.empty_table()
        for key in keys:
            for batch in batches(self._table(key)):
                if batch.num_rows:
                    yield _in_schema(batch, numbered(batch[ROW].to_numpy() + first), schema)
            facts = self.facts(key)
            assert facts is not None
            first += facts.rows

    def aside(self, keys: Sequence[ShardKey]) -> Iterator[dict[str, object]]:
        """Rows that were set aside: `row`, `file`, `line` (None without lines), `reason`, `message`, `content`."""
        first = lines = 0
        file = None
        for key in keys:
            facts = self.facts(key)
            assert facts is not None
            if key.file != file:
                file, lines = key.file, 0
            for text in self._aside(key).read_text(encoding="utf-8").splitlines():
                row = json.loads(text)
                line = None if row["line"] is None else lines + row["line"]
                yield {
                    "row": first + row["number"],
                    "file": facts.origin,
                    "line": line,
                    **{name: row[name] for name in ("reason", "message", "content")},
                }
            first += facts.rows
            lines += facts.lines

    def _table(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.arrow"

    def _aside(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.aside.jsonl"

    def _facts(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.json"


def _in_schema(batch: pa.RecordBatch, numbers: NDArray[np.int64], schema: pa.Schema) -> pa.Table:
    columns = {name: batch[name] for name in batch.schema.names} | {ROW: pa.array(numbers)}
    given = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(len(batch), f.type) for f in schema]
    return pa.table(given, schema=schema)
