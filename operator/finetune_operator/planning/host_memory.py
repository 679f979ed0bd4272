"""Memory of the host that a process of inference requests: for stages and servers alike."""

from __future__ import annotations

from finetune_operator.planning.memory import CPU_PROCESS_BYTES

MIB = 1 << 20
MEMORY_STEP = 128 * MIB
"""Requests are rounded up to whole steps, so that they stay readable and a small change of a plan does not show."""
INFERENCE_BATCH_BYTES = 512 * MIB
"""Activations of one inference batch on CPU: 2,048 tokens are 50 to 400 MiB for BERT base to XLM-R large."""


def inference_bytes(parameters: int) -> int:
    """Return the memory, in bytes, of one process that answers with a model of so many parameters."""
    # The weights in fp32, of which bf16 takes half, and once more while they are read.
    return CPU_PROCESS_BYTES + 2 * 4 * parameters + INFERENCE_BATCH_BYTES


def memory_request(count: int) -> str:
    """Return these bytes as a Kubernetes quantity, rounded up to whole steps."""
    return f"{-(-count // MEMORY_STEP) * MEMORY_STEP // MIB}Mi"
