"""Signs that a training had to share its processors: a slow step is then no fault of the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from finetune_trainer.report.measured_facts import CGROUP, cgroup_folders

THROTTLED_SHARE = 0.05
"""Share of the scheduler's periods, 100 ms each, in which a process was stopped by its CPU limit."""


class SharedMachine:
    """Signs of other programs on the machine of this process, from now until `seen`."""

    def __init__(
        self, cgroup: Path = CGROUP, load: Callable[[], float] = lambda: os.getloadavg()[0], cores: int | None = None
    ) -> None:
        """`load`: function that returns the runnable processes of the machine, the mean of the last minute."""
        self._cgroup = cgroup
        self._load = load
        self._cores = cores or os.cpu_count() or 1
        self._began = self._throttled()

    def seen(self) -> bool:
        """Return True if more processes than cores were runnable, or the CPU limit stopped this one often."""
        throttled, periods = (now - then for now, then in zip(self._throttled(), self._began, strict=True))
        return self._load() > self._cores or throttled > THROTTLED_SHARE * periods

    def _throttled(self) -> tuple[int, int]:
        """Return the periods with throttling and all periods, of this process's cgroup and its parents."""
        throttled = periods = 0
        for folder in (*cgroup_folders(self._cgroup), self._cgroup / "cpu"):
            try:
                lines = (folder / "cpu.stat").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            values = dict(line.split() for line in lines)
            throttled += int(values.get("nr_throttled", 0))
            periods += int(values.get("nr_periods", 0))
        return throttled, periods
