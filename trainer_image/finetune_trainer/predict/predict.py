"""The `predict` stage: one prediction for each row that can be answered, in the order of the rows.

Rows are answered shard by shard, and each shard is written as a part that outlives the attempt: a killed worker resumes
from there. Several workers share the shards (`prediction_workers`). From the complete parts worker 0 writes the output:
a file, which appears whole or not at all, or a folder (`prediction_output`). Rows that cannot be read or answered go to
a file beside it with the reason; too many of them fail the stage.

The bytes of the output depend only on the data, the model, the settings and `manifest.json` of the parts: not on the
number of workers, their shares, or restarts.

A copied column with the name of a column of the predictions (`label`, say) is written as `input_<name>`; nothing is
overwritten. The column `predict.idColumn` is written as `id`; rows with the same id are all answered.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.allocator import give_back_freed_memory
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import discard, discard_leftovers, through_outage
from finetune_trainer.core.progress import NoProgress, ProgressSink
from finetune_trainer.data.row_shards import ShardKey, no_rows
from finetune_trainer.predict.answering import Answerer
from finetune_trainer.predict.backends.backend_in_use import BackendInUse
from finetune_trainer.predict.prediction_inputs import PARTS_FORMAT, PredictionInputs, copied_columns
from finetune_trainer.predict.prediction_output import Output, output_of, write_lines
from finetune_trainer.predict.prediction_parts import Joined, PartFacts, Parts, PartsManifest
from finetune_trainer.predict.prediction_workers import Crew, Sharing, SingleWorker, result_of
from finetune_trainer.predict.runner import Means, settle, shown_by_rows, used_model, weights_version
from finetune_trainer.predict.shard_claims import Worker
from finetune_trainer.predict.tensor_group import WHOLE_MODEL, WholeModel, joined_group
from finetune_trainer.predict.token_rate import log_tokens, token_throughput
from finetune_trainer.prepare.prepare import labels_of_model
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.report.reporting import merge_generation, merge_metrics
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.tasks.writing import TOKENS

log = logging.getLogger(__name__)

_PARTS = "predictions.parts"
_OVER = "predictions.over-"
"""Prefix of the name that the parts get before they are removed."""
_LEAST_TO_JUDGE = 1000
"""Rows after which too many bad ones end the stage early."""
GIVE_BACK_EVERY = 2
"""Parts after which freed memory goes back to the kernel. Buffers of batches differ in size and fragment the heap: 8
parts of 4,000 short rows each leave 270 MiB beside the 200 MiB in use.
"""
LOOK_SECONDS = 1.0
"""Shortest time between two listings of other workers' parts."""
BACKEND = "rung"
"""Key of the backend in the manifest of parts; older attempts have written it."""
_CHOICE = "choice"
"""Claim on choosing a backend."""


def predict(
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    world: ProcessWorld = ProcessWorld(),  # noqa: B008  # frozen
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write the predictions and return `rows`, `path` (file, folder or URI), `split`, `bad_rows` and `bad_rows_path`
    if there are any, `parts` of a folder, `generated_tokens` and `tokens_per_second` of texts, and `computed_in` unless
    fp32. A worker other than 0 returns the `rows` that it answered.

    StageError DATA (`TooManyBadRows`: no output is written), MODEL, STRATEGY_NOT_IN_EFFECT
    `DeviceMissing`, COLLECTIVE if another worker failed, WORLD_SIZE, or CONFIG for an output that cannot be written; an
    earlier result stays on failure.
    """
    worker = Worker.of(job, world, environment)
    group = joined_group(world, job.inference(Stage.PREDICT), Means.of(job.predict).device)
    if not group.leads:
        given = PredictionInputs.of(job, paths, copied_columns(job, output_of(job, paths)), group)
        if group.has_begun():
            _loaded_answerer(given, paths).follow()
        return {"rows": 0}
    result = predict_as(worker, job, paths, progress, group=group)
    group.end()
    return result


def predict_as(
    worker: Worker | None,
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    watch: Callable[[], None] = lambda: None,
    group: WholeModel = WHOLE_MODEL,
) -> dict[str, Any]:
    """Do the share of `worker` in a prediction, or all of it if None; `watch`: see `Crew`; `group`: the processes that
    hold its model. Result and errors as of `predict`.
    """
    output = output_of(job, paths)
    if job.predict is None or job.predict.optimization == "none":
        _forget_table(paths)
    if worker is not None and (result := result_of(worker, paths)) is not None:
        if not worker.leads:
            return {"rows": 0}  # it comes late
        discard(paths.root / _PARTS, paths.root, _OVER)
        return dict(result)
    given = PredictionInputs.of(job, paths, copied_columns(job, output), group)
    parts = Parts(paths.root / _PARTS / given.key(paths)).open()
    if worker is None:
        done = _AnsweredParts(progress, given.source.weight, parts, others=False)
        return _led(given, parts, SingleWorker(parts.there), done, paths, output, lambda _result: None)
    with Crew(worker, paths, parts.folder, watch) as crew:
        if worker.leads:
            done = _AnsweredParts(progress, given.source.weight, parts, others=True)
            return _led(given, parts, crew, done, paths, output, crew.publish_result)
        rows = _followed(given, parts, crew, progress, paths)
    if result_of(worker, paths) is not None:
        # A worker that comes late creates the folder again after worker 0 has discarded it.
        discard(parts.folder.parent, paths.root, _OVER)
    return {"rows": rows}


def _followed(given: PredictionInputs, parts: Parts, crew: Crew, progress: ProgressSink, paths: JobPaths) -> int:
    """Do the work of a worker other than 0; return the number of rows that it answered."""
    done = _OwnRows(progress)
    try:
        _answer(given, parts, crew, done, paths)
    except OSError:
        if not crew.ended_by_leader():
            raise
    return done.rows


def _led(
    given: PredictionInputs,
    parts: Parts,
    sharing: Sharing,
    done: _AnsweredParts,
    paths: JobPaths,
    output: Output,
    publish_result: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Answer rows, then join the parts into the output."""
    job = given.job
    done.collect()
    done.begin()
    reused = done.rows
    keys = _answer(given, parts, sharing, done, paths)
    if not done.rows:
        raise no_rows(given.source)
    if reused:
        log.info("%s of %s rows were answered by an earlier attempt.", f"{reused:,}", f"{done.rows:,}")
    bad_rows = output.bad_rows
    if done.bad:
        through_outage(lambda: bad_rows.put(lambda path: write_lines(path, parts.bad_rows(keys))))
        if done.bad > _allowed(job, done.rows):
            raise _too_many(job, done, bad_rows.name, parts.bad_rows(keys))
    else:
        bad_rows.discard()
    details: dict[str, Any] = {"bad_rows": done.bad, "bad_rows_path": bad_rows.name} if done.bad else {}
    if job.predict is not None and job.predict.optimization != "none":
        details["optimization"] = parts.optimization().get(BACKEND, "none")
        _keep_table(paths, str(details["optimization"]))
    written = done.throughput()
    log_tokens(written)
    merge_generation(paths, Stage.PREDICT, written)
    details |= through_outage(lambda: output.write(Joined(parts, keys, given.source.numbered)))
    result = {"rows": done.rows, "path": output.name, "split": given.role, **details, **written, **given.means.entry}
    publish_result(result)
    discard(parts.folder.parent, paths.root, _OVER)
    discard_leftovers(paths.root, _OVER)  # of a worker that was killed here
    if done.truncated:
        share, length = f"{done.truncated:,} of {done.rows:,} rows", given.coding.max_length
        log.warning("%s exceed %d tokens and are truncated.", share, length)
    return result


class _OwnRows:
    """Counts the rows that this worker answered."""

    def __init__(self, progress: ProgressSink) -> None:
        self.rows = 0
        self._progress = progress

    def begin(self) -> None:
        """Do nothing: worker 0 measures the rate of all."""

    def add(self, key: ShardKey, facts: PartFacts) -> None:
        """Count a part that this worker wrote."""
        self.rows += facts.rows

    def within(self, rows: int, weight: int, share: float, tokens: int) -> None:
        """Report the progress within a shard of this worker."""
        self._progress.update(self.rows + round(rows * share), self.rows + rows)

    def collect(self) -> None:
        """Do nothing: worker 0 counts the rows of the others."""

    def judge(self, given: PredictionInputs, keys: Sequence[ShardKey]) -> bool:
        """Leave it to worker 0."""
        return False


class _AnsweredParts:
    """Parts of all workers so far; reports progress in rows, whose total is an estimate until the last part."""

    def __init__(
        self,
        progress: ProgressSink,
        weight: int | None,
        parts: Parts,
        *,
        others: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = self.bad = self.truncated = self.tokens = 0
        self._progress = progress
        self._all = weight
        self._weight = 0
        self._parts = parts
        self._facts: dict[str, PartFacts] = {}
        self._clock = clock
        self._others = others
        self._next_look = clock()
        self._began: tuple[int, float] | None = None
        self._prefix = self._prefix_rows = self._prefix_bad = 0
        self._tokens_began = (0, clock())

    def begin(self) -> None:
        """Measure the rate of generated tokens from now on: the model is loaded, or parts of an earlier attempt are
        counted.
        """
        self._tokens_began = (self.tokens, self._clock())

    def throughput(self) -> dict[str, float]:
        """Return the number of generated tokens of all workers and attempts, and their rate in this attempt."""
        return self._throughput(0)

    def _throughput(self, tokens: int) -> dict[str, float]:
        first, since = self._tokens_began
        return token_throughput(self.tokens + tokens, self.tokens + tokens - first, self._clock() - since)

    def collect(self) -> None:
        """Count the parts of others; listing takes at most 5 % of the time."""
        began = self._clock()
        if began < self._next_look:
            return
        there = self._parts.there()
        for name in there:
            if name not in self._facts:
                facts = self._parts.facts(ShardKey.parse(name))
                if facts is None:
                    self._parts.forget(ShardKey.parse(name))
                else:
                    self._count(name, facts)
        took = self._clock() - began
        self._next_look = self._clock() + max(LOOK_SECONDS, 20 * took) if self._others else math.inf
        if self._facts:
            self._report(self.rows, self._total(0, 0))

    def add(self, key: ShardKey, facts: PartFacts) -> None:
        """Count a part that this worker wrote."""
        if str(key) not in self._facts:
            self._count(str(key), facts)
        self._report(self.rows, self._total(0, 0))
        self.collect()

    def within(self, rows: int, weight: int, share: float, tokens: int) -> None:
        """Report the progress within a shard of this worker, with its generated tokens so far."""
        self._report(self.rows + round(rows * share), self._total(rows, weight), tokens)
        self.collect()

    def judge(self, given: PredictionInputs, keys: Sequence[ShardKey]) -> bool:
        """Return whether the rows before the first missing part already show that too many are bad."""
        while self._prefix < len(keys) and (facts := self._facts.get(str(keys[self._prefix]))) is not None:
            self._prefix += 1
            self._prefix_rows += facts.rows
            self._prefix_bad += facts.rows - facts.answered
        total = max(self._prefix_rows, self._total(0, 0))
        return self._prefix_rows >= _LEAST_TO_JUDGE and self._prefix_bad > _allowed(given.job, total)

    def begin_with(self, keys: Sequence[ShardKey]) -> Sequence[ShardKey]:
        """Count only the rows before the first missing part, and return the keys of their parts."""
        self.rows, self.bad = self._prefix_rows, self._prefix_bad
        return keys[: self._prefix]

    def end(self, keys: Sequence[ShardKey]) -> bool:
        """Return whether all parts are complete."""
        self._next_look = self._clock()
        self.collect()
        if any(str(key) not in self._facts for key in keys):
            return False
        self._report(self.rows, self.rows)
        return True

    def _count(self, name: str, facts: PartFacts) -> None:
        self._facts[name] = facts
        self.rows += facts.rows
        self.bad += facts.rows - facts.answered
        self.truncated += facts.truncated
        self.tokens += facts.tokens
        self._weight += facts.weight

    def _total(self, rows: int, weight: int) -> int:
        """Estimate the total rows from the weight of the rows so far and of `rows` more with `weight`."""
        seen = self.rows + rows
        whole = seen if not self._all else round(seen * self._all / max(1, self._weight + weight))
        return max(seen, whole)

    def _report(self, rows: int, total: int, tokens: int = 0) -> None:
        now = self._clock()
        if self._began is None:
            self._began = (rows, now)
        first, since = self._began
        rate = {"rows_per_second": (rows - first) / (now - since)} if rows > first and now > since else {}
        of_tokens = self._throughput(tokens)
        of_tokens.pop(TOKENS, None)
        self._progress.update(rows, total, **rate, **of_tokens)


class _ShardProgress(NoProgress):
    """Receives the progress within a shard, and checks on the other workers."""

    def __init__(self, done: _AnsweredParts | _OwnRows, sharing: Sharing, rows: int, weight: int) -> None:
        self._done = done
        self._sharing = sharing
        self._rows = rows
        self._weight = weight

    def update(self, step: int, total: int, **values: float) -> None:
        """Report the progress within the shard."""
        self._done.within(self._rows, self._weight, step / max(1, total), int(values.get(TOKENS, 0)))
        self._sharing.check()


def _answer(
    given: PredictionInputs, parts: Parts, sharing: Sharing, done: _AnsweredParts | _OwnRows, paths: JobPaths
) -> Sequence[ShardKey]:
    """Answer the shards that this process takes, and return the keys of all parts in the order of the rows; of those
    before the first missing one if too many rows are bad.
    """
    answerer: Answerer | None = None
    keys: list[ShardKey] = []
    passes = written = 0
    while True:
        for number, shard in enumerate(given.source.shards()):
            if not passes:
                keys.append(shard.key)
            if sharing.takes(number, shard.key):
                rows = shard.read()
                if answerer is None:
                    answerer = _answerer(given, parts, sharing, paths)
                    done.begin()
                within = _ShardProgress(done, sharing, rows.count, shard.weight)
                done.add(shard.key, parts.write(shard, rows, answerer.answers(shard, rows, within)))
                written += 1
                if not written % GIVE_BACK_EVERY:
                    give_back_freed_memory()
                if isinstance(done, _AnsweredParts) and done.judge(given, keys):
                    return done.begin_with(keys)  # the rest cannot change that
            if sharing.through:
                break
        passes += 1
        if not sharing.again(keys, done.collect) and (isinstance(done, _OwnRows) or done.end(keys)):
            return keys


def _answerer(given: PredictionInputs, parts: Parts, sharing: Sharing, paths: JobPaths) -> Answerer:
    import torch

    # The bytes of the output do not depend on the GPUs of a model, but on a division of its sums.
    left_out = {"devices"} if given.means.tensor > 1 else {"devices", "tensor"}
    means = {name: value for name, value in asdict(given.means).items() if name not in left_out}

    job = given.job
    given.group.begin()
    answerer = _loaded_answerer(given, paths)
    workers = 1 if job.predict is None else job.predict.workers * job.predict.models
    source = given.source
    backends = BackendInUse(answerer, source.shards, source.weight, paths, weights_version(job, paths), workers)

    def choose() -> PartsManifest:
        threads = worker_threads(given, torch.get_num_threads())
        torch.set_num_threads(threads)
        name = backends.choose()
        optimization: dict[str, JsonValue] = {} if name == "none" else {BACKEND: name}
        fitting = answerer.fitting_tokens(source.shards(), backends.built)
        return PartsManifest(
            version=PARTS_FORMAT, means=means, threads=threads, batch_tokens=fitting, optimization=optimization
        )

    # One worker measures for all; if there is nothing to measure, no worker waits.
    first = (lambda there: not there()) if backends.request.optimization == "none" else partial(sharing.first, _CHOICE)
    agreed = parts.agreed(PARTS_FORMAT, means, choose, first)
    torch.set_num_threads(agreed.threads)
    forward = backends.forward(str(agreed.optimization.get(BACKEND, "none")))
    return replace(answerer, forward=forward, batch_tokens=agreed.batch_tokens)


def worker_threads(given: PredictionInputs, threads: int) -> int:
    """Return the threads of a worker: `threads`, its share of the pod's cores, or more of them on CPUs if there are
    fewer shards than processes, of which only as many as shards compute.
    """
    predict = given.job.predict
    if predict is None or predict.models == 1 or given.means.device != "cpu":
        return threads
    busy = sum(1 for _ in islice(given.source.shards(), predict.models))
    return threads * predict.models // max(1, busy)


def _loaded_answerer(given: PredictionInputs, paths: JobPaths) -> Answerer:
    """Load the model, or this process's slice of it."""
    job, task, means = given.job, task_of(given.job), given.means
    model, _ = used_model(job, paths, means.precision, means.devices, given.group)
    model.config.update(shown_by_rows(job, paths))
    labels = labels_of_model(job, task.head, model.config)
    settle(model, means.device)
    encoder = Encoder(task, given.coding, packing=False)
    return Answerer(job, encoder, model, labels, means, given.requested, settled=True, group=given.group)


def _forget_table(paths: JobPaths) -> None:
    """Remove the table of an earlier prediction, which was computed otherwise."""
    if paths.optimization.exists():
        paths.optimization.unlink(missing_ok=True)
        merge_metrics(paths, {}, without=["predict"])


def _keep_table(paths: JobPaths, used: str) -> None:
    try:
        table = json.loads(paths.optimization.read_bytes())
    except OSError:
        return  # another worker measured, and its file may not be visible yet
    merge_metrics(paths, {"predict": {"optimization": used, "reason": table["reason"], "backends": table["backends"]}})


def _allowed(job: TrainerJob, rows: int) -> int:
    predict = job.predict
    return 0 if predict is None else max(predict.max_bad_rows, int(predict.max_bad_share * rows))


def _too_many(job: TrainerJob, done: _AnsweredParts, path: str, bad_rows: Iterator[Mapping[str, object]]) -> StageError:
    first = next(bad_rows)
    place = f"line {first['line']}" if first["line"] is not None else f"row {first['row']}"
    return StageError(
        FailureClass.DATA,
        "TooManyBadRows",
        f"{done.bad:,} of {done.rows:,} rows cannot be answered, and predict.maxBadRows allows "
        f"{_allowed(job, done.rows):,}; all are in {path}. The first, {first['file']}, {place}: {first['message']}",
        "Correct the rows or raise predict.maxBadRows; the rows that were answered are kept.",
    )
