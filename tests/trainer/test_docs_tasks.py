"""docs/tasks.md has the facts of each task's module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from finetune_contract.choices import Task
from finetune_operator.spec.rules.column_rules import COLUMN_TASKS
from finetune_trainer.tasks.label_forms import FORMS
from finetune_trainer.tasks.task_registry import task_parts

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
LINES = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
TABLE = {
    name: [re.findall(r"[\w/]+", cell) for cell in cells]
    for first, *cells in LINES
    if (name := first.strip("` ")) in get_args(Task) and len(cells) == 3
}
FORM_LINES = [
    line for line in PAGE.partition("| it holds |")[2].partition("\n- ")[0].splitlines() if line.count("|") == 5
][1:]


def test_the_table_has_all_tasks() -> None:
    assert tuple(TABLE) == get_args(Task)


@pytest.mark.parametrize("task", TABLE)
def test_documented_table_matches_the_task(task: Task) -> None:
    columns, metrics, predictions = TABLE[task]
    module = task_parts(task)
    assert {name for name in columns if name in COLUMN_TASKS} == {
        column for column, tasks in COLUMN_TASKS.items() if task in tasks
    }
    if None in module.scoring.metrics:
        assert tuple(metrics) == module.scoring.metrics[None]
    assert set(predictions) == module.description.answer_columns
    assert f"\n## {task}\n" in PAGE


def test_each_form_of_labels_is_documented_with_metrics_and_columns() -> None:
    documented_forms = [[re.findall(r"\w+", cell) for cell in line.strip("| ").split(" | ")[2:]] for line in FORM_LINES]
    assert documented_forms == [[list(form.metrics), list(form.columns)] for form in FORMS.values()]
