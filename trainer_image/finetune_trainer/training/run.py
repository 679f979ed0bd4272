"""The train stage from its inputs to `model/`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_contract.arguments import compiles, groups_by_length
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.plan_check import MeasuredTraining, PlannedTraining, check_plan
from finetune_contract.plans import REQUESTED_LOGITS
from finetune_contract.report import Communication
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.adapters import Adapted, adapt, write_adapter_and_merge
from finetune_trainer.allocator import give_back_freed_memory
from finetune_trainer.checkpoints import CheckpointStore, identity
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.slices import TokenSlice
from finetune_trainer.distributed import ProcessWorld, gathered
from finetune_trainer.failures import StageError
from finetune_trainer.files import share
from finetune_trainer.float8 import InFloat8, convert, refuse_without_library, refuse_without_units
from finetune_trainer.metric_names import refuse_unknown_metrics
from finetune_trainer.model_card import write_model_card
from finetune_trainer.models import load_tokenizer, pinned, position_limit, weights_digest
from finetune_trainer.packed_attention import pack_attention
from finetune_trainer.progress import ProgressSink
from finetune_trainer.reporting import merge_metrics, training_environment, write_environment
from finetune_trainer.signing import signer_of
from finetune_trainer.spread_hashing import SpreadHashing
from finetune_trainer.stage_console import quiet_transformers
from finetune_trainer.storage import storage_errors_named
from finetune_trainer.stored_weights import as_stored, in_training_type, narrow_weights
from finetune_trainer.strategies.mesh import MeshShape
from finetune_trainer.strategies.select import strategy_for
from finetune_trainer.strategies.strategy_protocol import Strategy, tied_names
from finetune_trainer.tasks.task_protocol import Objective, TaskModule, compared
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.tensor_files import mapped_tensors
from finetune_trainer.training.activations import InHostMemory, OnDevice
from finetune_trainer.training.chunked_loss import chunk_loss
from finetune_trainer.training.dealing import Deal
from finetune_trainer.training.dropout import share_random_bits
from finetune_trainer.training.history import History, RunFigures
from finetune_trainer.training.interruption import Interruption
from finetune_trainer.training.loop import LoopParts, Observer, TrainingLoop
from finetune_trainer.training.measured_run import PeakMemory, peak_memory, resident_peak
from finetune_trainer.training.objective import objective_of
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
from finetune_trainer.training.reference_answers import KeptReference, NoReference, Reference, ReferenceAnswers
from finetune_trainer.training.run_observers import RunObserver, SilentObserver
from finetune_trainer.training.saving import RunSaver
from finetune_trainer.training.stopping import EarlyStopper, NeverStop
from finetune_trainer.training.timing import PartClock, moments_of, time_split
from finetune_trainer.training.tracking import Tracked, tracking
from finetune_trainer.training.training_arguments import refused_arguments, training_arguments
from finetune_trainer.training.validation_rounds import ROLE as VALIDATION
from finetune_trainer.training.validation_rounds import Validation

log = logging.getLogger(__name__)

_VALIDATION_TOKENS_PER_MICRO_BATCH = 4
"""Factor of a validation batch: a forward pass without gradients keeps one layer's activations, so four times the rows
of a training micro-batch are safe.
"""


@dataclass(frozen=True)
class Outcome:
    """Data that the stage adds to the report."""

    metrics: dict[str, Any]
    artifacts: dict[str, str]
    fingerprint: str


def read_deepspeed_config(path: Path | None) -> dict[str, Any] | None:
    """Parse deepspeed.json; raise StageError CONFIG when it cannot be read."""
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(
            FailureClass.CONFIG, "DeepSpeedConfig", f"{path} cannot be read: {error}", "Plan again."
        ) from error
    if not isinstance(config, dict):
        raise StageError(FailureClass.CONFIG, "DeepSpeedConfig", f"{path} holds no JSON object.", "Plan again.")
    return config


def read_estimate(path: Path | None) -> PlannedTraining | None:
    """Parse estimate.json; None without the file, as older operators write none. A file that cannot be read only costs
    the comparison, which a warning reports.
    """
    if path is None or not path.exists():
        return None
    try:
        return PlannedTraining.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        log.warning("The plan is not compared with the training: %s cannot be read: %s", path, error)
        return None


@dataclass(frozen=True)
class _Run:
    """Inputs that all parts of the stage share."""

    job: TrainerJob
    training: Training
    paths: JobPaths
    world: ProcessWorld
    strategy: Strategy
    task: TaskModule
    prepared: PreparedData

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process: processes of one rank read the same rows."""
        return self._mesh.data_rank(self.world.rank)

    @property
    def tokens_of_rows(self) -> TokenSlice:
        """Slice of its rows' tokens that this process has."""
        return self._mesh.token_slice(self.world.rank)

    @property
    def _mesh(self) -> MeshShape:
        return MeshShape.of(self.training.strategy, self.training.batch.data_parallel)


@dataclass(frozen=True)
class _Start:
    """Model before its first step."""

    model: PreTrainedModel
    job: TrainerJob
    """Job with the model revision with which the training begins."""
    adapted: Adapted | None
    in_float8: InFloat8 | None
    objective: Objective
    digest: str | None
    """Digest of the weights, where the objective compares the model with them."""


def train(
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    *,
    world: ProcessWorld,
    deepspeed: Mapping[str, Any] | None,
    interruption: Interruption,
    planned: PlannedTraining | None = None,
    devices: MeasuredDevices | None = None,
    communication: Communication | None = None,
    fp8_without_units: bool = False,
) -> Outcome:
    """Train the job's model; on rank 0 write `model/`, `history.jsonl` and the train section of metrics.json.

    `planned`: the plan's estimates, which metrics.json compares with the measurements.
    `devices`: the measured GPUs, for metrics.json; None on a CPU.
    `communication`: transports between the processes, for metrics.json.
    `fp8_without_units`: for tests, which multiply in fp8 on a CPU: torch can, but slower than in any other precision.
    """
    started = time.monotonic()
    training = training_of(job)
    clock = PartClock(moments_of(training.world.device))
    quiet_transformers()
    strategy = strategy_for(training, deepspeed, paths.offload)
    memory_before = resident_peak()
    run = _run_of(job, training, paths, world, strategy, fp8_without_units=fp8_without_units)
    stopper = _stopper(run)
    history = History(paths.history)
    observer = RunObserver(history, progress, training.max_steps)
    order = _order(run)
    start = _start(run)
    saver = _saver(run, start, stopper)
    resume = saver.find() is not None
    arguments = training_arguments(training, paths.checkpoints, strategy.arguments())
    rank_observer = observer if world.is_main else SilentObserver(progress, training.max_steps)
    tracked = Tracked(job.name, paths.tracking, saver.first_step, os.environ)
    parts = _parts(run, start, order, rank_observer, saver, stopper, interruption, clock)
    with tracking(training.arguments if world.is_main else {}, tracked) as callbacks:
        loop = TrainingLoop(start.model, arguments, replace(parts, callbacks=callbacks))
        if world.is_main:
            history.begin(saver.first_step)
        progress.update(saver.first_step, training.max_steps)
        interruption.defer()
        _train(loop, resume=resume)
    clock.enter("finish")
    give_back_freed_memory()
    with _trained_weights(run, loop, stopper) as weights:
        peaks = gathered(peak_memory(training.world.device, loop.placed, memory_before))
        if not world.is_main:
            return Outcome({}, {}, run.prepared.facts.fingerprint)
        shutil.rmtree(paths.offload, ignore_errors=True)  # all ranks have synchronised in `gathered`
        _publish(run, start, loop.placed.model, weights)
    spent, seconds = clock.lap(), time.monotonic() - started
    observer.on_pause(loop.state.global_step, spent)
    lines = history.read()
    measurements = _Measurements(_measured(lines, saver.first_step, strategy, peaks), planned)
    done = {"seconds": seconds, "steps": loop.state.global_step, **loop.engine.compiled.figures()}
    surroundings = _surroundings(devices, communication)
    return _outcome(run, RunFigures(lines), done, peaks, measurements, stopper, clock, surroundings)


def _run_of(
    job: TrainerJob,
    training: Training,
    paths: JobPaths,
    world: ProcessWorld,
    strategy: Strategy,
    *,
    fp8_without_units: bool,
) -> _Run:
    """Return the inputs of the stage. Raise StageError for a precision or a setting that is not possible with them."""
    _refuse_fp8(training, without_units=fp8_without_units)
    run = _Run(job, training, paths, world, strategy, task_of(job), PreparedData.open(paths))
    _refuse_smoothing(training, run.task, run.prepared)
    return run


def _surroundings(devices: MeasuredDevices | None, communication: Communication | None) -> dict[str, Any]:
    """Return what was measured of the processes' GPUs and of the transports between them, for metrics.json."""
    found: dict[str, Any] = {}
    if devices is not None:
        found["devices"] = {"text": devices.text, **devices.model_dump(mode="json")}
    if communication is not None:
        found["communication"] = communication.model_dump(mode="json")
    return found


def _refuse_fp8(training: Training, *, without_units: bool) -> None:
    if training.precision == "fp8":
        refuse_without_library()
        if not without_units:
            refuse_without_units(training.world.device)


def _order(run: _Run) -> EpochOrder:
    training, prepared = run.training, run.prepared
    lengths, widths = prepared.lengths("train"), run.task.widths(prepared, "train")
    grouped = groups_by_length(run.job.task, training.arguments)
    order = EpochOrder(lengths, training.loop_batch, run.data_rank, training.seed, widths, grouped=grouped)
    if order.steps != training.steps_per_epoch:
        log.warning(
            "An epoch of these data has %d steps, and the plan assumed %d.", order.steps, training.steps_per_epoch
        )
    return order


def _start(run: _Run) -> _Start:
    """Load the model, before `training_arguments`: with a ZeRO-3 configuration alive, transformers would load it in
    shards and draw a new head on rank 0 alone, from another state of the generator than every other strategy.
    """
    training = run.training
    began_with, _ = pinned(run.job)
    model = as_stored(lambda: run.task.build_model(began_with, run.prepared.facts))
    _refuse_recomputing(training, model)
    _refuse_liger(training, model)
    digest = weights_digest(model) if compared(run.task) else None
    adapted = None if training.adapter is None else adapt(model, training.adapter, began_with)
    match run.strategy.takes_weights:
        case "host":
            in_training_type(model.parameters())
        case "device":
            narrow = narrow_weights(model, training.precision)
            in_training_type(model.parameters(), narrow, training.world.device)
        case "files":
            pass
    if training.world.device == "cpu" and not compiles(training.arguments):  # which has its own dropout
        share_random_bits(model)
    in_float8 = _in_float8(training, model) if training.precision == "fp8" else None
    return _Start(model, began_with, adapted, in_float8, _objective(run, model), digest)


def _objective(run: _Run, model: PreTrainedModel) -> Objective:
    """Return the loss to minimise, which `model` computes in chunks from here on where it can."""
    own, training, in_chunks = run.task.objective, run.training, False
    if own is None or own.of_rows is not None:
        in_chunks = chunk_loss(model, training, of_rows=own is not None) is not None
    form = run.prepared.facts.label_form
    return objective_of(run.task, form, model, training.label_smoothing, in_chunks=in_chunks)


def _parts(
    run: _Run,
    start: _Start,
    order: EpochOrder,
    observer: Observer,
    saver: RunSaver,
    stopper: EarlyStopper | NeverStop,
    interruption: Interruption,
    clock: PartClock,
) -> LoopParts:
    training, prepared, settings = run.training, run.prepared, run.training.strategy
    tokens = _validation_tokens(start.model, training.batch.micro_batch_size, prepared.facts.max_length)
    # In a forward pass that fails on one GPU the others must not wait for it.
    alone = settings.replica_ranks == 1 and settings.name != "fsdp" and settings.zero_stage != 3
    halves = alone and training.world.device == "cuda"
    ranks = training.batch.data_parallel
    deal = Deal(prepared, run.task, tokens, run.data_rank, ranks, run.tokens_of_rows, halves=halves)
    reference = _reference(run, start, deal, order, partial(observer.on_validation_batch, saver.first_step))
    return LoopParts(
        strategy=run.strategy,
        adapted=start.adapted,
        in_float8=start.in_float8,
        order=order,
        rows=TrainRows(prepared, reference.answers),
        collate=Collate(run.task, prepared.pad_token_id, run.tokens_of_rows),
        validation=Validation(deal, reference.answers) if VALIDATION in prepared.facts.splits else None,
        objective=start.objective,
        reference=reference,
        observer=observer,
        saver=saver,
        stopper=stopper,
        interruption=interruption,
        save_on_preemption=training.checkpoints.on_preemption,
        optimizer=training.optimizer,
        checkpointing=settings.activation_checkpointing,
        packs=pack_attention(
            start.model, training, torch.device(training.world.device), packing=run.job.preparation.packing
        ),
        activations=InHostMemory() if settings.offload_activations == "cpu" else OnDevice(),
        clock=clock,
    )


def _validation_tokens(model: PreTrainedModel, rows: int, length: int) -> int:
    """Return the limit of padded tokens in a validation batch, for micro-batches of `rows` x `length` in training.

    A language model holds all logits of the batch, in 16 bits and in the fp32 to which accelerate converts them: those
    of one row, or `REQUESTED_LOGITS` if that is more. The plan counts none beside those of training.
    """
    tokens = _VALIDATION_TOKENS_PER_MICRO_BATCH * rows * length
    if cast(Any, model).get_output_embeddings() is None:
        return tokens
    vocabulary: int = model.config.get_text_config().vocab_size
    return min(tokens, max(length, REQUESTED_LOGITS // vocabulary))


@contextmanager
def _trained_weights(run: _Run, loop: TrainingLoop, stopper: EarlyStopper | NeverStop) -> Iterator[Path]:
    """Yield the path of a file that rank 0 has: the weights of the best evaluation, or the last ones, in a file that is
    deleted in the end. In host memory they would take as much as the model.
    """
    path = run.paths.model.with_name(f"{run.paths.model.name}.weights")
    if stopper.best_step is not None:
        # Rank 0 alone knows the hash.
        yield (stopper.best_weights() if run.world.is_main else None) or path
        return
    try:
        with storage_errors_named(path, "gathering the trained weights"):
            run.strategy.write_weights(loop.placed, path)
        yield path
    finally:
        if run.world.is_main:
            path.unlink(missing_ok=True)


def _publish(run: _Run, start: _Start, trained: PreTrainedModel, weights: Path) -> None:
    """Write `model/`, and `adapter/` of an adapted model. `weights`: the file with the trained weights."""
    earlier = weights.suffix == ".pt"  # best weights that an earlier release kept
    state = torch.load(weights, weights_only=True, mmap=True) if earlier else mapped_tensors(weights)
    # Gathered from shards, a shared weight would appear under each of its names.
    tied = tied_names(trained)
    state = {name: weight for name, weight in state.items() if name not in tied}
    size = 0 if start.adapted else sum(weight.numel() * weight.element_size() for weight in state.values())
    with _published(run.paths, size) as (model_folder, adapter_folder):
        if start.adapted is None:
            trained.save_pretrained(str(model_folder), state_dict=state)
        else:
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # else transformers loads it in shards
            whole = run.task.build_model(start.job, run.prepared.facts)
            merged = write_adapter_and_merge(whole, start.adapted, start.job, state, adapter_folder)
            merged.save_pretrained(str(model_folder))
        _published_tokenizer(run.job, trained).save_pretrained(str(model_folder))
        for folder in (model_folder, adapter_folder):
            share(folder)


@dataclass(frozen=True)
class _Measurements:
    """Measurements of an attempt, and the estimates of its plan."""

    measured: MeasuredTraining
    planned: PlannedTraining | None

    def check(self) -> dict[str, Any]:
        """Return the entries of metrics.json with the plan's estimates and their comparison, and log what was off;
        none without a plan.
        """
        if self.planned is None:
            return {}
        check = check_plan(self.planned, self.measured)
        for sentence in check.off():
            log.warning("%s", sentence)
        planned = self.planned.model_dump(mode="json", exclude_none=True)
        return {"plan_check": check.model_dump(mode="json", exclude_none=True), "planned": planned}


def _measured(
    lines: Sequence[Mapping[str, Any]], first_step: int, strategy: Strategy, peaks: list[PeakMemory]
) -> MeasuredTraining:
    """Return the measurements of an attempt that began after `first_step`: time of its steps by the history's lines,
    and memory of its fullest process.
    """
    of_attempt = RunFigures([line for line in lines if line["step"] > first_step])
    fullest = max(peaks, key=lambda peak: peak.device)
    step = of_attempt.median_step()
    return MeasuredTraining(
        steps=step.steps,
        memory_bytes=fullest.device,
        memory_terms=fullest.terms,
        step_seconds=step.seconds,
        step_parts=step.parts,
        with_communication=tuple(part for part in strategy.communicates_in if part in step.parts),
    )


def _outcome(
    run: _Run,
    run_figures: RunFigures,
    done: Mapping[str, Any],
    peaks: list[PeakMemory],
    measurements: _Measurements,
    stopper: EarlyStopper | NeverStop,
    clock: PartClock,
    surroundings: Mapping[str, Any],
) -> Outcome:
    """Write the figures of the training to metrics.json and the model card."""
    paths, training = run.paths, run.training
    kept = CheckpointStore(paths.checkpoints, training.checkpoints.keep).size_bytes()
    figures = {
        **run_figures.losses(),
        **run_figures.rates(),
        "peak_memory_bytes": max(peak.allocated for peak in peaks),
        **done,
        "measured": measurements.measured.model_dump(mode="json"),
        "strategy": training.strategy.label,
        "world_size": run.world.size,
        **({"checkpoint_bytes": kept} if kept else {}),
        **({} if stopper.best_step is None else {"best_step": stopper.best_step}),
        **run_figures.validation(stopper.best_step),
    }
    details = {
        "peak_memory_bytes_by_rank": [peak.allocated for peak in peaks],
        "time": time_split(run_figures.seconds(), run.strategy, clock).model_dump(mode="json"),
        **measurements.check(),
        **surroundings,
    }
    write_environment(paths, training_environment(training.world))
    # Metrics of an earlier model do not apply to this one.
    metrics = merge_metrics(paths, {"train": {**figures, **details}}, without=("evaluate", "majority"))
    write_model_card(paths, run.job, run.prepared.facts, metrics)
    folders = (paths.model, paths.adapter, *((paths.checkpoints,) if kept else ()))
    artifacts = {each.name: each.name for each in folders if each.exists()}
    return Outcome({"train": figures}, artifacts, run.prepared.facts.fingerprint)


def _published_tokenizer(job: TrainerJob, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer to be saved with the model, which truncates at the model's limit when asked to: that of the
    base model may have no limit.
    """
    tokenizer = load_tokenizer(job)
    limit = position_limit(model.config)
    if limit is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
    return tokenizer


def training_of(job: TrainerJob) -> Training:
    """Return `job.training`; raise StageError CONFIG when the job trains nothing."""
    if job.training is None:
        raise StageError(
            FailureClass.CONFIG,
            "NothingToTrain",
            f"Job {job.name} has no training section.",
            "Leave the train stage out.",
        )
    return job.training


def _refuse_smoothing(training: Training, task: TaskModule, prepared: PreparedData) -> None:
    """Raise StageError CONFIG for a setting that has no effect on the task's loss."""
    if training.label_smoothing and prepared.facts.label_form not in task.smooths_labels:
        raise StageError(
            FailureClass.CONFIG,
            "LabelSmoothing",
            f"training.labelSmoothing is {training.label_smoothing:g}, which this task's loss does not support.",
            "Leave training.labelSmoothing out.",
        )


def _refuse_recomputing(training: Training, model: PreTrainedModel) -> None:
    """Raise StageError CONFIG for activation checkpointing of a model that does not support it."""
    if training.strategy.activation_checkpointing != "none" and not model.supports_gradient_checkpointing:
        raise StageError(
            FailureClass.CONFIG,
            "ActivationCheckpointing",
            f"parallelism.activationCheckpointing is {training.strategy.activation_checkpointing}, and "
            f"{type(model).__name__} does not support it.",
            "Set parallelism.activationCheckpointing to none, and lower training.microBatchSize if memory is short.",
        )


def _refuse_liger(training: Training, model: PreTrainedModel) -> None:
    """Raise StageError CONFIG where Liger's kernels would not be used: it skips unknown models."""
    if not training.arguments.get("use_liger_kernel"):
        return
    from transformers.utils.import_utils import is_liger_kernel_available

    reason = ""
    if not is_liger_kernel_available():
        reason = "this image has no liger-kernel"
    else:
        known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
        if model.config.model_type not in known:
            reason = f"it has none for models of type {model.config.model_type}"
    if reason:
        raise StageError(
            FailureClass.CONFIG,
            "LigerKernel",
            f"training.arguments.use_liger_kernel is true, and {reason}.",
            "Leave it out.",
        )


def _in_float8(training: Training, model: PreTrainedModel) -> InFloat8:
    """Convert the model's layers, and log the result."""
    converted = convert(model)
    log.info("%s.", converted)
    if not compiles(training.arguments):
        log.warning("Without training.arguments.torch_compile fp8 is slower than bf16: rounding is not fused.")
    return converted


def _train(loop: TrainingLoop, *, resume: bool) -> None:
    try:
        loop.train(resume=resume)
    except ValueError as error:
        if "DeepSpeed config values" in str(error):
            raise refused_arguments(error) from error
        raise


def _stopper(run: _Run) -> EarlyStopper | NeverStop:
    if run.training.early_stopping is None:
        return NeverStop()
    if VALIDATION not in run.prepared.facts.splits:
        raise StageError(
            FailureClass.CONFIG,
            "NoValidationSplit",
            "training.earlyStopping is set and the data have no validation split.",
            "Name one in dataset.splits.validation, or leave training.earlyStopping out.",
        )
    refuse_unknown_metrics(run.job, run.task.metrics[run.prepared.facts.label_form])
    return EarlyStopper(run.training.early_stopping, run.paths.checkpoints / "best", run.world)


def _saver(run: _Run, start: _Start, stopper: EarlyStopper | NeverStop) -> RunSaver:
    settings, checkpoints = identity(run.job, run.prepared.facts.fingerprint), run.training.checkpoints
    if start.digest is not None:
        settings["reference_weights"] = start.digest  # a checkpoint has other weights
    if start.adapted is not None:
        settings["frozen_weights"] = start.adapted.base  # they are not in the checkpoint
    signer = signer_of(run.job.name, checkpoints, os.environ)
    hashing = SpreadHashing(run.world.size)
    return RunSaver(
        CheckpointStore(run.paths.checkpoints, checkpoints.keep, signer, hashing),
        checkpoints,
        hashing=hashing,
        strategy=run.strategy,
        label=run.training.strategy.checkpoint_form,
        world=run.world,
        data_rank=run.data_rank,
        job=settings,
        stopper=stopper,
        seed=run.training.seed,
    )


def _reference(run: _Run, start: _Start, deal: Deal, order: EpochOrder, on_batch: Callable[[int], None]) -> Reference:
    if start.digest is None:
        return NoReference()
    splits = {"train": deal.split("train", order.rows_of(run.training.max_steps))}
    if VALIDATION in run.prepared.facts.splits:
        splits[VALIDATION] = deal.split(VALIDATION)
    basis = {
        "weights": start.digest,
        "data": run.prepared.facts.fingerprint,
        "precision": run.training.precision,
    }
    return KeptReference(
        ReferenceAnswers(compared(run.task)), splits, run.paths.checkpoints, basis, run.world, on_batch
    )


@contextmanager
def _published(paths: JobPaths, size: int) -> Iterator[tuple[Path, Path]]:
    """Yield temporary folders for the model and the adapter, which finally replace theirs. `size`: bytes of the
    weights, 0 where they are not known.
    """
    folders = (paths.model, paths.adapter)
    partial = {folder: folder.with_name(f"{folder.name}.partial") for folder in folders}
    for each in partial.values():
        shutil.rmtree(each, ignore_errors=True)
    try:
        with storage_errors_named(partial[paths.model], "the trained model", size):
            yield partial[paths.model], partial[paths.adapter]
    except BaseException:
        for each in partial.values():
            shutil.rmtree(each, ignore_errors=True)
        raise
    for folder, written in partial.items():
        former = folder.with_name(f"{folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            os.replace(folder, former)
        if written.exists():
            os.replace(written, folder)
        shutil.rmtree(former, ignore_errors=True)
