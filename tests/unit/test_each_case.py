"""One test over many cases names every case that fails."""

from __future__ import annotations

import inspect

import pytest

from each_case import each_case, pairs_of


def test_all_failed_cases_are_named_with_their_errors() -> None:
    ran = []

    @each_case("number, word", [(1, "a"), (2, "b"), pytest.param(3, "c", id="the third"), (4, "d")])
    def even(number: int, word: str, beside: str) -> None:
        ran.append(f"{number}{word}{beside}")
        assert number % 2 == 0
        if number == 4:
            pytest.fail("too large")

    assert list(inspect.signature(even).parameters) == ["beside"]
    with pytest.raises(BaseExceptionGroup, match=r"3 of 4 cases failed: 1-a, the third, 4-d") as caught:
        even(beside="!")
    assert ran == ["1a!", "2b!", "3c!", "4d!"]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        [f"in the case {name}"] for name in ("1-a", "the third", "4-d")
    ]


@each_case("text", ["a", "b"], ids=lambda text: f"the letter {text}")
@pytest.mark.parametrize("count", [1, 2])
def test_cases_meet_parameters_and_fixtures(text: str, count: int, request: pytest.FixtureRequest) -> None:
    assert text in "ab"
    assert request.node.name.endswith(f"[{count}]")


def test_decorators_one_below_another_give_all_combinations() -> None:
    @each_case("a", [1, 2])
    @each_case(("b", "c"), [(3, 5), (4, 6)])
    def small(a: int, b: int, c: int) -> None:
        assert a + b + c < 11

    with pytest.raises(BaseExceptionGroup, match=r"2 of 4 cases failed: 4-6-1, 4-6-2"):
        small()


def test_case_cannot_be_skipped() -> None:
    @each_case("reason", ["no cluster"])
    def skipped(reason: str) -> None:
        pytest.skip(reason)

    with pytest.raises(BaseExceptionGroup, match="1 of 1 cases failed: no cluster"):
        skipped()


def test_few_pairs_have_each_row_and_each_column_with_each_kind_of_row() -> None:
    rows, columns = ["a1", "a2", "a3", "b1"], [1, 2]
    few = pairs_of(rows, columns, lambda row: row[0], everything=False)
    assert few == [("a1", 1), ("a2", 2), ("a3", 1), ("b1", 1), ("b1", 2)]
    assert len(pairs_of(rows, columns, lambda row: row[0], everything=True)) == 8
