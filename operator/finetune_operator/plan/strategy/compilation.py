"""Choice of torch.compile for a training that leaves it open: decoders on GPUs that are planned to gain.

The estimate of the gain is that of published runs (torchtitan's Llama 3.1 8B, 16 % more tokens a second). On an H100
decoders of 4 and 12 blocks of 2,048 wide gained 17 and 29 % (docs/gpu.md). A training that compiles by the plan goes on
without where that fails, so that a job which the plan compiles ends as it would without.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.arguments import COMPILATION
from finetune_contract.choices import DECODER_TASKS
from finetune_contract.facts import BF16_FROM
from finetune_contract.plans import CHUNKED_LOSS_FAMILIES
from finetune_operator.plan.hardware.gpu_table import capability_numbers
from finetune_operator.plan.strategy.combination_checks import with_spec
from finetune_operator.plan.strategy.ladder import fit_at, fits
from finetune_operator.plan.time.cost import step_duration, step_time, table_gpu
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.quantities import human_seconds

LEAST_GAIN = 0.05
"""Share of a step below which the estimate is too coarse for a choice."""
COMPILE_SECONDS = 60.0
"""Time of an attempt's compilations of a block. Measured with torch 2.11 on a machine with an H100: 15 s for the steps
and 5 s for validation; a node's processor may be three times slower.
"""


def choose_compilation(draft: Draft) -> Draft:
    """Compile a decoder's training on GPUs by torch.compile, if the job leaves it open and may use it as planned, and
    if the steps would be shorter by more than it takes. Add the reason for the attention over packed rows, which
    depends on that.
    """
    if draft.problems:
        return draft  # the training was refused, and has no strategy
    return _explain_packs(_with_compilation(draft))


def _explain_packs(draft: Draft) -> Draft:
    if not draft.packing:
        return draft
    why = draft.why_packs_have_masks(decided(draft.strategy))
    how = f"with a mask of tokens x tokens, as {why}" if why else "of each row by itself, without a mask"
    return draft.because(f"packed rows: attention {how}")


def _with_compilation(draft: Draft) -> Draft:
    arguments, spec = draft.training.arguments, draft.spec
    if any(name in arguments for name in COMPILATION) or not _is_known_to_gain(draft):
        return draft
    training = draft.training.model_copy(update={"arguments": {**arguments, "torch_compile": True}})
    compiled = with_spec(draft, spec.model_copy(update={"training": training}))
    strategy, batch = decided(draft.strategy), decided(draft.batch)
    if compiled.problems:
        return draft
    fit = fit_at(compiled, strategy, batch.micro_batch_size)
    plain, quick = step_time(draft, strategy, batch), step_time(compiled, strategy, batch)
    if plain is None or quick is None or quick.total > (1 - LEAST_GAIN) * plain.total or not fits(compiled, fit.memory):
        return draft
    gain = decided(draft.steps).total * (plain.total - quick.total)
    if gain < COMPILE_SECONDS:
        return draft
    return replace(compiled, memory=fit.memory, compiles_by_plan=True).because(
        f"torch.compile is on: by the estimate a step takes {step_duration(quick.total)} instead of "
        f"{step_duration(plain.total)}, {human_seconds(gain)} less in all; where it fails, the training goes on "
        "without. training.arguments.torch_compile: false turns it off"
    )


def _is_known_to_gain(draft: Draft) -> bool:
    """Return whether the training is of a plain decoder on NVIDIA GPUs with units for bf16, and computes with them.

    Blocks with experts choose tokens for them, and ZeRO-3 gathers weights inside of blocks: compiled code would end
    there, and begin again.
    """
    strategy, model, gpu = decided(draft.strategy), draft.model, table_gpu(draft)
    own_code = draft.spec.model.trust_remote_code or not draft.model_known
    plain = draft.spec.task in DECODER_TASKS and model.model_type in CHUNKED_LOSS_FAMILIES and not model.experts
    if own_code or not plain or strategy.zero_stage == 3 or strategy.offload_activations != "none":
        return False
    if gpu is None or draft.precision not in ("bf16", "fp8") or not gpu.capability:
        return False
    return capability_numbers(gpu.capability) >= BF16_FROM
