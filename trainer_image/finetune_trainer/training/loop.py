"""The training loop: rows, forward and backward, one optimizer step, a report, validation, a checkpoint.

`TrainingLoop.train` shows the order. The model with its wrappers, optimizer and gradients is in `Engine`; rows,
strategy, checkpoints and reports are passed as `LoopParts`. The settings are transformers' `TrainingArguments`; its
`Trainer` is not used (`training.script` runs programs that use one).

- The loss of a step is the mean over the whole global batch, for any number of ranks and accumulation steps.
- Validation and checkpoints follow the step's report, so that a checkpoint holds a finished step.
- One small all-reduce in host memory at the start of a step shares its items and requests to stop with every rank.
- On a GPU the host runs ahead of the device, and waits for it once a step: for the figures of the step before, when it
  has queued the next one. So the device is never idle for the host's sake, and reports are a step late.
- A clock records the part of the step that each moment belongs to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils.memory import clear_device_cache
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_contract.choices import CheckpointingMode, OptimizerName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_trainer.core.allocator import give_back_freed_memory
from finetune_trainer.core.distributed import summed
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import Interruption, preempted
from finetune_trainer.core.slices import LABELS
from finetune_trainer.models.adapters import Adapted
from finetune_trainer.models.float8 import InFloat8
from finetune_trainer.strategies.strategy_protocol import Placed, Strategy
from finetune_trainer.tasks.task_protocol import REFERENCE, Objective
from finetune_trainer.training.engine import StepFigures, engine_of
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows, micro_batches
from finetune_trainer.training.passes.activations import Activations, OnDevice, assert_checkpointing_in_effect
from finetune_trainer.training.passes.known_padding import KnownPadding, known_padding
from finetune_trainer.training.passes.objective import ModelLoss
from finetune_trainer.training.passes.packed_attention import PackAttention, WithMasks
from finetune_trainer.training.reference_answers import NoReference, Reference
from finetune_trainer.training.timing import Lap, PartClock
from finetune_trainer.training.validation_rounds import Validation


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    """Seconds from requesting its rows, or from the loss of the step before if that came later, to its loss; without
    evaluation and checkpoints.
    """
    samples: int
    tokens: int
    computed_tokens: int
    """`tokens` with padding."""
    parts: Mapping[TimePart, float]
    """Seconds since the previous step, or since the start."""

    @property
    def rates(self) -> dict[str, float]:
        """Return the rates over all processes; tokens without padding."""
        return {
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }


class Observer(Protocol):
    """Receives finished steps and evaluations."""

    def on_step(self, report: StepReport) -> None:
        """Handle a finished step; called after every step, on every rank."""

    def on_validation_batch(self, step: int, done: int) -> None:
        """Handle a finished batch of an evaluation after `step`; called on every rank."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle a finished evaluation; called on every rank, with the same figures."""

    def on_pause(self, step: int, parts: Mapping[TimePart, float]) -> None:
        """Handle the end of an evaluation or checkpoint after `step`, with the time since the step; on every rank."""


class Saver(Protocol):
    """Writes and reads checkpoints of a running loop."""

    def wants(self) -> bool:
        """Return whether a checkpoint by the clock is due; called on rank 0."""

    def due(self, step: int, *, by_clock: bool) -> bool:
        """Return whether to save after `step`; the same answer on every rank."""

    def save(self, loop: TrainingLoop, *, wait: bool) -> None:
        """Save a checkpoint, and `wait` until it is valid, or let it be written beside the training; every rank calls
        it.
        """

    @property
    def writing(self) -> bool:
        """True from `save` to `finish` of a checkpoint that is written beside the training; alike on all ranks."""

    def finish(self) -> None:
        """Wait for a checkpoint that is written beside the training; every rank calls it."""

    def resume(self, loop: TrainingLoop) -> None:
        """Restore model, optimizer, schedule, the count of steps, and the generators; every rank calls it."""


class Stopper(Protocol):
    """Decides whether to end before the last step."""

    def should_stop(self, step: int, metrics: Mapping[str, float], loop: TrainingLoop) -> bool:
        """Return the decision after an evaluation; called on every rank, with the same figures."""

    @property
    def stopped(self) -> bool:
        """Return whether it has decided to stop, in this attempt or in the resumed one."""


@dataclass(frozen=True)
class LoopParts:
    """Collaborators of the loop."""

    strategy: Strategy
    adapted: Adapted | None
    """Adapter in the model; None: all weights are trained."""
    order: EpochOrder
    rows: TrainRows
    collate: Collate
    validation: Validation | None
    observer: Observer
    saver: Saver
    stopper: Stopper
    interruption: Interruption
    save_on_preemption: bool
    optimizer: OptimizerName = "adamw"
    checkpointing: CheckpointingMode = "none"
    in_float8: InFloat8 | None = None
    """Layers in fp8; None: no layer multiplies in fp8."""
    activations: Activations = field(default_factory=OnDevice)
    packs: PackAttention = field(default_factory=WithMasks)
    clock: PartClock = field(default_factory=PartClock)
    objective: Objective = field(default_factory=ModelLoss)
    """Loss to minimise."""
    reference: Reference = field(default_factory=NoReference)
    callbacks: Sequence[TrainerCallback] = ()
    """Experiment trackers; of transformers' events they receive the begin, the end and the figures of a training."""


@dataclass(frozen=True)
class _StepAgreement:
    """Values that all ranks share at the start of a step."""

    items: float
    """Labelled items of the step, over all ranks."""
    stop: bool
    """True if any process was asked to stop."""
    save: bool
    """True if a checkpoint by the clock is due."""


@dataclass(frozen=True)
class _Unreported:
    """A step that the host has queued, and whose figures it has not read."""

    figures: StepFigures
    learning_rate: float
    started: float
    """Time of requesting its rows, on the monotonic clock."""
    lap: Lap


class TrainingLoop:
    """One run over `max_steps` optimizer steps."""

    def __init__(self, model: PreTrainedModel, args: TrainingArguments, parts: LoopParts) -> None:
        self.args = args
        self.parts = parts
        self.engine = engine_of(model, args, parts.strategy, adapted=parts.adapted is not None)
        self.state = TrainerState(
            max_steps=args.max_steps,
            num_train_epochs=math.ceil(args.max_steps / parts.order.steps),
            logging_steps=1,
            is_local_process_zero=args.local_process_index == 0,
            is_world_process_zero=args.process_index == 0,
        )
        self._stopped = False
        self._unreported: _Unreported | None = None
        self._reported_at = -math.inf

    @property
    def placed(self) -> Placed:
        """Return the sharded model, once training has begun."""
        return self.engine.placed

    def train(self, *, resume: bool = False) -> None:
        """Train to the last step, or until the stopper ends the run. `resume`: start from the saver's checkpoint."""
        clock, engine, state, order = self.parts.clock, self.engine, self.state, self.parts.order
        self._set_up(resume)
        steps = micro_batches(self._loader(), order, state.global_step, self.args.gradient_accumulation_steps)
        while state.global_step < state.max_steps and not self._stopped:
            started = time.monotonic()
            clock.enter("data")
            batches = next(steps)
            clock.enter("rest")
            counts = [[self.parts.collate.items(micro) for micro in self._passed(batch)] for batch in batches]
            agreed = self._agree(sum(map(sum, counts)))
            loss = torch.zeros((), device=self.args.device)
            for number, (batch, items) in enumerate(zip(batches, counts, strict=True), start=1):
                last = number == len(batches)
                with nullcontext() if last else engine.accumulating():
                    loss += self._forward_and_backward(batch, items, agreed.items, last=last)
            self._average_gradients()
            clock.enter("optimizer")
            done = engine.step()
            self._scale_weights()
            self._report()  # the step before, whose number `state` still has
            state.global_step += 1
            state.epoch = state.global_step / order.steps
            clock.enter("rest")
            figures = engine.figures(loss, done)
            self._unreported = _Unreported(figures, done.learning_rate, started, clock.end_lap())
            if not engine.runs_ahead:
                self._report()
            self._validate_and_save(agreed)
        self._report()
        if self.parts.saver.writing:
            clock.enter("checkpoint")
            self.parts.saver.finish()
            clock.enter("rest")
        self._notify_trackers("on_train_end")

    # ---------------------------------------------------------------------------------------------------------- set-up

    def _set_up(self, resume: bool) -> None:
        parts, engine = self.parts, self.engine
        engine.start(self._first_loss)
        placed = engine.placed
        engine.assert_in_effect(parts.optimizer)
        if parts.adapted is not None:
            parts.adapted.assert_in_effect(placed.model)
        if parts.in_float8 is not None:
            parts.in_float8.assert_in_effect(placed.model)
        assert_checkpointing_in_effect(parts.checkpointing, placed.model, parts.strategy.name)
        parts.activations.watch(placed.wrapped)
        self._ask_reference()
        if resume:
            parts.saver.resume(self)
            self._stopped = parts.stopper.stopped
        self._scale_weights()
        self._notify_trackers("on_train_begin")

    def _scale_weights(self) -> None:
        if self.parts.in_float8 is not None:
            self.parts.in_float8.scale_weights(self.engine.model)

    def _first_loss(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the loss of an epoch's first micro-batch, with 0 for the reference's answers, measured later."""
        parts = self.parts
        batch = parts.collate(parts.rows.without_reference(next(iter(parts.order))))
        pairs = torch.zeros(parts.collate.items(batch))
        batch |= {f"{REFERENCE}{name}": pairs for name in parts.objective.compares}
        with parts.packs.over(batch):
            return parts.objective.loss(model, self.engine.to_device(batch))

    def _ask_reference(self) -> None:
        """Measure the reference: before the first step and any checkpoint, the model is in its initial state."""
        if not self.parts.objective.compares:
            return
        clock = self.parts.clock
        clock.enter("evaluation")
        self.parts.reference.measure(self.engine.wrapped, self.args.device)
        give_back_freed_memory()
        clock.enter("start")

    def _loader(self) -> DataLoader[Any]:
        args = self.args
        workers = args.dataloader_num_workers
        return DataLoader(
            self.parts.rows,
            batch_sampler=self.parts.order,
            collate_fn=self.parts.collate,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # A generator of its own: an iterator draws a seed when it starts, which must not shift the dropout masks.
            generator=torch.Generator().manual_seed(args.seed),
        )

    # ------------------------------------------------------------------------------------------------------------ step

    def _agree(self, items: int) -> _StepAgreement:
        """Sum `items` over all ranks, which in the same call agree on stopping and saving after the step."""
        wanted = self.args.process_index == 0 and self.parts.saver.wants()
        stop_requested = self.parts.interruption.requested
        if torch.distributed.is_initialized():
            self.parts.clock.enter("communication")
        of_step, asks, wants = summed([items, stop_requested, wanted])
        return _StepAgreement(of_step, asks > 0, wants > 0)

    def _passed(self, batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Divide a batch of the loader into the micro-batches of a pass through a pipeline; without one, keep it."""
        own = self.parts.strategy.replica_step
        if own is None or own.passed == 1:
            return [dict(batch)]
        parts = {name: value.chunk(own.passed) for name, value in batch.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(own.passed)]

    def _forward_and_backward(
        self, batch: Mapping[str, torch.Tensor], items: Sequence[int], of_step: float, *, last: bool
    ) -> torch.Tensor:
        """Add the gradients of a batch, and return its share in the loss of the step. `items`: those of its
        micro-batches, counted before the transfer to the device, for which the host need not wait.
        """
        clock, own = self.parts.clock, self.parts.strategy.replica_step
        padding = KnownPadding.of(batch)
        clock.enter("data")  # on its way to the device
        packs = self.parts.packs.over(batch)
        batch = self.engine.to_device(batch)
        counts = iter(items)
        if own is not None and own.pipeline is not None:
            clock.enter("forward_backward")

            def share_of(stage: Any, micro: dict[str, torch.Tensor]) -> torch.Tensor:
                return self._share(stage, micro, next(counts), of_step)

            with known_padding(padding.of_each(own.passed) if padding is not None else None):
                loss = own.pipeline.step(self._passed(batch), share_of)
        else:
            clock.enter("forward")
            with known_padding(padding), packs:
                loss = self._share(self.engine.wrapped, batch, next(counts), of_step)
            if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
                clear_device_cache()
            clock.enter("backward")
            self.engine.backward(loss, last=last)
        clock.enter("rest")
        return loss.detach()

    def _share(self, model: Any, batch: dict[str, torch.Tensor], items: int, of_step: float) -> torch.Tensor:
        """Return the micro-batch's share in the mean over the global batch, times the ranks, because gradients are
        averaged over them; processes of one replica read the same rows, and are counted as often on both sides. Where
        the tokens of rows are divided, each process counts its own.

        mean over global batch = sum over micro-batches of (mean of micro-batch x its items) / items of the global batch
        """
        with self.parts.activations.forward():
            if items:
                mean = self.parts.objective.loss(model, batch)
                share: torch.Tensor = mean * (items * self.args.world_size / of_step)
            else:
                # A window may hold no item; the mean over none is NaN, and all ranks have to run the backward pass.
                outputs = model(**{name: value for name, value in batch.items() if name not in LABELS})
                share = outputs.logits.sum() * 0.0
        self.parts.activations.assert_in_effect(self.parts.strategy.name)
        self.parts.packs.assert_in_effect()
        return share

    def _average_gradients(self) -> None:
        """Average the gradients over the global batch, where the strategy does it itself."""
        if (own := self.parts.strategy.replica_step) is not None:
            self.parts.clock.enter("communication")
            own.average_gradients(self.engine.model)

    # ---------------------------------------------------------------------------------------------------- after a step

    def _report(self) -> None:
        """Report the last step, unless that is done. Raise StageError when its loss is not finite."""
        if self._unreported is None:
            return
        of_step, self._unreported = self._unreported, None
        loss, grad_norm = of_step.figures.read()  # mean over all ranks
        now, step, learning_rate = time.monotonic(), self.state.global_step, of_step.learning_rate
        began, self._reported_at = max(of_step.started, self._reported_at), now
        if not math.isfinite(loss):
            raise StageError(
                FailureClass.LOSS_NOT_FINITE,
                "LossNotFinite",
                f"The loss is {loss} at step {step} with learning rate {learning_rate:.3g}.",
                "Lower training.learningRate, lengthen training.warmupSteps, or train in fp32.",
            )
        order, of_epoch = self.parts.order, (step - 1) % self.parts.order.steps
        report = StepReport(
            step=step,
            epoch=self.state.epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            seconds=now - began,
            samples=order.step_rows,
            tokens=order.step_tokens(of_epoch),
            computed_tokens=order.step_computed_tokens(of_epoch),
            parts=self.parts.clock.seconds(of_step.lap),
        )
        self.parts.observer.on_step(report)
        norm = {} if report.grad_norm is None else {"grad_norm": report.grad_norm}
        figures = {"loss": loss, **norm, "learning_rate": report.learning_rate, "epoch": report.epoch, **report.rates}
        self._notify_trackers("on_log", logs=figures)

    def _notify_trackers(self, event: str, **figures: Any) -> None:
        for callback in self.parts.callbacks:
            getattr(callback, event)(self.args, self.state, TrainerControl(), model=self.engine.model, **figures)

    def _validate_and_save(self, agreed: _StepAgreement) -> None:
        """Validate at the end of an epoch, save when due, and raise StageError PREEMPTED when asked to stop."""
        step, clock = self.state.global_step, self.parts.clock
        last = step >= self.state.max_steps
        validates = self.parts.validation is not None and (step % self.parts.order.steps == 0 or last)
        if validates:
            self._report()
            clock.enter("evaluation")
            self._validate(step)
            clock.enter("rest")
        stop = agreed.stop and not (last or self._stopped)
        saves = self.parts.saver.due(step, by_clock=agreed.save) or (stop and self.parts.save_on_preemption)
        if saves:
            self._report()  # no checkpoint has a loss that is not finite
            clock.enter("checkpoint")
            give_back_freed_memory()
            # Nothing goes on beside the last one, and nobody waits for a thread of a process that is being evicted.
            self.parts.saver.save(self, wait=last or stop or self._stopped)
            give_back_freed_memory()
            clock.enter("rest")
        if validates or saves:
            self.parts.observer.on_pause(step, clock.lap())
        if stop:
            self._report()
            self.parts.saver.finish()
            raise preempted(f"after step {step} of {self.state.max_steps}")

    def _validate(self, step: int) -> None:
        assert self.parts.validation is not None
        give_back_freed_memory()
        on_batch = partial(self.parts.observer.on_validation_batch, step)
        metrics = self.parts.validation.metrics(self.engine.wrapped, self.args.device, on_batch)
        give_back_freed_memory()
        self.parts.observer.on_validation(step, metrics)
        self._notify_trackers("on_log", logs={f"eval_{name}": value for name, value in metrics.items()})
        self._stopped = self.parts.stopper.should_stop(step, metrics, self)
