"""Run the tests on a cluster with nodes: one box, held by this process, and a call of pytest for each phase.

    python -m box_support.phases --reports FOLDER [FILE...] [PYTEST-OPTION...]

Such tests mostly wait for pods to start, so files run in parallel where possible (see the suite's conftest.py). An
external cluster, named by FINETUNE_TEST_KUBECONFIG, gets all phases in one call, one test at a time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from box_support.box import CONTROLLERS, HELD, ROOT, running_box, why_no_box
from suite_plugins.times import ControlGroup

SUITE = "tests/e2e/cluster"
NOTHING_CHOSEN = 5
"""Exit code of pytest without tests: options may deselect all of a phase."""

FILE_BYTES = 9 << 29
"""Memory for the processes of one file, 4.5 GiB: two ranks of 1.2 GiB, their launchers, a server, pytest. With less,
all of them wait for the disk: Linux drops their code, and reads it again.
"""

NOT_ENDED = 70
"""Exit code of a phase until it ends; none of pytest's."""

BOX_GROUP = ControlGroup()
"""Counts the CPU time of the box's servers and pods, which no process of pytest has started."""


@dataclass(frozen=True)
class Phase:
    """Tests that may run at the same time."""

    name: str
    marks: str
    workers: int = 0
    """Files that run in parallel; 0: one test after another."""

    def run(self, reports: Path, options: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run pytest and return its exit code, also written beside its report for scripts that judge each call; no
        file is left of a phase without tests.
        """
        self.write_code(reports, NOT_ENDED)
        before = BOX_GROUP.seconds()
        code = subprocess.run(self.command(reports, options), cwd=ROOT, env=environment).returncode
        if before is not None and (after := BOX_GROUP.seconds()) is not None:
            (reports / f"e2e-{self.name}.cpu").write_text(f"{after - before:.1f}\n")
        self.write_code(reports, code)
        if code == NOTHING_CHOSEN:
            for ending in ("code", "cpu", "xml"):
                (reports / f"e2e-{self.name}.{ending}").unlink(missing_ok=True)
        return code

    def write_code(self, reports: Path, code: int) -> None:
        """Write the exit code beside the phase's report."""
        reports.mkdir(parents=True, exist_ok=True)
        (reports / f"e2e-{self.name}.code").write_text(f"{code}\n")

    def command(self, reports: Path, options: Sequence[str]) -> list[str]:
        """Return the command line of pytest for this phase."""
        workers = fitting(self.workers, psutil.virtual_memory().available)
        beside = ["--numprocesses", str(workers), "--dist", "loadfile", "--max-worker-restart", "0"] if workers else []
        chosen = ["-m", self.marks] if self.marks else []
        report = f"--junitxml={reports / f'e2e-{self.name}.xml'}"
        files = [] if any(option.startswith(SUITE) for option in options) else [SUITE]
        return [sys.executable, "-m", "pytest", *files, *chosen, *beside, report, *options]


def fitting(workers: int, available: int) -> int:
    """Return the number of files, at most `workers`, for which `available` bytes of memory are enough; at least 1."""
    return min(workers, max(1, available // FILE_BYTES))


PHASES = (
    Phase("bare", "bare"),
    Phase("shared", "not bare and not alone and not last", workers=3),
    Phase("alone", "alone or last"),
)


def main(arguments: Sequence[str]) -> int:
    """Run all phases, also after a failed one; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description="Run the tests on a cluster with nodes.")
    parser.add_argument("--reports", type=Path, default=Path(".test-reports"), help="folder of the JUnit reports")
    parser.add_argument("--only", choices=[phase.name for phase in PHASES], help="run this phase alone")
    chosen, options = parser.parse_known_args(arguments)
    phases = [phase for phase in PHASES if chosen.only in (None, phase.name)]
    if os.environ.get("FINETUNE_TEST_KUBECONFIG") or why_no_box():
        return Phase("all", "").run(chosen.reports, options, os.environ)
    for phase in phases:
        # A script that judges each call must not miss one that never ran.
        phase.write_code(chosen.reports, NOT_ENDED)
    BOX_GROUP.join()
    # On SIGTERM the box is taken down.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="finetune-box-") as box_folder, ExitStack() as stack:
        box = stack.enter_context(running_box(Path(box_folder)))
        box.install_operator(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        environment, codes = {**os.environ, HELD: str(box.folder)}, []
        for phase in phases:
            if phase.name != "bare":
                # A plan by `launcher: auto` depends on installed controllers: the same for all workers from the start.
                for controller in CONTROLLERS:
                    box.install_controller(controller)
            codes.append(phase.run(chosen.reports, options, environment))
    failed = [code for code in codes if code not in (0, NOTHING_CHOSEN)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
