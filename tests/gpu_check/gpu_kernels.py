"""Kernels that the trainer calls on a GPU, each on its own: it runs, its numbers are right, and how fast it is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional

from finetune_operator.plan.hardware.devices import find_gpu
from gpu_check.gpu_report import SkippedError

REPEATS = 5
Check = Callable[[torch.device, bool], Mapping[str, Any]]
"""Takes the device, and True for sizes that a CPU computes in a moment."""


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median duration of `work`, after one call that is not counted."""
    spent = []
    for _ in range(REPEATS + 1):
        started = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(perf_counter() - started)
    return statistics.median(spent[1:])


def matrix_product(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Multiply in bf16: the rate beside the peak that plans are made with."""
    size = 512 if small else 8192
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds_of(lambda: one @ other, device) / 1e12
    figures = {"TFLOP/s in bf16": rate}
    known = find_gpu(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if known is not None and known.half_tflops:
        figures |= {"peak in the table": known.half_tflops, "share": rate / known.half_tflops}
    return figures


def attention(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Run causal attention forward and backward by torch's fused kernels, and compare with plain arithmetic in fp32."""
    heads, length = (2, 64) if small else (16, 2048)
    query, key, value = (
        torch.randn(1, heads, length, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    found.sum().backward()
    mask = torch.ones(length, length, device=device, dtype=torch.bool).tril()
    scores = (query.float() @ key.float().transpose(-1, -2)) / 64**0.5
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value.float()
    difference = float((found.float() - expected).abs().max())
    if not difference < 0.05:
        raise AssertionError(f"answers differ from plain attention by {difference}")
    step = seconds_of(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True), device)
    return {"largest difference": difference, "ms forward": 1000 * step}


def packed_rows(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Compute the rows of a pack by themselves, forward and backward, and compare with a mask in fp32."""
    from finetune_trainer.training.passes import packed_attention

    heads, sizes = (4, (20, 1, 30, 13)) if small else (16, (700, 1, 1000, 347))
    tokens, positions = sum(sizes), torch.cat([torch.arange(size) for size in sizes])[None]
    given = [torch.randn(1, each, tokens, 64, device=device, dtype=torch.bfloat16) for each in (heads, 2, 2)]
    rows = packed_attention.packed_rows(positions, device)
    number = (positions == 0).cumsum(-1).to(device)
    mask = (number.mT == number).tril()

    def apart(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return packed_attention.attend_rows(rows, query, key, value).transpose(1, 2)

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (each.repeat_interleave(heads // 2, 1) for each in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    answers = []
    for attend, dtype in ((apart, torch.bfloat16), (masked, torch.float32)):
        inputs = [each.to(dtype).detach().requires_grad_() for each in given]
        found = attend(*inputs)
        answers.append([found.detach(), *torch.autograd.grad(found.sum(), inputs)])
    pairs = zip(*answers, strict=True)
    difference = max(float(((mine.float() - theirs).abs() / (1 + theirs.abs())).max()) for mine, theirs in pairs)
    if not difference < 0.05:
        raise AssertionError(f"rows by themselves answer otherwise than with a mask, by {difference}")
    reason = packed_attention.why_not_varlen(device, 64, 0.0)
    figures = {"calls": f"one for each row: {reason}" if reason else "one", "largest difference": difference}
    return {**figures, "ms forward": 1000 * seconds_of(lambda: apart(*given), device)}


def fp8_product(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Multiply in fp8 by the kernel of torchao's linear layers."""
    if device.type != "cuda":
        raise SkippedError("a CPU has no units for fp8")
    if torch.version.cuda and torch.cuda.get_device_capability() < (8, 9):
        raise SkippedError("fp8 needs compute capability 8.9")
    size = 512 if small else 8192
    one, other = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(one, other.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    difference = float((product().float() - one.float() @ other.float().t()).abs().max())
    return {"TFLOP/s in fp8": 2 * size**3 / seconds_of(product, device) / 1e12, "largest difference": difference}


def compiled_block(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Compile a feed-forward block, run it forward and backward, and compare with the block itself."""
    width = 64 if small else 2048
    block = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    block.to(device)
    inputs = torch.randn(64, width, device=device)
    started = perf_counter()
    compiled = torch.compile(block)
    found = compiled(inputs)
    found.sum().backward()
    seconds = perf_counter() - started
    difference = float((found - block(inputs)).abs().max())
    if not difference < 1e-2:
        raise AssertionError(f"the compiled block answers otherwise, by {difference}")
    return {"s to compile": seconds, "largest difference": difference}


def four_bit_product(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Multiply by a weight in 4 bits, and compare with the rounded weight."""
    if find_spec("bitsandbytes") is None:
        raise SkippedError("bitsandbytes is not installed (finetune-trainer[qlora])")
    from bitsandbytes.functional import dequantize_4bit

    from finetune_trainer.models.four_bits import FourBitLinear

    width = 128 if small else 4096
    layer = torch.nn.Linear(width, width, bias=False)
    held = FourBitLinear(layer, torch.bfloat16).to(device)
    inputs = torch.randn(16, width, device=device, dtype=torch.bfloat16)
    rounded = dequantize_4bit(held.weight.data, held.weight.quant_state).to(torch.bfloat16)
    difference = float((held(inputs).float() - (inputs @ rounded.t()).float()).abs().max())
    if not difference < 0.05:
        raise AssertionError(f"the product differs from that of the rounded weight by {difference}")
    return {"largest difference": difference, "ms": 1000 * seconds_of(lambda: held(inputs), device)}


def liger_kernels(device: torch.device, small: bool) -> Mapping[str, Any]:
    """Run Liger's RMS norm and its loss fused with the head, forward and backward, and compare with plain torch."""
    if find_spec("liger_kernel") is None:
        raise SkippedError("liger-kernel is not installed (finetune-trainer[liger])")
    if device.type != "cuda":
        raise SkippedError("Liger's kernels need a GPU")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm

    tokens, width, vocabulary = (64, 128, 512) if small else (4096, 2048, 32_000)
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    norm, plain = LigerRMSNorm(width).to(device), torch.nn.RMSNorm(width, eps=1e-6, device=device)
    fused = LigerFusedLinearCrossEntropyLoss()
    answers = [
        torch.autograd.grad(loss, (hidden, weight))
        for loss in (
            fused(weight, norm(hidden), labels),
            functional.cross_entropy(plain(hidden) @ weight.t(), labels),
        )
    ]
    # TF32 in Liger's products keeps 10 bits of a factor's mantissa.
    difference = max(float((mine - other).norm() / other.norm()) for mine, other in zip(*answers, strict=True))
    if not difference < 0.02:
        raise AssertionError(f"gradients differ from those of plain torch by {difference} of their norm")
    seconds = seconds_of(lambda: torch.autograd.grad(fused(weight, norm(hidden), labels), (hidden, weight)), device)
    return {"largest relative difference of gradients": difference, "ms forward and backward": 1000 * seconds}


KERNELS: Mapping[str, Check] = {
    "matrix product": matrix_product,
    "attention": attention,
    "packed rows": packed_rows,
    "fp8 product": fp8_product,
    "torch.compile": compiled_block,
    "4-bit product": four_bit_product,
    "Liger": liger_kernels,
}


def run(name: str, small: bool) -> Mapping[str, Any]:
    """Return the figures of the check `name` on this machine's GPU; on its CPU if it has none."""
    return KERNELS[name](torch.device("cuda" if torch.cuda.is_available() else "cpu"), small)
