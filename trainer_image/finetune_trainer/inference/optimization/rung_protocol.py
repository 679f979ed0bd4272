"""The interface of a rung: one way to compute a model's forward pass."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Batch: TypeAlias = "Mapping[str, torch.Tensor]"
"""What the model takes of some features, padded to the longest: `input_ids` and the rest, rows x tokens."""


class NotAvailable(Exception):  # noqa: N818  # a result that is reported, not a fault
    """A rung cannot be made of this model on this machine; the text is the reason, for people, in one line."""


@dataclass(frozen=True)
class Machine:
    """What decides which rungs a machine has."""

    cpu: str = ""
    """Model of the processor."""
    avx2: bool = False
    avx512: bool = False
    vnni: bool = False
    """Units for products of 8-bit numbers."""
    bf16: bool = False
    amx: bool = False
    cores: int = 1

    @property
    def multiplies_bf16(self) -> bool:
        """Whether it has units for bfloat16."""
        return self.bf16 or self.amx

    @classmethod
    def here(cls, read: Callable[[], str] = Path("/proc/cpuinfo").read_text) -> Machine:
        """Return this machine's; without flags where the kernel does not list them.

        ATEN_CPU_CAPABILITY=avx2 takes the wider units away, as it does from torch.
        """
        try:
            lines = read().splitlines()
        except OSError:
            lines = []
        facts = dict(_pair(line) for line in reversed(lines) if ":" in line)
        flags = set(facts.get("flags", facts.get("Features", "")).split())
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


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


class ForwardPass(Protocol):
    """Answers batches in place of the model."""

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Return an object with what the task reads of the model's own output: `logits`, `start_logits` and the like.
        Batches have any number of rows and any length.
        """


class Rung(Protocol):
    """One way to compute the forward pass."""

    @property
    def name(self) -> str:
        """As `predict.optimization` has it."""

    @property
    def lossy(self) -> bool:
        """Whether labels may differ from those of the planned precision."""

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason why this model cannot run so on this machine, None when it can be tried."""

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Make what runs. `sample`: batches of the job's own rows, to calibrate with. What is converted lies in
        `folder` and is used again from there; it loads without this project.

        NotAvailable when it turns out that it cannot be made.
        """
