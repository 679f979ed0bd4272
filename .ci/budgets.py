"""Print the CPU seconds of test suites beside their budgets, and the dearest tests.

    budgets.py --tier T1 .test-reports/test.xml      one line, and what is over; exits with 1 above 150 % of the tier
    budgets.py .test-reports/*.xml                   tables by suite and file, with the twenty dearest tests
    budgets.py --record .test-reports/*.xml          write the seconds of dear files into tests/areas.toml

CPU seconds are divided by the calibration of the same run (tests/suite_plugins/times.py): those of the reference
machine. Those of a suite include imports and collection in its workers.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dear_tests import TABLE, DearFile, read_areas
from reports import BadReportError, Report, read_report

TIERS: Mapping[str, float] = {"T1": 550.0, "T2": 2000.0}
"""Tier -> CPU seconds of all its tests; T1 is a part of T2."""
CHEAP_SECONDS = 10.0
"""CPU seconds of one test in T1."""
NOTED, FAILED = 1.1, 1.5
"""Parts of a budget: above the first it is noted, above the second a tier fails."""
SLACK_SECONDS = 5.0
"""A dear file differs from its recorded seconds by more than this before it is noted."""
DEAREST = 20


def calibration(reports: Sequence[Report]) -> float:
    """Return the mean speed of the machine during these runs; 1 without a measurement."""
    found = [each.number("calibration") for report in reports for each in report.results]
    return statistics.mean([value for value in found if value] or [1.0])


def total(reports: Sequence[Report]) -> float:
    """Return the CPU seconds of all suites on the reference machine."""
    return sum(report.cpu_seconds for report in reports) / calibration(reports)


def by_file(reports: Sequence[Report], speed: float) -> dict[str, float]:
    """Return CPU seconds of each file without imports, the dearest first; what a suite shares counts by time."""
    found: dict[str, float] = {}
    for report in reports:
        whole = sum(each.seconds for each in report.results) or 1.0
        for each in report.results:
            spent = each.cpu_seconds + report.shared * each.seconds / whole
            found[each.file] = found.get(each.file, 0.0) + spent / speed
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def over(reports: Sequence[Report], files: Sequence[DearFile], speed: float, tier: str) -> list[str]:
    """Return a line for each test of T1, dear file and tier above its budget."""
    lines = []
    for each in (each for report in reports if report.suite == "test" for each in report.results):
        if (spent := each.cpu_seconds / speed) > NOTED * CHEAP_SECONDS:
            lines.append(f"over budget: {spent:.1f} of {CHEAP_SECONDS:g} CPU s: {each.node_id}: mark it slow")
    measured = by_file([report for report in reports if report.suite != "test"], speed)
    for file in files:
        if (spent := measured.get(file.path, 0.0)) > NOTED * file.cpu + SLACK_SECONDS:
            lines.append(f"over budget: {spent:.0f} of {file.cpu:g} CPU s: {file.path}")
    if tier and (spent := total(reports)) > NOTED * TIERS[tier]:
        lines.append(f"over budget: {spent:.0f} of {TIERS[tier]:g} CPU s: {tier}")
    return lines


def describe(reports: Sequence[Report], tier: str = "") -> str:
    """Return the tables of a run: suites, the dearest files and tests, and what is over its budget."""
    speed = calibration(reports)
    lines = ["tests  CPU s, of it imports   and pods  suite"]
    for report in reports:
        before = sum(each.number("cpu.before") for each in report.results)
        figures = "".join(f"{seconds / speed:11.1f}" for seconds in (report.cpu_seconds, before, report.shared))
        lines.append(f"{len(report.results):5}{figures}  {report.suite}")
    lines += ["", f"  CPU s  dearest {DEAREST} files"]
    lines += [f"{spent:7.1f}  {file}" for file, spent in list(by_file(reports, speed).items())[:DEAREST]]
    tests = sorted((each for report in reports for each in report.results), key=lambda each: -each.cpu_seconds)
    lines += ["", f"  CPU s  dearest {DEAREST} tests"]
    lines += [f"{each.cpu_seconds / speed:7.1f}  {each.node_id}" for each in tests[:DEAREST]]
    return "\n".join([*lines, "", *over(reports, read_areas().files, speed, tier), summary(reports, tier)])


def summary(reports: Sequence[Report], tier: str) -> str:
    """Return one line: CPU seconds of all suites, the tier's budget, the speed of the machine."""
    spent = f"{tier or 'all'}: {total(reports):.0f}{f' of {TIERS[tier]:g}' if tier else ''} CPU s"
    return f"{spent}; this machine took {calibration(reports):.2f} times as long as the reference"


def exceeds(reports: Sequence[Report], tier: str) -> bool:
    """Return whether a tier is so far above its budget that the run fails."""
    return total(reports) > FAILED * TIERS[tier]


def record(text: str, measured: Mapping[str, float]) -> str:
    """Return the table of areas with measured CPU seconds in the rows of files that ran."""
    suite, lines = "", []
    for line in text.split("\n"):
        if match := re.match(r'\[tests\."?([\w/]+)', line):
            suite = match[1]
        if (match := re.match(r"(\w+) = {cpu = \d+", line)) and (
            spent := measured.get(f"tests/{suite}/test_{match[1]}.py")
        ):
            line = f"{match[1]} = {{cpu = {max(1, round(spent))}{line[match.end() :]}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=sorted(TIERS), default="", help="compare with this tier's budget")
    parser.add_argument("--record", action="store_true", help="write measured seconds into the table of areas")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    given = parser.parse_args(arguments)
    try:
        reports = [read_report(file) for file in given.reports]
    except BadReportError as error:
        print(error, file=sys.stderr)
        return 2
    speed = calibration(reports)
    if given.record:
        dear = by_file([report for report in reports if report.suite != "test"], speed)
        TABLE.write_text(record(TABLE.read_text(encoding="utf-8"), dear), encoding="utf-8")
    elif given.tier:
        print("\n".join([*over(reports, [], speed, given.tier), summary(reports, given.tier)]))
        return int(exceeds(reports, given.tier))
    else:
        print(describe(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
