"""Precision of a training by its devices: as asked, or the fastest that they compute in."""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.arguments import allows_tf32, compiles
from finetune_contract.choices import Precision
from finetune_operator.plan.hardware.devices import find_gpu, has_fp8, scales_fp16
from finetune_operator.plan.strategy.combination_checks import check_rules
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.types import FineTuneJobSpec


def _splits_layers(spec: FineTuneJobSpec) -> bool:
    """Return whether the job requests tensor or pipeline parallelism, which have no loss scaling for fp16."""
    return spec.parallelism.tensor > 1 or spec.parallelism.pipeline.degree > 1


def choose_precision(draft: Draft) -> Draft:
    """Choose the precision; `auto` takes bf16 if the hardware has units for it, for any model size, else fp16 or fp32.

    Measured on 2 cores with AVX512-BF16, rows of 32 and 128 tokens: bf16 trains a 22M-parameter BERT 1.5 to 1.8 times
    as fast as fp32 and BERT base 1.7 to 1.9 times; on cores without such units it is 2 to 4 times slower.
    """
    asked, hardware, world = draft.training.precision, draft.hardware, draft.world
    if world is None:
        return draft  # The world was refused, and without it the devices are not known.
    on_gpu = world.device == "cuda"
    has_bf16 = decided(hardware.gpu).bf16 if on_gpu else hardware.cpu_bf16
    device = decided(hardware.gpu).product if on_gpu else "the CPU"
    fp8 = has_fp8(decided(hardware.gpu), draft.settings.hardware) if on_gpu else False
    path = ("training", "precision")
    match asked:
        case "auto":
            precision, why = _automatic_precision(draft, device, has_bf16)
            return _with_tf32(replace(draft, precision=precision).because(f"precision {precision}: {why}"))
        case "fp8" if on_gpu and fp8 is False:
            return draft.refusing(
                path,
                asked,
                f"{device} has no units for it, as GPUs have from compute capability 8.9 on",
                "set it to auto, fp32 or bf16",
                "NotSupported",
            )
        case "fp8" if on_gpu:
            compiled = compiles(draft.training.arguments)
            slower = "" if compiled else "; without training.arguments.torch_compile that is slower than bf16"
            has = "has units for it" if fp8 else "is taken to have units for it, which the training checks"
            return replace(draft, precision="fp8").because(
                f"precision fp8: as asked; {device} {has}, and linear layers of the blocks multiply in it, "
                f"with all else in bf16{slower}"
            )
        case "bf16" if on_gpu and not has_bf16:
            return draft.refusing(
                path,
                asked,
                f"{device} does not compute in bf16",
                "set it to fp32" if _splits_layers(draft.spec) else "set it to fp32 or fp16",
                "NotSupported",
            )
        case _:
            slower = (
                "; the CPU has no units for it, so it is slower than fp32" if asked == "bf16" and not has_bf16 else ""
            )
            return _with_tf32(replace(draft, precision=asked).because(f"precision {asked}: as asked{slower}"))


def _with_tf32(draft: Draft) -> Draft:
    """Add the reason for TF32 to a draft with a precision, if it is fp32 and its GPU is known to have TF32."""
    if draft.precision != "fp32" or decided(draft.world).device == "cpu":
        return draft
    gpu = find_gpu(decided(draft.hardware.gpu).product, draft.settings.hardware)
    if gpu is None or not gpu.tf32_flops:
        return draft
    if not allows_tf32("fp32", draft.training.arguments):
        return draft.because(f"matrix products in plain fp32: training.arguments.tf32 is false; {gpu.name} has TF32")
    return draft.because(
        f"matrix products in TF32, which {gpu.name} has: factors keep 10 bits of their mantissa, all else is in fp32; "
        "training.arguments.tf32: false turns it off"
    )


BEYOND_FP16 = ("t5", "mt5", "umt5", "longt5", "gemma", "gemma2", "gemma3", "gemma3_text")
"""Model types that were trained in bf16 and whose activations exceed the range of fp16, so that loss scaling does not
help.
"""


def _automatic_precision(draft: Draft, device: str, has_bf16: bool) -> tuple[Precision, str]:
    """Return the precision for `auto`, and the reason."""
    if has_bf16:
        return "bf16", f"{device} has units for bf16"
    if decided(draft.world).device == "cpu":
        return "fp32", f"{device} has no units for bf16, and emulated it is 2 to 4 times slower"
    if not scales_fp16(decided(draft.hardware.gpu), draft.settings.hardware):
        return "fp32", f"{device} has no units for bf16, and no known ones for fp16"
    if draft.model.model_type in BEYOND_FP16:
        return "fp32", f"{device} has no units for bf16, and {draft.model.model_type} exceeds what fp16 holds"
    tried = check_rules(replace(draft, precision="fp16", problems=())).problems
    if any(problem.path == "spec.training.precision" for problem in tried):
        return "fp32", f"{device} has no units for bf16, and fp16 does not go together with what is asked for"
    if not draft.scaled:
        return "fp32", f"{device} has no units for bf16, and no form in fp16 fits or is as quick"
    return "fp16", f"{device} has units for fp16 and none for bf16; the loss is scaled, so that small gradients stay"
