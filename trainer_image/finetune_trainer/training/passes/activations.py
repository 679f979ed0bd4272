"""Activations kept for the backward pass: all, some with the rest recomputed, or in host memory.

Selective checkpointing keeps results that are small and expensive to compute, those of matrix products with weights and
of fused attention, and recomputes the rest: norms, activation functions, dropout, unfused attention scores (Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5, chooses by the same ratio;
torch calls it selective activation checkpointing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from finetune_contract.choices import CheckpointingMode, StrategyName
from finetune_trainer.strategies.strategy_protocol import expect
from finetune_trainer.training.passes.activation_copies import ActivationLane, MovedActivation, StreamCopies

_LEAST_BYTES = 1 << 16
"""Least size to copy: a smaller copy costs more time than its memory is worth."""
_PRODUCTS = frozenset({nn.functional.linear, torch.addmm, torch.matmul, torch.bmm})
"""Functions of torch that multiply with the weights of a module, and that autocast computes in 16 bits."""
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


# -------------------------------------------------------------------------------------------------------- recomputation


def checkpointing_arguments(mode: CheckpointingMode) -> Mapping[str, object]:
    """Return the fields of TrainingArguments for activation checkpointing."""
    if mode == "none":
        return {"activation_checkpointing": False}
    # The reentrant form fails under FSDP and DDP when inputs need no gradient, as token ids do not.
    how: dict[str, object] = {"use_reentrant": False}
    if mode == "selective":
        how["context_fn"] = selective_contexts
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass and of its repetition, in the form that torch's checkpoint expects.

    Only operations whose results are kept are matched between both. Others may differ: ZeRO-3 gathers a weight in
    either pass, or has prefetched it.
    """
    from torch.utils.checkpoint import _CachedTorchDispatchMode, create_selective_checkpoint_contexts

    class Repetition(_CachedTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in kept:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    aten = torch.ops.aten
    fused = [getattr(aten, name).default for name in _FUSED_ATTENTION if hasattr(aten, name)]
    kept = [aten.mm.default, aten.addmm.default, aten.linear.default, *fused]
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):  # as of packed rows; defined when its module is imported
        kept.append(torch.ops.torch_attn._varlen_attn.default)
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):  # defined when that library is imported
        kept.append(torch.ops.bitsandbytes.gemm_4bit.default)
    forward, _ = create_selective_checkpoint_contexts(kept)  # type: ignore[no-untyped-call]
    return forward, Repetition(None, forward.storage)


def assert_checkpointing_in_effect(mode: CheckpointingMode, model: nn.Module, strategy: StrategyName) -> None:
    """Raise StageError STRATEGY_NOT_IN_EFFECT unless the blocks of `model` recompute as `mode` requires."""
    actual = "off" if not getattr(model, "is_activation_checkpointing", False) else "full"
    blocks = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    kinds = {getattr(block._gradient_checkpointing_func, "keywords", {}).get("context_fn") for block in blocks}
    if actual == "full" and kinds == {selective_contexts}:
        actual = "selective"
    problem = f"activation checkpointing is {actual} in the model, requested was {mode}"
    expect(actual == ("off" if mode == "none" else mode), strategy, "WrongActivationCheckpointing", problem)


# -------------------------------------------------------------------------------------------------------------- offload


class Activations(Protocol):
    """Storage of saved activations."""

    def watch(self, model: nn.Module) -> None:
        """Register the sharded model, before the first step."""

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward pass."""

    def assert_in_effect(self, strategy: StrategyName) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT when the first forward pass stored nothing in the required place."""


class OnDevice:
    """Leaves activations where autograd saves them."""

    def watch(self, model: nn.Module) -> None:
        """Do nothing."""

    def forward(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def assert_in_effect(self, strategy: StrategyName) -> None:
        """Do nothing: it always is."""


class InHostMemory:
    """Copies activations to page-locked host memory after their layer, and back before its backward pass, beside the
    computation (`finetune_trainer.training.passes.activation_copies`).

    Weights, which autograd saves as well, stay in place. They are recognised by their storage while their module
    computes: ZeRO-3 and FSDP give a weight another storage each time it is gathered. Under autocast, products save a
    16-bit copy of a weight, which is created here to be known. On a CPU nothing is copied, as the device is the host.
    """

    def __init__(self) -> None:
        self._weights: Counter[int] = Counter()
        """Storage -> number of modules that compute with it now."""
        self._running: list[list[int]] = []
        """Storages of the modules that compute now, the innermost last."""
        self._casts = _WeightCasts()
        self._lanes: dict[torch.device, ActivationLane] = {}
        self.moved_bytes = 0
        """Bytes moved in the forward passes so far."""
        self._seen = False

    def watch(self, model: nn.Module) -> None:
        """Add hooks to every module that has weights of its own, after those of the strategies."""
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._running.append([_storage(parameter) for parameter in module.parameters(recurse=False)])
        self._weights.update(self._running[-1])

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._weights -= Counter(self._running.pop())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Move the tensors that autograd saves inside the context."""
        for lane in self._lanes.values():
            lane.begin_forward()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self._casts:
            try:
                yield
            finally:
                self._casts.forget()
                for lane in self._lanes.values():
                    lane.end_forward()

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Return whether a saved tensor is neither a weight nor too small to move."""
        if tensor.numel() * tensor.element_size() < _LEAST_BYTES:
            return False
        storage = _storage(tensor)
        return not self._weights[storage] and storage not in self._casts.storages

    def _pack(self, tensor: torch.Tensor) -> MovedActivation | torch.Tensor:
        self._seen = True
        if tensor.device.type == "cpu" or not self.is_activation(tensor):
            return tensor
        self.moved_bytes += tensor.numel() * tensor.element_size()
        return self._lane(tensor.device).out(tensor)

    def _unpack(self, packed: MovedActivation | torch.Tensor) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else self._lane(packed.device).back(packed)

    def _lane(self, device: torch.device) -> ActivationLane:
        if device not in self._lanes:
            self._lanes[device] = ActivationLane(StreamCopies(device))
        return self._lanes[device]

    def assert_in_effect(self, strategy: StrategyName) -> None:
        """Check after the first forward pass, once autograd has called the hooks."""
        problem = "the model saved no activations through the hooks that offload them"
        expect(self._seen, strategy, "ActivationsNotOffloaded", problem)


class _WeightCasts(TorchFunctionMode):
    """Creates 16-bit copies of weights in a forward pass under autocast: one a weight, as autocast itself does."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self.storages: set[int] = set()
        """Storages of the copies."""

    def forget(self) -> None:
        """End the forward pass; tensors saved by autograd stay alive."""
        self._copies, self.storages = {}, set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            args = tuple(self._cast(arg) if isinstance(arg, nn.Parameter) else arg for arg in args)
        return func(*args, **(kwargs or {}))

    def _cast(self, weight: nn.Parameter) -> torch.Tensor:
        device = weight.device.type
        # A copy created without a gradient would cut the weight off from its gradient at the next use.
        if weight.dtype != torch.float32 or not (torch.is_grad_enabled() and torch.is_autocast_enabled(device)):
            return weight
        if id(weight) not in self._copies:
            copy = weight.to(torch.get_autocast_dtype(device))
            self._copies[id(weight)] = weight, copy
            self.storages.add(_storage(copy))
        return self._copies[id(weight)][1]


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that this process holds of it."""
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # FSDP gathers weights of layers in fp8 as torchao's tensors, which wrap the rounded one.
    local = getattr(local, "_data", local)
    identity: int = local.untyped_storage()._cdata
    return identity
