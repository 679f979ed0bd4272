"""Run failed tests of suites with real processes once more, alone, and decide whether the run is good.

Reads DIR/SUITE.xml of each suite. A test that then passes is FLAKY: it is printed, its logs are kept, and it counts as
passed. Not run again: unit, golden, chart and architecture tests, crashed workers, suites without a whole report, more
failures than chance explains. Writes DIR/verdict.json for closing_line.py. The exit code is 0 if the run is good.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports import BadReportError, End, Outcome, Report, Result, read_end, read_report

MAX_FAILURES = 20
"""Most failures that count as chance."""
MAX_FLAKY = 3
"""Most flaky tests of a good run; more are a fault of the suite, to be fixed."""
RERUN_FOLDERS = ("trainer", "e2e/local", "cluster", "e2e/cluster")
"""Folders of tests with processes and clusters; all other tests are deterministic."""
TESTS_FAILED = 1
"""pytest's exit status when all tests ran and some failed."""
MAKE_FAILED = 2
"""make's exit code when a command of a target failed, for any exit code of that command."""

EXAMPLE = """\
example:
  rerun.py --suite test=0 --suite test-slow=2 --options test-slow='--timeout 1800' -- .venv/bin/python -m pytest

  The number after a suite is the exit code of its command, make or pytest.
"""


@dataclass(frozen=True)
class SuiteRun:
    """End of one suite."""

    name: str
    code: int
    report: Report | None = None
    end: End | None = None
    problem: str = ""
    """Reason for a missing report."""


@dataclass(frozen=True)
class Flaky:
    """A test that failed in its suite and passed alone."""

    suite: str
    result: Result

    def __str__(self) -> str:
        return f"FLAKY {self.result.node_id}: first: {self.result.message}; passed when run alone"


@dataclass(frozen=True)
class Verdict:
    """The outcome of all suites."""

    flaky: Sequence[Flaky] = ()
    failed: Sequence[str] = ()
    """Ids of tests that failed for good."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Suites whose pytest did not end normally, with the reason."""
    refusal: str = ""
    """Reason why failed tests were not run again, or why the run is not good although they passed."""

    @property
    def good(self) -> bool:
        return not (self.failed or self.broken or self.refusal)


def broken_reason(run: SuiteRun) -> str:
    """Return why a suite cannot be judged by its tests; empty if it can."""
    if run.report is None:
        return f"{run.problem} (exit code {run.code})"
    if run.code not in (0, TESTS_FAILED, MAKE_FAILED):
        return f"its command ended with exit code {run.code}"
    if run.end is None:
        return "pytest did not come to its end"
    expected = TESTS_FAILED if run.report.bad else 0
    if run.end.status != expected or (run.code == 0) != (expected == 0):
        bad = len(run.report.bad)
        return f"pytest's exit status is {run.end.status} and its command's {run.code}, with {bad} failed tests"
    if not run.report.results or run.end.collected != len(run.report.results):
        return f"the report has {len(run.report.results)} of {run.end.collected} tests"
    return ""


def causes(results: Iterable[Result]) -> int:
    """Count failures; a set-up that fails for several tests of a file counts once."""
    results = list(results)
    return sum(not result.in_setup for result in results) + len({each.file for each in results if each.in_setup})


def refusal(results: Sequence[Result]) -> str:
    """Return why these failed tests must not be run again; empty if they may."""
    for result in results:
        if result.crashed:
            return f"{result.node_id}: {result.message}"
        if result.folder not in RERUN_FOLDERS:
            return f"{result.node_id} has no processes that chance could disturb"
        if not result.recorded:
            return f"{result.node_id}: the report lacks its node id"
    if (count := causes(results)) > MAX_FAILURES:
        return f"{count} failures are more than {MAX_FAILURES}, which is not chance"
    return ""


def first_verdict(runs: Sequence[SuiteRun]) -> Verdict:
    """Judge the suites before anything is run again."""
    failed = [result for run in runs if run.report for result in run.report.bad]
    broken = {run.name: reason for run in runs if (reason := broken_reason(run))}
    why = refusal(failed) or (f"{', '.join(broken)} did not end well" if broken and failed else "")
    return Verdict(
        failed=tuple(result.node_id for result in failed), broken=broken, refusal=f"not run again: {why}" if why else ""
    )


def final_verdict(first: Sequence[tuple[str, Result]], second: Mapping[str, Result]) -> Verdict:
    """Judge failed tests, each with its suite, by the results of the second run."""
    passed = {node_id for node_id, result in second.items() if result.outcome is Outcome.PASSED}
    flaky = [Flaky(suite, result) for suite, result in first if result.node_id in passed]
    failed = [result.node_id for _, result in first if result.node_id not in passed]
    count = causes(each.result for each in flaky)
    why = f"{count} flaky tests are more than {MAX_FLAKY}: mend them" if count > MAX_FLAKY else ""
    return Verdict(flaky=flaky, failed=failed, refusal=why)


def read_suite(reports: Path, name: str, code: int) -> SuiteRun:
    file = reports / f"{name}.xml"
    try:
        return SuiteRun(name, code, read_report(file), read_end(file))
    except BadReportError as error:
        return SuiteRun(name, code, problem=str(error))


def run_again(
    folder: Path, suite: str, results: Sequence[Result], command: Sequence[str], problems: list[str]
) -> dict[str, Result]:
    """Run tests of a suite alone and return their results by node id; keep the logs of both runs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(results, 1):
        slug = re.sub(r"[^\w.-]+", "-", result.node_id.removeprefix("tests/"))[:100].strip("-")
        (folder / f"{number:02}-{slug}.first.txt").write_text(f"{result.node_id}\n\n{result.text}\n", encoding="utf-8")
    report = folder / "again.xml"
    report.unlink(missing_ok=True)
    whole = [*command, f"--junitxml={report}", *(result.node_id for result in results)]
    # The options of the first run would name its report and its workers.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    print(f"{suite}: running {len(results)} failed tests alone, log in {folder / 'again.log'}", flush=True)
    with (folder / "again.log").open("w", encoding="utf-8") as log:
        print(shlex.join(whole), file=log, flush=True)
        code = subprocess.run(whole, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    try:
        found, end = read_report(report), read_end(report)
    except BadReportError as error:
        problems.append(f"{suite}, second run: {error} (exit code {code})")
        return {}
    if end is None or end.status != code or code not in (0, TESTS_FAILED):
        problems.append(f"{suite}, second run: pytest ended with exit code {code}")
        return {}
    return {result.node_id: result for result in found.results}


def judged(runs: Sequence[SuiteRun], command: Sequence[str], options: Mapping[str, str], folder: Path) -> Verdict:
    """Judge the suites, running failed tests again if they may be."""
    verdict = first_verdict(runs)
    if verdict.broken or verdict.refusal or not verdict.failed:
        return verdict
    problems: list[str] = []
    first = [(run.name, result) for run in runs if run.report for result in run.report.bad]
    second: dict[str, Result] = {}
    for run in runs:
        if run.report and run.report.bad:
            whole = [*command, *shlex.split(options.get(run.name, ""))]
            second |= run_again(folder / run.name, run.name, run.report.bad, whole, problems)
    for problem in problems:
        print(problem)
    return final_verdict(first, second)


def describe(verdict: Verdict) -> list[str]:
    """Return lines for the log of the run."""
    lines = [str(each) for each in verdict.flaky]
    lines += [f"FAILED {node_id}" for node_id in verdict.failed]
    lines += [f"BROKEN {suite}: {reason}" for suite, reason in verdict.broken.items()]
    if verdict.refusal:
        lines.append(verdict.refusal)
    return lines


def to_json(verdict: Verdict) -> str:
    flaky = [
        {"suite": each.suite, "nodeid": each.result.node_id, "first": each.result.message} for each in verdict.flaky
    ]
    fields = {
        "good": verdict.good,
        "flaky": flaky,
        "failed": list(verdict.failed),
        "broken": dict(verdict.broken),
        "refusal": verdict.refusal,
    }
    return json.dumps(fields, indent=2) + "\n"


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _suite(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    if not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=EXIT_CODE")
    return name, int(value)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--reports", type=Path, default=Path(".test-reports"), metavar="DIR", help="folder of SUITE.xml and SUITE.exit")
    add("--artefacts", type=Path, metavar="DIR", help="folder for both logs of flaky tests (default: REPORTS/again)")
    add("--suite", type=_suite, action="append", required=True, metavar="NAME=CODE", help="a suite that ran; repeat")
    add("--options", type=_pair, action="append", default=[], metavar="NAME=OPTIONS", help="pytest's, for that suite")
    add("command", nargs="+", help="pytest without workers, after `--`; gets --junitxml and the ids of tests")
    given = parser.parse_args(arguments)
    runs = [read_suite(given.reports, name, code) for name, code in given.suite]
    folder = given.artefacts or given.reports / "again"
    verdict = judged(runs, given.command, dict(given.options), folder)
    print("\n".join(describe(verdict)), end="\n" if describe(verdict) else "", flush=True)
    given.reports.mkdir(parents=True, exist_ok=True)
    (given.reports / "verdict.json").write_text(to_json(verdict), encoding="utf-8")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
