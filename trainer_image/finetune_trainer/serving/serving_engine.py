"""Model of a server: rows in, predictions out, by the code of the stage predict."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune_contract.choices import WRITING_TASKS
from finetune_contract.data_settings import Columns
from finetune_contract.inference_settings import CPU_BATCH_TOKENS, Generation, Prediction, Serving
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.file_formats import json_column
from finetune_trainer.data.prepared import POSITION, FeatureBatch, FeatureSet, PreparedSplit
from finetune_trainer.data.row_shards import ShardKey
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.predict.answering import Answerer, RequestedColumns, coding_of, seed_of
from finetune_trainer.predict.backends.served_backend import backend_to_serve, plain_answerer, served_backend
from finetune_trainer.predict.runner import settle, shown_by_rows, used_model, weights_version
from finetune_trainer.prepare.prepare import labels_of_model
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.scripts.trained import job_of_trained_model
from finetune_trainer.serving.request_rows import Form, RequestError, Row, input_forms
from finetune_trainer.serving.stop_texts import first_stop
from finetune_trainer.serving.watched_writing import WatchedWriting
from finetune_trainer.tasks.task_protocol import Description, Labels
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.tasks.writing import WRITTEN, ends, watch

if TYPE_CHECKING:
    from finetune_trainer.serving.served_adapters import AdaptedModel

log = logging.getLogger(__name__)

_KEY = ShardKey(0, 0)


@dataclass(frozen=True)
class EncodedRow:
    """An encoded row, ready for a batch."""

    row: Row
    features: FeatureBatch
    """Features of all rows that were encoded with it."""
    first: int
    last: int
    """Its features: from `first` up to `last`, exclusive."""
    width: int
    """Padded tokens that it takes at least in a batch."""
    tokens: int
    """Tokens of its features."""


@dataclass(frozen=True)
class ServedModel:
    """A model that requests can name."""

    answerer: Answerer
    adapter: str | None = None
    """Adapter that it computes with; None: the model of the job by itself."""
    revision: str | None = None
    """Digest of the adapter; None: the revision of the job's model."""


@dataclass
class ServingEngine:
    """Answers rows, one batch at a time; several threads may call it only if the model writes, by turns.

    Its properties are available at once, and answers once `open` has loaded the model.
    """

    job: TrainerJob
    serving: Serving
    trained: bool
    """True if the job trained the model."""
    paths: JobPaths
    models: dict[str, ServedModel] = field(default_factory=dict)
    """Models by their names, the default one first; empty before `open`."""
    _adapted: AdaptedModel | None = None
    _of_form: dict[Form, Answerer] = field(default_factory=dict)

    @classmethod
    def of(cls, job: TrainerJob, paths: JobPaths) -> ServingEngine:
        """Return the engine of a job, without its model."""
        serving = job.serving or Serving(model_name=job.name, device="cpu", max_batch_tokens=CPU_BATCH_TOKENS)
        return cls(job.model_copy(update={"serving": serving}), serving, job.trains, paths)

    @classmethod
    def load(cls, job: TrainerJob, paths: JobPaths) -> ServingEngine:
        """Call `of` and `open`."""
        engine = cls.of(job, paths)
        engine.open()
        return engine

    def open(self) -> None:
        """Load the model, once, and convert it if the job requests it. StageErrors of the model and of the backend."""
        if self.models:
            return
        garbage_collection.begin_with_models()
        serving, paths, job = self.serving, self.paths, self.job
        version, judged = weights_version(job, paths), backend_to_serve(job, paths, serving.optimization)
        shown = shown_by_rows(job, paths)
        if self.trained:
            # The tokenizer, too, is read from the trained model's folder: nothing is fetched.
            trained_job = job_of_trained_model(job, paths)
            job = trained_job.model_copy(update={"training": None})
        predict = Prediction(
            device=serving.device,
            batch_tokens=serving.max_batch_tokens,
            precision=serving.precision,
            optimization=serving.optimization,
            tolerance=serving.tolerance,
        )
        self.job = job = job.model_copy(update={"predict": predict})
        task = task_of(job)
        encoder = Encoder(task, coding_of(job), packing=False)
        if serving.adapters:
            from finetune_trainer.serving.served_adapters import load_adapted  # imports torch: the server listens first

            self._adapted = adapted = load_adapted(job, task.head, serving.precision)
            settle(adapted.model, serving.device)
            plain = plain_answerer(job, adapted.model, Labels(), encoder)
            self.models = _served(serving.model_name, replace(plain, settled=True), adapted)
            return
        model, _ = used_model(job, paths, serving.precision)
        model.config.update(shown)
        labels = labels_of_model(job, task.head, model.config)
        plain = plain_answerer(job, model, labels, encoder)
        _, forward = served_backend(plain, _writable(paths), version, judged)
        settle(model, serving.device)
        self.models = {serving.model_name: ServedModel(replace(plain, forward=forward, settled=True))}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models in requests, the default one first; before `open`, those that the job names."""
        base = (self.serving.model_name,) * self.serving.serves_model
        return tuple(self.models) or (*base, *(adapter.name for adapter in self.serving.adapters))

    @property
    def name(self) -> str:
        """Name of the model of requests that name none."""
        return self.names[0]

    @property
    def answerer(self) -> Answerer:
        """Answerer of that model."""
        return self.models[self.name].answerer

    @property
    def writes(self) -> bool:
        """True if the model writes texts."""
        return self.job.task in WRITING_TASKS

    @property
    def description(self) -> Description:
        """Part of the task that describes rows and answers."""
        return task_of(self.job).description

    @property
    def columns(self) -> Columns:
        """Columns of the job's data set."""
        return self.job.dataset.columns if self.job.dataset else Columns()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.answerer.encoder.coding.tokenizer

    @property
    def generation(self) -> Generation:
        """Generation settings for requests without their own."""
        return self.job.generation

    def warm_up(self) -> float:
        """Answer batches of one row and of several, one with each adapter, and return the seconds per padded token."""
        row = self.description.warm_row(self.tokenizer)
        few = Generation(max_new_tokens=min(4, self.generation.max_new_tokens))
        form = Form(tuple(row), few if self.writes else self.generation)
        for name in self.names[1:]:
            other = replace(form, model=name)
            self.answer(other, self.encode(other, [row]))
        for rows in (1, 4, 4):
            encoded = self.encode(form, [row] * rows)
            began = time.perf_counter()
            self.answer(form, encoded)
            seconds = time.perf_counter() - began
        return seconds / max(1, sum(encoded_row.width for encoded_row in encoded))

    def encode(self, form: Form, rows: Sequence[Row]) -> list[EncodedRow]:
        """Tokenise rows. StageError DATA for the first row that the task rejects."""
        answerer = self._answerer(form)
        encoding, columns = answerer.encoder.task.encoding, answerer.requested.columns
        table = _table(rows)
        encoding.check(RawSplit("", "the request", table, one_row=len(rows) == 1), columns, "inputs")
        features, _ = answerer.encoder.features(table, encoding.inputs(columns))
        extra = form.generation.max_new_tokens if self.writes else 0
        encoded: list[EncodedRow] = []
        for batch in features.batches:
            lengths = np.diff(batch.lists["input_ids"][1])
            starts = [*np.flatnonzero(np.diff(batch.numbers[POSITION], prepend=-1)).tolist(), len(lengths)]
            for first, last in pairwise(starts):
                longest, count = int(lengths[first:last].max()), last - first
                width = (longest + extra) * form.generation.num_beams if extra else longest * count
                encoded.append(
                    EncodedRow(rows[len(encoded)], batch, first, last, width, int(lengths[first:last].sum()))
                )
        return encoded

    def answer(
        self, form: Form, rows: Sequence[EncodedRow], writing: WatchedWriting | None = None
    ) -> list[dict[str, Any]]:
        """Return the columns of predict for each of the rows. `writing`: for models that write, by turns."""
        answerer = self._answerer(form)
        table = _table([row.row for row in rows])
        features = FeatureSet.of(row.features.part(row.first, row.last, at) for at, row in enumerate(rows))
        split = answerer.split(table, features, answerer.encoder.task.encoding.inputs(answerer.requested.columns))
        if writing is None:
            self._use(form)
            answers: list[dict[str, Any]] = answerer.predicted(_KEY, split, NoProgress()).to_pylist()
            return answers
        return self._watched(answerer, writing, split, form)

    def _watched(
        self, answerer: Answerer, writing: WatchedWriting, split: PreparedSplit, form: Form
    ) -> list[dict[str, Any]]:
        """Predict like the answerer, by turns with others, with tokens counted, and up to a stop text."""
        writing.tokenizer, writing.beams = self.tokenizer, answerer.job.generation.num_beams
        writing.ends, writing.stops = frozenset(ends(answerer.model, self.tokenizer)), form.stop
        seed = seed_of(self.job.seed if form.seed is None else form.seed, _KEY)
        writing.resume = partial(self._use, form)
        with writing.turns.taken():
            self._use(form)
            before = watch.set(writing)
            try:
                answers = answerer.answered(split, NoProgress(), answerer.forward, seed)
            finally:
                watch.reset(before)
            writing.finish([answers[features[-1]] for features in split.features_by_row])
            rows: list[dict[str, Any]] = self.description.predictions(answers, split, slice(0, split.rows)).to_pylist()
        for at, row in enumerate(rows if form.stop else ()):
            if (end := first_stop(row[WRITTEN], form.stop)) is not None:
                row[WRITTEN] = row[WRITTEN][:end]
                writing.finishes[at] = replace(writing.finishes[at], ended=True)
        return rows

    def model_of(self, form: Form) -> str:
        """Return the name of the model that a form's rows are for."""
        return form.model or self.name

    def _use(self, form: Form) -> None:
        """Compute with the adapter of a form's model from now on."""
        if self._adapted is not None:
            self._adapted.use(self.models[self.model_of(form)].adapter)

    def _answerer(self, form: Form) -> Answerer:
        """Return the answerer of a form; at most 64 are cached, as clients choose the generation settings."""
        answerer = self._of_form.get(form)
        if answerer is None:
            if len(self._of_form) >= 64:
                self._of_form.clear()
            job = self.job.model_copy(update={"generation": form.generation})
            requested = RequestedColumns(form.columns, "inputs", {})
            answerer = self._of_form[form] = replace(
                self.models[self.model_of(form)].answerer, job=job, requested=requested
            )
        return answerer


def _table(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a table, with conversations as JSON, in which each message keeps its own keys."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    talks = {name for name, values in columns.items() if any(_is_conversation(value) for value in values)}
    return pa.table(
        {name: json_column(values) if name in talks else pa.array(values) for name, values in columns.items()}
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _served(base: str, plain: Answerer, adapted: AdaptedModel) -> dict[str, ServedModel]:
    """Return the base model, if it answers by itself, and its adapters. `plain`: an answerer without labels."""
    models = {}
    if adapted.base_labels is not None:
        models[base] = ServedModel(replace(plain, labels=adapted.base_labels))
    for name, adapter in adapted.adapters.items():
        models[name] = ServedModel(replace(plain, labels=adapter.labels), name, adapter.revision)
    return models


def refuse_roles(task: str, roles: Sequence[str]) -> None:
    """Raise RequestError 422 for inputs that the task does not take."""
    forms = input_forms(task)
    if set(roles) not in forms:
        wanted = "; or ".join(", ".join(sorted(form)) for form in forms)
        raise RequestError(
            422, f"The model's task, {task}, expects the inputs {wanted}; found {', '.join(roles) or 'none'}."
        )


def _writable(paths: JobPaths) -> JobPaths:
    """Return the place of converted models: the job's folder, or a temporary one if that is read-only, as in the pods
    of an endpoint.
    """
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=paths.root):
            return paths
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="finetune-serve-"))
        log.info("%s cannot be written (%s): converted models go to %s.", paths.root, error.strerror, folder)
        return JobPaths(folder)
