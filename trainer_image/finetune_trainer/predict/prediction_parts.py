"""Parts of the predictions: one for each shard of the rows, in a folder that outlives attempts.

A part is written beside its place and moved there, and its facts are written after it: a part with facts is complete,
and is not computed again. Complete parts are joined in the order of the rows, which get their numbers then.

Further inputs of a result, beside the data and the model, are in `manifest.json`, which the first worker writes and all
others follow, in later attempts too: sums in fp32 depend on the number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue, ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import create_whole, replaced, through_outage, write_atomically
from finetune_trainer.data.prepared import batches, write_tables
from finetune_trainer.data.row_shards import RowShard, ShardKey, ShardRows
from finetune_trainer.predict.answering import ROW, ShardAnswers

FILE, POSITION = "file", "position"
"""Columns that replace `row` in a folder of parts."""
_MANIFEST = "manifest.json"


class PartFacts(Message):
    """Facts of a complete part."""

    origin: str
    rows: int = Field(ge=0)
    """Rows of the shard, answered or not."""
    answered: int = Field(ge=0)
    truncated: int = Field(ge=0)
    lines: int = Field(ge=0)
    """Lines of text in the shard."""
    weight: int = Field(ge=0)
    tokens: int = Field(default=0, ge=0)
    """Generated tokens."""


class PartsManifest(Message):
    """Settings with which all parts are computed."""

    version: int
    """Format of the parts."""
    means: dict[str, JsonValue]
    """Device, precision and size of batches."""
    threads: int = Field(ge=1)
    """CPU threads of a worker."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Padded tokens of a batch that fit the memory of all processes of a model, where those of `means` do not; None:
    those of `means`.
    """
    optimization: dict[str, JsonValue] = Field(default_factory=dict)
    """Backend that was chosen by measuring; empty: the plain loop."""


@dataclass(frozen=True)
class Parts:
    """Parts of the predictions of one job over one set of rows."""

    folder: Path

    def open(self) -> Parts:
        """Create the folder; it is not created again after worker 0 removed it."""
        through_outage(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        return self

    def agreed(
        self,
        version: int,
        means: Mapping[str, JsonValue],
        choose: Callable[[], PartsManifest],
        first: Callable[[Callable[[], bool]], bool],
    ) -> PartsManifest:
        """Return the manifest of the first worker. `first` waits until that exists, or has this worker choose.
        StageError CONFIG `WorkersDiffer` if it differs from this worker's version and means.
        """
        place = self.folder / _MANIFEST
        if first(place.exists):
            proposed = choose().to_json()
            through_outage(lambda: create_whole(place, proposed))
        try:
            manifest = PartsManifest.model_validate_json(through_outage(place.read_bytes))
        except ValidationError as error:
            raise StageError(
                FailureClass.STORAGE_LOST,
                "ManifestDamaged",
                f"{place} is damaged: {error}",
                f"Delete {self.folder}; its rows are answered again.",
            ) from error
        mine: dict[str, object] = {"version": version, **means}
        theirs: dict[str, object] = {"version": manifest.version, **manifest.means}
        differing = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        if differing:
            differences = "; ".join(f"{name} is {mine.get(name)!r}, there {theirs.get(name)!r}" for name in differing)
            raise StageError(
                FailureClass.CONFIG,
                "WorkersDiffer",
                f"This worker differs from {place}: {differences}.",
                "Run all workers with one image and one job.",
            )
        return manifest

    def optimization(self) -> dict[str, JsonValue]:
        """Return the backend that the first worker chose."""
        return PartsManifest.model_validate_json(through_outage((self.folder / _MANIFEST).read_bytes)).optimization

    def there(self) -> list[str]:
        """Return the keys of the complete parts, as text."""
        names = through_outage(lambda: [path.name for path in self.folder.iterdir()])
        return [name.removesuffix(".json") for name in names if is_facts(name)]

    def forget(self, key: ShardKey) -> None:
        """Have a damaged part computed again."""
        self._facts(key).unlink(missing_ok=True)

    def facts(self, key: ShardKey) -> PartFacts | None:
        """Return the facts of a part; None if it is missing or incomplete."""
        try:
            return PartFacts.model_validate_json(through_outage(self._facts(key).read_bytes))
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, shard: RowShard, rows: ShardRows, answers: ShardAnswers) -> PartFacts:
        """Write the part, and then its facts; wait for a storage that does not respond. FileNotFoundError if the folder
        was removed.
        """
        return through_outage(lambda: self._written(shard, rows, answers))

    def _written(self, shard: RowShard, rows: ShardRows, answers: ShardAnswers) -> PartFacts:
        with replaced(self._table(shard.key), folder=False) as place:
            write_tables(place, [answers.table])
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in answers.bad_rows]
        write_atomically(self._bad_rows_path(shard.key), "".join(lines), folder=False)
        facts = PartFacts(
            origin=shard.origin,
            rows=rows.count,
            answered=len(answers.table),
            truncated=answers.truncated,
            lines=rows.last_line,
            weight=shard.weight,
            tokens=answers.tokens,
        )
        write_atomically(self._facts(shard.key), facts.to_json(), folder=False)
        return facts

    def schema(self, keys: Sequence[ShardKey]) -> pa.Schema:
        """Return a schema that fits all parts. StageError DATA `MixedTypes` if a copied column has several types."""
        schemas: list[pa.Schema] = []
        for key in keys:
            with pa.memory_map(str(self._table(key))) as file, pa.ipc.open_stream(file) as reader:
                if reader.schema.names and reader.schema not in schemas:
                    schemas.append(reader.schema)
        try:
            return pa.unify_schemas(schemas, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise StageError(
                FailureClass.DATA,
                "MixedTypes",
                f"A column of predict.columns has different types in the rows: {error}",
                "Use one type in all rows of the column, or do not copy it.",
            ) from error

    def joined(
        self, keys: Sequence[ShardKey], numbered: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> Iterator[pa.Table]:
        """Yield tables of one schema, at least one, in the order of `keys`; `numbered` maps a row's position among all
        rows to its number.
        """
        schema = self.schema(keys)
        yield schema.empty_table()
        for key, _, first in self._placed(keys):
            for batch in batches(self._table(key)):
                if batch.num_rows:
                    yield _in_schema(batch, {ROW: numbered(batch[ROW].to_numpy() + first)}, schema)

    def apart(
        self, keys: Sequence[ShardKey], numbered: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> Iterator[pa.Table]:
        """Yield a table for each part with rows, of one schema. Instead of a number, rows have their file and their
        number in it.
        """
        whole = self.schema(keys)
        if ROW not in whole.names:
            return
        at = whole.get_field_index(ROW)
        schema = whole.remove(at).insert(at, pa.field(POSITION, pa.int64())).insert(at, pa.field(FILE, pa.string()))
        file, begins = None, 0
        for key, facts, first in self._placed(keys):
            if key.file != file:
                file, begins = key.file, first
            tables = [
                _in_schema(
                    batch,
                    {
                        FILE: np.repeat(facts.origin, batch.num_rows),
                        POSITION: numbered(batch[ROW].to_numpy() + first) - begins,
                    },
                    schema,
                )
                for batch in batches(self._table(key))
                if batch.num_rows
            ]
            if tables:
                yield pa.concat_tables(tables)

    def _placed(self, keys: Sequence[ShardKey]) -> Iterator[tuple[ShardKey, PartFacts, int]]:
        """Yield each part with its facts and the position of its first row among all rows."""
        first = 0
        for key in keys:
            facts = self.facts(key)
            assert facts is not None
            yield key, facts, first
            first += facts.rows

    def bad_rows(self, keys: Sequence[ShardKey]) -> Iterator[dict[str, object]]:
        """Yield the rows set aside: `row`, `file`, `line` (None without lines), `reason`, `message`, `content`."""
        lines = 0
        file = None
        for key, facts, first in self._placed(keys):
            if key.file != file:
                file, lines = key.file, 0
            for text in self._bad_rows_path(key).read_text(encoding="utf-8").splitlines():
                row = json.loads(text)
                line = None if row["line"] is None else lines + row["line"]
                yield {
                    "row": first + row["number"],
                    "file": facts.origin,
                    "line": line,
                    **{name: row[name] for name in ("reason", "message", "content")},
                }
            lines += facts.lines

    def _table(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.arrow"

    def _bad_rows_path(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.aside.jsonl"

    def _facts(self, key: ShardKey) -> Path:
        return self.folder / f"{key}.json"


@dataclass(frozen=True)
class Joined:
    """All parts, as `JoinedRows` for an output."""

    parts: Parts
    keys: Sequence[ShardKey]
    numbered: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Function from positions among all rows to row numbers."""

    def joined(self) -> Iterator[pa.Table]:
        """See `Parts.joined`."""
        return self.parts.joined(self.keys, self.numbered)

    def apart(self) -> Iterator[pa.Table]:
        """See `Parts.apart`."""
        return self.parts.apart(self.keys, self.numbered)


def is_facts(name: str) -> bool:
    """Return whether a file named `name` in a folder of parts holds the facts of a part."""
    return name.endswith(".json") and name[:1].isdecimal()


def _in_schema(batch: pa.RecordBatch, made: Mapping[str, NDArray[Any]], schema: pa.Schema) -> pa.Table:
    columns = {name: batch[name] for name in batch.schema.names} | {name: pa.array(made[name]) for name in made}
    given = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(len(batch), f.type) for f in schema]
    return pa.table(given, schema=schema)
