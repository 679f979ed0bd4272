"""Host memory request of an inference process, of stages and servers alike."""

from __future__ import annotations

from finetune_contract.byte_text import MIB
from finetune_operator.plan.memory.process_memory import CPU_PROCESS_BYTES

MEMORY_STEP = 128 * MIB
"""Step to which requests are rounded up, so that they stay readable and small changes of a plan do not change them."""
INFERENCE_BATCH_BYTES = 512 * MIB
"""Activations of one inference batch on CPU: 2,048 tokens are 50 to 400 MiB for BERT base to XLM-R large."""


def inference_bytes(parameters: int) -> int:
    """Return the memory, in bytes, of one inference process of a model with `parameters` parameters."""
    # The weights in fp32 (bf16 takes half), twice, as they are there once more while they are read.
    return CPU_PROCESS_BYTES + 2 * 4 * parameters + INFERENCE_BATCH_BYTES


def memory_request(count: int) -> str:
    """Return `count` bytes as a Kubernetes quantity, rounded up to whole steps."""
    return f"{-(-count // MEMORY_STEP) * MEMORY_STEP // MIB}Mi"
