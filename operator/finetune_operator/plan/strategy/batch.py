"""Arithmetic of one optimizer step: global batch = micro-batch x accumulation x data-parallel ranks, exactly.

A rule refuses a global batch that the ranks do not divide: rounding it would change the training.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_contract.arguments import groups_by_length
from finetune_contract.choices import Precision
from finetune_contract.trainer_job import Batch, Strategy
from finetune_operator.plan.memory.model_parallel_plan import fills
from finetune_operator.plan.strategy.padding_estimate import StepRows, quickest, step_rows
from finetune_operator.plan.types.draft import Draft, Lengths, decided

CPU_TOKENS = 2048
"""Tokens of a micro-batch above which a CPU gains no throughput: with a 22M-parameter BERT on 2 cores, rows/s at 32
tokens rose from 18 (1 row) over 56 (8) to 68 (32) and 72 (64), and at 128 tokens from 12 (1 row) to 15.6 (16), then
fell to 13.5 (64).
"""
CPU_LEAST_ROWS = 4
"""Rows below which throughput falls at any length that fits (by 15 % at 32 tokens, 6 % at 128)."""
CPU_PASS_TOKENS: Mapping[Precision, int] = {"fp32": 32, "bf16": 80}
"""Fixed cost of a pass, in tokens that a thread computes meanwhile. Forward and backward of a 22M-parameter BERT took
25 ms and 0.72 to 0.80 ms a token of one core in fp32 (32 to 37 tokens), 21 ms and 0.23 to 0.32 ms in bf16 (64 to 98);
of BERT base 114 to 140 ms and 4.9 to 5.1 ms (22 to 28), 93 to 101 ms and 1.3 to 1.5 ms (61 to 78). It is multiplied by
the threads: the fixed cost is many small operations and reading all weights from memory, which more cores hardly
shorten.
"""
GPU_PASS_TOKENS = 16_384
"""Fixed cost of a GPU's pass, computed and not measured, and rather too high, so that a step is only cut if that surely
helps. Some 2,000 kernels of 5 to 10 us are launched for the passes of a 12-layer encoder, 10 to 20 ms; an H100 at 35 %
of its bf16 peak computes 7,000 to 14,000 tokens of 85M parameters meanwhile.
"""
GPU_PASS_TOKENS_WIDE = 4_096
"""Fixed cost for models of more than 2,048 hidden units, 1B parameters and more. Launches cost some 1,000 tokens. So do
weights: a pass moves about 20 bytes a parameter (read forward and backward, gradient written and summed) and computes
6 operations a parameter and token, which takes as long at 20 / 6 x 295 = 1,000 tokens on an H100 with its 295
operations a byte.
"""
GPU_WIDE = 2048
"""Hidden units above which a model is wide."""


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, largest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}, reverse=True))


def cpu_row_limit(lengths: Lengths) -> int:
    """Return the rows of a micro-batch above which a CPU computes no faster."""
    return max(CPU_LEAST_ROWS, int(CPU_TOKENS / lengths.row))


def micro_batches(draft: Draft) -> tuple[int, ...]:
    """Return the micro-batches to try, the best first.

    A micro-batch that the user fixed is the only one until it has run out of memory: only the global batch is
    guaranteed.
    """
    asked, world, most = draft.training.micro_batch_size, decided(draft.world), draft.adaptation.micro_batch_limit
    if asked != "auto" and (most is None or asked <= most):
        return (asked,)
    sizes = fills(draft.spec.parallelism.pipeline, divisors(_share(draft)), _share(draft))
    if asked == "auto" and world.device == "cpu":
        limit = cpu_row_limit(draft.lengths)
        # A pipeline may not allow passes of so few rows.
        sizes = tuple(size for size in sizes if size <= limit) or sizes[-1:]
    return sizes if most is None else tuple(size for size in sizes if size <= most) or sizes[-1:]


def less_padded(draft: Draft, strategy: Strategy, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Filter `sizes` (largest first) to those up to the one with the fastest step, since smaller ones have less
    padding; return all of them if a step is not to be cut for that.
    """
    step = _uneven_step(draft, strategy)
    if step is None:
        return sizes
    limit = quickest(step, sizes, _pass_tokens(draft))
    return tuple(size for size in sizes if size <= limit)


def _uneven_step(draft: Draft, strategy: Strategy) -> StepRows | None:
    """Return a step of rows of any length if it may be cut to have less padding.

    None if there is nothing to gain or to choose (packs and steps of like rows have hardly any padding, and a requested
    micro-batch stays), if lengths are unknown, and if passes cost more than their arithmetic: sharded strategies gather
    weights or reduce gradients in each pass, and processes that share a replica wait for each other in each. DDP sends
    nothing before the last pass.
    """
    split = draft.train_split
    if draft.training.micro_batch_size != "auto" or draft.packing or draft.replica_ranks > 1:
        return None
    if strategy.name not in ("single", "ddp") or groups_by_length(draft.spec.task, draft.training.arguments):
        return None
    if split is None or not split.longest or not split.length_histogram:
        return None
    return step_rows(split, draft.training.global_batch_size)


def _pass_tokens(draft: Draft) -> int:
    """Return the fixed cost of a pass, in tokens that are computed in the same time."""
    world = decided(draft.world)
    if world.device == "cpu":
        return CPU_PASS_TOKENS[decided(draft.precision)] * world.threads_per_process
    return GPU_PASS_TOKENS_WIDE if draft.model.hidden_size > GPU_WIDE else GPU_PASS_TOKENS


def _share(draft: Draft) -> int:
    """Return the rows of one rank in one optimizer step."""
    return draft.training.global_batch_size // draft.data_ranks


def _ran_out(draft: Draft, limit: int) -> str:
    """Name the micro-batch that ran out of memory, of which `limit` is half: the only divisor with that half, if there
    is only one.
    """
    asked, sizes = draft.training.micro_batch_size, divisors(_share(draft))
    halved = [size for size in sizes if size // 2 == limit]
    if asked != "auto" and asked in halved:
        return f"{asked}"
    return f"{halved[0]}" if len(halved) == 1 else f"more than {limit}"


def batch_of(draft: Draft, micro: int) -> Batch:
    """Return the step's arithmetic with `micro` rows at once."""
    ranks, total = draft.data_ranks, draft.training.global_batch_size
    return Batch(
        global_batch_size=total,
        micro_batch_size=micro,
        gradient_accumulation=total // (ranks * micro),
        data_parallel=ranks,
    )


def batch_arithmetic(batch: Batch) -> str:
    """Format the arithmetic, e.g. `64 = 8 micro x 4 accumulation x 2 ranks`."""
    ranks = f"{batch.data_parallel} rank{'' if batch.data_parallel == 1 else 's'}"
    per_rank = f"{batch.micro_batch_size} micro x {batch.gradient_accumulation} accumulation"
    return f"{batch.global_batch_size} = {per_rank} x {ranks}"


def explain_batch(draft: Draft, batch: Batch, most: bool = True) -> str:
    """Return the reason for this micro-batch; `most`: no larger one fits."""
    micro, arithmetic = batch.micro_batch_size, batch_arithmetic(batch)
    share = batch.global_batch_size // batch.data_parallel
    if micro == draft.training.micro_batch_size:
        return f"micro-batch {micro}: as asked; {arithmetic}"
    limit = draft.adaptation.micro_batch_limit
    if limit is not None and limit < share and micro == max(size for size in divisors(share) if size <= limit):
        return f"micro-batch {micro}: {_ran_out(draft, limit)} ran out of memory; {arithmetic}"
    sizes, step = micro_batches(draft), _uneven_step(draft, decided(draft.strategy))
    if step is not None and micro < sizes[0] and micro == quickest(step, sizes, _pass_tokens(draft)):
        return (
            f"micro-batch {micro}: of {step.padding(sizes[0]):.0%} padding that {sizes[0]} rows at once would have, "
            f"{step.padding(micro):.0%} remains, which saves more time than the further passes take; {arithmetic}"
        )
    if draft.spec.parallelism.pipeline.degree > 1:
        return f"micro-batch {micro}: the largest that fits and leaves enough to fill the pipeline; {arithmetic}"
    if micro == share:
        return f"micro-batch {micro}: each rank's whole share fits at once; {arithmetic}"
    on_cpu = decided(draft.world).device == "cpu"
    if on_cpu and micro == sizes[0]:
        return (
            f"micro-batch {micro}: the largest divisor of {share} up to {cpu_row_limit(draft.lengths)} rows, "
            f"above which "
            f"a CPU computes no faster at {draft.lengths.row:.0f} tokens a row; {arithmetic}"
        )
    if not most:
        return f"micro-batch {micro}: a step takes no less time with more rows at once; {arithmetic}"
    return f"micro-batch {micro}: the largest divisor of {share} whose activations fit the memory; {arithmetic}"
