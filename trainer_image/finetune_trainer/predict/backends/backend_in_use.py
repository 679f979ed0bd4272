"""Backend of a predict stage: chosen once for all workers and attempts, and remembered.

Converted models and measurements are in `optimized/` in the job's folder, by a digest of the weights: a later stage
with the same weights on the same kind of machine, with the same GPU if it computes on one, does not measure again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.choices import BACKEND_TASKS, GPU_BACKENDS, TEXT_BACKENDS, VLLM_TASKS, Stage
from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.metrics import LOSS
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import write_atomically
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.row_shards import RowShard
from finetune_trainer.predict.answering import Answerer
from finetune_trainer.predict.backends.answer_agreement import agreement
from finetune_trainer.predict.backends.backend_protocol import Machine, Substitute, TextSettings
from finetune_trainer.predict.backends.backend_table import BackendRow, BackendTable
from finetune_trainer.predict.backends.backends import backend_by_name
from finetune_trainer.predict.backends.choosing import (
    SAMPLE_ROWS,
    TEXT_SAMPLE_BATCHES,
    TEXT_SAMPLE_ROWS,
    TEXT_SAMPLE_SHARE,
    BackendRequest,
    Chosen,
    Sample,
    by_name,
    choose,
    not_available,
    small_job,
    small_seconds,
)
from finetune_trainer.predict.backends.device_meter import DeviceMeter, meter_of, timed
from finetune_trainer.predict.backends.text_metrics import reference_texts, text_metrics
from finetune_trainer.predict.labelled_rows import labelled_split
from finetune_trainer.predict.runner import answers_of
from finetune_trainer.tasks.task_protocol import Answer
from finetune_trainer.tasks.writing import written

log = logging.getLogger(__name__)

FOLDER = "optimized"
_FEW_ROWS = 32
_LEAST_EQUAL, _LEAST_EQUAL_16_BITS = 0.9, 0.5
"""Share of equal labels of a few rows below which a way that rounds like the model is broken on this machine. Models in
16 bits round otherwise in it, which changes labels that are near a tie.
"""
_FP32_BYTES = 4
_MANY = 100
"""Factor on the sample for an unknown number of rows, as in compressed files."""


class _StoredChoice(Message):
    """A choice, and the conditions that it depends on."""

    basis: str
    table: BackendTable


@dataclass
class BackendInUse:
    """Chooses a backend for an answerer, and builds a chosen one."""

    answerer: Answerer
    shards: Callable[[], Iterable[RowShard]]
    weight: int | None
    """Weight of all shards; None: unknown."""
    paths: JobPaths
    version: object
    """Version of the weights."""
    workers: int = 1
    machine: Machine | None = None
    """None: this machine."""
    _chosen: Chosen | None = None
    _samples: dict[int, tuple[Sample, int]] = field(default_factory=dict)

    @property
    def request(self) -> BackendRequest:
        """Optimization and tolerances that the job requests."""
        predict = self.answerer.job.predict
        if predict is None:
            return BackendRequest("none", None)
        return BackendRequest(predict.optimization, predict.tolerance, predict.metric_tolerance, self._texts)

    @property
    def _texts(self) -> TextSettings | None:
        job = self.answerer.job
        if job.predict is None or job.task not in VLLM_TASKS:
            return None
        generation, batch_tokens = job.generation, self.answerer.means.batch_tokens
        lengths = (generation.max_new_tokens, generation.num_beams, generation.temperature)
        return TextSettings(*lengths, batch_tokens, job.predict.server)

    @property
    def _sample_rows(self) -> int:
        texts = self.request.texts
        if texts is None:
            return SAMPLE_ROWS
        if self.request.optimization != "measured":
            return TEXT_SAMPLE_ROWS
        few = self._sampled(_FEW_ROWS)[0]
        longest = max(batch["input_ids"].shape[1] for batch in few.batches)
        batch = max(1, texts.batch_tokens // (longest + texts.max_new_tokens))
        most = max(TEXT_SAMPLE_ROWS, int(TEXT_SAMPLE_SHARE * self._remaining(_FEW_ROWS)))
        return min(SAMPLE_ROWS, most, max(TEXT_SAMPLE_ROWS, TEXT_SAMPLE_BATCHES * batch))

    def choose(self) -> str:
        """Return the name of the backend, measured unless known. StageErrors of `choosing.choose`."""
        chosen = self._without_measuring() or self._small() or self._remembered() or self._measured()
        if not any(row.chosen and row.agreement is not None for row in chosen.table.backends):
            self._refuse_wrong(chosen.name, chosen.forward)
        self._chosen = chosen
        return chosen.name

    def forward(self, name: str) -> Substitute | None:
        """Return the forward pass that replaces the model's; None for the model itself. StageError
        `BackendNotAvailable` if this machine cannot compute as the others do.
        """
        if self._chosen is None or self._chosen.name != name:
            self._chosen = None
            made = None if name == "none" else self._made(name)
            self._refuse_wrong(name, made)
            return made
        if self.request.optimization != "none":
            write_atomically(self.paths.optimization, self._chosen.table.to_json())
            requested = "auto" if self.request.optimization == "measured" else self.request.optimization
            log.info("predict.optimization %s: %s, %s.", requested, name, self._chosen.table.reason)
        return self._chosen.forward

    @property
    def built(self) -> Substitute | None:
        """Forward pass that `choose` has built; None for the model itself, and before."""
        return None if self._chosen is None else self._chosen.forward

    def _without_measuring(self) -> Chosen | None:
        requested = self.request.optimization
        if requested == "none":
            return _plain("asked for")
        why, task = None, self.answerer.job.task
        suitable = VLLM_TASKS if requested in TEXT_BACKENDS or task in VLLM_TASKS else BACKEND_TASKS
        if task not in suitable or (requested not in (*TEXT_BACKENDS, "measured") and task in VLLM_TASKS):
            what = requested if requested in TEXT_BACKENDS else "backends of one forward pass"
            why = f"{what} can compute {', '.join(VLLM_TASKS if requested in TEXT_BACKENDS else BACKEND_TASKS)}"
        elif self.request.texts is not None:
            why = None  # on any device
        elif self.answerer.means.device != "cpu" and requested not in (*GPU_BACKENDS, "measured"):
            why = "it computes on CPUs only"
        elif self.answerer.means.devices > 1:
            why = f"the model's layers are on {self.answerer.means.devices} GPUs, and backends are for a model on one"
        if why is None:
            return None
        if requested != "measured":
            raise not_available(requested, why)
        return _plain(why)

    def _small(self) -> Chosen | None:
        """Return the plain model if a few rows show a job so small that measuring would take longer."""
        if self.request.optimization != "measured":
            return None
        sample, _ = self._sampled(_FEW_ROWS)
        if (texts := self.request.texts) is None:
            sample.answers(None)  # the first pass allocates and starts threads
        elif texts.server is None and self._remaining(_FEW_ROWS) * TEXT_SAMPLE_SHARE < TEXT_SAMPLE_ROWS:
            return _plain(f"fewer than {TEXT_SAMPLE_ROWS / TEXT_SAMPLE_SHARE:,.0f} texts are too few to measure")
        _, once = timed(self._meter, lambda: sample.answers(None))
        seconds = once / max(1, sample.rows) * self._remaining(_FEW_ROWS)
        return _plain(small_job(seconds)) if seconds < small_seconds(self.request, self._meter) else None

    def _remembered(self) -> Chosen | None:
        try:
            stored = _StoredChoice.model_validate_json(self._place.read_bytes())
        except (OSError, ValidationError):
            return None
        if stored.basis != self._basis():
            return None
        log.info("Using earlier measurements of the backends on this type of machine.")
        made = None if stored.table.chosen == "none" else self._made(stored.table.chosen)
        return Chosen(stored.table.chosen, made, stored.table)

    def _measured(self) -> Chosen:
        sample, remaining = self._sampled(self._sample_rows)[0], self._remaining(self._sample_rows)
        if self.request.metric_tolerance is not None:
            sample = replace(sample, metrics=self._judge())
        model, meter = self.answerer.model, self._meter
        chosen = choose(self.request, model, sample, remaining, self._folder, self._machine, self.workers, meter)
        meter.release()  # the memory of the other backends
        for row in chosen.table.backends:
            log.info("%s", _result_line(row))
        if any(row.name != "none" and row.rows_per_second for row in chosen.table.backends):
            self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                write_atomically(self._place, _StoredChoice(basis=self._basis(), table=chosen.table).to_json())
        return chosen

    def _judge(self) -> Callable[[Substitute | None], Mapping[str, float]]:
        """Return a function that measures metrics on labelled rows. StageError DATA `NoLabels`, `NoReferences` or
        `NotPrepared`.
        """
        job, means, task = self.answerer.job, self.answerer.means, self.answerer.encoder.task
        split = labelled_split(task.scoring, PreparedData.open(self.paths)).head(self._sample_rows)
        answered = partial(
            answers_of,
            Stage.PREDICT if self.request.texts else Stage.EVALUATE,
            job,
            self.answerer.model,
            split,
            device=means.device,
            batch_tokens=means.batch_tokens,
            progress=NoProgress(),
        )

        def answers(forward: Substitute | None) -> list[Answer]:
            return answered(forward=forward, halves=forward is None)

        if self.request.texts:
            references = reference_texts(split, self.answerer.encoder.coding.tokenizer)
            return lambda forward: text_metrics(written(answers(forward), split.features_by_row), references)

        def metrics(forward: Substitute | None) -> dict[str, float]:
            measured = task.scoring.score(answers(forward), split)
            return {name: value for name, value in measured.items() if name != LOSS}

        return metrics

    def _refuse_wrong(self, name: str, forward: Substitute | None) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT `BackendNotRightEnough` for a way that should compute the same as the
        model, and does not: a compiler may build wrong kernels for a machine.
        """
        if forward is None or self.request.texts is not None or backend_by_name(name).lossy:
            return
        sample, _ = self._sampled(_FEW_ROWS)
        share = agreement(sample.answers(None), sample.answers(forward))
        narrow = self.answerer.model.dtype.itemsize < _FP32_BYTES
        if share < (_LEAST_EQUAL_16_BITS if narrow else _LEAST_EQUAL):
            raise StageError(
                FailureClass.STRATEGY_NOT_IN_EFFECT,
                "BackendNotRightEnough",
                f"predict.optimization is {name}, which computes wrongly on this machine ({self._machine.cpu}): "
                f"{share:.0%} of the labels of {sample.rows} rows are those of the model as it is.",
                "Leave predict.optimization at auto, which compares labels, or set it to none.",
            )

    def _made(self, name: str) -> Substitute:
        sample = self._sampled(self._sample_rows)[0]
        return by_name(name, self.answerer.model, sample, self._folder, self._machine, self.request.texts)

    def _sampled(self, rows: int) -> tuple[Sample, int]:
        if rows not in self._samples:
            self._samples[rows] = self.answerer.sample(self.shards(), rows)
        return self._samples[rows]

    def _remaining(self, wanted: int) -> int:
        """Estimate the rows that this worker has to answer, from a sample of `wanted` rows."""
        sample, weight = self._sampled(wanted)
        if sample.rows < wanted:
            rows = sample.rows
        elif self.weight is None:
            rows = sample.rows * _MANY
        else:
            rows = max(sample.rows, round(sample.rows * self.weight / max(1, weight)))
        return -(-rows // self.workers)

    @cached_property
    def _meter(self) -> DeviceMeter:
        return meter_of(self.answerer.means.device)

    @property
    def _machine(self) -> Machine:
        return replace(self.machine or Machine.here(), gpu=self._meter.gpu)

    @property
    def _folder(self) -> Path:
        job, means = self.answerer.job, self.answerer.means
        identity = json.dumps([job.model.uri, job.model.revision, self.version, means.precision], sort_keys=True)
        return self.paths.root / FOLDER / hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def _place(self) -> Path:
        return self._folder / "choice.json"

    def _basis(self) -> str:
        import torch

        means = self.answerer.means
        return json.dumps(
            {
                "machine": asdict(self._machine),
                "threads": torch.get_num_threads(),
                "several_workers": self.workers > 1,
                "torch": torch.__version__,
                "batch_tokens": means.batch_tokens,
                "max_length": self.answerer.encoder.coding.max_length,
                **asdict(self.request),
            },
            sort_keys=True,
        )


def _plain(reason: str) -> Chosen:
    return Chosen("none", None, BackendTable(chosen="none", rows=0, reason=reason))


def _result_line(row: BackendRow) -> str:
    tokens = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f} tokens/s, "
    measured = row.rows_per_second is not None and row.agreement is not None
    figures = f"{row.rows_per_second:,.0f} rows/s, {tokens}{row.agreement:.2%} of labels equal: " if measured else ""
    return f"  {row.name}: {figures}{row.why}"
