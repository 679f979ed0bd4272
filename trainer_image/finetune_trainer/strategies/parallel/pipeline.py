"""Pipeline parallelism: the layers in stages on several processes, micro-batches passing through them one after another
in the order of a schedule of torch.distributed.pipelining.

A stage is the model itself without its other parts (`model_layout.py`), so that the model's own code computes masks,
positions and heads; nothing is traced. Every process reads the whole micro-batches and only hidden states are sent. The
last stage computes the loss. A schedule needs one shape for all micro-batches of a pass: they are padded to the same
length, and each shape has a schedule of its own, created at its first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed, nn

from finetune_contract.choices import PipelineSchedule, Precision
from finetune_contract.trainer_job import Pipeline as PipelineSettings
from finetune_trainer.strategies.parallel.model_layout import Layout, Shell, cuts_of, keep_stages, layout_of, shell_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

Batch: TypeAlias = Mapping[str, torch.Tensor]
LossOf: TypeAlias = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
"""Function of a model and a micro-batch: the micro-batch's share in the loss of the step."""


class _Stage(nn.Module):
    """One stage as torch's schedules call it: hidden states in (none in the first), hidden states or the loss out."""

    def __init__(self, shell: Shell, *, first: bool, last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shell = shell
        self.first = first
        self.last = last
        self._computed = dtype
        self.sent = dtype
        """Type of the hidden states sent between processes."""
        self.precision: Precision = "fp32"
        self._accepts = frozenset(inspect.signature(shell.body.forward).parameters)
        # In a list, as it must not register the model's modules as its own.
        self.model = [shell.model]
        self.batches: Sequence[Batch] = ()
        self.loss_of: LossOf | None = None

    def own_weights(self) -> None:
        """Register the model, which returns numbers in fp32, as under FSDP without a pipeline."""
        self.inner = self.shell.model
        self.shell.model.register_forward_hook(lambda module, given, outputs: _in_fp32(outputs))

    def forward(self, *hidden: torch.Tensor, micro: int) -> torch.Tensor:
        """Return hidden states or the loss; `micro`: index in `batches`."""
        batch = self._take(self.batches[micro], *hidden)
        with self._autocast(batch):
            if not self.last:
                return self._hidden(batch)
            assert self.loss_of is not None
            return self.loss_of(self.model[0], batch)

    def evaluate(self, batch: Batch, *hidden: torch.Tensor) -> Any:
        """Return hidden states, or the whole model's output."""
        taken = self._take(batch, *hidden)
        with self._autocast(taken):
            return self.model[0](**taken) if self.last else self._hidden(taken)

    def _take(self, batch: Batch, *hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.shell.received is not None:
            # The layers of this stage add to hidden states in the type of the weights, as in one process.
            self.shell.received.hidden = hidden[0].to(self._computed)
        return {name: value for name, value in batch.items() if name not in self.shell.skips}

    def _hidden(self, batch: Batch) -> torch.Tensor:
        outputs = self.shell.body(**{name: value for name, value in batch.items() if name in self._accepts})
        states: torch.Tensor = outputs.last_hidden_state
        return states.to(self.sent)

    def _autocast(self, batch: Batch) -> AbstractContextManager[Any]:
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16)


def _in_fp32(outputs: Any) -> Any:
    """Return a model's outputs with their fractions in fp32."""
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            outputs[name] = value.float()
    return outputs


class Pipeline:
    """Stages of this process, and the passes through them."""

    def __init__(self, model: PreTrainedModel, settings: PipelineSettings, mesh: DeviceMesh) -> None:
        """Cut `model` into stages, and remove those of other processes from it."""
        self._settings = settings
        self._group = mesh.get_group()
        self._rank: int = mesh.get_local_rank()
        self._ranks = [distributed.get_global_rank(self._group, rank) for rank in range(settings.degree)]
        self.layout: Layout = layout_of(model)
        self.cuts = cuts_of(model, self.layout, settings.stages)
        self.own = tuple(range(self._rank, settings.stages, settings.degree))
        self.width: int = model.config.get_text_config().hidden_size
        self._sent = torch.float32  # as weights are trained; until here they may be as stored
        self._schedules: dict[tuple[int, int], Any] = {}
        self._stages: dict[int, _Stage] = {}
        self._sharded = False
        keep_stages(model, self.layout, self.cuts, self.own)

    def build_stages(self, model: PreTrainedModel) -> None:
        """Build the stages of this process from what is left of `model`, once its layers are split."""
        self._stages = {
            stage: _Stage(
                shell_of(model, self.layout, self.cuts[stage], self.cuts[stage + 1]),
                first=stage == 0,
                last=stage == self._settings.stages - 1,
                dtype=model.dtype,
            )
            for stage in self.own
        }

    def compute_in(self, precision: Precision, *, autocast: bool = True) -> None:
        """Switch from fp32 to `precision`: bf16 by autocast, or by weights that FSDP gathers in bf16, with hidden
        states and their gradients sent in bf16.
        """
        if precision == "bf16":
            self._sent = torch.bfloat16
        for stage in self._stages.values():
            stage.precision, stage.sent = precision if autocast else "fp32", self._sent

    @property
    def stages(self) -> Sequence[nn.Module]:
        """Stages of this process."""
        return tuple(self._stages.values())

    def stages_with_weights(self) -> Iterator[nn.Module]:
        """Yield the stages of this process, each with its weights as its own, so that FSDP can shard them."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        self._sharded = True
        for stage in self._stages.values():
            stage.own_weights()
            yield stage
            register_fsdp_forward_method(stage, "evaluate")

    @property
    def _last_rank(self) -> int:
        """Global rank of the process with the last stage."""
        return self._ranks[-1]

    def process_of(self, name: str) -> int:
        """Return the global rank of this pipeline's process with the weight or buffer `name` of the model."""
        stage = self.layout.stage_of(name, self.cuts)
        return self._ranks[stage % self._settings.degree]

    # ---------------------------------------------------------------------------------------------------------- train

    def step(self, batches: Sequence[Batch], loss_of: LossOf) -> torch.Tensor:
        """Run all micro-batches, of one shape, forward and backward; return their summed loss on every process."""
        for stage in self._stages.values():
            stage.shell.follow()
            stage.batches, stage.loss_of = batches, loss_of
        device = batches[0]["input_ids"].device
        losses: list[torch.Tensor] = []
        numbers = [{"micro": index} for index in range(len(batches))]
        self._release_weights()
        earlier = self._take_earlier_gradients(batches[0]["input_ids"])
        schedule = self._schedule(batches[0]["input_ids"])
        schedule.step(
            arg_mbs=[()] * len(batches),
            kwarg_mbs=numbers,
            target_mbs=[None] * len(batches),
            losses=losses,
            return_outputs=False,
        )
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for stage in self._stages.values():
            stage.batches, stage.loss_of = (), None
            if stage.shell.received is not None:
                stage.shell.received.hidden = None
        total = torch.stack(losses).sum().float() if losses else torch.zeros((), device=device)
        distributed.broadcast(total, src=self._last_rank, group=self._group)
        return total

    def _release_weights(self) -> None:
        """Release weights that an evaluation has left gathered, so that all replicas gather them in this pass.

        A schedule releases them at its first use (torch 2.15, `_post_metadata_inference_cleanup`), and replicas meet a
        new shape at different passes: one of them would gather while the others, which still have the weights, do not.
        """
        from torch.distributed.fsdp import FSDPModule

        for stage in self._stages.values() if self._sharded else ():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _take_earlier_gradients(self, ids: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Remove and return the gradients of earlier passes of the step, if the schedule for this shape is a new one:
        it clears the gradients of sharded stages at its first use (torch 2.15, `_post_metadata_inference_cleanup`).
        """
        if not self._sharded or tuple(ids.shape) in self._schedules:
            return []
        taken = []
        for parameter in (weight for stage in self._stages.values() for weight in stage.parameters()):
            if parameter.grad is not None:
                taken.append((parameter, parameter.grad))
                parameter.grad = None
        return taken

    def _schedule(self, ids: torch.Tensor) -> Any:
        """Return the schedule for micro-batches of this shape."""
        rows, length = ids.shape
        if (rows, length) not in self._schedules:
            stages = [self._torch_stage(index, rows, length, ids.device) for index in self.own]
            self._schedules[rows, length] = make_schedule(self._settings.schedule, stages, self._settings.micro_batches)
        return self._schedules[rows, length]

    def _torch_stage(self, index: int, rows: int, length: int, device: torch.device) -> Any:
        from torch.distributed.pipelining import PipelineStage

        shape = (rows, length, self.width)
        hidden = torch.empty(shape, dtype=self._sent, device="meta", requires_grad=True)
        stage = self._stages[index]
        return PipelineStage(
            stage,
            index,
            self._settings.stages,
            device,
            input_args=() if stage.first else (hidden,),
            output_args=torch.empty((), device="meta", requires_grad=True) if stage.last else hidden,
            group=self._group,
        )

    # ------------------------------------------------------------------------------------------------------- evaluate

    def evaluate(self, **batch: torch.Tensor) -> Any:
        """Return the whole model's output for `batch`, without gradients, on every process of the pipeline."""
        from transformers.utils.generic import ModelOutput

        hidden: list[torch.Tensor] = []
        answer: Any = None
        for index in range(self._settings.stages):
            process = index % self._settings.degree
            if process == self._rank:
                self._stages[index].shell.follow()
                if index and not hidden:
                    hidden = [self._empty(batch["input_ids"])]
                    distributed.recv(hidden[0], src=self._ranks[process - 1], group=self._group)
                outputs = self._stages[index].evaluate(batch, *hidden)
                hidden = []
                if index == self._settings.stages - 1:
                    answer = outputs
                else:
                    after = (index + 1) % self._settings.degree
                    distributed.send(outputs.detach().contiguous(), dst=self._ranks[after], group=self._group)
        layout: list[Any] = [None]
        if answer is not None:
            kept = {name: value for name, value in answer.items() if isinstance(value, torch.Tensor)}
            layout = [{name: (tuple(value.shape), value.dtype) for name, value in kept.items()}]
        distributed.broadcast_object_list(layout, src=self._last_rank, group=self._group)
        made = ModelOutput()  # type: ignore[no-untyped-call]
        for name, (shape, dtype) in layout[0].items():
            value = (
                torch.empty(shape, dtype=dtype, device=batch["input_ids"].device)
                if answer is None
                else answer[name].detach().contiguous()
            )
            distributed.broadcast(value, src=self._last_rank, group=self._group)
            made[name] = value
        return made

    def _empty(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty((*ids.shape, self.width), dtype=self._sent, device=ids.device)


def make_schedule(name: PipelineSchedule, stages: Sequence[Any], micro_batches: int) -> Any:
    """Return torch's schedule `name` over the `stages` of this process; the last stage outputs the loss itself."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    def loss(output: torch.Tensor, target: None) -> torch.Tensor:
        return output

    # Losses are shares of the whole step, so gradients must not be divided again.
    how: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    match name:
        case "gpipe":
            return ScheduleGPipe(stages[0], **how)
        case "1f1b":
            return Schedule1F1B(stages[0], **how)
        case "interleaved":
            return ScheduleInterleaved1F1B(list(stages), **how)
