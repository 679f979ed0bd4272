"""Backend of a server, and of the evaluation whose gate decides whether the model is served: both convert alike.

Backends are measured and calibrated on the same rows of several lengths, as a server has no data of its own.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune_contract.data_settings import Columns
from finetune_contract.inference_settings import Prediction
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.row_shards import RowShard, ShardKey, ShardRows
from finetune_trainer.predict.answering import Answerer, RequestedColumns, coding_of
from finetune_trainer.predict.backends.backend_in_use import BackendInUse
from finetune_trainer.predict.backends.backend_protocol import ForwardPass
from finetune_trainer.predict.backends.backends import FAMILIES
from finetune_trainer.predict.runner import Means, weights_version
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.tasks.task_protocol import Labels
from finetune_trainer.tasks.task_registry import task_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

JUDGED_IN = "optimization"
"""Key in the section `evaluate` of metrics.json: backend that the metrics and the gate were computed with."""
_ROWS_TO_COME = 1_000_000
"""Number of rows that measuring and converting are weighed against: a server answers many."""


def plain_answerer(job: TrainerJob, model: PreTrainedModel, labels: Labels, encoder: Encoder) -> Answerer:
    """Return the answerer of a server's rows with the model as it is. `job`: with its `predict`."""
    row = encoder.task.description.warm_row(encoder.coding.tokenizer)
    roles = RequestedColumns(Columns(**{role: role for role in row}), "inputs", {})
    return Answerer(job, encoder, model, labels, Means.of(job.predict), roles)


def served_backend(
    answerer: Answerer, paths: JobPaths, version: object, judged: str | None = None
) -> tuple[str, ForwardPass | None]:
    """Return the backend of a server, and its forward pass; None: the model's own. `judged`: backend to build in
    place of the requested `measured`. StageErrors of `choosing.choose`, with the endpoint's fields.
    """
    predict = answerer.job.predict
    if predict is None or predict.optimization == "none":
        return "none", None
    encoder = answerer.encoder
    shard = _sample_shard(encoder.task.description.warm_row(encoder.coding.tokenizer))
    backends = BackendInUse(answerer, lambda: iter([shard]), _ROWS_TO_COME, paths, version)
    try:
        name = backends.choose() if judged is None else judged
        forward = backends.forward(name)
    except StageError as error:
        texts = (text.replace("predict.", "endpoint.") for text in (error.message, error.hint))
        raise StageError(error.failure_class, error.reason, *texts) from error
    assert forward is None or callable(forward), f"{name} generates texts, which no server requests"
    return name, forward


@contextmanager
def judged_backend(
    job: TrainerJob, paths: JobPaths, model: PreTrainedModel, labels: Labels
) -> Iterator[tuple[str | None, ForwardPass | None]]:
    """Yield the backend that the evaluation computes with, and its forward pass; (None, None) if it does not request
    one.

    Converted models are temporary: a server on another machine converts again.
    """
    evaluation = job.evaluation
    if evaluation is None or evaluation.optimization == "none":
        yield None, None
        return
    predict = Prediction(
        device=evaluation.device,
        batch_tokens=evaluation.batch_tokens,
        precision=evaluation.precision,
        optimization=evaluation.optimization,
        tolerance=evaluation.tolerance,
    )
    served = job.model_copy(update={"predict": predict})
    answerer = plain_answerer(served, model, labels, Encoder(task_of(served), coding_of(served), packing=False))
    with tempfile.TemporaryDirectory(prefix="finetune-evaluate-") as folder:
        name, forward = served_backend(answerer, JobPaths(Path(folder)), weights_version(job, paths))
        log.info("The gate is judged with the optimization %s, with which the model is served.", name)
        yield name, forward


def backend_to_serve(job: TrainerJob, paths: JobPaths, requested: str) -> str | None:
    """Return the backend that the gate was judged with, which a server must use; None if the job has no gate.

    StageError CONFIG `GateJudgedOtherwise` if another one is requested, MODEL `GateNotJudged` without a judgement.
    """
    if job.evaluation is None or job.evaluation.gate is None:
        return None
    try:
        judged = json.loads(paths.metrics.read_bytes())["evaluate"].get(JUDGED_IN, "none")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StageError(
            FailureClass.MODEL,
            "GateNotJudged",
            f"{paths.metrics} has no evaluation, and evaluation.gate is set.",
            "Run the stage evaluate first, or leave evaluation.gate out.",
        ) from error
    if requested != "measured" and judged not in FAMILIES.get(requested, (requested,)):
        raise StageError(
            FailureClass.CONFIG,
            "GateJudgedOtherwise",
            f"endpoint.optimization is {requested}, and evaluation.gate was judged with {judged}.",
            f"Set endpoint.optimization to {judged}, or evaluate and serve the model with {requested} in a new job.",
        )
    return str(judged)


def _sample_shard(row: Mapping[str, Any]) -> RowShard:
    """Return rows of several lengths, to measure backends on."""
    longest = max(row, key=lambda role: len(row[role]))
    rows = []
    for times in (1, 2, 4, 8) * 64:
        value = row[longest]
        rows.append({**row, longest: value * times if isinstance(value, list) else " ".join([value] * times)})
    table = pa.Table.from_pylist(rows)
    read = ShardRows(len(rows), np.arange(len(rows)), lambda indices: table.take(pa.array(indices, pa.int64())))
    return RowShard(ShardKey(0, 0), "sample", len(rows), lambda: read)
