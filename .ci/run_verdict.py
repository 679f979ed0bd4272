"""Judge the runs of pytest of one tier: run failed tests with real processes once more, and print one closing line.

A test that passes when it is run alone is FLAKY: it is printed, its logs are kept, and it counts as passed. Not run
again: unit, golden, chart and architecture tests, crashed workers, and more failures than chance explains.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports import BadReportError, Outcome, Report, Result, read_report

MAX_FAILURES = 20
"""Most failures that count as chance."""
MAX_FLAKY = 3
"""Most flaky tests of a good run; more are a fault of the suite, to be fixed."""
RERUN_FOLDERS = ("trainer", "tracing", "e2e", "cluster")
"""Folders of tests with processes and clusters; all other tests are deterministic."""
TEST_SECONDS = 1800
"""Limit of a test that is run again, scaled by patience."""
TESTS_FAILED = (1, 2)
"""Exit codes of pytest and of make when all tests ran and some failed."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of all suites."""

    flaky: Mapping[str, Result] = field(default_factory=dict)
    """Tests that failed in their suite and passed alone, by node id."""
    failed: Sequence[str] = ()
    """Ids of tests that failed for good."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Suites and steps that did not end normally, with the reason."""
    refusal: str = ""
    """Reason why failed tests were not run again, or why the run is not good although they passed."""

    @property
    def good(self) -> bool:
        return not (self.failed or self.broken or self.refusal)

    def lines(self) -> list[str]:
        """Return lines for the log of the run."""
        return [
            *(f"FLAKY {name}: first: {each.message}; passed when run alone" for name, each in self.flaky.items()),
            *(f"FAILED {name}" for name in self.failed),
            *(f"BROKEN {suite}: {reason}" for suite, reason in self.broken.items()),
            *([self.refusal] if self.refusal else []),
        ]


def broken_reason(report: Report, code: int) -> str:
    """Return why a suite cannot be judged by its tests; empty if it can."""
    if not report.results:
        return f"no tests ran (exit code {code})"
    if code not in (0, *TESTS_FAILED) or (code == 0) != (not report.bad):
        return f"its command ended with exit code {code}, with {len(report.bad)} failed tests"
    return ""


def causes(results: Collection[Result]) -> int:
    """Count failures; a set-up that fails for several tests of a file counts once."""
    return sum(not result.in_setup for result in results) + len({each.file for each in results if each.in_setup})


def refusal(results: Sequence[Result]) -> str:
    """Return why these failed tests must not be run again; empty if they may."""
    for result in results:
        if result.crashed:
            return f"{result.node_id}: {result.message}"
        if not result.file.startswith(tuple(f"tests/{folder}/" for folder in RERUN_FOLDERS)):
            return f"{result.node_id} has no processes that chance could disturb"
    if (count := causes(results)) > MAX_FAILURES:
        return f"{count} failures are more than {MAX_FAILURES}, which is not chance"
    return ""


def judge(folder: Path, codes: Mapping[str, int], command: Sequence[str]) -> tuple[Verdict, list[Report]]:
    """Judge suites by their reports in `folder` and their exit codes; `command`: pytest, for tests to run again."""
    reports, broken = [], {}
    for suite, code in codes.items():
        try:
            reports.append(report := read_report(folder / f"{suite}.xml"))
            reason = broken_reason(report, code)
        except BadReportError as error:
            reason = f"{error} (exit code {code})"
        broken.update({suite: reason} if reason else {})
    bad = [result for report in reports for result in report.bad]
    why = refusal(bad) or (f"{', '.join(broken)} did not end well" if broken and bad else "")
    if why or broken or not bad:
        failed = [result.node_id for result in bad]
        return Verdict(failed=failed, broken=broken, refusal=f"not run again: {why}" if why else ""), reports
    passed: set[str] = set()
    for report in reports:
        if report.bad:
            passed |= _passed_alone(folder / "again" / report.suite, report.bad, command)
    return final_verdict(bad, passed), reports


def final_verdict(bad: Sequence[Result], passed: Collection[str]) -> Verdict:
    """Judge failed tests by the ids of those that passed in the second run."""
    flaky = {result.node_id: result for result in bad if result.node_id in passed}
    failed = [result.node_id for result in bad if result.node_id not in passed]
    count = causes(flaky.values())
    why = f"{count} flaky tests are more than {MAX_FLAKY}: mend them" if count > MAX_FLAKY else ""
    return Verdict(flaky, failed, refusal=why)


def _passed_alone(folder: Path, results: Sequence[Result], command: Sequence[str]) -> set[str]:
    """Run tests of a suite alone and return the ids of those that passed; keep the logs of both runs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(results, 1):
        slug = re.sub(r"[^\w.-]+", "-", result.node_id.removeprefix("tests/"))[:100].strip("-")
        (folder / f"{number:02}-{slug}.first.txt").write_text(f"{result.node_id}\n\n{result.text}\n", encoding="utf-8")
    report, limit = folder / "again.xml", f"--timeout={TEST_SECONDS}"
    whole = [*command, limit, f"--junitxml={report}", *(result.node_id for result in results)]
    # The options of the first run would name its report and its workers.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    print(f"running {len(results)} failed tests alone, log in {folder / 'again.log'}", flush=True)
    with (folder / "again.log").open("w", encoding="utf-8") as log:
        print(shlex.join(whole), file=log, flush=True)
        subprocess.run(whole, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        return {each.node_id for each in read_report(report).results if each.outcome is Outcome.PASSED}
    except BadReportError as error:
        print(f"second run: {error}", flush=True)
        return set()


def closing_line(reports: Sequence[Report], verdict: Verdict, seconds: float) -> str:
    """Return a line as at the end of pytest: `=== 1 failed, 20 passed, 3 skipped in 61.20s (0:01:01) ===`.

    Flaky tests count as passed unless they are too many; a suite or step that did not end well counts as a failure.
    """
    results = [result for report in reports for result in report.results]
    flaky = 0 if verdict.refusal else len(verdict.flaky)
    failed = sum(not result.good for result in results) - flaky + len(verdict.broken)
    counts = {
        "failed": failed or int(not verdict.good),
        "passed": sum(result.outcome is Outcome.PASSED for result in results) + flaky,
        "skipped": sum(result.outcome is Outcome.SKIPPED for result in results),
        "flaky": flaky,
    }
    parts = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    whole = int(seconds)
    time = f"{seconds:.2f}s ({whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02})"
    return f" {parts or 'no tests ran'} in {time} ".center(80, "=")
