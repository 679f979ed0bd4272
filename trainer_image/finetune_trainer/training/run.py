"""The train stage from its inputs to `model/`."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from finetune_contract.arguments import compiles, groups_by_length
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.plan_check import PlannedTraining
from finetune_contract.plans import REQUESTED_LOGITS
from finetune_contract.report import Communication
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.checkpoint.checkpoints import CheckpointStore, identity
from finetune_trainer.checkpoint.sharded_hashing import ShardedHashing
from finetune_trainer.checkpoint.signing import signer_of
from finetune_trainer.core.allocator import give_back_freed_memory
from finetune_trainer.core.distributed import ProcessWorld, gathered
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.core.library_patches import patches_removed
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.core.stage_console import quiet_transformers
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.devices.pass_memory import device_memory
from finetune_trainer.models.adapters import adapt
from finetune_trainer.models.float8 import InFloat8, convert
from finetune_trainer.models.loading import pinned, weights_digest
from finetune_trainer.models.stored_weights import as_stored, log_private_weights, place_on
from finetune_trainer.report.history import History, RunFigures
from finetune_trainer.strategies.select import strategy_for
from finetune_trainer.strategies.strategy_protocol import Strategy
from finetune_trainer.tasks.metric_names import refuse_unknown_metrics
from finetune_trainer.tasks.task_protocol import Objective
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.training.loop import TrainingLoop
from finetune_trainer.training.loop_parts import LoopData, LoopHooks, LoopModel, LoopSchedule
from finetune_trainer.training.measured_run import peak_memory, resident_peak
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
from finetune_trainer.training.passes.activations import InHostMemory, OnDevice
from finetune_trainer.training.passes.chunked_loss import chunk_loss
from finetune_trainer.training.passes.compiled_blocks import with_working_compiler
from finetune_trainer.training.passes.dropout import share_random_bits
from finetune_trainer.training.passes.objective import objective_of
from finetune_trainer.training.passes.packed_attention import pack_attention
from finetune_trainer.training.rank_shards import RankShards
from finetune_trainer.training.reference_answers import KeptReference, NoReference, Reference, ReferenceAnswers
from finetune_trainer.training.run_inputs import TrainingRun, training_of
from finetune_trainer.training.run_observers import RunObserver, SilentObserver
from finetune_trainer.training.run_refusals import refuse_fp8, refuse_liger, refuse_recomputing, refuse_smoothing
from finetune_trainer.training.run_results import (
    Measurements,
    Outcome,
    measured_surroundings,
    measured_training,
    write_outcome,
)
from finetune_trainer.training.saving import RunSaver
from finetune_trainer.training.shared_machine import SharedMachine
from finetune_trainer.training.stopping import EarlyStopper, NeverStop
from finetune_trainer.training.timing import PartClock, moments_of
from finetune_trainer.training.tracking import Tracked, tracking
from finetune_trainer.training.trained_model import StartedModel, publish_model, trained_weights
from finetune_trainer.training.training_arguments import refused_arguments, training_arguments
from finetune_trainer.training.validation_rounds import ROLE as VALIDATION
from finetune_trainer.training.validation_rounds import Validation

log = logging.getLogger(__name__)

_VALIDATION_TOKENS_PER_MICRO_BATCH = 4
"""Factor of a validation batch: a forward pass without gradients keeps one layer's activations, so four times the rows
of a training micro-batch are safe.
"""


@patches_removed()
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
    note: Callable[[str], None] = log.warning,
    fp8_without_units: bool = False,
) -> Outcome:
    """Train the job's model; on rank 0 write `model/`, `history.jsonl` and the train section of metrics.json.

    `planned`: the plan's estimates, which metrics.json compares with the measurements.
    `devices`: the measured GPUs, for metrics.json; None on a CPU.
    `communication`: transports between the processes, for metrics.json.
    `note`: called with remarks for the job's status.
    `fp8_without_units`: for tests, which multiply in fp8 on a CPU: torch can, but slower than in any other precision.
    """
    started = time.monotonic()
    training = with_working_compiler(training_of(job))
    if training != job.training:
        planned = None  # its estimates are those of a compiled training
    clock = PartClock(moments_of(training.world.device))
    quiet_transformers()
    strategy = strategy_for(training, deepspeed, paths.offload)
    memory_before, machine = resident_peak(), SharedMachine()
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
    data = _data(run, start, order, partial(rank_observer.on_validation_batch, saver.first_step))
    model = _model(run, start)
    schedule = LoopSchedule(saver, stopper, interruption, training.checkpoints.on_preemption)
    with tracking(training.arguments if world.is_main else {}, tracked, note) as trackers:
        loop = TrainingLoop(arguments, model, data, schedule, LoopHooks(rank_observer, clock, trackers))
        if world.is_main:
            history.begin(saver.first_step)
        progress.update(saver.first_step, training.max_steps)
        interruption.defer()
        _train(loop, resume=resume)
    clock.enter("finish")
    give_back_freed_memory()
    with trained_weights(run, loop.placed, stopper) as weights:
        peaks = gathered(peak_memory(training.world.device, loop.placed, memory_before))
        machine_shared = any(gathered(machine.seen()))
        if not world.is_main:
            return Outcome({}, {}, run.prepared.facts.fingerprint)
        shutil.rmtree(paths.offload, ignore_errors=True)  # all ranks have synchronised in `gathered`
        publish_model(run, start, loop.placed.model, weights)
    spent, seconds = clock.lap(), time.monotonic() - started
    observer.on_pause(loop.state.global_step, spent)
    lines = history.read()
    measured = measured_training(lines, saver.first_step, strategy, peaks, machine_shared=machine_shared)
    measurements = Measurements(measured, planned)
    done = {"seconds": seconds, "steps": loop.state.global_step, **loop.engine.compiled.figures()}
    surroundings = measured_surroundings(devices, communication)
    return write_outcome(run, RunFigures(lines), done, peaks, measurements, stopper, clock, surroundings)


def _run_of(
    job: TrainerJob,
    training: Training,
    paths: JobPaths,
    world: ProcessWorld,
    strategy: Strategy,
    *,
    fp8_without_units: bool,
) -> TrainingRun:
    """Return the inputs of the stage. Raise StageError for a precision or a setting that is not possible with them."""
    refuse_fp8(training, without_units=fp8_without_units)
    run = TrainingRun(job, training, paths, world, strategy, task_of(job), PreparedData.open(paths))
    refuse_smoothing(training, run.task.head, run.prepared)
    return run


def _order(run: TrainingRun) -> EpochOrder:
    training, prepared = run.training, run.prepared
    lengths, widths = prepared.lengths("train"), run.task.encoding.widths(prepared, "train")
    grouped = groups_by_length(run.job.task, training.arguments)
    order = EpochOrder(lengths, training.loop_batch, run.data_rank, training.seed, widths, grouped=grouped)
    if order.steps != training.steps_per_epoch:
        log.warning(
            "An epoch of these data has %d steps, and the plan assumed %d.", order.steps, training.steps_per_epoch
        )
    return order


def _start(run: TrainingRun) -> StartedModel:
    """Load the model, before `training_arguments`: with a ZeRO-3 configuration alive, transformers would load it in
    shards and draw a new head on rank 0 alone, from another state of the generator than every other strategy.
    """
    training = run.training
    began_with, _ = pinned(run.job)
    model = as_stored(lambda: run.task.head.build_model(began_with, run.prepared.facts))
    refuse_recomputing(training, model)
    refuse_liger(training, model)
    digest = weights_digest(model) if run.task.head.compared else None
    adapted = None if training.adapter is None else adapt(model, training.adapter, began_with)
    if run.strategy.takes_weights == "device":
        place_on(training.world.device, model, training.precision)
    else:
        log_private_weights(model)
    if training.world.device == "cpu" and not compiles(training.arguments):  # which has its own dropout
        share_random_bits(model)
    in_float8 = _in_float8(training, model) if training.precision == "fp8" else None
    return StartedModel(model, began_with, adapted, in_float8, _objective(run, model), digest)


def _objective(run: TrainingRun, model: PreTrainedModel) -> Objective:
    """Return the loss to minimise, which `model` computes in chunks from here on where it can."""
    objective, training, in_chunks = run.task.head.objective, run.training, False
    if objective is None or objective.of_rows is not None:
        in_chunks = chunk_loss(model, training, of_rows=objective is not None) is not None
    return objective_of(run.task.head, model, training.label_smoothing, in_chunks=in_chunks)


def _data(run: TrainingRun, start: StartedModel, order: EpochOrder, on_batch: Callable[[int], None]) -> LoopData:
    """Return the rows. `on_batch`: called with the number of each batch that the reference answers."""
    training, prepared, settings = run.training, run.prepared, run.training.strategy
    tokens = _validation_tokens(start.model, training.batch.micro_batch_size, prepared.facts.max_length)
    # In a forward pass that fails on one GPU the others must not wait for it.
    alone = settings.replica_ranks == 1 and settings.name != "fsdp" and settings.zero_stage != 3
    halves = alone and training.world.device == "cuda"
    memory = None if alone else device_memory(training.world.device)
    ranks = training.batch.data_parallel
    shards = RankShards(
        prepared, run.task, tokens, run.data_rank, ranks, run.tokens_of_rows, halves=halves, memory=memory
    )
    reference = _reference(run, start, shards, order, on_batch)
    return LoopData(
        order,
        rows=TrainRows(prepared, reference.answers),
        collate=Collate(run.task.encoding, prepared.pad_token_id, run.tokens_of_rows),
        validation=Validation(shards, reference.answers) if VALIDATION in prepared.facts.splits else None,
        reference=reference,
    )


def _model(run: TrainingRun, start: StartedModel) -> LoopModel:
    training, settings = run.training, run.training.strategy
    device = torch.device(training.world.device)
    return LoopModel(
        start.model,
        run.strategy,
        training.optimizer,
        objective=start.objective,
        adapted=start.adapted,
        in_float8=start.in_float8,
        packs=pack_attention(start.model, training, device, packing=run.job.preparation.packing),
        checkpointing=settings.activation_checkpointing,
        activations=InHostMemory() if settings.offload_activations == "cpu" else OnDevice(),
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


def _stopper(run: TrainingRun) -> EarlyStopper | NeverStop:
    if run.training.early_stopping is None:
        return NeverStop()
    if VALIDATION not in run.prepared.facts.splits:
        raise StageError(
            FailureClass.CONFIG,
            "NoValidationSplit",
            "training.earlyStopping is set and the data have no validation split.",
            "Name one in dataset.splits.validation, or leave training.earlyStopping out.",
        )
    refuse_unknown_metrics(run.job, run.task.scoring.metrics[run.prepared.facts.label_form])
    return EarlyStopper(run.training.early_stopping, run.paths.checkpoints / "best", run.world, run.strategy)


def _saver(run: TrainingRun, start: StartedModel, stopper: EarlyStopper | NeverStop) -> RunSaver:
    settings = identity(run.job, run.prepared.facts.fingerprint, run.task.head.identity(run.job))
    checkpoints = run.training.checkpoints
    if start.digest is not None:
        settings["reference_weights"] = start.digest  # a checkpoint has other weights
    if start.adapted is not None:
        settings["frozen_weights"] = start.adapted.base  # they are not in the checkpoint
    signer = signer_of(run.job.name, checkpoints, os.environ)
    hashing = ShardedHashing(run.world.size)
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


def _reference(
    run: TrainingRun, start: StartedModel, shards: RankShards, order: EpochOrder, on_batch: Callable[[int], None]
) -> Reference:
    if start.digest is None:
        return NoReference()
    splits = {"train": shards.split("train", order.rows_of(run.training.max_steps))}
    if VALIDATION in run.prepared.facts.splits:
        splits[VALIDATION] = shards.split(VALIDATION)
    basis = {
        "weights": start.digest,
        "data": run.prepared.facts.fingerprint,
        "precision": run.training.precision,
    }
    return KeptReference(
        ReferenceAnswers(run.task.head.compared), splits, run.paths.checkpoints, basis, run.world, on_batch
    )
