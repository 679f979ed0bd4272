"""Predictions for the rows of one shard at a time.

A row that the task rejects or that cannot be encoded is set aside with the reason; all other rows are answered.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune_contract.choices import DECODER_TASKS, Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress, ProgressSink
from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import FeatureSet, PreparedData, PreparedSplit
from finetune_trainer.data.row_shards import BadRow, RowShard, ShardKey, ShardRows, most_of
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.models.loading import (
    load_config,
    load_tokenizer,
    position_limit,
    tokenizer_embedded,
    truncation_length,
    window_stride,
)
from finetune_trainer.predict.backends.backend_protocol import Substitute
from finetune_trainer.predict.backends.choosing import Sample
from finetune_trainer.predict.pod_processes import BatchShard
from finetune_trainer.predict.runner import REFUSED, Means, answers_of, fitted_budgets, follow, probed_ways
from finetune_trainer.predict.tensor_group import WHOLE_MODEL, WholeModel
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.task_protocol import Answer, Coding, Labels
from finetune_trainer.tasks.writing import WRITTEN, generated_tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ROLE = "predict"
ROW = "row"
"""Column of predictions: index of the row among all rows of the data."""


@dataclass(frozen=True)
class RequestedColumns:
    """Columns to read from the data."""

    columns: Columns
    setting: str
    """Path of the data source in the job file."""
    copies: Mapping[str, str]
    """Column of the predictions -> column of the data that it copies."""


@dataclass(frozen=True)
class ShardAnswers:
    """Predictions for one shard."""

    table: pa.Table
    """Columns: `row` (index in the shard), copied ones, and those of the task."""
    bad_rows: tuple[BadRow, ...]
    truncated: int
    """Number of truncated rows."""
    tokens: int = 0
    """Number of generated tokens."""


@dataclass(frozen=True)
class Answerer:
    """Turns rows into predictions with a model."""

    job: TrainerJob
    encoder: Encoder
    model: PreTrainedModel
    labels: Labels
    means: Means
    requested: RequestedColumns
    forward: Substitute | None = None
    """Forward pass or generation that replaces the model's; None: the model's own."""
    settled: bool = False
    """True if the model stays on its device and in evaluation mode."""
    group: WholeModel = WHOLE_MODEL
    """Processes that hold the model."""
    batch_tokens: int | None = None
    """Padded tokens of a batch that fit the memory of all processes of the group; None: those of `means`."""

    def answers(self, shard: RowShard, rows: ShardRows, progress: ProgressSink) -> ShardAnswers:
        """Return predictions for all rows that can be answered. StageError of the model, and DATA `MixedTypes` if rows
        that are readable one by one have no common type.
        """
        failures: dict[int, StageError] = {}
        inputs = self.encoder.task.encoding.inputs(self.requested.columns)
        kept, encoded = self._encoded_rows(rows, failures)
        if encoded is None:
            return ShardAnswers(pa.table({}), _all_bad(rows, failures), 0)
        table, features, truncated = encoded
        split = self.split(table, features, inputs)
        answers = self.answered(split, progress, self.forward, seed_of(self.job.seed, shard.key))
        answered = self.encoder.task.description.predictions(answers, split, slice(0, split.rows))
        numbers = pa.array(rows.numbers[np.asarray(kept)])
        copies = {name: table[column] for name, column in self.requested.copies.items() if column in table.column_names}
        predicted = dict(zip(answered.column_names, answered.columns, strict=True))
        whole = pa.table({ROW: numbers, **copies, **predicted})
        refused = _refused(answers, split)
        if refused:
            failures |= {kept[at]: error for at, error in refused.items()}
            whole = whole.filter(pa.array([at not in refused for at in range(split.rows)]))
        return ShardAnswers(whole, _all_bad(rows, failures), truncated, generated_tokens(answers))

    def _encoded_rows(
        self, rows: ShardRows, failures: dict[int, StageError]
    ) -> tuple[Sequence[int], tuple[pa.Table, FeatureSet, int] | None]:
        """Return the rows that can be encoded; and these, their features and the number of truncated ones. `failures`
        gets the reasons of the others.
        """
        inputs = self.encoder.task.encoding.inputs(self.requested.columns)

        def encoded_of(indices: Sequence[int]) -> tuple[pa.Table, FeatureSet, int]:
            table = rows.checked(indices, self._check)
            features, truncated = self.encoder.features(table, inputs)
            return table, features, truncated

        return most_of(list(range(len(rows.numbers))), encoded_of, failures)

    def _encoded(self, table: pa.Table, rows: Sequence[int], inputs: Mapping[str, str]) -> FeatureSet:
        return self.encoder.features(table.take(pa.array(rows, pa.int64())), inputs)[0]

    def _check(self, split: RawSplit) -> None:
        self.encoder.task.encoding.check(split, self.requested.columns, self.requested.setting)

    def sample(self, shards: Iterable[RowShard], rows: int) -> tuple[Sample, int]:
        """Return about `rows` of the first rows that can be answered, to measure backends with, and the weight of their
        shards. StageError DATA `EmptySplit` if there are none.
        """
        inputs = self.encoder.task.encoding.inputs(self.requested.columns)
        tables: list[pa.Table] = []
        weight = 0.0
        for shard in shards:
            read = shard.read()
            wanted = range(min(len(read.numbers), rows - sum(map(len, tables))))
            kept, table = most_of(list(wanted), partial(read.checked, check=self._check), {})
            weight += shard.weight * len(wanted) / max(1, len(read.numbers))
            if kept and table is not None:
                tables.append(table)
            if sum(map(len, tables)) >= rows:
                break
        if not tables:
            raise StageError(
                FailureClass.DATA, "EmptySplit", "No row can be answered.", "Correct the rows, or leave predict out."
            )
        alike = [table for table in tables if table.schema == tables[0].schema]
        return self._sample(pa.concat_tables(alike), inputs), round(weight)

    def _sample(self, table: pa.Table, inputs: Mapping[str, str]) -> Sample:
        kept, features = most_of(list(range(len(table))), lambda rows: self._encoded(table, rows, inputs), {})
        assert features is not None
        split = self.split(table.take(pa.array(kept, pa.int64())), features, inputs)
        task = self.encoder.task

        def answers(forward: Substitute | None) -> list[dict[str, Any]]:
            answered = self.answered(split, NoProgress(), forward, self.job.seed, halves=forward is None)
            rows: list[dict[str, Any]] = task.description.predictions(answered, split, slice(0, split.rows)).to_pylist()
            return rows

        return Sample(
            split.rows, [*self._collated(split)], answers, tokens=None if task.writer is None else self._tokens
        )

    def _tokens(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of generated tokens, without special ones."""
        ids = self.encoder.coding.tokenizer([row[WRITTEN] for row in rows], add_special_tokens=False)["input_ids"]
        return sum(map(len, ids))

    def _collated(self, split: PreparedSplit) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the model's inputs for all features, without labels; of a task that writes, the prompts."""
        task, data = self.encoder.task, split.data
        for batch in inference_batches(task.encoding.widths(data, split.role), batch_tokens=self.means.batch_tokens):
            features = data.features(split.role, batch)
            if task.writer is not None and "prompt" in features[0]:
                prompts = [{"input_ids": feature["input_ids"][: int(feature["prompt"])]} for feature in features]
                collated = padded(prompts, {"input_ids": data.pad_token_id})
            else:
                collated = task.encoding.collate(features, pad_token_id=data.pad_token_id)
            yield {name: tensor.to(self.model.device) for name, tensor in collated.items() if name != "labels"}

    def predicted(self, key: ShardKey, split: PreparedSplit, progress: ProgressSink) -> pa.Table:
        """Return the task's columns of the predictions for all rows of `split`; `key` seeds the sampling."""
        answers = self.answered(split, progress, self.forward, seed_of(self.job.seed, key))
        return self.encoder.task.description.predictions(answers, split, slice(0, split.rows))

    def split(self, table: pa.Table, features: FeatureSet, inputs: Mapping[str, str]) -> PreparedSplit:
        """Return rows and their features as a split of prepared data. `inputs`: see `Encoding.inputs`."""
        tokenizer = self.encoder.coding.tokenizer
        assert isinstance(tokenizer.pad_token_id, int)
        facts = DataFacts(
            fingerprint="",
            splits={},
            labels=self.labels.names,
            label_form=self.labels.form,
            max_length=self.encoder.coding.max_length,
        )
        judged = {**inputs, **self.encoder.task.encoding.judged(self.requested.columns)}
        named = {role: name for role, name in judged.items() if name in table.column_names}
        data = PreparedData.in_memory(_ROLE, features, table, facts, tokenizer.pad_token_id, self.job.task, named)
        return data.of(_ROLE)

    def answered(
        self,
        split: PreparedSplit,
        progress: ProgressSink,
        forward: Substitute | None,
        seed: int,
        *,
        halves: bool = True,
    ) -> list[Answer]:
        """Return the answers of `answers_of` by `forward`."""
        return answers_of(
            Stage.PREDICT,
            self.job,
            self.model,
            split,
            device=self.means.device,
            batch_tokens=self.means.batch_tokens,
            progress=progress,
            tokenizer=self.encoder.coding.tokenizer,
            forward=forward,
            seed=seed,
            settled=self.settled,
            share=BatchShard(group=self.group),
            budgets=() if self.batch_tokens is None else (self.batch_tokens,),
            halves=halves,
        )

    def fitting_tokens(self, shards: Iterable[RowShard], forward: Substitute | None = None) -> int | None:
        """Return the padded tokens of a batch that fit the memory of all processes of the group, measured with rows of
        the first shard that has any; None if all planned batches fit, or if nothing has to be measured: on CPUs, and
        for texts of a whole model, whose longest batch takes as long as many others.
        """
        alone = self.group.size == 1
        if alone and (self.means.device == "cpu" or self.encoder.task.writer is not None):
            return None
        inputs = self.encoder.task.encoding.inputs(self.requested.columns)
        for shard in shards:
            kept, encoded = self._encoded_rows(shard.read(), {})
            if kept and encoded is not None:
                table, features, _ = encoded
                split, tokenizer = self.split(table, features, inputs), self.encoder.coding.tokenizer
                if alone:
                    return self._halved_tokens(split, forward)
                (budget,) = fitted_budgets(
                    Stage.PREDICT,
                    self.job,
                    self.model,
                    split,
                    batch_tokens=self.means.batch_tokens,
                    tokenizer=tokenizer,
                    share=BatchShard(group=self.group),
                )
                return budget
        return None

    def _halved_tokens(self, split: PreparedSplit, forward: Substitute | None) -> int | None:
        planned = self.means.batch_tokens
        (way,) = probed_ways(Stage.PREDICT, self.job, self.model, split, forward=forward)
        fitting = self.group.fitted(way, planned)
        if fitting == planned:
            return None
        log.warning("Batches have at most %s padded tokens, and not %s, which the GPU does not hold.", fitting, planned)
        return fitting

    def follow(self) -> None:
        """Compute this process's part of the shards that the first process of the group answers."""
        tokenizer = self.encoder.coding.tokenizer
        assert isinstance(tokenizer.pad_token_id, int)
        follow(
            Stage.PREDICT,
            self.job,
            self.model,
            self.group,
            device=self.means.device,
            pad_token_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
        )


def coding_of(job: TrainerJob) -> Coding:
    """Load the tokenizer and lengths with which the job's model reads rows. StageError MODEL or CONFIG."""
    config = load_config(job)
    length = truncation_length(job, config)
    positions = position_limit(config)
    if job.task in DECODER_TASKS and positions is not None:
        # Prompt and answer share the positions of a decoder.
        length = max(1, min(length, positions - job.generation.max_new_tokens))
    tokenizer = load_tokenizer(job)
    embedded = tokenizer_embedded(job, config, tokenizer)
    return Coding(tokenizer, length, window_stride(job, length), config.model_type, embedded)


def seed_of(seed: int, key: ShardKey) -> int:
    """Return the seed of one shard: every worker draws the same, and equal rows of two shards get different texts."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:7], "big")


def _refused(answers: Sequence[Answer], split: PreparedSplit) -> dict[int, StageError]:
    """Return the rows that a server has not answered, with the reason."""
    reasons = {at: answers[features[-1]].get(REFUSED) for at, features in enumerate(split.features_by_row)}
    return {
        at: StageError(FailureClass.DATA, str(why[0]), str(why[1])) for at, why in reasons.items() if why is not None
    }


def _all_bad(rows: ShardRows, failures: Mapping[int, StageError]) -> tuple[BadRow, ...]:
    """Return the rows without a prediction in their order: unreadable, unanswerable and refused ones."""
    failed = [_bad_row(rows, at, error) for at, error in failures.items()]
    return tuple(sorted((*rows.bad_rows, *failed), key=lambda row: row.number))


def _bad_row(rows: ShardRows, at: int, error: StageError) -> BadRow:
    line = None if rows.lines is None else int(rows.lines[at])
    return BadRow(int(rows.numbers[at]), error.reason, error.message, "", line)
