"""The checkpoint store: valid checkpoints, skipped ones, and deleted ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_contract.layout import FailureClass
from finetune_trainer.checkpoint.checkpoints import MANIFEST, CheckpointStore, refuse_other_job, verify
from finetune_trainer.core.failures import StageError


def write(store: CheckpointStore, step: int, *, first: bool = False, job: dict[str, object] | None = None) -> None:
    store.begin(step)
    (store.partial(step) / "state").mkdir()
    (store.partial(step) / "state" / "weights.pt").write_bytes(b"w" * (1000 + step))
    (store.partial(step) / "scheduler.pt").write_bytes(b"s")
    store.commit(step, strategy="ddp", world_size=2, job=job or {"seed": 1}, first_of_run=first)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 15):
        write(store, step)
    assert steps(tmp_path) == ["latest", "step-10", "step-15"]
    assert (tmp_path / "latest").read_text() == "step-15\n"
    newest = store.newest()
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.strategy, newest.manifest.world_size) == (15, "ddp", 2)
    assert sorted(newest.manifest.files) == ["scheduler.pt", "state/weights.pt"]


def test_the_first_of_a_new_run_replaces_those_of_the_run_before(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (50, 60):
        write(store, step)
    write(store, 5, first=True)
    assert steps(tmp_path) == ["latest", "step-5"]


def damage_content(folder: Path) -> None:
    (folder / "state" / "weights.pt").write_bytes(b"x" * (folder / "state" / "weights.pt").stat().st_size)


def cut(folder: Path) -> None:
    (folder / "state" / "weights.pt").write_bytes(b"w")


def remove(folder: Path) -> None:
    (folder / "state" / "weights.pt").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_content, "weights.pt has changed since"),
        (cut, "weights.pt has 1 bytes instead of 1010"),
        (remove, "weights.pt is missing"),
        (remove_manifest, "manifest.json is missing"),
        (break_manifest, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_one_is_skipped_and_the_file_named(
    damage: Callable[[Path], None], named: str, tmp_path: Path, caplog
):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5)
    write(store, 10)
    damage(tmp_path / "step-10")
    newest = store.newest()
    assert newest is not None
    assert newest.manifest.step == 5
    assert len(caplog.records) == 1
    assert named in caplog.records[0].getMessage()


def test_run_does_not_restart_silently_when_all_checkpoints_are_damaged(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5)
    cut(tmp_path / "step-5")
    with pytest.raises(StageError) as error:
        store.newest()
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CHECKPOINT, "NoWholeCheckpoint")


def test_leftovers_of_an_interrupted_attempt_are_no_checkpoint(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    store.begin(5)
    (store.partial(5) / "weights.pt").write_bytes(b"w")
    assert store.newest() is None
    write(store, 10)
    assert steps(tmp_path) == ["latest", "step-10"]


def test_checkpoint_of_another_job_is_refused_with_the_differing_settings(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, job={"seed": 1, "learning_rate": 0.1})
    checkpoint = verify(tmp_path / "step-5")
    refuse_other_job(checkpoint, {"learning_rate": 0.1, "seed": 1})
    with pytest.raises(StageError, match=r"learning_rate was 0.1, is 0.2\."):
        refuse_other_job(checkpoint, {"seed": 1, "learning_rate": 0.2})
