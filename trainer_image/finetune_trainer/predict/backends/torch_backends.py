"""Backends of torch itself: the plain model, 16-bit products, and compiled kernels."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune_trainer.devices.compile_cache import separate_compile_cache
from finetune_trainer.predict.backends.backend_protocol import (
    NO_BF16,
    Batch,
    ForwardPass,
    Machine,
    NotAvailable,
    extremes,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

_COMPILERS = {"cpu": ("CXX", ("c++", "g++", "clang++")), "cuda": ("CC", ("gcc", "clang"))}
"""Device -> variable that names the compiler of its kernels or, with Triton, of their launchers; and those that are
tried without it (triton/runtime/build.py).
"""


def copied_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model for inference, with its floating-point tensors in `dtype`.

    Each tensor is converted by itself: a whole copy in the model's own type before that may not fit beside the model.
    """
    from torch import nn

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach().clone()

    copies: dict[int, object] = {id(buffer): converted(buffer) for buffer in model.buffers()}
    copies |= {id(weight): nn.Parameter(converted(weight), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, copies)


@dataclass(frozen=True)
class PlainBackend:
    """Model as loaded: SDPA, in the planned precision. The other backends are compared with it."""

    name: str = "none"
    lossy: bool = False

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return None: it always runs."""
        return None

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Return the model."""
        return cast(ForwardPass, model)


@dataclass(frozen=True)
class HalfBackend:
    """Weights and products in bfloat16."""

    name: str = "bf16"
    lossy: bool = True

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason on a device that would emulate bfloat16, and for a model in bfloat16 already."""
        import torch

        from finetune_trainer.devices.device_units import has_bf16

        if model.dtype == torch.bfloat16:
            return "the plan computes in bf16 already"
        if getattr(model, "hf_quantizer", None) is not None:
            return "the model's weights are quantized already"
        if model.device.type == "cpu" and not machine.multiplies_bf16:
            return NO_BF16
        if model.device.type == "cuda" and not has_bf16(torch.cuda.get_device_properties(model.device)):
            return "the GPU has no bfloat16 units (compute capability 8.0 and above, or AMD's MI100 and later)"
        return None

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Return a copy of the model."""
        import torch

        return cast(ForwardPass, copied_in(cast("nn.Module", model), torch.bfloat16))


@dataclass(frozen=True)
class CompiledBackend:
    """Kernels that torch.compile builds for this model, for any batch size. On a GPU Triton builds them, which compiles
    their launchers in C.
    """

    name: str = "compile"
    lossy: bool = False

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason if kernels cannot be built."""
        variable, usual = _COMPILERS[model.device.type]
        named = os.environ.get(variable)
        if not any(map(shutil.which, (named,) if named else usual)):
            language = "C++" if variable == "CXX" else "C"
            return f"there is no {language} compiler ({', '.join(usual)}) to build kernels with"
        return None

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Compile with two batches of different sizes; NotAvailable with the compiler's message."""
        import torch

        separate_compile_cache()
        compiled: Any = torch.compile(model, dynamic=True)
        try:
            with torch.inference_mode():
                for batch in extremes(sample):
                    compiled(**batch)
        except Exception as error:  # torch.compile raises the errors of all its parts
            lines = str(error).strip().splitlines()
            raise NotAvailable(f"torch.compile: {lines[0] if lines else type(error).__name__}") from error
        return cast(ForwardPass, compiled)


PLAIN, BF16, COMPILE = PlainBackend(), HalfBackend(), CompiledBackend()
