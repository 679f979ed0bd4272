"""Choice of the rows of a batch by what padding costs: time of a batch = fixed part + part of each padded token.

Both parts are fitted to measured batches by least squares. A row joins a batch if the padding that it adds takes less
time than its share of the fixed part would be in another batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = 1 / 3
"""Share of the fixed part: another batch has other rows, too. In a simulation of random requests with the parts of
three rungs, the slowest of 100 answers were fastest with a third to a half."""

_KEPT = 0.97
"""Weight that a batch keeps with each later one: some 30 batches count."""


@dataclass
class BatchCost:
    """Time of a batch by its padded tokens; free until it has measurements."""

    kept: Sequence[tuple[int, float]] = ()
    """Padded tokens and seconds of the batches of the warm-up, which always count: batches of one size fit no line."""
    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._weight = self._weight * _KEPT + 1
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._squares = self._squares * _KEPT + tokens * tokens
        self._products = self._products * _KEPT + tokens * seconds

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds of a batch without tokens and of one padded token, neither below 0."""
        weight = self._weight + len(self.kept)
        tokens = self._tokens + sum(each for each, _ in self.kept)
        seconds = self._seconds + sum(each for _, each in self.kept)
        squares = self._squares + sum(each * each for each, _ in self.kept)
        products = self._products + sum(each * taken for each, taken in self.kept)
        if not tokens:
            return 0.0, 0.0
        spread = weight * squares - tokens * tokens
        slope = (weight * products - tokens * seconds) / spread if spread > 1e-9 * squares else seconds / tokens
        if slope <= 0:
            return seconds / weight, 0.0
        fixed = (seconds - slope * tokens) / weight
        return (fixed, slope) if fixed > 0 else (0.0, products / squares)

    def seconds(self, tokens: int) -> float:
        """Return the time of a batch of so many padded tokens."""
        fixed, slope = self.parts
        return fixed + slope * tokens

    def tokens_within(self, seconds: float) -> float:
        """Return the padded tokens of a batch that takes that long; infinite if tokens cost nothing."""
        fixed, slope = self.parts
        return (seconds - fixed) / slope if slope else math.inf

    @property
    def worth(self) -> float:
        """Padded tokens that a row may add to a batch; infinite if tokens cost nothing."""
        fixed, slope = self.parts
        return _SHARE * fixed / slope if slope else math.inf


def rows_of_batch(widths: Sequence[int], room: float, worth: float) -> list[int]:
    """Return the indices of rows that share a batch with the first, the closest in length first.

    `widths`: tokens of each waiting row. The batch has at most `room` padded tokens, unless the first row alone has
    more, and no row adds more than `worth` tokens of padding.
    """
    chosen, longest = [0], widths[0]
    for at in sorted(range(1, len(widths)), key=lambda each: abs(widths[each] - widths[0])):
        wider = max(longest, widths[at])
        padded = wider * (len(chosen) + 1)
        if padded > room:
            break
        if padded - longest * len(chosen) - widths[at] > worth:
            continue
        chosen.append(at)
        longest = wider
    return chosen
