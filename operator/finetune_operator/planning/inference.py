"""How evaluation and prediction go over rows, and whether they can at all: they are one process with the whole model on
its device, however many the training is spread over.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.choices import LANGUAGE_TASKS, WRITING_TASKS, InferencePrecision, Stage
from finetune_contract.plans import ASKED_LOGITS
from finetune_operator.api.quantities import human_bytes
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.facts import is_well_known
from finetune_operator.planning.memory import inference_bytes

GPU_BATCH_TOKENS = 16_384
"""Padded tokens of one inference batch: enough to fill any GPU of the table, and below 1 GB of activations up to 2,048
wide.
"""
GPU_BATCH_TOKENS_WIDE = 4_096
"""The same for models wider than that."""
CPU_BATCH_TOKENS = 2_048
"""On CPU larger batches gain nothing and leave the caches; see `batch.CPU_TOKENS`."""


def inference_tokens(draft: Draft) -> int:
    """Padded tokens of one inference batch; never fewer than the longest row."""
    if draft.inference_device == "cpu":
        tokens = CPU_BATCH_TOKENS
    else:
        tokens = GPU_BATCH_TOKENS if draft.model.hidden_size <= 2048 else GPU_BATCH_TOKENS_WIDE
    if draft.spec.task in LANGUAGE_TASKS:
        tokens = min(tokens, ASKED_LOGITS // draft.model.vocabulary_size)
    return max(tokens, draft.length_limit)


def choose_inference(draft: Draft) -> Draft:
    """fp32 where that fits, else bf16 where the GPU has units for it and that fits. Where neither does, an evaluation
    that nobody has asked for is left out, and what was asked for is refused.

    The stages of a job that has begun stay as they are: what prepare has measured changes only what they compute in.
    """
    if draft.inference_device == "cpu" or not {Stage.EVALUATE, Stage.PREDICT} & set(draft.stages):
        return draft
    gpu = decided(draft.hardware.gpu)
    there, wide, narrow = gpu.memory_bytes, _takes(draft, "fp32"), _takes(draft, "bf16")
    if wide <= there:
        return draft
    known = draft.model_known and (draft.data is None or is_well_known(draft.spec.model.uri))
    if gpu.bf16 and (narrow <= there or not known):
        names = {Stage.EVALUATE: "evaluation", Stage.PREDICT: "prediction"}
        what = [name for stage, name in names.items() if stage in draft.stages]
        return replace(draft, inference_precision="bf16").because(
            f"{' and '.join(what)} compute{'s' * (len(what) == 1)} in bf16: in fp32 one process with the whole model "
            f"takes {human_bytes(wide)} of {human_bytes(there)} ({human_bytes(4 * draft.model.parameters)} for its "
            f"weights), in bf16 {human_bytes(narrow)}"
        )
    return _without(draft, wide, narrow) if known else draft


def _takes(draft: Draft, precision: InferencePrecision) -> int:
    """Bytes of the device."""
    task, sequences, generation = draft.spec.task, draft.lengths.sequences, draft.spec.generation
    # However few tokens a batch is to have, one row is in it.
    tokens, cached = max(inference_tokens(draft), sequences * draft.length_limit), 0
    if task in WRITING_TASKS:
        cached = max(tokens, (draft.length_limit + generation.max_new_tokens) * generation.num_beams)
    return inference_bytes(draft.model, task, precision, tokens=tokens, length=draft.length_limit, cached=cached)


def _without(draft: Draft, wide: int, narrow: int) -> Draft:
    """With what was asked for refused, and an evaluation that was not left out."""
    gpu = decided(draft.hardware.gpu)
    of, enough = human_bytes(gpu.memory_bytes), f"devices of more than {human_bytes(narrow)}"
    rule = f"one process with the whole model does it, which takes {human_bytes(wide)} of {of} in fp32"
    if gpu.bf16:
        rule += f" and {human_bytes(narrow)} in bf16"
    else:
        rule += f", and {gpu.product} does not compute in bf16"
        enough = f"devices of more than {human_bytes(wide)}, or of {human_bytes(narrow)} that compute in bf16"
    for path, asked in (("evaluation", draft.spec.evaluation), ("predict", draft.spec.predict)):
        if asked is not None:
            draft = draft.refusing((path,), None, rule, f"leave it out, or use {enough}", "NotSupported")
    if Stage.EVALUATE not in draft.stages or draft.spec.evaluation is not None:
        return draft
    left = tuple(stage for stage in draft.stages if stage is not Stage.EVALUATE)
    return replace(draft, stages=left).because(f"no evaluation at the end: {rule}; the training measures its loss")
