"""Print where the time of the tests went: by suite, file, fixture and kind of work, and the longest tests.

Reads JUnit reports with the properties of tests/suite_plugins/times.py; of others only seconds are known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports import Report, Result, read_reports
from tables import seconds, table

EXAMPLE = """\
examples:
  test_times.py .test-reports/*.xml                 everything, as tables
  test_times.py --top 20 .test-reports/test.xml     the 20 longest of each
  test_times.py -o json .test-reports/*.xml | jq '.kinds'

columns:
  test s    set-up, call and tear-down, added up over workers
  CPU s     the test process and the processes below it, but not daemons
  fixture   its set-up, without the fixtures that it requests
  kind      marked by support modules with `spent` of suite_plugins/times.py
"""


@dataclass(frozen=True)
class Share:
    """Time of one suite, file, fixture or kind of work."""

    name: str
    count: int
    """Number of tests; for a fixture, of set-ups that took at least a millisecond."""
    seconds: float
    cpu_seconds: float = 0.0
    longest: float = 0.0
    wall_seconds: float = 0.0


def _share(name: str, results: Sequence[Result], wall_seconds: float = 0.0) -> Share:
    return Share(
        name=name,
        count=len(results),
        seconds=sum(each.seconds for each in results),
        cpu_seconds=sum(each.cpu_seconds for each in results),
        longest=max((each.seconds for each in results), default=0.0),
        wall_seconds=wall_seconds,
    )


def by_suite(reports: Sequence[Report]) -> list[Share]:
    return [_share(report.suite, report.results, report.seconds) for report in reports]


def by_file(results: Iterable[Result]) -> list[Share]:
    files: dict[str, list[Result]] = {}
    for result in results:
        files.setdefault(result.file, []).append(result)
    return _longest_first(_share(name, found) for name, found in files.items())


def by_part(results: Iterable[Result], prefix: str) -> list[Share]:
    """Sum up the properties that begin with `prefix`, by fixture or kind."""
    parts: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.parts(prefix).items():
            parts.setdefault(name, []).append(value)
    return _longest_first(Share(name, len(found), sum(found), longest=max(found)) for name, found in parts.items())


def _longest_first(shares: Iterable[Share]) -> list[Share]:
    return sorted(shares, key=lambda share: -share.seconds)


def times(reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Return all tables as values for JSON; all but suites and kinds have at most `top` rows."""
    results = [result for report in reports for result in report.results]
    longest = sorted(results, key=lambda result: -result.seconds)[:top]
    return {
        "suites": [vars(share) for share in by_suite(reports)],
        "kinds": [vars(share) for share in by_part(results, "kind.")],
        "before_first_test": [
            {
                "suite": report.suite,
                "processes": [each.parts("before")[""] for each in report.results if "before" in each.properties],
            }
            for report in reports
        ],
        "files": [vars(share) for share in by_file(results)[:top]],
        "fixtures": [vars(share) for share in by_part(results, "fixture.")[:top]],
        "tests": [
            {
                "nodeid": result.node_id,
                "seconds": result.seconds,
                "cpu_seconds": result.cpu_seconds,
                "phases": result.parts("seconds."),
                "kinds": result.parts("kind."),
            }
            for result in longest
        ],
    }


def describe(found: dict[str, Any]) -> str:
    """Return the values as text tables."""
    processes = [[each["suite"], " ".join(map(seconds, each["processes"]))] for each in found["before_first_test"]]
    tests = [
        [seconds(each["seconds"]), seconds(each["cpu_seconds"]), each["nodeid"] + _kinds(each["kinds"])]
        for each in found["tests"]
    ]
    part = ("times", "s", "longest s"), ("count", "seconds", "longest")
    return "\n\n".join([
        _shares(
            found["suites"],
            ("suite", "tests", "wall s", "test s", "CPU s"),
            ("name", "count", "wall_seconds", "seconds", "cpu_seconds"),
        ),
        _shares(found["kinds"], ("kind of work", *part[0]), ("name", *part[1])),
        table(["suite", "s of each process before its first test: imports, collection"], processes),
        _shares(
            found["files"],
            ("file", "tests", "test s", "CPU s", "longest s"),
            ("name", "count", "seconds", "cpu_seconds", "longest"),
        ),
        _shares(found["fixtures"], ("fixture", *part[0]), ("name", *part[1])),
        table(["test s", "CPU s", "longest tests"], tests),
    ])  # fmt: skip


def _shares(shares: Sequence[dict[str, Any]], heading: Sequence[str], fields: Sequence[str]) -> str:
    return table(heading, [[_cell(share[field]) for field in fields] for share in shares])


def _cell(value: str | int | float) -> str:
    return seconds(value) if isinstance(value, float) else str(value)


def _kinds(kinds: dict[str, float]) -> str:
    """Format kinds as `  (training 3.1, waiting 2.0)`."""
    longest = sorted(kinds.items(), key=lambda one: -one[1])
    parts = ", ".join(f"{name} {value:.1f}" for name, value in longest if value >= 0.05)
    return f"  ({parts})" if parts else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", choices=["json"], help="print JSON in place of tables")
    add("--top", type=int, default=100, metavar="N", help="rows of each table, at most (default: 100)")
    add("reports", nargs="+", type=Path, metavar="REPORT.xml")
    given = parser.parse_args(arguments)
    reports = read_reports(given.reports, sys.stderr)
    if not reports:
        return 1
    found = times(reports, given.top)
    print(json.dumps(found, indent=2) if given.output == "json" else describe(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
