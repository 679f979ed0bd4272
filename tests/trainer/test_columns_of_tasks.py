"""Columns of a task: validation refuses exactly those that the trainer's first stage would refuse."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest

from finetune_contract.choices import Task
from finetune_operator.cli.files.checking import data_question
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.column_rules import COLUMN_TASKS
from finetune_trainer.core.failures import StageError
from finetune_trainer.prepare.prepare import parts_of, predict_part
from finetune_trainer.tasks.task_registry import task_parts
from planning_support.cases import job


def subsets(task: Task) -> list[dict[str, str]]:
    """Return every subset of the task's own columns."""
    own = [name for name, tasks in COLUMN_TASKS.items() if task in tasks]
    return [{name: f"my_{name}" for name in names} for most in range(len(own) + 1) for names in combinations(own, most)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URI of a folder with an empty file for each split; nothing reads them here."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("train", "validation", "test"):
        (folder / f"{name}.jsonl").touch()
    return f"file://{folder}"


def refused(**spec: Any) -> tuple[bool, bool]:
    """Return whether validation refuses the job, and whether the trainer does."""
    made = job(spec)
    question, broken = data_question(made), any(not rule.holds(made.spec) for rule in RULES)
    try:
        encoding = task_parts(question.task).encoding
        parts_of(question, encoding, trains=True)
        predict_part(question, encoding)
    except StageError as error:
        return broken, "columns" in str(error)
    return broken, False


@pytest.mark.parametrize("task", get_args(Task))
def test_validation_refuses_the_columns_that_the_trainer_refuses(task: Task, rows: str) -> None:
    found = [refused(task=task, dataset={"uri": rows, "columns": columns}) for columns in subsets(task)]
    assert [validated for validated, _ in found] == [trainer for _, trainer in found]
    assert (True, True) in found or task != "text-generation"


@pytest.mark.parametrize("columns", subsets("text-generation"), ids=lambda columns: "-".join(columns) or "none")
def test_rows_to_predict_have_the_form_of_those_that_are_trained(columns: dict[str, str], rows: str) -> None:
    dataset = {"uri": rows, "columns": columns}
    if refused(task="text-generation", dataset=dataset) == (False, False):
        for other in subsets("text-generation"):
            predict = {"dataset": {"uri": rows, "columns": other}}
            validated, trainer = refused(task="text-generation", dataset=dataset, predict=predict)
            # A target beside messages, which prediction would ignore, is refused by validation alone.
            assert validated == trainer or set(other) == {"messages", "target"}, (columns, other)
        alone = {"dataset": {"uri": rows}}
        assert refused(task="text-generation", dataset=dataset, predict=alone) == (False, False)
