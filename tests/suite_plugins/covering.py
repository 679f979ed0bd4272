"""Covering selections: few cases of a grid that together cover its values and neighbouring pairs.

A case is described by its axes, a value for each: family, engine, sharding, checkpointing and so on, in an order in
which interacting axes are neighbours.

Guarantee: each value of each axis, and each pair of values on neighbouring axes that occurs in the grid, occurs in a
chosen case. A fault that needs three values at once, or two on axes that are not neighbours, can hide in a case that is
left out; runs of the whole grid find it.

The choice is greedy: always the case with the most new pairs for its cost, the first of the grid among equals; in the
end redundant cases are dropped, the most expensive first. The same grid gives the same choice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

Axes = Mapping[str, Hashable]
"""Axis -> value; at least two, in order."""
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]
"""Two neighbouring axes with their values."""


@dataclass(frozen=True)
class Case:
    """One case of a grid; `cost` in any unit, the same for all cases of the grid."""

    name: str
    axes: Axes
    cost: float = 1.0

    @property
    def pairs(self) -> frozenset[Pair]:
        """Pairs of values on neighbouring axes; each value is in at least one."""
        return frozenset(pairwise(self.axes.items()))


@dataclass(frozen=True)
class Choice:
    """Cases of a grid, and the names of those that cover it."""

    cases: tuple[Case, ...]
    chosen: frozenset[str]

    @property
    def left(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.name not in self.chosen)


def choose(cases: Iterable[Case]) -> Choice:
    """Choose cases that cover all of them.

    ValueError if axes differ or are fewer than two, or if a name occurs twice.
    """
    grid = tuple(cases)
    _refuse_uneven(grid)
    missing = {pair for case in grid for pair in case.pairs}
    picked: list[Case] = []
    while missing:
        best = max(grid, key=lambda case: len(case.pairs & missing) / case.cost)
        picked.append(best)
        missing -= best.pairs
    for case in sorted(picked, key=lambda case: (-case.cost, grid.index(case))):
        others = [each for each in picked if each is not case]
        if case.pairs <= {pair for each in others for pair in each.pairs}:
            picked = others
    return Choice(grid, frozenset(case.name for case in picked))


def _refuse_uneven(grid: tuple[Case, ...]) -> None:
    if len({case.name for case in grid}) < len(grid):
        raise ValueError(f"a name comes twice: {[case.name for case in grid]}")
    axes = {tuple(case.axes) for case in grid}
    if len(axes) > 1 or any(len(each) < 2 for each in axes):
        raise ValueError(f"axes differ, or are fewer than two: {sorted(axes)}")
