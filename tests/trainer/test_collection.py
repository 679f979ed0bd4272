"""Garbage collection is off while a stage imports its libraries, and on before the stage does anything."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.stage.stages import STAGES, StageInput
from suite_plugins.patience import patient
from trainer_support.tasks import task_job, training_of


@pytest.fixture(autouse=True)
def found_as_left() -> Iterator[None]:
    yield
    gc.enable()


@pytest.fixture
def job(tmp_path: Path) -> TrainerJob:
    return task_job("text-classification", tmp_path, tmp_path, ["text", "label"], training=training_of(steps=1))


def test_garbage_collector_skips_objects_created_before_training() -> None:
    garbage_collection.put_off()
    assert not gc.isenabled()
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    garbage_collection.begin()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made) // 2  # frozen ones may die meanwhile


def test_a_process_that_did_not_put_it_off_keeps_its_own_settings() -> None:
    before = gc.get_freeze_count()
    garbage_collection.begin()
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # one of those that were frozen before may have died


@pytest.mark.parametrize(
    ("stage", "module", "function"),
    [
        (Stage.PREPARE, "finetune_trainer.prepare.prepare", "prepare"),
        (Stage.TRAIN, "finetune_trainer.training.run", "train"),
        (Stage.EVALUATE, "finetune_trainer.predict.evaluate", "evaluate"),
        (Stage.PREDICT, "finetune_trainer.predict.predict", "predict"),
    ],
)
def test_a_stage_searches_before_it_does_anything(
    stage: Stage, module: str, function: str, job: TrainerJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any, **__: Any) -> Any:
        raise LookupError(gc.isenabled())

    monkeypatch.setattr(importlib.import_module(module), function, work)
    garbage_collection.put_off()
    given = StageInput(job, JobPaths(tmp_path), NoProgress(), ProcessWorld(), None, Interruption())
    with pytest.raises(LookupError, match=r"^True$"):
        STAGES[stage](given)


def test_the_process_of_a_stage_puts_it_off(job: TrainerJob, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job.to_json())
    program = f"""
import gc, sys
from finetune_trainer.stage import rank
rank.STAGES = {{stage: lambda _: sys.exit(str(gc.isenabled())) for stage in rank.STAGES}}
rank.run(["evaluate", "--job", {str(tmp_path / "job.json")!r}, "--workspace", {str(tmp_path)!r}])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    assert "SystemExit: False" in ran.stderr, ran.stderr
