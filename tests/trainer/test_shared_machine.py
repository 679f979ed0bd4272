"""Signs that a training shares its processors, by the files of a cgroup and the load of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune_trainer.training.shared_machine import SharedMachine

CASES = {
    # (load, throttled periods, all periods) while it trains, on a machine with 8 cores -> shared
    "a machine of its own": ((7.5, 0, 0), False),
    "more processes than cores": ((8.5, 0, 0), True),
    "a CPU limit that stops it now and then": ((2.0, 4, 100), False),
    "a CPU limit that stops it often": ((2.0, 6, 100), True),
}


def write_statistics(folder: Path, throttled: int, periods: int) -> None:
    text = f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 7\n"
    (folder / "cpu.stat").write_text(text)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("case", CASES)
def test_machine_is_shared_by_its_load_or_its_limit(case: str, version: str, tmp_path: Path) -> None:
    (load, throttled, periods), expected = CASES[case]
    folder = tmp_path / "cpu" if version == "v1" else tmp_path
    folder.mkdir(exist_ok=True)
    write_statistics(folder, 50, 60)  # before the training: another container, or the start
    machine = SharedMachine(tmp_path, lambda: load, cores=8)
    write_statistics(folder, 50 + throttled, 60 + periods)
    assert machine.seen() is expected


def test_machine_without_limits_has_no_statistics(tmp_path: Path) -> None:
    assert not SharedMachine(tmp_path, lambda: 0.0, cores=1).seen()
