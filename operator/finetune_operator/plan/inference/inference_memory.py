"""Batch of inference, and the device memory that one process takes with the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import LANGUAGE_TASKS, WRITING_TASKS, InferencePrecision
from finetune_contract.inference_settings import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS
from finetune_contract.plans import REQUESTED_LOGITS
from finetune_operator.plan.memory.process_memory import inference_bytes
from finetune_operator.plan.types.draft import Draft, decided

GPU_BATCH_TOKENS_WIDE = 4_096
"""Padded tokens of one inference batch for wider models."""


def inference_tokens(draft: Draft) -> int:
    """Return the padded tokens of one inference batch; at least those of the longest row."""
    if draft.inference_device == "cpu":
        tokens = CPU_BATCH_TOKENS
    else:
        tokens = GPU_BATCH_TOKENS if draft.model.hidden_size <= 2048 else GPU_BATCH_TOKENS_WIDE
    if draft.spec.task in LANGUAGE_TASKS:
        tokens = min(tokens, REQUESTED_LOGITS // draft.model.vocabulary_size)
    return max(tokens, draft.length_limit)


@dataclass(frozen=True)
class InferenceNeed:
    """Memory of the device that one process takes with the whole model, in bytes."""

    wide: int
    """Bytes in fp32."""
    narrow: int | None
    """Bytes in bf16; None if the device does not compute in it."""
    there: int
    devices: int = 1
    """Devices that hold the model; the bytes are those of each."""

    @property
    def least(self) -> int:
        """Return the bytes in the precision that takes fewer."""
        return self.wide if self.narrow is None else min(self.wide, self.narrow)

    def fits(self, *, wide: bool = False) -> bool:
        """Return whether it fits; `wide`: in fp32."""
        return (self.wide if wide else self.least) <= self.there

    def rule(self, draft: Draft) -> str:
        """Describe the needed and the available memory."""
        of = human_bytes(self.there)
        who = "one process with the whole model does it, which"
        if self.devices > 1:
            who, of = f"one process on all {self.devices} GPUs of a pod", f"{of} of each"
        rule = f"{who} takes {human_bytes(self.wide)} of {of} in fp32"
        if self.narrow is not None:
            return f"{rule} and {human_bytes(self.narrow)} in bf16"
        if draft.inference_device == "cpu":
            return f"{rule} of the node's memory"
        return f"{rule}, and {decided(draft.hardware.gpu).product} does not compute in bf16"

    def enough(self, draft: Draft) -> str:
        """Describe devices on which it would fit."""
        if draft.inference_device == "cpu":
            return f"nodes with more than {human_bytes(self.wide)} of memory"
        if self.narrow is not None:
            return f"devices of more than {human_bytes(self.narrow)}"
        narrow = human_bytes(process_bytes(draft, "bf16", self.devices))
        return f"devices of more than {human_bytes(self.wide)}, or of {narrow} that compute in bf16"


def inference_need(draft: Draft, devices: int = 1) -> InferenceNeed:
    if draft.inference_device == "cpu":
        return InferenceNeed(process_bytes(draft, "fp32"), None, draft.hardware.memory_bytes)
    gpu = decided(draft.hardware.gpu)
    narrow = process_bytes(draft, "bf16", devices) if gpu.bf16 else None
    return InferenceNeed(process_bytes(draft, "fp32", devices), narrow, gpu.memory_bytes, devices)


def process_bytes(draft: Draft, precision: InferencePrecision, devices: int = 1, *, tensor: bool = False) -> int:
    """Return the bytes that one process takes of each of its devices."""
    task, sequences, generation = draft.spec.task, draft.lengths.sequences, draft.spec.generation
    # A batch has at least one row.
    tokens, cached = max(inference_tokens(draft), sequences * draft.length_limit), 0
    if task in WRITING_TASKS:
        cached = max(tokens, (draft.length_limit + generation.max_new_tokens) * generation.num_beams)
    length = draft.length_limit
    return inference_bytes(
        draft.model, task, precision, tokens=tokens, length=length, cached=cached, devices=devices, tensor=tensor
    )
