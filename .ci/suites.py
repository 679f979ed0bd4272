"""Run the tests of a tier in two queues: one computes with two workers, one waits for clusters, niced.

    suites.py t2                  T1, and the dear tests that a change can break: what .ci/run calls
    suites.py t3 --part 1/6       everything, in parts of similar length
    suites.py changed --list      the dear tests of the areas that a change touches; --list only names them

Ends with tables of CPU seconds, the choice of files, and one closing line for all suites.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread

from budgets import TIERS, describe, exceeds
from dear_tests import (
    ROOT,
    Areas,
    Choice,
    changed_since,
    choose,
    default_base,
    first_reasons,
    git,
    part,
    read_areas,
    touched,
)
from run_verdict import closing_line, judge

REPORTS = Path(".test-reports")
PYTEST = (".venv/bin/python", "-m", "pytest")
CLUSTER, BOX = "tests/cluster/", "tests/e2e/cluster/"
PROGRAMS = {CLUSTER: ("etcd", "kubernetes"), BOX: ("etcd", "kubernetes", "training-operator", "mpi-operator")}
"""Suite -> programs that all its tests need."""
LINT_SECONDS = 100.0
"""CPU seconds of T0, which are a part of T2's."""
PATIENCE, BESIDE = "FINETUNE_TEST_PATIENCE", 3.0
TEST_SECONDS = "1800"
"""Limit of a dear test, scaled by patience."""


@dataclass
class Queues:
    """The suites of a run: their exit codes, and the processes that are running."""

    everything: bool = False
    """All cases of grids run, not a choice of them."""
    codes: dict[str, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, files: Sequence[str], cheap: bool) -> None:
        """Run dear test files, and T1 if `cheap`, to their end."""
        cluster, box = ([file for file in files if file.startswith(suite)] for suite in (CLUSTER, BOX))
        rest = [file for file in files if not file.startswith((CLUSTER, BOX))]
        queues = [
            Thread(target=self._compute, args=(rest, cheap), daemon=True),
            Thread(target=self._wait, args=(cluster, box), daemon=True),
        ]
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            for queue in queues:
                queue.start()
            for queue in queues:
                queue.join()
        finally:
            for process in self._running.values():
                os.killpg(process.pid, signal.SIGTERM)

    def _compute(self, files: Sequence[str], cheap: bool) -> None:
        if cheap:
            options = "--everything" if self.everything else ""
            command = ["make", "test", "WORKERS=2", f"REPORTS={REPORTS}", f"ARGS={options}"]
            self._suite("test", command, {})
        if files:
            # DeepSpeed compiles two files of 2 GB each at its first offload: one after the other.
            self._suite("dear", self._pytest("dear", files, workers=2), {"MAX_JOBS": "1"})

    def _wait(self, cluster: Sequence[str], box: Sequence[str]) -> None:
        if cluster:
            # One that is given is one for all; of our own, each worker has a control plane.
            workers = 0 if "FINETUNE_TEST_KUBECONFIG" in os.environ else 3
            self._suite("cluster", self._pytest("cluster", cluster, workers), {}, nice=5)
        if box:
            command = [PYTEST[0], "-m", "box_support.phases", "--reports", str(REPORTS), *box]
            self._suite("e2e", command, {"PYTHONPATH": "tests"}, nice=5)
            # A report and a code for each phase that had tests; those of the whole where none came to its start.
            phases = {file.stem: int(file.read_text()) for file in REPORTS.glob("e2e-*.code")}
            if phases and (self.codes["e2e"] == 0 or any(phases.values())):
                del self.codes["e2e"]
            self.codes |= phases

    def _pytest(self, name: str, files: Sequence[str], workers: int) -> list[str]:
        options = ["--dear", *(["--everything"] if self.everything else []), "--timeout", TEST_SECONDS]
        beside = ["-n", str(workers), "--dist", "loadfile", "--max-worker-restart", "0"]
        return [*PYTEST, *options, *beside, f"--junitxml={REPORTS / name}.xml", *files]

    def _suite(self, name: str, command: Sequence[str], more: Mapping[str, str], nice: int = 0) -> None:
        """Run one suite to its end and print its output."""
        log = REPORTS / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **more},
                start_new_session=True,
                preexec_fn=partial(os.nice, nice),
            )
            self._running[name] = process
            self.codes[name] = process.wait()
        del self._running[name]
        text = log.read_text(encoding="utf-8", errors="replace")
        self.say(f"{name} has ended with {self.codes[name]}:\n{text}")

    def say(self, text: str) -> None:
        seconds = int(time.monotonic() - self.began)
        print(f"[{seconds // 60:02}:{seconds % 60:02}] {text}", flush=True)


def selected(tier: str, base: str, place: str, table: Areas) -> Choice:
    """Return the dear test files of a run; ValueError for an unknown base or part."""
    if tier == "t3":
        number, _, count = place.partition("/")
        return part(table, int(number), int(count or 1))
    changed = changed_since(base or default_base())
    if tier == "changed":
        return Choice({file.path: reason for file, reason in first_reasons(touched(table, changed)).items()}, {})
    return choose(table, changed, git("rev-parse", "HEAD"), TIERS["T2"] - TIERS["T1"] - LINT_SECONDS)


def programs(choice: Choice, table: Areas) -> list[str]:
    """Return the programs of a control plane that the chosen tests need."""
    suites = [names for suite, names in PROGRAMS.items() if any(path.startswith(suite) for path in choice.chosen)]
    files = [file.programs for file in table.files if file.path in choice.chosen]
    return list(dict.fromkeys(name for names in (*suites, *files) for name in names))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("tier", choices=["t2", "t3", "changed"])
    add("--base", default="", metavar="COMMIT", help="begin of the change (default: where it left main)")
    add("--part", default="1/1", metavar="K/N", help="of t3: one of N parts")
    add("--list", action="store_true", help="name the chosen files, and run nothing")
    add("--programs", action="store_true", help="print the needed programs of a control plane, and run nothing")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    table = read_areas()
    try:
        choice = selected(given.tier, given.base, given.part, table)
    except ValueError as error:
        parser.error(str(error))
    if given.programs:
        print(*programs(choice, table))
        return 0
    print("\n".join(choice.lines()), flush=True)
    cheap = given.tier == "t2" or (given.tier == "t3" and given.part.startswith("1/"))
    if given.list or not (cheap or choice.chosen):
        return 0
    REPORTS.mkdir(exist_ok=True)
    for old in (file for ending in ("xml", "code", "cpu", "log") for file in REPORTS.glob(f"*.{ending}")):
        old.unlink()
    os.environ[PATIENCE] = f"{beside_each_other():.2f}"
    queues = Queues(everything=given.tier == "t3")
    queues.run(list(choice.chosen), cheap)
    return finish(queues, choice, "T2" if given.tier == "t2" else "")


def beside_each_other() -> float:
    """Return the factor for limits of tests: two queues beside each other are slower than one suite alone."""
    sys.path.insert(0, str(ROOT / "tests"))
    from suite_plugins.patience import MAX_FACTOR, factor

    return min(MAX_FACTOR, BESIDE * factor())


def finish(queues: Queues, choice: Choice, tier: str) -> int:
    """Run failed tests again, print the tables and the closing line, and return the exit code."""
    verdict, reports = judge(REPORTS, queues.codes, PYTEST)
    if tier and exceeds(reports, tier):
        verdict = replace(verdict, broken={**verdict.broken, tier: "its CPU seconds are far above the budget"})
    print("\n".join(["", describe(reports, tier), "", *choice.lines(), "", *verdict.lines()]))
    print(closing_line(reports, verdict, time.monotonic() - queues.began), flush=True)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
