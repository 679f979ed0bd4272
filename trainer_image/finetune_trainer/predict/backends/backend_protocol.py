"""The interface of a backend: one way to compute a model's forward pass."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from finetune_trainer.devices.processor_facts import instructions, processor_facts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

Batch: TypeAlias = "Mapping[str, torch.Tensor]"
"""Inputs of the model for some features, padded to the longest: `input_ids` and the rest, rows x tokens."""


@dataclass(frozen=True)
class TextSettings:
    """Settings of a job whose answers are generated texts."""

    max_new_tokens: int
    num_beams: int
    temperature: float
    batch_tokens: int
    """Most tokens of a batch."""
    server: str | None = None
    """URL of the server for backend `vllm`."""


class NotAvailable(Exception):  # noqa: N818  # a result that is reported, not a fault
    """A backend cannot be built from this model on this machine; the text is the reason in one line, for people."""


@dataclass(frozen=True)
class Machine:
    """Properties that decide which backends a machine has."""

    cpu: str = ""
    """Model of the processor."""
    avx2: bool = False
    avx512: bool = False
    vnni: bool = False
    """True if there are units for products of 8-bit numbers."""
    bf16: bool = False
    amx: bool = False
    cores: int = 1
    gpu: str = ""
    """Name of the GPU that computes; empty if none does."""

    @property
    def multiplies_bf16(self) -> bool:
        """True if there are units for bfloat16."""
        return self.bf16 or self.amx

    @classmethod
    def here(cls, read: Callable[[], str] = Path("/proc/cpuinfo").read_text) -> Machine:
        """Return this machine; without flags if the kernel does not list them.

        ATEN_CPU_CAPABILITY=avx2 disables the wider units, as it does in torch.
        """
        facts = processor_facts(read)
        flags = instructions(facts)
        wide = os.environ.get("ATEN_CPU_CAPABILITY", "").lower() not in ("default", "avx2")
        return cls(
            cpu=facts.get("model name", platform.machine()),
            avx2="avx2" in flags,
            avx512=wide and "avx512f" in flags,
            vnni="avx_vnni" in flags or (wide and "avx512_vnni" in flags),
            bf16=wide and bool(flags & {"avx512_bf16", "bf16"}),
            amx=wide and "amx_tile" in flags,
            cores=len(os.sched_getaffinity(0)),
        )


NO_BF16 = "the CPU has no bfloat16 units (AMX or AVX512-BF16)"


def extremes(batches: Sequence[Batch]) -> tuple[Batch, Batch]:
    """Return the batches with the fewest and the most tokens, padding included."""

    def tokens(batch: Batch) -> int:
        return int(batch["input_ids"].numel())

    return min(batches, key=tokens), max(batches, key=tokens)


class ForwardPass(Protocol):
    """Computes batches in place of the model."""

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Return an object with the fields of the model's output that the task reads (`logits`, `start_logits` and the
        like). Batches have any number of rows and any length.
        """


@runtime_checkable
class TextGenerator(Protocol):
    """Generates texts in place of the model, with the part of transformers' interface that generation needs."""

    refused: Mapping[int, tuple[str, str]]
    """Rows of the last call of `generate` without a text -> reason and message."""

    def generate(self, **inputs: Any) -> torch.Tensor:
        """See `generate` of transformers."""

    def calls(self, tokens: NDArray[np.int64], batch_tokens: int) -> Sequence[NDArray[np.int64]]:
        """Return the rows of each call of `generate`. `tokens`: those of each row's prompt and longest text;
        `batch_tokens`: most tokens of a batch.
        """


def with_texts(input_ids: torch.Tensor, texts: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """Return prompts, shape (rows, tokens), with the tokens of each row's text behind them, padded at the end."""
    import torch

    written = input_ids.new_full((len(texts), max([1, *map(len, texts)])), pad)
    for row, tokens in enumerate(texts):
        written[row, : len(tokens)] = torch.tensor(tokens, dtype=written.dtype)
    return torch.cat([input_ids, written], 1)


Substitute: TypeAlias = "ForwardPass | TextGenerator"
"""Computes in place of the model."""


class Backend(Protocol):
    """One way to compute the forward pass."""

    @property
    def name(self) -> str:
        """Name in `predict.optimization`."""

    @property
    def lossy(self) -> bool:
        """True if labels may differ from those of the planned precision."""

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason why this model cannot run so on this machine; None if it can be tried."""

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> Substitute:
        """Build what computes. `sample`: batches of the job's own rows, for calibration. Converted models are kept
        and reused in `folder`; they load without this project.

        NotAvailable if the build fails.
        """
