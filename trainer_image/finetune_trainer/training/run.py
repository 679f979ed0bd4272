"""The train stage from its inputs to `model/`."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_contract.arguments import groups_by_length
from finetune_contract.job import TrainerJob, Training
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.adapters import Adapted, adapt, write_adapter_and_merge
from finetune_trainer.allocator import give_back_freed_memory
from finetune_trainer.checkpoints import CheckpointStore, identity
from finetune_trainer.console import quiet_transformers
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.distributed import ProcessWorld, gathered
from finetune_trainer.failures import StageError
from finetune_trainer.files import share
from finetune_trainer.float8 import InFloat8, convert, refuse_without_library, refuse_without_units
from finetune_trainer.metric_names import refuse_unknown_metrics
from finetune_trainer.models import load_tokenizer, pinned, position_limit, weights_digest
from finetune_trainer.progress import ProgressSink
from finetune_trainer.reporting import merge_metrics, training_environment, write_environment, write_model_card
from finetune_trainer.signing import signer_of
from finetune_trainer.storage import storage_errors_named
from finetune_trainer.strategies.base import Strategy, tied_names
from finetune_trainer.strategies.mesh import MeshShape
from finetune_trainer.strategies.select import strategy_for
from finetune_trainer.tasks.base import TaskModule, compared
from finetune_trainer.tasks.registry import task_of
from finetune_trainer.training.activations import InHostMemory, OnDevice
from finetune_trainer.training.arguments import refused_arguments, training_arguments
from finetune_trainer.training.dealing import Deal
from finetune_trainer.training.dropout import share_random_bits
from finetune_trainer.training.history import History, RunFigures
from finetune_trainer.training.interruption import Interruption
from finetune_trainer.training.loop import LoopParts, TrainingLoop
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
from finetune_trainer.training.reference import KeptReference, NoReference, Reference, Said
from finetune_trainer.training.saving import RunSaver
from finetune_trainer.training.stopping import EarlyStopper, NeverStop
from finetune_trainer.training.telling import RunObserver, SilentObserver
from finetune_trainer.training.timing import PartClock, moments_of, time_split
from finetune_trainer.training.tracking import Tracked, tracking
from finetune_trainer.training.validation import ROLE as VALIDATION
from finetune_trainer.training.validation import Validation

log = logging.getLogger(__name__)

_VALIDATION_TOKENS_PER_MICRO_BATCH = 4
"""A forward pass without gradients keeps one layer's activations: four times the rows of a training micro-batch are
safe.
"""


@dataclass(frozen=True)
class Outcome:
    """What the stage adds to the report."""

    metrics: dict[str, Any]
    artifacts: dict[str, str]
    fingerprint: str


def read_deepspeed_config(path: Path | None) -> dict[str, Any] | None:
    """The parsed deepspeed.json; StageError CONFIG when it cannot be read."""
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


def train(
    job: TrainerJob,
    paths: JobPaths,
    progress: ProgressSink,
    *,
    world: ProcessWorld,
    deepspeed: Mapping[str, Any] | None,
    interruption: Interruption,
    fp8_without_units: bool = False,
) -> Outcome:
    """Trains the job's model; on rank 0 leaves `model/`, `history.jsonl` and the train section of metrics.json.

    `fp8_without_units`: for tests, which multiply in fp8 on a CPU: torch can, but slower than in any other precision.
    """
    started = time.monotonic()
    clock = PartClock(moments_of(training_of(job).world.device))
    quiet_transformers()
    training = training_of(job)
    strategy = strategy_for(training, deepspeed, paths.offload)
    if training.precision == "fp8":
        refuse_without_library()
        if not fp8_without_units:
            refuse_without_units(training.world.device)
    task, prepared = task_of(job), PreparedData.open(paths)
    _refuse_smoothing(job, training, task, prepared)
    stopper = _stopper(job, training, paths, world, prepared, task)
    history = History(paths.history)
    observer = RunObserver(history, progress, training.max_steps)
    shape = MeshShape.of(training.strategy, training.batch.data_parallel)
    data_rank, tokens_of_rows = shape.data_rank(world.rank), shape.token_slice(world.rank)
    lengths, widths = prepared.lengths("train"), task.widths(prepared, "train")
    grouped = groups_by_length(job.task, training.arguments)
    order = EpochOrder(lengths, training.loop_batch, data_rank, training.seed, widths, grouped=grouped)
    _warn_of_other_epoch(order, training)

    # The model before the arguments: with a ZeRO-3 configuration alive, transformers would load it in shards and draw
    # a new head on rank 0 alone, from another state of the generator than every other strategy.
    began_with, _ = pinned(job)
    model = task.build_model(began_with, prepared.facts)
    _refuse_recomputing(training, model)
    _refuse_liger(training, model)
    weights = weights_digest(model) if compared(task) else None
    adapted = None if training.adapter is None else adapt(model, training.adapter, began_with)
    if training.world.device == "cpu" and not training.arguments.get("torch_compile"):  # which has its own dropout
        share_random_bits(model)
    in_float8 = _in_float8(training, model) if training.precision == "fp8" else None
    saver = _saver(job, training, paths, world, data_rank, prepared, strategy, stopper, adapted, weights)
    resume_from = saver.find()
    arguments = training_arguments(training, paths.checkpoints, strategy.arguments())
    heard_by = observer if world.is_main else SilentObserver(progress, training.max_steps)
    tokens = _VALIDATION_TOKENS_PER_MICRO_BATCH * training.batch.micro_batch_size * prepared.facts.max_length
    deal = Deal(prepared, task, tokens, data_rank, training.batch.data_parallel, tokens_of_rows)
    told_of = partial(heard_by.on_validation_batch, saver.first_step)
    reference = _reference(task, training, deal, order, weights, paths.checkpoints, world, told_of)
    told = Tracked(job.name, paths.tracking, saver.first_step, os.environ)
    parts = LoopParts(
        strategy=strategy,
        adapted=adapted,
        in_float8=in_float8,
        order=order,
        rows=TrainRows(prepared, reference.said),
        collate=Collate(task, prepared.pad_token_id, tokens_of_rows),
        validation=Validation(deal, reference.said) if VALIDATION in prepared.facts.splits else None,
        objective=task.objective,
        reference=reference,
        observer=heard_by,
        saver=saver,
        stopper=stopper,
        interruption=interruption,
        save_on_preemption=training.checkpoints.on_preemption,
        optimizer=training.optimizer,
        checkpointing=training.strategy.activation_checkpointing,
        activations=InHostMemory() if training.strategy.offload_activations == "cpu" else OnDevice(),
        clock=clock,
    )
    with tracking(training.arguments if world.is_main else {}, told) as callbacks:
        loop = TrainingLoop(model, arguments, replace(parts, callbacks=callbacks))
        if world.is_main:
            history.begin(saver.first_step)
        progress.update(saver.first_step, training.max_steps)
        interruption.defer()
        _run(loop, resume_from)

    clock.enter("finish")
    give_back_freed_memory()
    state = strategy.model_state(loop.placed)
    peaks = _peak_memory_bytes(training)
    steps = loop.state.global_step
    if not world.is_main:
        return Outcome({}, {}, prepared.facts.fingerprint)
    shutil.rmtree(paths.offload, ignore_errors=True)  # all ranks have met in _peak_memory_bytes
    best = stopper.best_weights()
    if best is not None:
        state = torch.load(best, weights_only=True)
    # Gathered from shards, what the model has once would be there under each of its names.
    tied = tied_names(loop.placed.model)
    state = {name: weight for name, weight in state.items() if name not in tied}
    size = sum(weight.numel() * weight.element_size() for weight in state.values()) if adapted is None else 0
    with _published(paths, size) as (model_folder, adapter_folder):
        if adapted is None:
            loop.placed.model.save_pretrained(str(model_folder), state_dict=state)
        else:
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # or transformers would load it in shards
            whole = task.build_model(began_with, prepared.facts)
            write_adapter_and_merge(whole, adapted, began_with, state, adapter_folder).save_pretrained(
                str(model_folder)
            )
        _published_tokenizer(job, loop.placed.model).save_pretrained(str(model_folder))
        for folder in (model_folder, adapter_folder):
            share(folder)
    spent, seconds = clock.lap(), time.monotonic() - started
    observer.on_pause(steps, spent)
    course = RunFigures(history.read())
    kept = CheckpointStore(paths.checkpoints, training.checkpoints.keep).size_bytes()
    figures = {
        **course.losses(),
        **course.rates(),
        "peak_memory_bytes": max(peaks),
        "strategy": training.strategy.label,
        "world_size": world.size,
        "seconds": seconds,
        "steps": steps,
        **({"checkpoint_bytes": kept} if kept else {}),
        **({} if best is None else {"best_step": stopper.best_step}),
        **course.validation(stopper.best_step),
    }
    details = {
        "peak_memory_bytes_by_rank": peaks,
        "time": time_split(course.seconds(), strategy, clock).model_dump(mode="json"),
    }
    write_environment(paths, training_environment(training.world))
    # What an earlier model was worth is not said of this one.
    metrics = merge_metrics(paths, {"train": {**figures, **details}}, without=("evaluate", "majority"))
    write_model_card(paths, job, prepared.facts, metrics)
    folders = (paths.model, paths.adapter, *((paths.checkpoints,) if kept else ()))
    return Outcome(
        {"train": figures}, {each.name: each.name for each in folders if each.exists()}, prepared.facts.fingerprint
    )


def _published_tokenizer(job: TrainerJob, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer to be saved with the model, which cuts texts where the model ends when it is asked to cut:
    that of the base model may know no limit.
    """
    tokenizer = load_tokenizer(job)
    limit = position_limit(model.config)
    if limit is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
    return tokenizer


def training_of(job: TrainerJob) -> Training:
    """`job.training`; StageError CONFIG when the job trains nothing."""
    if job.training is None:
        raise StageError(
            FailureClass.CONFIG,
            "NothingToTrain",
            f"Job {job.name} has no training section.",
            "Leave the train stage out.",
        )
    return job.training


def _refuse_smoothing(job: TrainerJob, training: Training, task: TaskModule, prepared: PreparedData) -> None:
    """StageError CONFIG for a setting that the task's loss would leave without effect."""
    if training.label_smoothing and prepared.facts.label_form not in task.smooths_labels:
        raise StageError(
            FailureClass.CONFIG,
            "LabelSmoothing",
            f"training.labelSmoothing is {training.label_smoothing:g}, which this task's loss does not take.",
            "Leave training.labelSmoothing out.",
        )


def _refuse_recomputing(training: Training, model: PreTrainedModel) -> None:
    """StageError CONFIG for activation checkpointing of a model that has not learnt it."""
    if training.strategy.activation_checkpointing != "none" and not model.supports_gradient_checkpointing:
        raise StageError(
            FailureClass.CONFIG,
            "ActivationCheckpointing",
            f"parallelism.activationCheckpointing is {training.strategy.activation_checkpointing}, and "
            f"{type(model).__name__} does not support it.",
            "Set parallelism.activationCheckpointing to none, and training.microBatchSize lower if memory is short.",
        )


def _refuse_liger(training: Training, model: PreTrainedModel) -> None:
    """StageError CONFIG where Liger's kernels would not be used: it passes over models that it does not know."""
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
    """The model's layers converted, of which the log tells."""
    converted = convert(model)
    log.info("%s.", converted)
    if not training.arguments.get("torch_compile"):
        log.warning("Without training.arguments.torch_compile fp8 is slower than bf16: rounding is not fused.")
    return converted


def _run(loop: TrainingLoop, resume_from: Path | None) -> None:
    try:
        loop.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    except ValueError as error:
        if "DeepSpeed config values" in str(error):
            raise refused_arguments(error) from error
        raise


def _stopper(
    job: TrainerJob,
    training: Training,
    paths: JobPaths,
    world: ProcessWorld,
    prepared: PreparedData,
    task: TaskModule,
) -> EarlyStopper | NeverStop:
    if training.early_stopping is None:
        return NeverStop()
    if "validation" not in prepared.facts.splits:
        raise StageError(
            FailureClass.CONFIG,
            "NoValidationSplit",
            "training.earlyStopping is set and the data have no validation split.",
            "Name one in dataset.splits.validation, or leave training.earlyStopping out.",
        )
    refuse_unknown_metrics(job, task.metrics[prepared.facts.label_form])
    return EarlyStopper(training.early_stopping, paths.checkpoints / "best", world)


def _saver(
    job: TrainerJob,
    training: Training,
    paths: JobPaths,
    world: ProcessWorld,
    data_rank: int,
    prepared: PreparedData,
    strategy: Strategy,
    stopper: EarlyStopper | NeverStop,
    adapted: Adapted | None,
    weights: str | None,
) -> RunSaver:
    settings = identity(job, prepared.facts.fingerprint)
    if weights is not None:
        settings["reference_weights"] = weights  # those of a checkpoint are others
    if adapted is not None:
        settings["frozen_weights"] = adapted.base  # they are not in the checkpoint
    return RunSaver(
        CheckpointStore(
            paths.checkpoints, training.checkpoints.keep, signer_of(job.name, training.checkpoints, os.environ)
        ),
        training.checkpoints,
        strategy=strategy,
        label=training.strategy.checkpoint_form,
        world=world,
        data_rank=data_rank,
        job=settings,
        stopper=stopper,
        seed=training.seed,
    )


def _reference(
    task: TaskModule,
    training: Training,
    deal: Deal,
    order: EpochOrder,
    weights: str | None,
    folder: Path,
    world: ProcessWorld,
    told: Callable[[int], None],
) -> Reference:
    """`weights`: digest of those that the model has before training."""
    if not compared(task) or weights is None:
        return NoReference()
    splits = {"train": deal.split("train", order.rows_of(training.max_steps))}
    if VALIDATION in deal.prepared.facts.splits:
        splits[VALIDATION] = deal.split(VALIDATION)
    basis = {"weights": weights, "data": deal.prepared.facts.fingerprint, "precision": training.precision}
    return KeptReference(Said(compared(task)), splits, folder, basis, world, told)


def _warn_of_other_epoch(order: EpochOrder, training: Training) -> None:
    if order.steps != training.steps_per_epoch:
        log.warning("An epoch of these data has %d steps, the plan counted %d.", order.steps, training.steps_per_epoch)


@contextmanager
def _published(paths: JobPaths, size: int) -> Iterator[tuple[Path, Path]]:
    """Folders beside those of the model and the adapter, to write them to; in the end they take the place of these.
    `size`: bytes of the weights, 0 where they are not known.
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


def _peak_memory_bytes(training: Training) -> list[int]:
    """The most that each process has used, by rank: of its GPU, or its resident set on CPU. Every rank must call it."""
    # ru_maxrss counts kibibytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if training.world.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return gathered(peak)
