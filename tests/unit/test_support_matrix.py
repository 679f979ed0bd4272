"""docs/support.md covers every task, strategy and launcher; its cells are answers of `finetune plan`."""

from __future__ import annotations

import re

import support_matrix as page
from finetune_operator.spec.fields.support import served_words
from finetune_operator.spec.types import ParallelismSpec
from support_matrix import ADAPTERS, LAUNCHERS, PRECISIONS, STRATEGIES, TASKS, Combination, refusals

TEXT = page.support_matrix()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]


def test_tables_name_every_task_strategy_launcher_adapter_and_precision() -> None:
    heads = {cell.strip() for row in ROWS for cell in row.split("|")}
    assert {*TASKS, *STRATEGIES, *LAUNCHERS, *ADAPTERS, *PRECISIONS} <= heads
    strategies = {parallelism.get("strategy") for parallelism in STRATEGIES.values()}
    assert set(ParallelismSpec.model_fields["strategy"].annotation.__args__) - {"auto"} <= strategies  # type: ignore[union-attr]


def test_every_refusal_has_its_footnote_and_every_footnote_its_refusal() -> None:
    marks = {number for row in ROWS for number in re.findall(r"\[\^(\d+)\]", row)}
    notes = set(re.findall(r"^\[\^(\d+)\]: `spec\.", TEXT, re.MULTILINE))
    assert len(notes) > 10
    assert marks == notes


def test_cell_of_the_matrix_is_the_answer_of_the_plan() -> None:
    assert refusals(Combination("text-generation", "`tensor: 2`")) == ()
    assert [each.path for each in refusals(Combination("summarization", "`tensor: 2`"))] == ["spec.parallelism.tensor"]
    refused = {name for name in LAUNCHERS if refusals(Combination(launcher=name))}
    assert refused == set(LAUNCHERS) - set(served_words("launcher", LAUNCHERS))
