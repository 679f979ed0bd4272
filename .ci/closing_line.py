"""One closing line for several runs of pytest, counted from their JUnit reports: `closing_line.py REPORT.xml ...`."""

import sys
from xml.etree import ElementTree

KINDS = {"failures": "failed", "passed": "passed", "skipped": "skipped", "errors": "errors"}
"""Attributes of a report's test suites in the order and words of pytest; `passed` is what is left."""


def closing_line(reports: list[str]) -> str:
    """As pytest ends: `=== 1 failed, 20 passed, 3 skipped in 61.20s (0:01:01) ===`."""
    counts, seconds = dict.fromkeys(KINDS, 0), 0.0
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            found = {kind: int(suite.get(kind, 0)) for kind in ("failures", "skipped", "errors")}
            found["passed"] = int(suite.get("tests", 0)) - sum(found.values())
            counts = {kind: counts[kind] + found[kind] for kind in KINDS}
            seconds += float(suite.get("time", 0))
    words = [
        f"{count} {'error' if kind == 'errors' and count == 1 else KINDS[kind]}"
        for kind, count in counts.items()
        if count
    ]
    whole = int(seconds)
    time = f"{seconds:.2f}s ({whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02})"
    return f" {', '.join(words) or 'no tests ran'} in {time} ".center(80, "=")


if __name__ == "__main__":
    print(closing_line(sys.argv[1:]))
