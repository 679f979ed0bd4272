"""Differences between documents: their format, and that none is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from differences import difference, same, written

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a value is set, another added, another removed": (
        {"spec": {"replicas": 2, "paused": None}}, {"spec": {"replicas": 4, "text": "4"}},
        ["spec.replicas: 4", "- spec.paused", '+ spec.text: "4"'],
    ),
    "true is not 1, and 1 is not 1.0": ({"a": True, "b": 1}, {"a": 1, "b": 1.0}, ["a: 1", "b: 1.0"]),
    "an inserted item moves no other": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "value": "1"}, {"name": "X"}, {"name": "B", "value": "3"}, {"name": "Y"}]},
        ["+ env[X] before B: {}", 'env[B].value: "3"', "+ env[Y]: {}"],
    ),
    "another order is a difference": (
        {"env": [{"name": "A"}, {"name": "B"}]}, {"env": [{"name": "B"}, {"name": "C"}, {"name": "A"}]},
        ["+ env[C]: {}", 'order env: ["B", "C", "A"]'],
    ),
    "mounts of one volume are named by their paths": (
        {"mounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
        {"mounts": [{"name": "v", "mountPath": "/b"}]},
        ["- mounts[/a]"],
    ),
    "a flag is named with its value": (
        {"command": ["python", "run", "--job", "a.json", "--quiet"]},
        {"command": ["python", "run", "--job", "b.json", "--level", "2", "--quiet"]},
        ['command[--job]: "b.json"', '+ command[--level] before --quiet: "2"'],
    ),
    "a flag that occurs twice leaves the list whole": (
        {"args": ["--x", "A"]}, {"args": ["--x", "A", "--x", "B"]}, ['args: ["--x", "A", "--x", "B"]'],
    ),
    "a list of values is written whole": ({"a": [1, 2]}, {"a": [1, 3]}, ["a: [1, 3]"]),
    "names that a path would not show are quoted": (
        {"labels": {"a.b/c": "1"}, "": {"x]": 1}}, {"labels": {"a.b/c": "2"}, "": {"x]": "\u2028"}},
        ['labels."a.b/c": "2"', '""."x]": "\\u2028"'],
    ),
    "a large object that is added has a line for each field": (
        {}, {"a": {"b": "x" * 60, "c": {"d": "y" * 60, "e": {}}}},
        [f'+ a.b: "{"x" * 60}"', f'+ a.c: {{"d": "{"y" * 60}", "e": {{}}}}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_difference_reads_as_written_here(case: str) -> None:
    base, new, lines = CASES[case]
    assert written(difference(base, new)) == lines


@pytest.mark.parametrize("at", [0, 1])
def test_item_that_all_documents_have_is_no_difference(at: int) -> None:
    base = [{"name": "A"}, {"name": "B"}]
    new = [{"name": "A"}, {"name": "B"}, {"name": "X"}]
    more = [[*items[:at], {"name": "MORE"}, *items[at:]] for items in (base, new)]
    assert difference({"env": more[0]}, {"env": more[1]}) == difference({"env": base}, {"env": new})


WORDS = ["--a", "--b", "x"]
ITEMS = [{"name": "A"}, {"name": "A", "v": 1}, {"name": "B", "mountPath": "A"}, {"v": {}}]


@pytest.mark.parametrize("parts", [WORDS, ITEMS], ids=["arguments", "items"])
def test_no_two_lists_have_the_same_lines(parts: list[Any]) -> None:
    lists = [list(each) for size in range(4) for each in itertools.product(parts, repeat=size)]
    for base in lists:
        lines = {"\n".join(written(difference({"list": base}, {"list": each}))) for each in lists}
        assert len(lines) == len(lists)


NAMES = st.text(alphabet='ab." ]\n-', max_size=3)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(0, 2), st.sampled_from(["", "--a", "--b", "x y", "before", "1"])
)
NAMED = st.fixed_dictionaries({"name": NAMES}, optional={"mountPath": NAMES, "value": SCALARS})
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(NAMED, max_size=5),
        st.lists(st.sampled_from(["python", "--a", "--b", "1", "x y"]), max_size=5),
        st.dictionaries(NAMES, inner, max_size=4),
    ),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
def test_other_documents_have_other_lines(base: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
    lines, others = (written(difference(base, new)) for new in (one, other))
    assert all("\n" not in line for line in lines)
    assert bool(lines) is not same(base, one)
    assert (lines == others) is same(one, other)
