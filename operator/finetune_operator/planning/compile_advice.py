"""Advice on torch.compile: the time of a step with it, where a decoder is planned to gain.

It is not a default. The gain is that of published runs (torchtitan's Llama 3.1 8B, 16 % more tokens a second), and no
compiled training of this project has run on a GPU: a job that compiles unasked could fail, or compute wrong numbers,
where the same job without it is sound. So the plan names the gain, and the job's owner decides.
"""

from __future__ import annotations

from finetune_contract.arguments import COMPILATION
from finetune_contract.choices import DECODER_TASKS
from finetune_contract.facts import BF16_FROM
from finetune_operator.api.quantities import human_seconds
from finetune_operator.planning.combination_checks import with_spec
from finetune_operator.planning.cost import step_duration, step_time, table_gpu
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.gpu_table import capability_numbers
from finetune_operator.planning.ladder import fit_at, fits

LEAST_GAIN = 0.05
"""Share of a step below which the estimate is too coarse for advice."""
COMPILE_SECONDS = 180.0
"""Time of the two compilations of a block in an attempt. Assumed: no measurement on a GPU is known. A block alone
compiles several times as fast as a whole model (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
"""


def advise_compilation(draft: Draft) -> Draft:
    """Add a reason with the times of a step, if torch.compile would shorten a decoder's training on GPUs by more than
    it takes, and the job leaves it open and may use it as planned.
    """
    if draft.problems:
        return draft  # the training was refused, and has no strategy
    arguments, spec = draft.training.arguments, draft.spec
    if any(name in arguments for name in COMPILATION) or spec.task not in DECODER_TASKS or not _compiles_well(draft):
        return draft
    training = draft.training.model_copy(update={"arguments": {**arguments, "torch_compile": True}})
    compiled = with_spec(draft, spec.model_copy(update={"training": training}))
    strategy, batch = decided(draft.strategy), decided(draft.batch)
    if compiled.problems or not fits(compiled, fit_at(compiled, strategy, batch.micro_batch_size).memory):
        return draft
    plain, quick = step_time(draft, strategy, batch), step_time(compiled, strategy, batch)
    if plain is None or quick is None or quick.total > (1 - LEAST_GAIN) * plain.total:
        return draft
    gain = decided(draft.steps).total * (plain.total - quick.total)
    if gain < COMPILE_SECONDS:
        return draft
    return draft.because(
        f"torch.compile is off: training.arguments.torch_compile: true would take {step_duration(quick.total)} a step "
        f"instead of {step_duration(plain.total)}, {human_seconds(gain)} less in all, by the estimate; it is no "
        "default, as it has not been tried on a GPU"
    )


def _compiles_well(draft: Draft) -> bool:
    """Return whether the training is on NVIDIA GPUs with units for bf16, and computes with them."""
    gpu = table_gpu(draft)
    if gpu is None or draft.precision not in ("bf16", "fp8") or not gpu.capability:
        return False
    return capability_numbers(gpu.capability) >= BF16_FROM
