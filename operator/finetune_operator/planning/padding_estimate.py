"""How much of what an optimizer step computes is padding, and the micro-batch with which a step takes the least time.

Expectations from the histogram of lengths alone, without a draw, so that a plan stays a function of its facts. They
describe steps of any rows; a step whose rows are all of like length has hardly any padding however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, erfc, exp, lgamma, log, log1p, sqrt

from finetune_contract.facts import SplitFacts

_PARTS = 4
"""Of a bucket of lengths, in each of which one share of rows is longer: 2 tokens each where rows are short."""
_DEVIATIONS = 6.0
"""Counts of rows further from the mean than that have a probability below 1e-8."""
_NORMAL = 5.0
"""Deviation of a count of rows above which the normal distribution stands for the binomial one, whose sums would take
seconds for thousands of rows; the number of micro-batches differs by 0.7 % at most.
"""
LEAST_GAIN = 0.05
"""Share of the time below which a step is not cut: the estimate is no better than that."""


@dataclass(frozen=True)
class Slab:
    """Neighbouring positions of rows."""

    tokens: float
    """How many."""
    share: float
    """Of all rows, those that are so long."""


@dataclass(frozen=True)
class StepRows:
    """What a step of any rows is made of."""

    slabs: tuple[Slab, ...]
    rows: int
    """Over all ranks."""

    def computed(self, micro: int) -> float:
        """Expected tokens of the step, padding included, when micro-batches have `micro` rows.

        The rows are sorted and cut into micro-batches, each as long as its longest row (the trainer's
        `data.batches.training_order`; which rank gets which of them changes no sum). With K(l) rows longer than l, the
        first K(l) of the sorted ones, ceil(K(l) / micro) micro-batches are longer than l; so their lengths add up to
        the sum of that over all l. K(l) is binomial, of `rows` draws with the share of the data's rows that are longer
        than l: P(k-th longest > l) = P(K(l) >= k) (David and Nagaraja, "Order Statistics", 2003, section 2.1). The data
        are taken to be many more rows than a step.
        """
        return micro * sum(slab.tokens * _micro_batches(slab.share, self.rows, micro) for slab in self.slabs)

    @property
    def useful(self) -> float:
        """Expected tokens of the step without padding."""
        return self.rows * sum(slab.tokens * slab.share for slab in self.slabs)

    def padding(self, micro: int) -> float:
        """Expected share of padding in what is computed."""
        # Rounding alone makes row by row less than nothing.
        return max(0.0, 1 - self.useful / self.computed(micro))


def step_rows(split: SplitFacts, rows: int) -> StepRows:
    """A step of `rows` rows of a split whose lengths have been measured.

    Of a row that is two sequences their sum counts, and of an encoder-decoder's row the encoder's tokens: the padding
    of the shorter sequence, and of targets, is not known.
    """
    return StepRows(tuple(_slabs(split)), rows)


def _slabs(split: SplitFacts) -> Iterator[Slab]:
    """Shares by position, from the histogram. The rows of a bucket are spread evenly below its upper edge: over all of
    it, or as much less as makes the mean length the measured one, e.g. not at all when all rows are equally long.
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
    """E[ceil(K / micro)] for binomial K, of `rows` draws with probability `share`."""
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
    """Of `count` of `rows` draws; by logarithms, as the factors alone leave the range of floats."""
    ways = lgamma(rows + 1) - lgamma(count + 1) - lgamma(rows - count + 1)
    return exp(ways + count * log(share) + (rows - count) * log1p(-share))


# Kept: a plan asks again for each rung of its ladder, and the operator plans anew at each look at a job.
@lru_cache(maxsize=256)
def quickest(step: StepRows, sizes: tuple[int, ...], pass_tokens: float) -> int:
    """Of micro-batches (the largest first) the one with which the step takes the least time; the first, where no other
    saves at least `LEAST_GAIN`.

    A pass takes the time of its tokens and of `pass_tokens` more, which it costs whatever its size.
    """
    best, least = sizes[0], (step.computed(sizes[0]) + pass_tokens * step.rows / sizes[0]) * (1 - LEAST_GAIN)
    for size in sizes[1:]:
        passes = pass_tokens * step.rows / size
        # Even without any padding it would take longer, and so would smaller ones.
        if step.useful + passes >= least:
            break
        if (time := step.computed(size) + passes) < least:
            best, least = size, time
    return best
