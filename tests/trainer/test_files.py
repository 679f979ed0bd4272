"""Files and folders that appear and disappear as a whole, even while others still write."""

from __future__ import annotations

import threading
from pathlib import Path

from finetune_trainer.core.files import discard, temporary_folder

FILES = 500


def test_temporary_folder_is_deleted_despite_concurrent_writes(tmp_path: Path):
    """A pod whose leader has ended writes so: it has the folder's path, and puts one file after another there."""
    refused = threading.Event()

    def write_on(folder: Path) -> None:
        while (folder / "0").exists():
            pass
        try:
            for number in range(20 * FILES):
                (folder / f"late-{number}").touch()
        except FileNotFoundError:
            refused.set()

    with temporary_folder(tmp_path, "tmp-") as folder:
        for number in range(FILES):
            (folder / str(number)).touch()
        writer = threading.Thread(target=write_on, args=(folder,))
        writer.start()
    writer.join()
    assert refused.is_set()
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_not_discarded(tmp_path: Path):
    assert not discard(tmp_path / "nothing", tmp_path, "tmp-")
    (tmp_path / "folder" / "below").mkdir(parents=True)
    assert discard(tmp_path / "folder", tmp_path, "tmp-")
    assert list(tmp_path.iterdir()) == []
