"""Rules between fields, as read here. `tests/cluster/test_crd.py` holds the API server's CEL against the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from each_case import each_case
from finetune_operator.spec.fields.shapes import find, spec_shape
from finetune_operator.spec.rules import RULES, cel
from finetune_operator.spec.rules.column_rules import BLOCKS, COLUMN_TASKS
from finetune_operator.spec.rules.process_counts import certain_ranks, nearest_multiples
from finetune_operator.spec.types import FineTuneJobSpec

JOBS = Path(__file__).parent / "jobs"
ROWS: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load((JOBS / "rules.yaml").read_text())
BASE = {
    "task": "text-classification",
    "model": {"uri": "hf://a/b"},
    "dataset": {"uri": "hf://c/d"},
    "training": {},
}


def laid_over(patch: dict[str, Any]) -> FineTuneJobSpec:
    merged = {name: value for name, value in {**BASE, **patch}.items() if value is not None}
    return FineTuneJobSpec.model_validate_json(json.dumps(merged))


def broken_by(spec: FineTuneJobSpec) -> list[str]:
    return [rule.name for rule in RULES if not rule.holds(spec)]


def rows(kind: str) -> Iterator[Any]:
    for name, patches in ROWS.items():
        for patch in patches[kind]:
            yield pytest.param(name, patch, id=f"{name}-{json.dumps(patch)[:80]}")


def test_every_rule_has_rows() -> None:
    columns = [
        f"{block}.columns.{column}-is-for-{tasks[0]}" for block in BLOCKS for column, tasks in COLUMN_TASKS.items()
    ]
    assert [rule.name for rule in RULES if rule.name not in columns] == [*ROWS]
    assert {rule.name for rule in RULES} == {*ROWS, *columns}
    assert len(RULES) > 40


@each_case(("name", "patch"), rows("broken"))
def test_a_spec_breaks_exactly_the_rule_of_its_row(name: str, patch: dict[str, Any]) -> None:
    assert broken_by(laid_over(patch)) == [name]


@each_case(("name", "patch"), rows("kept"))
def test_a_spec_next_to_it_breaks_no_rule(name: str, patch: dict[str, Any]) -> None:
    assert broken_by(laid_over(patch)) == []


@pytest.mark.parametrize("column", COLUMN_TASKS)
def test_a_column_is_refused_for_tasks_that_do_not_read_it(column: str) -> None:
    tasks = find(spec_shape(), ["task"])
    assert tasks is not None
    for task in tasks.words:
        patch = {"task": task, "dataset": {"uri": "hf://c/d", "columns": {column: "x"}}}
        expected = (
            [] if task in COLUMN_TASKS[column] else [f"dataset.columns.{column}-is-for-{COLUMN_TASKS[column][0]}"]
        )
        assert broken_by(laid_over(patch)) == expected


def test_every_rule_names_fields_that_exist() -> None:
    for rule in RULES:
        for path in (rule.path, *rule.fields_read):
            assert find(spec_shape(), path.split(".")) is not None, (rule.name, path)
        assert rule.fields_read, rule.name


def test_cel_of_every_rule_is_read_to_its_end() -> None:
    for rule in RULES:
        assert (rule.cel is None) != (rule.test is None), f"{rule.name} is written once"
        cel._read(cel._TOKEN.findall(rule.cel or "true"))


CEL = {
    "1 + 2 * 3 == 7 && 7 % 4 == 3 && 7 / 2 == 3": True,
    "!(1 < 2) || 2 >= 2": True,
    "2 in [1, 2] && !('a' in ['b'])": True,
    "false ? false : true ? 'x' == 'x' : false": True,
    "has(self.training) && !has(self.training.script)": True,
    "self.training.learningRate == 2e-5 && double(int('2')) == 2.0": True,
    "self.model.uri.startsWith('hf://') && !self.model.uri.endsWith('/') && self.model.uri.contains('/')": True,
    "'a\\n'.matches('^a$')": False,
    "'x.y'.matches('[.]y$') && !'xzy'.matches('x\\\\.y')": True,
    "size([1, 2]) == 2 && [1, 2].size() == 2": True,
    "[1, 2].all(n, n > 0) && [1, 2].exists(n, n == 2) && [1, 2].exists_one(n, n > 1)": True,
    "[1, 2, 3].filter(n, n > 1).size() == 2": True,
    "type(self.resources.nodes) == int && type(self.parallelism.zeroStage) != int": True,
    "-1 < 0 || self.nothing": True,
}
"""CEL -> its value by the specification, on `BASE`."""


@pytest.mark.parametrize("text", CEL)
def test_cel_has_the_value_of_the_specification(text: str) -> None:
    assert cel.predicate(text)(laid_over({"training": {"learningRate": 2e-5}})) is CEL[text]


@pytest.mark.parametrize("text", ["1 +", "(1", "true true", "self.task ? 1", "a ~ b"])
def test_text_that_is_no_cel_is_refused(text: str) -> None:
    with pytest.raises((SyntaxError, KeyError)):
        cel.predicate(text)(laid_over({}))


def test_hint_for_an_indivisible_batch_names_the_nearest_valid_ones() -> None:
    rule = next(rule for rule in RULES if rule.name == "global-batch-divides")
    spec = laid_over({"training": {"globalBatchSize": 100}, "resources": {"nodes": 2, "processesPerNode": 8}})
    assert rule.advice is not None
    assert rule.advice(spec) == "use 96 or 112, multiples of 16 = 16 ranks"
    assert (certain_ranks(spec), nearest_multiples(100, 16), nearest_multiples(3, 16)) == (16, (96, 112), (16,))


def test_hint_for_uneven_replicas_names_degrees_and_a_product_that_divides() -> None:
    rule = next(rule for rule in RULES if rule.name == "model-parallel-divides-world")
    parallelism = {"tensor": 2, "pipeline": {"degree": 3}}
    spec = laid_over({"task": "text-generation", "parallelism": parallelism, "resources": {"gpusPerNode": 8}})
    assert rule.advice is not None
    assert rule.advice(spec) == (
        "8 processes are not a multiple of tensor 2 x pipeline 3: use a product that divides 8, e.g. 4"
    )
