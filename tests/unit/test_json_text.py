"""Responses of the API server are parsed whatever objects are stored: only values nested too deep are removed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.json_text import CUT, DEEPEST, cut, depth, loads
from finetune_operator.spec.problems import MAX_DEPTH
from suite_plugins.fuzz import examples

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
)


def deep(levels: int, opening: str, closing: str) -> str:
    return opening * levels + "1" + closing * levels


@pytest.mark.parametrize("levels", [900, 3_000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_a_hostile_item_leaves_the_other_items_of_its_list_as_they_are(levels: int, opening: str, closing: str) -> None:
    honest = {"name": 'a "quoted]" name\\', "deep": [{"b": []}]}
    text = f'{{"items": [{json.dumps(honest)}, {{"spec": {deep(levels, opening, closing)}}}, {json.dumps(honest)}]}}'
    read = loads(text.encode())
    assert isinstance(read, dict)
    assert isinstance(read["items"], list)
    assert (read["items"][0], read["items"][2]) == (honest, honest)


@pytest.mark.parametrize("levels", [DEEPEST - 1, DEEPEST, DEEPEST + 1, 5_000])
def test_cut_document_is_refused_as_a_job(levels: int) -> None:
    text = cut(deep(levels, '{"a":', "}").encode())
    assert (CUT in text) == (levels > DEEPEST)
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "a"}}
    spec = {"task": "text-classification", "template": {"affinity": json.loads(text)}}
    read, (problem,) = validate_job({**job, "spec": spec})
    assert read is None
    assert problem.path == "spec.template.affinity"
    assert f"at most {MAX_DEPTH} levels" in problem.rule


@examples(50, everything=200)
@given(VALUES)
def test_shallow_json_is_unchanged(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert cut(text) == text
    assert loads(text) == json.loads(text)


@examples(50, everything=200)
@given(VALUES)
def test_depth_is_that_of_the_value(value: object) -> None:
    def levels(inner: object) -> int:
        parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else None
        return 0 if parts is None else 1 + max(map(levels, parts), default=0)

    assert depth(json.dumps(value).encode()) == levels(value)


@pytest.mark.parametrize("text", [b"", b"{", b"[1,", b'{"a": ' * 2_000, b"[" * 2_000 + b"]" * 1_900, b"<html>"])
def test_invalid_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        loads(text)
