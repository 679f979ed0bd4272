"""The loop: `transformers.Trainer`, with our data order, our loss, our checkpoints, and a check that the strategy is
in effect.

What is overridden and why:
- the loss of a step is the mean over the whole global batch whatever the ranks and the accumulation. The Trainer
hands the number of items to the model, and classification heads ignore it, so their loss came out multiplied by the
accumulation;
- evaluation and checkpoints come after the step has been logged, in that order, so that a checkpoint holds a finished
step;
- one small all-reduce at the start of a step tells every rank of it whether any was asked to stop;
- a clock is told which part of a step begins where.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from finetune_contract.choices import CheckpointingMode, OptimizerName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_trainer.adapters import Adapted
from finetune_trainer.allocator import give_back_freed_memory
from finetune_trainer.data.slices import LABELS
from finetune_trainer.failures import StageError
from finetune_trainer.float8 import InFloat8
from finetune_trainer.strategies.base import Placed, ReplicaStep, Strategy, expect
from finetune_trainer.tasks.base import REFERENCE, Objective
from finetune_trainer.training.activations import Activations, OnDevice, assert_checkpointing_in_effect
from finetune_trainer.training.arguments import is_optimizer
from finetune_trainer.training.interruption import Interruption, preempted
from finetune_trainer.training.order import Collate, EpochLoader, EpochOrder, TrainRows
from finetune_trainer.training.reference import NoReference, Reference
from finetune_trainer.training.timing import PartClock
from finetune_trainer.training.validation import Validation


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    """From asking for its rows to its loss; without evaluation and checkpoints."""
    samples: int
    tokens: int
    computed_tokens: int
    """`tokens` with padding."""
    parts: Mapping[TimePart, float]
    """Seconds since the step before, or since the start."""

    @property
    def rates(self) -> dict[str, float]:
        """Over all processes; tokens without padding."""
        return {
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }


class Observer(Protocol):
    """Hears of finished steps and evaluations."""

    def on_step(self, report: StepReport) -> None:
        """After every step, on every rank."""

    def on_validation_batch(self, step: int, done: int) -> None:
        """After every batch of an evaluation after `step`, on every rank."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation, on every rank, with the same figures."""

    def on_pause(self, step: int, parts: Mapping[TimePart, float]) -> None:
        """After an evaluation or a checkpoint after `step`, on every rank, with the seconds since the step's end."""


class Saver(Protocol):
    """Writes and reads checkpoints of a running loop."""

    def wants(self) -> bool:
        """Whether a checkpoint by the clock is due; asked on rank 0."""

    def due(self, step: int, *, by_clock: bool) -> bool:
        """Whether to save after `step`; the same answer on every rank."""

    def save(self, loop: TrainingLoop) -> None:
        """Every rank calls it."""

    def resume(self, loop: TrainingLoop) -> None:
        """Restores model, optimizer and scheduler; every rank calls it."""

    def restore_random_state(self) -> None:
        """Restores the generators; called right before the first resumed step."""


class Stopper(Protocol):
    """Decides about the end before the last step."""

    def should_stop(self, step: int, metrics: Mapping[str, float], loop: TrainingLoop) -> bool:
        """Asked after every evaluation, on every rank, with the same figures."""

    @property
    def stopped(self) -> bool:
        """Whether it has said so, in this attempt or in the one that is resumed."""


@dataclass(frozen=True)
class LoopParts:
    """The small objects that the loop works with."""

    strategy: Strategy
    adapted: Adapted | None
    """None: all weights are trained."""
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
    """None: no layer multiplies in fp8."""
    activations: Activations = field(default_factory=OnDevice)
    clock: PartClock = field(default_factory=PartClock)
    objective: Objective | None = None
    """None: the loss of the model itself is minimised."""
    reference: Reference = field(default_factory=NoReference)
    callbacks: Sequence[TrainerCallback] = ()
    """Those that hear of figures besides the observer."""


@dataclass
class _Step:
    """The step under way."""

    started: float = field(default_factory=time.monotonic)
    stop: bool = False
    save_by_clock: bool = False
    items: Iterator[int] = field(default_factory=lambda: iter(()))
    """Of each micro-batch of this rank, in order."""


class TrainingLoop(Trainer):
    """One run over `max_steps` optimizer steps."""

    # compute_loss below has divided by the items of the whole step already.
    loss_is_scaled_for_ga = True

    def __init__(self, model: PreTrainedModel, args: TrainingArguments, parts: LoopParts) -> None:
        self.parts = parts
        self._step = _Step()
        self._finished_step = -1
        super().__init__(
            model=parts.strategy.prepare_model(model),
            args=args,
            data_collator=parts.collate,
            train_dataset=parts.rows,
            callbacks=list(parts.callbacks),
        )
        self.remove_callback(PrinterCallback)

    # ----------------------------------------------------------------------------------------------------------------
    # -- set-up

    @property
    def placed(self) -> Placed:
        """The model as it is spread, once training has begun."""
        model, wrapped, optimizer = self.model, self.model_wrapped, self.optimizer
        assert isinstance(model, PreTrainedModel)
        assert wrapped is not None
        assert optimizer is not None
        while hasattr(optimizer, "optimizer") and not self.is_deepspeed_enabled:
            optimizer = optimizer.optimizer  # accelerate's wrapper
            assert optimizer is not None
        # Around everything else when the job asks for torch_compile.
        wrapped = getattr(wrapped, "_orig_mod", wrapped)
        adapted = self.parts.adapted is not None
        return Placed(model, wrapped, optimizer, self.args.world_size, self.args.device, adapted)

    def get_train_dataloader(self) -> EpochLoader:
        """Our order; accelerate does not touch it."""
        args = self.args
        workers = args.dataloader_num_workers
        return EpochLoader(
            self.parts.rows,
            batch_sampler=self.parts.order,
            collate_fn=self.parts.collate,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # A generator of its own: an iterator draws a seed when it starts, and that must not shift the dropout
            # masks.
            generator=torch.Generator().manual_seed(args.seed),
        )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)  # type: ignore[no-untyped-call]
        placed = self.placed
        self.parts.strategy.assert_in_effect(placed)
        if self.parts.adapted is not None:
            self.parts.adapted.assert_in_effect(placed.model)
        if self.parts.in_float8 is not None:
            self.parts.in_float8.assert_in_effect(placed.model)
        assert_checkpointing_in_effect(self.parts.checkpointing, placed.model, self.parts.strategy.name)
        self.parts.activations.watch(placed.wrapped)
        self._assert_loss_scaled()
        self._assert_compiled()
        found = f"training.optimizer is {self.parts.optimizer}, and {type(placed.optimizer).__qualname__} steps"
        right = is_optimizer(self.parts.optimizer, placed.optimizer)
        expect(right, self.parts.strategy.name, "WrongOptimizer", found)
        self._ask_reference()
        if resume_from_checkpoint is not None:
            self.parts.saver.resume(self)
        if self.is_deepspeed_enabled:
            self._clock_engine()
        return prepared

    def _ask_reference(self) -> None:
        """Before the first step and before anything is read from a checkpoint the model is what it began with."""
        if self.parts.objective is None or not self.parts.objective.compares:
            return
        clock = self.parts.clock
        clock.enter("evaluation")
        self.parts.reference.measure(self.model_wrapped, self.args.device)
        give_back_freed_memory()
        clock.enter("start")

    def _clock_engine(self) -> None:
        """accelerate lets DeepSpeed's engine step inside of what it calls the backward pass."""
        engine: Any = self.model_wrapped
        step = engine.step

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self.parts.clock.enter("optimizer")
            return step(*args, **kwargs)

        engine.step = clocked

    def _assert_loss_scaled(self) -> None:
        """fp16 loses small gradients without a scaled loss; DeepSpeed's engine scales by itself."""
        scaler, wanted = self.accelerator.scaler, self.args.fp16 and not self.is_deepspeed_enabled
        scaled = scaler is not None and scaler.is_enabled()
        found = f"the loss is {'' if scaled else 'not '}scaled, and fp16 is {'on' if wanted else 'off'}"
        expect(scaled == wanted, self.parts.strategy.name, "WrongLossScaling", found)

    def _assert_compiled(self) -> None:
        """By torch.compile around the model, or by DeepSpeed's engine inside it."""
        wrapped = self.model_wrapped
        compiled = hasattr(wrapped, "_orig_mod") or bool(getattr(wrapped, "is_compiled", False))
        found = f"training.arguments.torch_compile is {self.args.torch_compile}, and the model is "
        found += "compiled" if compiled else "not compiled"
        expect(compiled == bool(self.args.torch_compile), self.parts.strategy.name, "WrongCompilation", found)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Nothing when the checkpoint is of the last step: the Trainer asks for the end only after a step."""
        if self.state.global_step >= self.state.max_steps or self.parts.stopper.stopped:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: `_prepare_for_training` restores everything once it is spread."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.parts.saver.restore_random_state()

    # ----------------------------------------------------------------------------------------------------------------
    # ---- step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The micro-batches of a step, with which it begins."""
        self._step = _Step()
        self.parts.clock.enter("data")
        taken = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.parts.clock.enter("rest")
        return taken

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """Labelled items of the step over all ranks; on the way these agree on stopping and saving after it."""
        counts = [self.parts.collate.items(micro) for batch in batch_samples for micro in self._micro_batches(batch)]
        self._step.items = iter(counts)
        wanted = self.args.process_index == 0 and self.parts.saver.wants()
        asked = self.parts.interruption.requested
        told = torch.tensor([sum(counts), asked, wanted], dtype=torch.float64, device=device)
        if torch.distributed.is_initialized():
            self.parts.clock.enter("communication")
            torch.distributed.all_reduce(told)
        self._step.stop, self._step.save_by_clock = bool(told[1] > 0), bool(told[2] > 0)
        return told[0]

    @property
    def _replica_step(self) -> ReplicaStep | None:
        """What the strategy does itself in a step."""
        return self.parts.strategy.replica_step

    def _micro_batches(self, batch: Any) -> list[dict[str, torch.Tensor]]:
        """Of one batch of the loader: those of one pass through a pipeline, else itself."""
        if self._replica_step is None or self._replica_step.passed == 1:
            return [batch]
        parts = {name: value.chunk(self._replica_step.passed) for name, value in batch.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(self._replica_step.passed)]

    def _prepare_inputs(self, inputs: Any) -> Any:
        """To the device. With DeepSpeed the Trainer rounds what is no whole number to the precision of the model, and
        log-likelihoods of whole rows are too large for that.
        """
        prepared = super()._prepare_inputs(inputs)
        said = {name: value.to(self.args.device) for name, value in inputs.items() if name.startswith(REFERENCE)}
        return {**prepared, **said}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward; after the last of a step the gradients are those of the whole global batch."""
        own, clock = self._replica_step, self.parts.clock
        clock.enter("data")  # on its way to the device
        if own is not None and own.pipeline is not None:
            model.train()
            batches = self._micro_batches(self._prepare_inputs(inputs))
            clock.enter("forward_backward")
            loss = own.pipeline.step(batches, partial(self._share, num_items_in_batch=num_items_in_batch))
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            clock.enter("rest")
            return loss
        if own is not None:
            clock.enter("communication")
            own.average_gradients(model)
        clock.enter("optimizer")
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._replica_step is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self._replica_step.clip_gradients(model, self.args.max_grad_norm)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """The Trainer's own takes all processes for replicas of each other."""
        if self._replica_step is None:
            super()._sync_replicated_trainable_parameters(model)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`_share`; the Trainer goes backward right after it."""
        self.parts.clock.enter("forward")
        loss = self._share(model, inputs, return_outputs, num_items_in_batch)
        self.parts.clock.enter("backward")
        return loss

    def _share(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The micro-batch's share in the mean over the global batch, times the ranks, because gradients are averaged
        over them; processes of one replica read the same rows, and are counted as often on both sides. Of rows whose
        tokens are divided each process counts its own.

        mean over global batch = sum over micro-batches of (mean of micro-batch x its items) / items of the global batch
        """
        # Counted before they came to the device, which need not be waited for.
        items = next(self._step.items)
        with self.parts.activations.forward():
            loss, outputs = self._forward(model, inputs, items, num_items_in_batch)
        self.parts.activations.assert_in_effect(self.parts.strategy.name)
        return (loss, outputs) if return_outputs else loss

    def _forward(self, model: Any, inputs: Any, items: int, num_items_in_batch: Any) -> tuple[Any, Any]:
        if not items:
            # A window may hold no item; the mean over none is no number, and all ranks have to go backward.
            outputs = model(**{name: value for name, value in inputs.items() if name not in LABELS})
            return outputs.logits.sum() * 0.0, outputs
        if self.parts.objective is not None:
            loss, outputs = self.parts.objective.loss(model, inputs), None
        else:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=None)
        return loss * (items * self.args.world_size / num_items_in_batch.to(loss.dtype)), outputs

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Only between nodes, of a hybrid mesh: inside of them shards are reduced after each micro-batch, or every
        process would keep whole gradients. The Trainer's own asks the model for the DistributedConfig that it was
        loaded with, which ours has not.
        """
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self.model.set_requires_all_reduce(True)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As a plain number; under FSDP the norm comes as a DTensor whose local part is only this rank's."""
        if self._replica_step is not None and grad_norm is None:
            grad_norm = self._replica_step.clip_gradients(model, math.inf)
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Not reported; counting walks over all parameters for every micro-batch."""
        return 0

    def store_flos(self) -> None:
        """Not reported; it would cost a collective for every logged step."""

    # --------------------------------------------------------------------------------------------------------------
    # after a step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Takes the step's figures; the loss is the mean over all ranks already. Ends the run when it is not finite."""
        if "loss" not in logs:
            return
        step = self.state.global_step
        if not math.isfinite(logs["loss"]):
            raise StageError(
                FailureClass.LOSS_NOT_FINITE,
                "LossNotFinite",
                f"The loss is {logs['loss']} at step {step} with learning rate {logs['learning_rate']:.3g}.",
                "Lower training.learningRate, lengthen training.warmupSteps, or train in fp32.",
            )
        order, of_epoch = self.parts.order, (step - 1) % self.parts.order.steps
        seconds = time.monotonic() - self._step.started
        report = StepReport(
            step=step,
            epoch=float(self.state.epoch or 0.0),
            loss=logs["loss"],
            learning_rate=logs["learning_rate"],
            grad_norm=logs.get("grad_norm"),
            seconds=seconds,
            samples=order.step_rows,
            tokens=order.step_tokens(of_epoch),
            computed_tokens=order.step_computed_tokens(of_epoch),
            parts=self.parts.clock.lap(),
        )
        self.parts.observer.on_step(report)
        self._tell_callbacks({**logs, "epoch": report.epoch, **report.rates})

    def _tell_callbacks(self, figures: Mapping[str, float]) -> None:
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(figures))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Logs, evaluates at the end of an epoch, saves when due. The Trainer asks again after each epoch."""
        step = self.state.global_step
        if step == self._finished_step:
            return
        clock = self.parts.clock
        clock.enter("rest")
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._finished_step = step
        last = step >= self.state.max_steps
        validates = self.parts.validation is not None and (step % self.parts.order.steps == 0 or last)
        if validates:
            clock.enter("evaluation")
            self._validate(step)
            clock.enter("rest")
        done = last or self.control.should_training_stop
        stop = self._step.stop and not done
        saves = self.parts.saver.due(step, by_clock=self._step.save_by_clock) or (
            stop and self.parts.save_on_preemption
        )
        if saves:
            clock.enter("checkpoint")
            give_back_freed_memory()
            self.parts.saver.save(self)
            give_back_freed_memory()
            clock.enter("rest")
        if validates or saves:
            self.parts.observer.on_pause(step, clock.lap())
        if stop:
            raise preempted(f"and stopped after step {step} of {self.state.max_steps}")

    def _validate(self, step: int) -> None:
        assert self.parts.validation is not None
        give_back_freed_memory()
        told = partial(self.parts.observer.on_validation_batch, step)
        metrics = self.parts.validation.metrics(self.model_wrapped, self.args.device, told)
        give_back_freed_memory()
        self.parts.observer.on_validation(step, metrics)
        self._tell_callbacks({f"eval_{name}": value for name, value in metrics.items()})
        if self.parts.stopper.should_stop(step, metrics, self):
            self.control.should_training_stop = True
