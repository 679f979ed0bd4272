"""Share of padding in an optimizer step, and the micro-batch with which a step takes the least time.

Expectations from the histogram of lengths alone, without sampling, so that a plan is a function of its facts. They
describe steps of any rows; a step of rows of similar length has hardly any padding at any micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, erfc, exp, lgamma, log, log1p, sqrt

from finetune_contract.facts import SplitFacts

_PARTS = 4
"""Parts of a bucket of lengths, each with one share of longer rows: 2 tokens each for short rows."""
_DEVIATIONS = 6.0
"""Deviations from the mean beyond which a count of rows has a probability below 1e-8."""
_NORMAL = 5.0
"""Deviation of a count of rows above which the normal distribution approximates the binomial one, whose sums would take
seconds for thousands of rows; the number of micro-batches differs by 0.7 % at most.
"""
LEAST_GAIN = 0.05
"""Least share of the time that has to be saved to cut a step: the estimate is no better than that."""


@dataclass(frozen=True)
class Slab:
    """Neighbouring positions of rows."""

    tokens: float
    """Number of positions."""
    share: float
    """Fraction of rows with at least this length."""


@dataclass(frozen=True)
class StepRows:
    """Expected rows of a step."""

    slabs: tuple[Slab, ...]
    rows: int
    """Rows of all ranks."""

    def computed(self, micro: int) -> float:
        """Return the expected tokens of the step, including padding, for micro-batches of `micro` rows.

        The rows are sorted and cut into micro-batches, each as long as its longest row (the trainer's
        `data.batches.training_order`; their assignment to ranks changes no sum). With K(l) rows longer than l, the
        first K(l) of the sorted ones, ceil(K(l) / micro) micro-batches are longer than l; so their lengths add up to
        the sum of that over all l. K(l) is binomial, of `rows` draws with the share of the data's rows that are longer
        than l: P(k-th longest > l) = P(K(l) >= k) (David and Nagaraja, "Order Statistics", 2003, section 2.1). The data
        are assumed to have many more rows than a step.
        """
        return micro * sum(slab.tokens * _micro_batches(slab.share, self.rows, micro) for slab in self.slabs)

    @property
    def useful(self) -> float:
        """Return the expected tokens of the step without padding."""
        return self.rows * sum(slab.tokens * slab.share for slab in self.slabs)

    def padding(self, micro: int) -> float:
        """Return the expected share of padding in the computed tokens."""
        # Rounding may give a slightly negative share for micro-batches of one row.
        return max(0.0, 1 - self.useful / self.computed(micro))


def step_rows(split: SplitFacts, rows: int) -> StepRows:
    """Return a step of `rows` rows of a split with measured lengths.

    The length of a row of two sequences is their sum, that of an encoder-decoder's row the encoder's tokens: the
    padding of the shorter sequence, and of targets, is not known.
    """
    return StepRows(tuple(_slabs(split)), rows)


def _slabs(split: SplitFacts) -> Iterator[Slab]:
    """Yield shares by position, from the histogram. The rows of a bucket are spread evenly below its upper edge: over
    all of it, or over less to match the measured mean length, e.g. not at all if all rows are equally long.
    """
    edges = sorted(split.length_histogram)
    buckets = [
        (low, min(high, split.longest), split.length_histogram[high])
        for low, high in zip([0, *edges], edges, strict=False)
    ]
    at_edges = sum(high * count for _, high, count in buckets)
    spread = min(1.0, max(0.0, 2 * (at_edges - split.tokens) / sum((high - low) * n for low, high, n in buckets)))
    longer, total = split.rows, split.rows
    for low, high, count in buckets:
        begin = high - spread * (high - low)
        if begin > low:
            yield Slab(begin - low, longer / total)
        if high > begin:
            for part in range(_PARTS):
                yield Slab((high - begin) / _PARTS, (longer - count * (part + 0.5) / _PARTS) / total)
        longer -= count


def _micro_batches(share: float, rows: int, micro: int) -> float:
    """Return E[ceil(K / micro)] for binomial K, of `rows` draws with probability `share`."""
    if share >= 1:
        return ceil(rows / micro)
    mean, deviation = rows * share, sqrt(rows * share * (1 - share))
    low, high = mean - _DEVIATIONS * (deviation + 1), mean + _DEVIATIONS * (deviation + 1)
    if deviation < _NORMAL:
        counts = range(max(1, ceil(low)), min(rows, int(high)) + 1)
        return sum(_probability(count, rows, share) * ceil(count / micro) for count in counts)
    # The sum of P(K > j micro) over all j, by the normal distribution; below `low` each of them is 1.
    first, last = max(0, ceil(low / micro)), int(high / micro)
    above = (erfc((j * micro + 0.5 - mean) / (deviation * sqrt(2))) / 2 for j in range(first, last + 1))
    return first + sum(above)


def _probability(count: int, rows: int, share: float) -> float:
    """Return the binomial probability of `count` in `rows` draws, by logarithms, as the factors overflow floats."""
    ways = lgamma(rows + 1) - lgamma(count + 1) - lgamma(rows - count + 1)
    return exp(ways + count * log(share) + (rows - count) * log1p(-share))


# Cached: a plan repeats the call for each rung of its ladder, and the operator plans again at each reconcile of a job.
@lru_cache(maxsize=256)
def quickest(step: StepRows, sizes: tuple[int, ...], pass_tokens: float) -> int:
    """Return the micro-batch (of `sizes`, largest first) with the fastest step; the first if no other saves at least
    `LEAST_GAIN`.

    A pass takes the time of its tokens and of `pass_tokens` more, its fixed cost.
    """
    best, least = sizes[0], (step.computed(sizes[0]) + pass_tokens * step.rows / sizes[0]) * (1 - LEAST_GAIN)
    for size in sizes[1:]:
        passes = pass_tokens * step.rows / size
        # Even without padding this size would take longer, and so would smaller ones.
        if step.useful + passes >= least:
            break
        if (time := step.computed(size) + passes) < least:
            best, least = size, time
    return best
