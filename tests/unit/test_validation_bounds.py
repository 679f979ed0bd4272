"""Validation takes no longer than its length suggests, whatever the spec: each of these took minutes, or ended in a
RecursionError.
"""

from __future__ import annotations

from typing import Any

import pytest

from each_case import each_case
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.problems import (
    HIDDEN,
    MAX_CHARACTERS,
    MAX_VALUES,
    MOST_PROBLEMS,
    describe_value,
    holds_secret,
)

MANY = 40_000
"""More than a job may have. A quadratic step over it exceeds the time limit on any machine."""

pytestmark = pytest.mark.timeout(60)


def job(metadata: Any = None, **spec: Any) -> dict[str, Any]:
    base = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}}
    base["training"] = {"epochs": 1, "globalBatchSize": 8}
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob"}
    return {**head, "metadata": {"name": "a", **(metadata or {})}, "spec": {**base, **spec}}


def keys(sign: str = "") -> dict[str, int]:
    return {f"k{at}{sign}": 1 for at in range(MANY)}


def affinity(values: list[Any]) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "a", "operator": "In", "values": values}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


LONG: dict[str, dict[str, Any]] = {
    "fields of valueFrom": job(template={"env": [{"name": "A", "valueFrom": keys()}]}),
    "values of an affinity": job(template=affinity([1] * MANY)),
    "fields of the spec": job(**keys()),
    "fields of a block": job(model={"uri": "hf://a/b", **keys()}),
    "labels": job({"labels": keys("!")}),
    "annotations": job({"annotations": keys()}),
    "training arguments": job(training={"epochs": 1, "globalBatchSize": 8, "arguments": keys()}),
    "hyperparameters": job(training={"script": {"git": {"url": "https://h/a"}, "hyperparameters": keys("!")}}),
    "DeepSpeed's settings": job(parallelism={"strategy": "deepspeed", "deepspeedConfig": keys()}),
    "tolerations": job(template={"tolerations": [{"k": 1}] * MANY}),
    "variables of one name": job(template={"env": [{"name": "A", "value": "1"}] * MANY}),
    "volumes of one name": job(template={"volumes": [{"name": "v", "emptyDir": {}}] * MANY}),
    "metrics": job(evaluation={"metrics": ["x"] * MANY}),
    "columns": job(predict={"columns": ["x y"] * MANY}),
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG.keys())
def test_number_of_reported_problems_is_limited(value: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_operator.spec.checks.validation.MAX_VALUES", 10 * MANY)
    monkeypatch.setattr("finetune_operator.spec.checks.validation.MAX_CHARACTERS", 100 * MANY)
    read, problems = validate_job(value)
    assert read is None
    assert 1 <= len(problems) <= MOST_PROBLEMS


DEEP = {"objects": lambda inner: {"a": inner}, "lists": lambda inner: [inner]}
PLACES = {
    "spec.template.affinity": lambda value: job(template={"affinity": value}),
    "spec.template.securityContext": lambda value: job(template={"securityContext": {"x": value}}),
    "spec.training.arguments": lambda value: job(
        training={"epochs": 1, "globalBatchSize": 8, "arguments": {"x": value}}
    ),
    "metadata.labels": lambda value: job({"labels": {"a": value}}),
    "spec.unknown": lambda value: job(unknown=value),
}


@each_case("levels", [90, 500, 9_000, 100_000])
@each_case("wrap", DEEP.values(), ids=DEEP.keys())
@each_case("place", PLACES)
def test_a_deep_value_is_refused_where_it_stands(place: str, wrap: Any, levels: int) -> None:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    read, problems = validate_job(PLACES[place](value))
    assert read is None
    assert problems[0].path.startswith(place)
    assert (len(problems), "levels deep" in problems[0].rule) == (1, True) or levels == 90


WIDE = {
    "fields": {f"k{at}": 1 for at in range(MAX_VALUES)},
    "items": [1] * MAX_VALUES,
    "fields of items": [{"a": 1}] * (MAX_VALUES // 2),
}
LONG_TEXTS = {
    "a text": "x" * MAX_CHARACTERS,
    "a name": {"x" * MAX_CHARACTERS: 1},
    "texts": ["x" * 1_000] * (MAX_CHARACTERS // 1_000),
}


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        *((value, f"at most {MAX_VALUES:,} fields and items") for value in WIDE.values()),
        *((value, f"at most {MAX_CHARACTERS:,} characters") for value in LONG_TEXTS.values()),
    ],
    ids=[*WIDE, *LONG_TEXTS],
)
def test_a_job_that_is_too_large_is_refused_where_it_becomes_so(value: Any, rule: str) -> None:
    checked = job(training={"epochs": 1, "globalBatchSize": 8, "arguments": {"x": value}})
    read, (problem,) = validate_job(checked)
    assert read is None
    assert rule in problem.rule
    assert problem.path.startswith("spec.training.arguments")


def test_annotations_may_be_as_long_as_the_api_server_lets_them() -> None:
    read, problems = validate_job(job({"annotations": {"a": "x" * 2 * MAX_CHARACTERS}}))
    assert (read is None, problems) == (False, [])


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize("end", ["", ".", ". ", ".a"])
def test_text_with_many_possible_tokens_is_searched_in_linear_time(end: str) -> None:
    text = "eyJ-" * MANY * 10 + end
    assert holds_secret(text) == (end == ".a")
    assert describe_value(text)


@pytest.mark.parametrize("text", [JWT, f"Bearer {JWT}", f"x={JWT}", f"a-{JWT}", f"eyJ-{JWT}", f"hf_abcdefgh12-{JWT}"])
def test_a_token_is_hidden_wherever_it_begins(text: str) -> None:
    shown = describe_value(text)
    assert HIDDEN in shown
    assert "eyJhb" not in shown
    assert "c2ln" not in shown


TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.mark.parametrize(
    "spec",
    [
        {"foo": {"train_uri": TOKEN}},
        {"foo": {"mlflow_tracking_uri": f"https://user:{TOKEN[3:]}@host/x"}},
        {"template": {"env": {"DATABASE": f"https://user:{TOKEN[3:]}@host/x", "OTHER": TOKEN}}},
    ],
    ids=["in an unknown object", "in a converted URI", "in a list written for the user"],
)
def test_hints_repeat_no_credentials_of_the_job(spec: dict[str, Any]) -> None:
    _, problems = validate_job(job(**spec))
    assert problems
    assert not [problem for problem in problems if TOKEN[3:] in problem.hint]


@pytest.mark.parametrize(
    "spec",
    [
        {"mlflow_tracking_uri": "x" * 3000},
        {"template": {"env": {"A": "y " * 1500}}},
        {"evaluation": {"metric": "m" * 3000}},
        {"endpoint": {"token": {"secretKeyRef": {"name": "a", "key": "b" * 3000}}}},
    ],
)
def test_hints_cut_long_values_of_the_job(spec: dict[str, Any]) -> None:
    _, problems = validate_job(job(**spec))
    assert problems
    assert max(len(problem.hint) for problem in problems) <= 1000


@pytest.mark.parametrize("number", [1e308, -1e308, 10**400], ids=["float", "negative", "integer"])
@pytest.mark.parametrize(
    "spec", [("runPolicy", "timeoutMinutes"), ("checkpoints", "minutes"), ("training", "eval_size")]
)
def test_number_too_large_for_any_field_is_refused(spec: tuple[str, str], number: float) -> None:
    block, name = spec
    _, problems = validate_job(job(**{block: {name: number}}))
    assert problems[0].path == f"spec.{block}.{name}"
