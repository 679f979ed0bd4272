"""The model in training: the wrappers around it, its optimizer and its learning-rate schedule.

accelerate adds autocast, DistributedDataParallel and the loss scaling of fp16. With a DeepSpeed configuration it starts
DeepSpeed's engine, which averages, clips and steps by itself. torch.compile compiles the blocks
(`compiled_blocks.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    enable_full_determinism,
    get_scheduler,
    set_seed,
)
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_pt_utils import get_parameter_names

from finetune_contract.choices import OptimizerName
from finetune_trainer.core.distributed import summed
from finetune_trainer.strategies.strategy_protocol import Placed, Strategy, expect
from finetune_trainer.tasks.task_protocol import REFERENCE
from finetune_trainer.training.passes.compiled_blocks import CompiledBlocks, compile_blocks
from finetune_trainer.training.passes.unused_weights import LossOf, may_leave_weights_unused
from finetune_trainer.training.training_arguments import is_optimizer

_NOT_DECAYED = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Name patterns of weights without weight decay, besides all of `nn.LayerNorm`; those of transformers' Trainer, whose
optimizer groups are in the checkpoints.
"""


class StepFigures:
    """Loss and gradient norm of a step, copied to page-locked memory beside the next work of the device."""

    def __init__(self, figures: torch.Tensor, grad_norm: float | None) -> None:
        """Begin the copy of `figures`: the loss, and the norm where it is on the device. `grad_norm`: one known to the
        host.
        """
        self._grad_norm = grad_norm
        # torch allocates page-locked memory for a copy from a GPU for which the host does not wait.
        self._figures = figures.to("cpu", non_blocking=True)
        self._copied: Any = None
        if figures.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> tuple[float, float | None]:
        """Return loss and gradient norm. The host waits for the copy, not for work that was queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, *norm = self._figures.tolist()
        known = None if self._grad_norm is None else float(self._grad_norm)
        return loss, norm[0] if norm else known


class Engine:
    """A model that accelerate prepares, or that its strategy has already sharded."""

    def __init__(self, model: PreTrainedModel, args: TrainingArguments, strategy: Strategy, *, adapted: bool) -> None:
        self.args = args
        self._strategy = strategy
        self._adapted = adapted
        self.model = strategy.prepare_model(model)
        seed = enable_full_determinism if args.full_determinism else set_seed
        seed(args.seed)
        self.accelerator = _accelerator(args)
        if strategy.scales_loss:
            # Under FSDP2 torch's scaler agrees with all processes on gradients that are no numbers, by DTensor.
            self.accelerator.scaler = torch.amp.GradScaler(args.device.type)
        self.model.config.use_cache = False
        if self._moves_model:
            self.model.to(args.device)  # type: ignore[arg-type]
        self.wrapped: nn.Module = self.model
        self.optimizer: Any = None
        self.schedule: Any = None
        self.compiled = CompiledBlocks(())

    @property
    def _moves_model(self) -> bool:
        return not self._strategy.shards_itself

    @property
    def placed(self) -> Placed:
        """Return the sharded model, after `start`."""
        return Placed(
            self.model, self.wrapped, self._inner_optimizer(), self.args.world_size, self.args.device, self._adapted
        )

    def _inner_optimizer(self) -> Any:
        return self.optimizer.optimizer

    def start(self, first_loss: LossOf) -> None:
        """Build the optimizer, wrap the model, and build the schedule. `first_loss`: that of this rank's first
        micro-batch, on the device.
        """
        args = self.args
        if args.use_liger_kernel:
            apply_liger_kernel(self.model, args.liger_kernel_config)  # type: ignore[no-untyped-call]
        if args.activation_checkpointing:
            self.model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=args.activation_checkpointing_kwargs
            )
        if args.neftune_noise_alpha is not None:
            activate_neftune(self.model, args.neftune_noise_alpha)  # type: ignore[no-untyped-call]
        self._look_for_unused_weights(first_loss)
        self.compiled = compile_blocks(self.model, args)
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, self.model)
        groups, replica_step = parameter_groups(self.model, args.weight_decay), self._strategy.replica_step
        self._wrap(kind(groups if replica_step is None else replica_step.stepped_groups(groups), **settings))
        further: Any = args.lr_scheduler_kwargs
        warmup = args.get_warmup_steps(args.max_steps)
        self.schedule = get_scheduler(args.lr_scheduler_type, self.optimizer, warmup, args.max_steps, further)
        self.wrapped.train()

    def _look_for_unused_weights(self, first_loss: LossOf) -> None:
        """Make DistributedDataParallel search in each step for weights without a gradient if there are any: it then
        walks through the graph, and reduces a map of the weights besides their gradients.
        """
        args = self.args
        if self._strategy.name != "ddp" or self._strategy.shards_itself:
            return
        # It cannot search where activations are recomputed, and need not where the graph never changes.
        if args.ddp_find_unused_parameters is not None or args.activation_checkpointing or args.ddp_static_graph:
            return
        with self.accelerator.autocast():
            mine = may_leave_weights_unused(self.model, first_loss)
        self.accelerator.ddp_handler.find_unused_parameters = summed([mine])[0] > 0

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        if self._strategy.shards_itself:
            # Adds autocast only.
            self.wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def assert_in_effect(self, optimizer: OptimizerName) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT unless the strategy, the loss scaling, torch.compile and the
        optimizer are the requested ones.
        """
        placed, args, name = self.placed, self.args, self._strategy.name
        self._strategy.assert_in_effect(placed)
        scaled = self.accelerator.scaler is not None and self.accelerator.scaler.is_enabled()
        problem = f"the loss is {'' if scaled else 'not '}scaled, and fp16 is {'on' if self._scales_loss else 'off'}"
        expect(scaled == self._scales_loss, name, "WrongLossScaling", problem)
        self.compiled.assert_in_effect(name, requested=bool(args.torch_compile))
        problem = f"training.optimizer is {optimizer}, and {type(placed.optimizer).__qualname__} steps"
        expect(is_optimizer(optimizer, placed.optimizer), name, "WrongOptimizer", problem)

    @property
    def _scales_loss(self) -> bool:
        """Return True for fp16, which loses small gradients unless the loss is scaled."""
        return bool(self.args.fp16) or self._strategy.scales_loss

    @property
    def scaling(self) -> dict[str, float]:
        """State of the loss scaling, the same on all ranks; empty where the loss is not scaled, and with DeepSpeed,
        which saves its own.
        """
        return {} if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()

    def restore_scaling(self, state: Mapping[str, float]) -> None:
        """Restore a result of `scaling`. An empty one leaves the scale that a training begins with."""
        if self.accelerator.scaler is not None and state:
            self.accelerator.scaler.load_state_dict(dict(state))

    # ------------------------------------------------------------------------------------------------------------ step

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch on its way to the device: from page-locked memory, the loader's for a GPU, the host does not
        wait for the copy.
        """
        return {name: value.to(self.args.device, non_blocking=True) for name, value in batch.items()}

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of every micro-batch of a step but the last."""
        return self._strategy.accumulating(self.placed)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`; `last`: of the last micro-batch of a step."""
        self.accelerator.backward(loss)

    def clip_and_step(self) -> Any:
        """Clip the gradients, and step the optimizer. Return their norm before clipping, a number or a tensor on the
        device; None where DeepSpeed computes none.
        """
        grad_norm = self._clipped(self.args.max_grad_norm or math.inf)
        self.optimizer.step()
        if (replica_step := self._strategy.replica_step) is not None:
            replica_step.share_weights()
        return grad_norm

    def _clipped(self, most: float) -> Any:
        """Clip the gradients and return their norm before; under FSDP it is a DTensor."""
        if self._strategy.scales_loss:
            # accelerate does it only together with autocast.
            self.accelerator.scaler.unscale_(self._inner_optimizer())
        replica_step = self._strategy.replica_step
        if replica_step is not None:
            return replica_step.clip_gradients(self.model, most)
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step_schedule(self) -> float:
        """Step the schedule, after the optimizer. Return the learning rate that it has stepped with."""
        learning_rate = float(self.schedule.get_last_lr()[0])
        if not self.optimizer.step_was_skipped:  # with fp16, where gradients overflow
            self.schedule.step()
        return learning_rate

    @property
    def runs_ahead(self) -> bool:
        """Return True if the device works beside the host, which queues the next step before it reads `figures`."""
        return self.args.device.type == "cuda"

    def figures(self, loss: torch.Tensor, grad_norm: Any) -> StepFigures:
        """Return the mean over all ranks of their `loss`, and the norm of the gradients, on their way to the host.
        Every rank must call it.
        """
        figures = [self.accelerator.gather(loss).mean().double()]
        if isinstance(grad_norm, torch.Tensor):
            figures.append(grad_norm.to(figures[0].device, torch.float64).reshape(()))
        return StepFigures(torch.stack(figures), None if len(figures) > 1 else grad_norm)


class DeepSpeedEngine(Engine):
    """A model in DeepSpeed's engine, which handles the precision, the exchange of gradients and the step."""

    _moves_model = False
    _scales_loss = False

    def _inner_optimizer(self) -> Any:
        return self.optimizer

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        from deepspeed.utils import logger as deepspeed_logger

        # Raises ValueError for a contradiction to `args`.
        self._config.trainer_config_finalize(self.args, self.model, self.args.max_steps)
        deepspeed_logger.setLevel(logging.ERROR)
        super()._wrap(optimizer)

    @property
    def _config(self) -> Any:
        return self.accelerator.state.deepspeed_plugin.hf_ds_config

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch on the device, fractions in the model's precision; log-likelihoods of whole rows are too
        large for it.
        """
        dtype = self._config.dtype()
        return {
            name: value.to(dtype) if value.is_floating_point() and not name.startswith(REFERENCE) else value
            for name, value in super().to_device(batch).items()
        }

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`, which is already divided by the whole step."""
        engine: Any = self.wrapped
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss, scale_wrt_gas=False)

    def clip_and_step(self) -> Any:
        """Make the engine clip, step and clear the gradients, and return their norm before."""
        engine: Any = self.wrapped
        engine.step()
        return engine.get_global_grad_norm()


def engine_of(model: PreTrainedModel, args: TrainingArguments, strategy: Strategy, *, adapted: bool) -> Engine:
    """Return the engine of the strategy, with the model sharded by it."""
    kind = Engine if args.deepspeed_plugin is None else DeepSpeedEngine
    return kind(model, args, strategy, adapted=adapted)


def _accelerator(args: TrainingArguments) -> Accelerator:
    requested = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    given = {name: value for name, value in requested.items() if value is not None}
    # Gradients are views of the reduced buckets, or there would be a second copy of all of them.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, **given)
    return Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        # The loop accumulates; accelerate must not divide a second time.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # Explicitly, as TrainingArguments set accelerate's environment variables for the whole model.
        dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend.NO),
        kwargs_handlers=[ddp],
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups: trained weights with and without weight decay, by the device mesh over which they
    are sharded, because one fused kernel cannot step weights of several meshes.
    """
    named = get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYED))  # type: ignore[no-untyped-call]
    decayed = set(named)
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        ([weight for name, weight in trained if name in decayed], weight_decay),
        ([weight for name, weight in trained if name not in decayed], 0.0),
    ]
    if len({_mesh_of(weight) for _, weight in trained}) > 1:
        groups = [(of_mesh, decay) for weights, decay in groups for of_mesh in _by_mesh(weights)]
    return [{"params": weights, "weight_decay": decay} for weights, decay in groups]


def _by_mesh(weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for weight in weights:
        by_mesh.setdefault(_mesh_of(weight), []).append(weight)
    return list(by_mesh.values())


def _mesh_of(weight: torch.Tensor) -> Any:
    return weight.device_mesh if isinstance(weight, DTensor) else None
