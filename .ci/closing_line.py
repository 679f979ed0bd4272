"""Print one closing line for several runs of pytest, in pytest's own form.

Counts the tests of the JUnit reports. By the verdict of rerun.py, flaky tests count as passed, and a suite that did not
end well counts as a failure of its own. Only the line of a run that is not good has `N failed`; errors are counted
there, too. The exit code is 0 if the run is good.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import BadReportError, Outcome, Report, read_report, suite_name

EXAMPLE = """\
example:
  closing_line.py --reports .test-reports --seconds $SECONDS
  === 5217 passed, 3 skipped, 1 flaky in 1640.00s (0:27:20) ===
"""


@dataclass(frozen=True)
class Counts:
    """Tests by outcome; flaky ones are among the passed."""

    failed: int
    passed: int
    skipped: int
    flaky: int


def count(reports: Sequence[Report], flaky: Collection[str], more_failures: int) -> Counts:
    """Count tests. `flaky`: node ids that count as passed; `more_failures`: suites and steps without a result."""
    results = [result for report in reports for result in report.results]
    forgiven = [result for result in results if not result.good and result.node_id in flaky]
    return Counts(
        failed=sum(not result.good for result in results) - len(forgiven) + more_failures,
        passed=sum(result.outcome is Outcome.PASSED for result in results) + len(forgiven),
        skipped=sum(result.outcome is Outcome.SKIPPED for result in results),
        flaky=len(forgiven),
    )


def closing_line(counts: Counts, seconds: float) -> str:
    """Return a line as at the end of pytest: `=== 1 failed, 20 passed, 3 skipped in 61.20s (0:01:01) ===`."""
    parts = [f"{number} {name}" for name, number in vars(counts).items() if number]
    whole = int(seconds)
    time = f"{seconds:.2f}s ({whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02})"
    return f" {', '.join(parts) or 'no tests ran'} in {time} ".center(80, "=")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--reports", type=Path, metavar="DIR", help="all DIR/*.xml, and the verdict of rerun.py on them")
    add("--seconds", type=float, help="wall-clock time of the whole run (default: the sum of the suites')")
    add("--failed", action="append", default=[], metavar="STEP", help="a step without a report that failed; repeat")
    add("files", nargs="*", type=Path, metavar="REPORT.xml", help="reports without a verdict")
    given = parser.parse_args(arguments)
    found: list[Report] = []
    broken = set(given.failed)
    for file in [*given.files, *(sorted(given.reports.glob("*.xml")) if given.reports else [])]:
        try:
            found.append(read_report(file))
        except BadReportError:
            broken.add(suite_name(file))
    flaky: set[str] = set()
    good = True
    if given.reports:
        try:
            verdict = json.loads((given.reports / "verdict.json").read_text(encoding="utf-8"))
            broken |= set(verdict["broken"])
            good = verdict["good"]
            # Too many flaky tests count as failed: nothing else shows why the run is not good.
            flaky = set() if verdict["refusal"] else {each["nodeid"] for each in verdict["flaky"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"verdict of {given.reports}: {error}", file=sys.stderr)
            broken.add("verdict")
    if not any(report.results for report in found):
        broken.add("no tests")
    counts = count(found, flaky, len(broken))
    if not good and not counts.failed:
        counts = count(found, flaky, 1)
    print(closing_line(counts, given.seconds if given.seconds is not None else sum(each.seconds for each in found)))
    return 0 if good and not counts.failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
