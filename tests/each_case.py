"""Many small cases in one test: pytest spends 10 ms on an item, more than thousands of cases spend on themselves."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

R = TypeVar("R")
C = TypeVar("C")
MOST_TRACEBACKS = 10
"""Failed cases that are shown with their traceback; all are named."""


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], Any] | Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run all cases in one test, which fails with the names of all failed ones.

    The arguments are those of `pytest.mark.parametrize`; one below another gives all combinations. Fixtures are shared
    by the cases, so a test that changes something (tmp_path, monkeypatch) needs `parametrize`.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    given = itertools.repeat(ids) if ids is None or callable(ids) else ids
    table = [_case(arguments, case, id_) for case, id_ in zip(cases, given, strict=False)]
    assert table, f"{names}: there are no cases"

    def decorate(decorated: Callable[..., None]) -> Callable[..., None]:
        test, below = getattr(decorated, "each_case", (decorated, [("", {})]))
        whole = [(f"{other}-{name}".strip("-"), values | more) for name, values in table for other, more in below]

        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for name, values in whole:
                try:
                    test(**fixtures, **values)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    error.add_note(f"in the case {name}")
                    failed[name] = error
            if failed:
                shown = list(failed.values())[:MOST_TRACEBACKS]
                raise BaseExceptionGroup(f"{len(failed)} of {len(whole)} cases failed: {', '.join(failed)}", shown)

        signature = inspect.signature(decorated)
        fixtures = [each for each in signature.parameters.values() if each.name not in arguments]
        all_cases.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        all_cases.each_case = test, whole  # type: ignore[attr-defined]
        return all_cases

    return decorate


def pairs_of(
    rows: Iterable[R], columns: Sequence[C], kind: Callable[[R], Hashable], everything: bool
) -> list[tuple[R, C]]:
    """Return pairs in which each row occurs, and each column with each kind of row; all pairs with `everything`."""
    if everything:
        return list(itertools.product(rows, columns))
    kinds: dict[Hashable, list[R]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    return [
        (group[at % len(group)], columns[at % len(columns)])
        for group in kinds.values()
        for at in range(max(len(group), len(columns)))
    ]


def _case(arguments: list[str], case: Any, given: Callable[[Any], Any] | str | None) -> tuple[str, dict[str, Any]]:
    """Return the name of a case and its arguments."""
    name = given if isinstance(given, str) else None
    if hasattr(case, "marks"):  # made by pytest.param
        assert not case.marks, f"{case}: marks need parametrize"
        name, values = case.id, case.values
    else:
        values = (case,) if len(arguments) == 1 else tuple(case)
    if name is None:
        name = "-".join(str(given(value) if callable(given) else value) for value in values)
    return name, dict(zip(arguments, values, strict=True))
