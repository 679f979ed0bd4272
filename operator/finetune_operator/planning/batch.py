"""The arithmetic of one optimizer step: global batch = micro-batch x accumulation x data-parallel ranks, exactly.

A global batch that the ranks do not divide is refused with the nearest ones that work: rounding it would change what is
learned.
"""

from __future__ import annotations

from finetune_contract.job import Batch
from finetune_operator.planning.draft import Draft, Lengths, decided
from finetune_operator.planning.model_parallel import fills

CPU_TOKENS = 2048
"""Tokens of a micro-batch above which a CPU gains nothing more: with a 22M-parameter BERT on 2 cores, rows/s at 32
tokens rose from 18 (1 row) over 56 (8) to 68 (32) and 72 (64), and at 128 tokens from 12 (1 row) to 15.6 (16), then
fell to 13.5 (64).
"""
CPU_LEAST_ROWS = 4
"""Fewer rows cost throughput at any length that fits (15 % at 32 tokens, 6 % at 128)."""


def check_batch(draft: Draft) -> Draft:
    """Refuse a global batch that the ranks, or the micro-batch that the user fixed, do not divide."""
    training, ranks = draft.training, draft.data_ranks
    total, micro = training.global_batch_size, training.micro_batch_size
    fixed = 1 if micro == "auto" else micro
    unit = ranks * fixed
    if total % unit == 0:
        return draft
    lower, upper = total // unit * unit, (total // unit + 1) * unit
    nearest = f"{lower} or {upper}" if lower else f"{upper}"
    product = (
        f"{ranks} ranks" if micro == "auto" else f"{fixed} rows of a micro-batch x {ranks} rank{'s' * (ranks > 1)}"
    )
    way_out = f"set globalBatchSize to {nearest}"
    if micro != "auto" and total % ranks == 0:
        share = total // ranks
        fitting = max(size for size in divisors(share) if size <= fixed)
        way_out += f", or microBatchSize to {fitting}"
    return draft.refusing(
        ("training", "globalBatchSize"), total, f"it has to be a multiple of {unit} = {product}", way_out
    )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, largest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}, reverse=True))


def cpu_row_limit(lengths: Lengths) -> int:
    """Rows of a micro-batch above which a CPU computes no faster."""
    return max(CPU_LEAST_ROWS, int(CPU_TOKENS / lengths.row))


def micro_batches(draft: Draft) -> tuple[int, ...]:
    """Micro-batches to try, the best first.

    The one that the user fixed is the only one until it has run out of memory: the global batch is what is promised,
    and the micro-batch is how it is reached.
    """
    asked, world, most = draft.training.micro_batch_size, decided(draft.world), draft.adaptation.micro_batch_limit
    if asked != "auto" and (most is None or asked <= most):
        return (asked,)
    sizes = fills(draft.spec.parallelism.pipeline, divisors(_share(draft)), _share(draft))
    if asked == "auto" and world.device == "cpu":
        limit = cpu_row_limit(draft.lengths)
        # A pipeline may take no passes of so few rows.
        sizes = tuple(size for size in sizes if size <= limit) or sizes[-1:]
    return sizes if most is None else tuple(size for size in sizes if size <= most) or sizes[-1:]


def _share(draft: Draft) -> int:
    """Rows of one rank in one optimizer step."""
    return draft.training.global_batch_size // draft.data_ranks


def _ran_out(draft: Draft, limit: int) -> str:
    """Which micro-batch ran out of memory, when `limit` is half of it: the only divisor with that half, if there is but
    one.
    """
    asked, sizes = draft.training.micro_batch_size, divisors(_share(draft))
    halved = [size for size in sizes if size // 2 == limit]
    if asked != "auto" and asked in halved:
        return f"{asked}"
    return f"{halved[0]}" if len(halved) == 1 else f"more than {limit}"


def batch_of(draft: Draft, micro: int) -> Batch:
    """The step's arithmetic with `micro` rows at once."""
    ranks, total = draft.data_ranks, draft.training.global_batch_size
    return Batch(
        global_batch_size=total,
        micro_batch_size=micro,
        gradient_accumulation=total // (ranks * micro),
        data_parallel=ranks,
    )


def batch_arithmetic(batch: Batch) -> str:
    """`64 = 8 micro x 4 accumulation x 2 ranks`."""
    ranks = f"{batch.data_parallel} rank{'' if batch.data_parallel == 1 else 's'}"
    per_rank = f"{batch.micro_batch_size} micro x {batch.gradient_accumulation} accumulation"
    return f"{batch.global_batch_size} = {per_rank} x {ranks}"


def explain_batch(draft: Draft, batch: Batch) -> str:
    """Why this micro-batch."""
    micro, arithmetic = batch.micro_batch_size, batch_arithmetic(batch)
    share = batch.global_batch_size // batch.data_parallel
    if micro == draft.training.micro_batch_size:
        return f"micro-batch {micro}: as asked; {arithmetic}"
    limit = draft.adaptation.micro_batch_limit
    if limit is not None and limit < share and micro == max(size for size in divisors(share) if size <= limit):
        return f"micro-batch {micro}: {_ran_out(draft, limit)} ran out of memory; {arithmetic}"
    if draft.spec.parallelism.pipeline.degree > 1:
        return f"micro-batch {micro}: the largest that fits and leaves enough to fill the pipeline; {arithmetic}"
    if micro == share:
        return f"micro-batch {micro}: each rank's whole share fits at once; {arithmetic}"
    on_cpu = decided(draft.world).device == "cpu"
    if on_cpu and micro == micro_batches(draft)[0]:
        return (
            f"micro-batch {micro}: the largest divisor of {share} up to {cpu_row_limit(draft.lengths)} rows, "
            f"above which "
            f"a CPU computes no faster at {draft.lengths.row:.0f} tokens a row; {arithmetic}"
        )
    return f"micro-batch {micro}: the largest divisor of {share} whose activations fit the memory; {arithmetic}"
