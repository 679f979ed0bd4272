"""Print a table of the suites beside their budgets, and the slowest tests.

A budget is for the seconds of all tests of a kind, added up over the workers of a suite, on the reference machine of
suite_plugins/patience.py; FINETUNE_TEST_PATIENCE scales it. Exceeding one is reported and fails nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import Report, Result, read_reports
from tables import seconds, table

PATIENCE = "FINETUNE_TEST_PATIENCE"
EXAMPLE = """\
example:
  suite_table.py .test-reports/*.xml
"""


@dataclass(frozen=True)
class Budget:
    """Seconds for all tests of a kind, and for one of them."""

    all: float
    each: float


BUDGETS: Mapping[str, Budget] = {
    "unit": Budget(all=240, each=5),
    "golden": Budget(all=30, each=5),
    "chart": Budget(all=60, each=10),
    "architecture": Budget(all=60, each=15),
    "trainer": Budget(all=480, each=20),
    "tracing": Budget(all=120, each=30),
    "e2e/local": Budget(all=120, each=60),
    "slow": Budget(all=900, each=240),
    "cluster": Budget(all=1500, each=90),
    "e2e/cluster": Budget(all=2400, each=300),
}
"""Kind of test (a folder of tests/, or `slow` for the suite test-slow) -> its budget."""


def kind(suite: str, result: Result) -> str:
    """Return the kind of a test, as in BUDGETS."""
    return "slow" if suite == "test-slow" else result.folder or "other"


def by_kind(reports: Sequence[Report]) -> dict[str, list[Result]]:
    """Return results by kind, in the order of BUDGETS, then others."""
    found: dict[str, list[Result]] = {}
    for report in reports:
        for result in report.results:
            found.setdefault(kind(report.suite, result), []).append(result)
    order = [*BUDGETS, *sorted(found.keys() - BUDGETS.keys())]
    return {name: found[name] for name in order if name in found}


def state(spent: float, budget: float | None) -> str:
    """Describe the distance of `spent` from its budget."""
    if budget is None:
        return "no budget"
    return f"{spent - budget:.0f} s over" if spent > budget else "within"


def suite_rows(reports: Sequence[Report]) -> list[list[str]]:
    return [
        [
            report.suite,
            str(len(report.results)),
            seconds(report.seconds),
            seconds(sum(each.seconds for each in report.results)),
            seconds(sum(each.cpu_seconds for each in report.results)),
        ]
        for report in reports
    ]


def kind_rows(kinds: Mapping[str, Sequence[Result]], factor: float) -> list[list[str]]:
    rows = []
    for name, results in kinds.items():
        spent = sum(each.seconds for each in results)
        budget = BUDGETS[name].all * factor if name in BUDGETS else None
        rows.append([
            name,
            str(len(results)),
            seconds(spent),
            seconds(sum(each.cpu_seconds for each in results)),
            f"{budget:.0f}" if budget is not None else "",
            state(spent, budget),
        ])  # fmt: skip
    return rows


def slowest_rows(kinds: Mapping[str, Sequence[Result]], factor: float, top: int) -> list[list[str]]:
    """Return rows of the slowest tests, with the budget for one of their kind."""
    every = sorted(
        ((each, name) for name, results in kinds.items() for each in results), key=lambda one: -one[0].seconds
    )
    rows = []
    for result, name in every[:top]:
        budget = BUDGETS[name].each * factor if name in BUDGETS else None
        rows.append([
            seconds(result.seconds),
            seconds(result.cpu_seconds),
            f"{budget:.0f}" if budget is not None else "",
            state(result.seconds, budget),
            result.node_id,
        ])  # fmt: skip
    return rows


def over_budget(kinds: Mapping[str, Sequence[Result]], factor: float) -> dict[str, int]:
    """Count tests over the budget for one of their kind, by kind."""
    counts = {
        name: sum(each.seconds > BUDGETS[name].each * factor for each in results)
        for name, results in kinds.items()
        if name in BUDGETS
    }
    return {name: number for name, number in counts.items() if number}


def patience() -> float:
    """Return the factor for a slower machine; 1 if the variable is unset or no number."""
    try:
        return max(1.0, float(os.environ.get(PATIENCE, "")))
    except ValueError:
        return 1.0


def describe(reports: Sequence[Report], factor: float, top: int) -> str:
    kinds = by_kind(reports)
    over = ", ".join(f"{number} {name}" for name, number in over_budget(kinds, factor).items())
    return "\n\n".join([
        table(["suite", "tests", "wall s", "test s", "CPU s"], suite_rows(reports)),
        table(["kind", "tests", "test s", "CPU s", "budget s", ""], kind_rows(kinds, factor)),
        f"budgets are scaled by {factor:g}; single tests over theirs: {over or 'none'}",
        table(["test s", "CPU s", "budget s", "", f"slowest {top} tests"], slowest_rows(kinds, factor, top)),
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="tests to list (default: 20)")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    given = parser.parse_args(arguments)
    reports = read_reports(given.reports, sys.stdout)
    print(describe(reports, patience(), given.top))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
