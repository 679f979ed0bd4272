"""The training loop: rows, one optimizer step, a report, validation, a checkpoint.

`TrainingLoop.train` shows the order. Forward, backward and the change of the weights are in `OptimizerStep`, the model
with its wrappers and optimizer in `Engine`; the other collaborators are passed in four values (`loop_parts.py`). The
settings are transformers' `TrainingArguments`; its `Trainer` is not used (`training.script` runs programs that use
one).

- Validation and checkpoints follow the step's report, so that a checkpoint holds a finished step.
- One small all-reduce in host memory at the start of a step shares its items and requests to stop with every rank.
- On a GPU the host runs ahead of the device, and waits for it once a step: for the figures of the step before, when it
  has queued the next one. So the device is never idle for the host's sake, and reports are a step late.
- A clock records the part of the step that each moment belongs to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState, TrainingArguments

from finetune_contract.layout import FailureClass
from finetune_trainer.core.allocator import give_back_freed_memory
from finetune_trainer.core.distributed import summed
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import preempted
from finetune_trainer.strategies.strategy_protocol import Placed
from finetune_trainer.tasks.task_protocol import REFERENCE
from finetune_trainer.training.engine import StepFigures, engine_of
from finetune_trainer.training.loop_parts import LoopData, LoopHooks, LoopModel, LoopSchedule, StepReport
from finetune_trainer.training.order import micro_batches
from finetune_trainer.training.passes.activations import assert_checkpointing_in_effect
from finetune_trainer.training.step import OptimizerStep
from finetune_trainer.training.timing import Lap


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

    def __init__(
        self, args: TrainingArguments, model: LoopModel, data: LoopData, schedule: LoopSchedule, hooks: LoopHooks
    ) -> None:
        self.args = args
        self._model = model
        self._data = data
        self._schedule = schedule
        self._hooks = hooks
        self.engine = engine_of(model.loaded, args, model.strategy, adapted=model.adapted is not None)
        self._step = OptimizerStep(self.engine, model, hooks.clock.enter)
        self.state = TrainerState(
            max_steps=args.max_steps,
            num_train_epochs=math.ceil(args.max_steps / data.order.steps),
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
        clock, state, order = self._hooks.clock, self.state, self._data.order
        self._set_up(resume)
        steps = micro_batches(self._loader(), order, state.global_step, self.args.gradient_accumulation_steps)
        while state.global_step < state.max_steps and not self._stopped:
            agreed = self._train_step(steps)
            self._validate_and_save(agreed)
        self._report()
        if self._schedule.saver.writing:
            clock.enter("checkpoint")
            self._schedule.saver.finish()
            clock.enter("rest")
        self._notify_trackers("on_train_end")

    # ---------------------------------------------------------------------------------------------------------- set-up

    def _set_up(self, resume: bool) -> None:
        model, engine = self._model, self.engine
        engine.start(self._first_loss)
        placed = engine.placed
        engine.assert_in_effect(model.optimizer)
        if model.adapted is not None:
            model.adapted.assert_in_effect(placed.model)
        if model.in_float8 is not None:
            model.in_float8.assert_in_effect(placed.model)
        assert_checkpointing_in_effect(model.checkpointing, placed.model, model.strategy.name)
        model.activations.watch(placed.wrapped)
        self._ask_reference()
        if resume:
            self._schedule.saver.resume(self)
            self._stopped = self._schedule.stopper.stopped
        self._step.scale_weights()
        self._notify_trackers("on_train_begin")

    def _first_loss(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the loss of an epoch's first micro-batch, with 0 for the reference's answers, measured later."""
        data, objective = self._data, self._model.objective
        batch = data.collate(data.rows.without_reference(next(iter(data.order))))
        pairs = torch.zeros(data.collate.items(batch))
        batch |= {f"{REFERENCE}{name}": pairs for name in objective.compares}
        with self._model.packs.over(batch):
            return objective.loss(model, self.engine.to_device(batch))

    def _ask_reference(self) -> None:
        """Measure the reference: before the first step and any checkpoint, the model is in its initial state."""
        if not self._model.objective.compares:
            return
        clock = self._hooks.clock
        clock.enter("evaluation")
        self._data.reference.measure(self.engine.wrapped, self.args.device)
        give_back_freed_memory()
        clock.enter("start")

    def _loader(self) -> DataLoader[Any]:
        args = self.args
        workers = args.dataloader_num_workers
        return DataLoader(
            self._data.rows,
            batch_sampler=self._data.order,
            collate_fn=self._data.collate,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # A generator of its own: an iterator draws a seed when it starts, which must not shift the dropout masks.
            generator=torch.Generator().manual_seed(args.seed),
        )

    # ------------------------------------------------------------------------------------------------------------ step

    def _train_step(self, steps: Iterator[list[dict[str, torch.Tensor]]]) -> _StepAgreement:
        """Take one step, and report the one before; on a CPU, report this one, too."""
        clock, engine, state = self._hooks.clock, self.engine, self.state
        started = time.monotonic()
        clock.enter("data")
        loaded = next(steps)
        clock.enter("rest")
        batches = [self._step.batch_of(tensors, self._data.collate.items) for tensors in loaded]
        agreed = self._agree(sum(sum(batch.items) for batch in batches))
        done = self._step.take(batches, agreed.items, clear_cache=self._clears_cache())
        self._report()  # the step before, whose number `state` still has
        state.global_step += 1
        state.epoch = state.global_step / self._data.order.steps
        clock.enter("rest")
        figures = engine.figures(done.loss, done.grad_norm)
        self._unreported = _Unreported(figures, done.learning_rate, started, clock.end_lap())
        if not engine.runs_ahead:
            self._report()
        return agreed

    def _agree(self, items: int) -> _StepAgreement:
        """Sum `items` over all ranks, which in the same call agree on stopping and saving after the step."""
        wanted = self.args.process_index == 0 and self._schedule.saver.wants()
        stop_requested = self._schedule.interruption.requested
        if torch.distributed.is_initialized():
            self._hooks.clock.enter("communication")
        of_step, asks, wants = summed([items, stop_requested, wanted])
        return _StepAgreement(of_step, asks > 0, wants > 0)

    def _clears_cache(self) -> bool:
        """Return whether the step releases freed memory of the device."""
        every = self.args.torch_empty_cache_steps
        return bool(every and self.state.global_step % every == 0)

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
        order, of_epoch = self._data.order, (step - 1) % self._data.order.steps
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
            parts=self._hooks.clock.seconds(of_step.lap),
        )
        self._hooks.observer.on_step(report)
        norm = {} if report.grad_norm is None else {"grad_norm": report.grad_norm}
        figures = {"loss": loss, **norm, "learning_rate": report.learning_rate, "epoch": report.epoch, **report.rates}
        self._notify_trackers("on_log", logs=figures)

    def _notify_trackers(self, event: str, **figures: Any) -> None:
        for tracker in self._hooks.trackers:
            tracker.notify(event, self.args, self.state, TrainerControl(), model=self.engine.model, **figures)

    def _validate_and_save(self, agreed: _StepAgreement) -> None:
        """Validate at the end of an epoch, save when due, and raise StageError PREEMPTED when asked to stop."""
        step, clock, saver = self.state.global_step, self._hooks.clock, self._schedule.saver
        last = step >= self.state.max_steps
        validates = self._data.validation is not None and (step % self._data.order.steps == 0 or last)
        if validates:
            self._report()
            clock.enter("evaluation")
            self._validate(step)
            clock.enter("rest")
        stop = agreed.stop and not (last or self._stopped)
        saves = saver.due(step, by_clock=agreed.save) or (stop and self._schedule.save_on_preemption)
        if saves:
            self._report()  # no checkpoint has a loss that is not finite
            clock.enter("checkpoint")
            give_back_freed_memory()
            # Nothing goes on beside the last one, and nobody waits for a thread of a process that is being evicted.
            saver.save(self, wait=last or stop or self._stopped)
            give_back_freed_memory()
            clock.enter("rest")
        if validates or saves:
            self._hooks.observer.on_pause(step, clock.lap())
        if stop:
            self._report()
            saver.finish()
            raise preempted(f"after step {step} of {self.state.max_steps}")

    def _validate(self, step: int) -> None:
        assert self._data.validation is not None
        give_back_freed_memory()
        on_batch = partial(self._hooks.observer.on_validation_batch, step)
        metrics = self._data.validation.metrics(self.engine.wrapped, self.args.device, on_batch)
        give_back_freed_memory()
        self._hooks.observer.on_validation(step, metrics)
        self._notify_trackers("on_log", logs={f"eval_{name}": value for name, value in metrics.items()})
        self._stopped = self._schedule.stopper.should_stop(step, metrics, self.placed)
