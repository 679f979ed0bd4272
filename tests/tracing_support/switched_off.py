"""Functions that a dry run switches off or replaces, and why. docs/gpu.md shows this table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class SwitchedOff:
    """A function with another body in a dry run."""

    targets: tuple[str, ...]
    """`module:attribute`, the first of which names it."""
    work: str
    """Its work in a training."""
    instead: str
    """Its replacement in a dry run."""
    why: str
    body: Any

    def apply(self) -> None:
        """Replace the function in this process, for good."""
        for target in self.targets:
            module, _, path = target.partition(":")
            owner: Any = importlib.import_module(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            assert hasattr(owner, name), f"{target} is no longer there: correct the table"
            setattr(owner, name, self.body)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _as_if_all_had_the_same(mine: Sequence[float]) -> list[float]:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return [float(each) * size for each in mine]


def _reduced_by_a_hook(model: Any, *arguments: Any, **settings: Any) -> None:
    _DDP_INIT(model, *arguments, **settings)
    model.register_comm_hook(None, _average)
    model.reducer = _FirstBuckets(model.reducer)


def _average(_, bucket):  # torch compares annotations, which would be texts here
    gradients = bucket.buffer().div_(torch.distributed.get_world_size())
    torch.distributed.all_reduce(gradients)
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(gradients)
    return made


class _FirstBuckets:
    """A reducer that keeps its initial buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _valid_all_the_same(norm: Any) -> bool:
    _INVALID_NORM(norm)  # it reads the device
    return False


def _no_overflow(optimizer: Any, partition_gradients: bool = True) -> bool:
    _HAS_OVERFLOW(optimizer, partition_gradients)  # it reads the device
    return False


_DDP_INIT = DistributedDataParallel.__init__
_HAS_OVERFLOW = DeepSpeedZeroOptimizer.has_overflow
_INVALID_NORM = is_invalid_grad_norm

ROWS = (
    SwitchedOff(
        ("finetune_trainer.strategies.parallel.model_parallel:ModelParallel._assert_in_stages",),
        "compares the parameters of all stages together with those of the model",
        "left off",
        "the sum needs the other processes' numbers",
        _nothing,
    ),
    SwitchedOff(
        ("finetune_trainer.strategies.parallel.pipeline:Pipeline.evaluate",),
        "has the whole model answer through all stages, for probes and validation",
        "answers a number",
        "the last stage sends the shapes of its answer as a pickled object",
        lambda *_, **__: {"logits": torch.zeros(())},
    ),
    SwitchedOff(
        (
            "finetune_trainer.strategies.parallel.whole_answers:shared_from_first",
            "finetune_trainer.strategies.parallel.model_parallel:shared_from_first",
            "finetune_trainer.strategies.parallel.sequence:shared_from_first",
        ),
        "has rank 0 compute the answers of the whole model, and sends them to all",
        "computes them on each process",
        "they are sent as a pickled object",
        lambda compute: compute(),
    ),
    SwitchedOff(
        (
            "finetune_trainer.core.distributed:summed",
            "finetune_trainer.training.loop:summed",
            "finetune_trainer.training.engine:summed",
        ),
        "adds up numbers of all processes in host memory",
        "answers as if all had the same",
        "it needs the other processes' numbers",
        _as_if_all_had_the_same,
    ),
    SwitchedOff(
        ("torch.nn.parallel.distributed:_verify_param_shape_across_processes",),
        "compares the shapes of DDP's parameters across processes",
        "left off",
        "it reads the other processes' shapes in C++",
        _nothing,
    ),
    SwitchedOff(
        ("torch.nn.parallel.distributed:_sync_module_states",),
        "sends the weights of rank 0 to all processes before DDP's first step",
        "left off",
        "it sends them in C++ by their addresses, which fake tensors lack",
        _nothing,
    ),
    SwitchedOff(
        ("torch.nn.parallel:DistributedDataParallel._distributed_broadcast_coalesced",),
        "sends the buffers of rank 0 before each forward pass of DDP",
        "left off",
        "it sends them in C++ by their addresses, which fake tensors lack",
        _nothing,
    ),
    SwitchedOff(
        ("torch.nn.parallel:DistributedDataParallel.__init__",),
        "has DDP reduce its buckets in C++, and order them anew after the first step",
        "reduces them by a communication hook, with the same all-reduces, in the first order",
        "the fake group's futures hold no result, and the new order is sent in C++ by its address",
        _reduced_by_a_hook,
    ),
    SwitchedOff(
        (
            "deepspeed.runtime.zero.utils:assert_ints_same_as_other_ranks",
            "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks",
        ),
        "compares the order and the sizes of ZeRO-3's gathers across processes",
        "left off",
        "it reads the other processes' numbers",
        _nothing,
    ),
    SwitchedOff(
        (
            "deepspeed.runtime.utils:is_invalid_grad_norm",
            "deepspeed.runtime.zero.stage3:is_invalid_grad_norm",
            "deepspeed.runtime.zero.stage_1_and_2:is_invalid_grad_norm",
            "deepspeed.runtime.bf16_optimizer:is_invalid_grad_norm",
        ),
        "has DeepSpeed skip a step whose gradients' norm is no number",
        "reads it and never skips one",
        "every bool read from a device is true",
        _valid_all_the_same,
    ),
    SwitchedOff(
        ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow",),
        "has DeepSpeed skip a step with a gradient that is no number",
        "reads them and never skips one",
        "every number read from a device is 1",
        _no_overflow,
    ),
    SwitchedOff(
        ("torch.nn.init:_no_grad_trunc_normal_",),
        "draws the first weights of some families",
        "draws none",
        "it draws again as long as the device reports outliers, and that never ends",
        lambda tensor, *_, **__: tensor,
    ),
    SwitchedOff(
        ("finetune_trainer.models.adapters:weights_digest",),
        "identifies the frozen weights by their first elements",
        "answers a constant",
        "fake weights have no elements",
        lambda *_, **__: "0" * 64,
    ),
    SwitchedOff(
        ("transformers.utils.import_utils:is_fake_tensor",),
        "has transformers make masks as when a graph is traced",
        "answers no",
        "masks are made as on a GPU",
        lambda _: False,
    ),
)


def _packed(
    data: torch.Tensor, requires_grad: bool = False, quant_state: Any = None, **settings: Any
) -> torch.nn.Parameter:
    """Return a packed weight as an ordinary parameter with the fields that libraries read."""
    made: Any = torch.nn.Parameter(data, requires_grad)
    for name, value in {"quant_state": quant_state, **settings}.items():
        setattr(made, name, value)
    return cast(torch.nn.Parameter, made)


FOUR_BITS = SwitchedOff(
    ("bitsandbytes.nn:Params4bit", "bitsandbytes.nn.modules:Params4bit"),
    "is a packed weight that takes its scales along to another device",
    "is an ordinary parameter; the scales are moved before the training",
    "a tensor of a class of its own is not fake",
    _packed,
)
"""Applied to trainings with weights in 4 bits, as others do not import the library."""
ANSWERED = (
    (
        "comparisons of values: probes of spread models (`OtherAnswers`)",
        "both sides are computed; they come out equal",
        "nothing is computed",
    ),
    ("the loss is finite, and overflow of gradients", "every number read from a device is 1", "nothing is computed"),
)
"""Checks that run and cannot fail: name, behaviour in a dry run, reason."""


def table() -> str:
    """Return the rows as Markdown."""
    lines = ["| in a training | in a dry run | because |", "|---|---|---|"]
    rows = (*ROWS, FOUR_BITS)
    lines += [f"| `{row.targets[0].rpartition(':')[2]}` {row.work} | {row.instead} | {row.why} |" for row in rows]
    lines += [f"| {work} | {instead} | {why} |" for work, instead, why in ANSWERED]
    return "\n".join(lines) + "\n"


def follow_devices() -> None:
    """Have fake tensors follow `tensor.data = other`, by which modules and strategies move parameters; torch changes
    the memory but not the device of a fake tensor. `Module.to` would swap tensors with other references.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    plain: Any = torch.Tensor.data

    def put(tensor: Any, other: Any) -> None:
        plain.__set__(tensor, other)
        if isinstance(other, FakeTensor):
            tensor.fake_device = other.fake_device

    def moved(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(change)
        for parameter in filter(lambda each: each is not None, module._parameters.values()):
            with torch.no_grad():
                changed = change(parameter)  # type: ignore[arg-type]
            if changed is not parameter:
                parameter.data = changed  # type: ignore[union-attr]
        module._buffers.update(
            {name: value if value is None else change(value) for name, value in module._buffers.items()}
        )
        return module

    FakeTensor.data = property(plain.__get__, put)  # type: ignore[assignment]
    torch.nn.Module._apply = moved  # type: ignore[method-assign]
