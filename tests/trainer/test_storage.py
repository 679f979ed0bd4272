"""A full volume is reported with its path, the intended write, and the space that was left."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import task_job, training_of, write_lines

MIB = 1 << 20


def test_a_known_size_is_compared_with_the_space_that_was_left(small_volume: Path) -> None:
    folder = small_volume / "model"
    folder.mkdir()
    with pytest.raises(StageError) as caught, storage_errors_named(folder, "the trained model", 6 * MIB):
        (folder / "weights").write_bytes(os.urandom(6 * MIB))
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.STORAGE_FULL, "NoSpaceLeft")
    assert caught.value.message == (
        f"The volume of {folder} is full: the trained model needs 6.0 MiB, and 4.0 MiB of 4.0 MiB were left for it."
    )


def test_full_volume_is_reported_for_unexplained_errors_of_torch(small_volume: Path) -> None:
    folder = small_volume / "step-1"
    folder.mkdir()
    with pytest.raises(StageError) as caught, storage_errors_named(folder, "the checkpoint"):
        torch.save(torch.zeros(2 * MIB), folder / "state.pt")
    assert "the checkpoint needs more than the 4.0 MiB of 4.0 MiB that were left for it" in caught.value.message


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), ValueError("no"), RuntimeError("write failed")])
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, storage_errors_named(tmp_path / "not-there", "nothing"):
        raise error
    assert caught.value is error


def test_prepare_on_a_full_volume_names_it_and_leaves_no_files(small_volume: Path, tmp_path: Path, tiny_bert) -> None:
    model = tiny_bert(tmp_path / "m", words=["a", "b"])
    rows = [{"text": "a b " * 2000, "label": i % 2} for i in range(1500)]
    data = write_lines(tmp_path / "data" / "train.jsonl", rows)
    training = training_of(steps=1, threads=1)
    job = task_job("text-classification", model, data, ["text", "label"], training=training)
    paths = JobPaths(small_volume / "job")
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    where, _, why = caught.value.message.partition(" is full: ")
    assert where.startswith(f"The volume of {paths.root}/prepared.tmp-")
    assert re.match(r"preparing the data needs more than the [34]\.\d MiB of 4\.0 MiB that were left", why)
    assert [path.name for path in paths.root.iterdir()] == [".prepare.lock"]
