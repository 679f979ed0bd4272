"""Read JUnit reports of pytest, with the properties that tests/suite_plugins/times.py adds; older reports have none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

CRASH = re.compile(r"worker '[^']+' crashed")
"""pytest-xdist's message for a test whose process died."""
FOLDERS = ("unit", "golden", "chart", "architecture", "trainer", "tracing", "e2e/local", "cluster", "e2e/cluster")
"""Folders of tests/, each a kind of test."""


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"


class BadReportError(Exception):
    """A report is missing or cut short."""


@dataclass(frozen=True)
class Result:
    """One test of a report; its seconds are the sum of set-up, call and tear-down."""

    node_id: str
    """Node id of pytest if `recorded`; otherwise composed of the report's names."""
    outcome: Outcome
    seconds: float
    recorded: bool = False
    message: str = ""
    """First failure in one line."""
    text: str = ""
    """All failures, with captured output."""
    in_setup: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.node_id.partition("::")[0]

    @property
    def folder(self) -> str:
        """Folder of tests/ as in FOLDERS; empty for any other."""
        return next((folder for folder in FOLDERS if self.file.startswith(f"tests/{folder}/")), "")

    @property
    def good(self) -> bool:
        return self.outcome in (Outcome.PASSED, Outcome.SKIPPED)

    @property
    def crashed(self) -> bool:
        return CRASH.search(self.message) is not None

    @property
    def cpu_seconds(self) -> float:
        return sum(self.parts("cpu.").values(), start=0.0)

    def parts(self, prefix: str) -> dict[str, float]:
        """Return seconds by name of the properties that begin with `prefix`."""
        return {
            name.removeprefix(prefix): float(value)
            for name, value in self.properties.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True)
class Report:
    """Results of one run of pytest."""

    suite: str
    """Name of the file."""
    results: Sequence[Result]
    seconds: float
    """Wall-clock time."""

    @property
    def bad(self) -> list[Result]:
        return [result for result in self.results if not result.good]


@dataclass(frozen=True)
class End:
    """End of a run, as recorded by pytest itself."""

    status: int
    collected: int


def read_report(file: Path) -> Report:
    """Read one report; raise BadReportError if it cannot be read."""
    try:
        root = ElementTree.parse(file).getroot()
    except FileNotFoundError:
        raise BadReportError(f"{file} is missing") from None
    except (OSError, ElementTree.ParseError) as error:
        raise BadReportError(f"{file} cannot be read: {error}") from None
    seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    return Report(suite_name(file), _merged(root.iter("testcase")), seconds)


def read_reports(files: Iterable[Path], problems: TextIO) -> list[Report]:
    """Read several reports; write the reasons for unreadable ones to `problems`."""
    reports = []
    for file in files:
        try:
            reports.append(read_report(file))
        except BadReportError as error:
            print(error, file=problems)
    return reports


def suite_name(file: Path) -> str:
    """Return the name of a report's suite: `test` for `.test-reports/test.xml`."""
    return file.name.removesuffix(".xml")


def end_file(report: Path) -> Path:
    """Return the file beside a report with pytest's exit status."""
    return report.with_suffix(".exit")


def read_end(report: Path) -> End | None:
    """Return the end of a report's run; None if it was cut short."""
    try:
        values = json.loads(end_file(report).read_text())
        return End(int(values["status"]), int(values["collected"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _merged(cases: Iterable[ElementTree.Element]) -> list[Result]:
    """Return one result for each test: if a test and its tear-down fail, pytest writes two cases."""
    by_name: dict[tuple[str, str], list[Result]] = {}
    for case in cases:
        by_name.setdefault((case.get("classname", ""), case.get("name", "")), []).append(_result(case))
    return [_worst(results) for results in by_name.values()]


def _worst(results: list[Result]) -> Result:
    """Return the first bad result, completed from the others."""
    first = next((result for result in results if not result.good), results[0])
    known = next((result for result in results if result.recorded), first)
    return Result(
        node_id=known.node_id,
        outcome=first.outcome,
        seconds=sum(result.seconds for result in results),
        recorded=known.recorded,
        message=next((result.message for result in results if result.crashed), first.message),
        text="\n".join(result.text for result in results if result.text),
        in_setup=first.in_setup,
        properties=known.properties,
    )


def _result(case: ElementTree.Element) -> Result:
    properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
    outcome, message, texts = Outcome.PASSED, "", []
    for kind, found in (
        (Outcome.SKIPPED, case.find("skipped")),
        (Outcome.ERROR, case.find("error")),
        (Outcome.FAILED, case.find("failure")),
    ):
        if found is not None:
            outcome, message = kind, found.get("message") or (found.text or "").strip()
            texts.append(f"{message}\n\n{found.text or ''}")
    for stream in ("system-out", "system-err"):
        texts += [f"---- {stream}\n{found.text or ''}" for found in case.findall(stream)]
    return Result(
        node_id=properties.get("nodeid") or _guessed_id(case.get("classname", ""), case.get("name", "")),
        outcome=outcome,
        seconds=float(case.get("time", 0)),
        recorded="nodeid" in properties,
        message=_one_line(message),
        text="\n".join(texts) if outcome in (Outcome.FAILED, Outcome.ERROR) else "",
        in_setup=outcome is Outcome.ERROR and "on teardown with" not in message,
        properties=properties,
    )


def _guessed_id(classname: str, name: str) -> str:
    """Compose a node id: `tests.unit.test_a.TestB` and `test_c` -> `tests/unit/test_a.py::TestB::test_c`; a module that
    cannot be imported has only a name.
    """
    if not classname:
        return name.replace(".", "/") + ".py"
    parts = classname.split(".")
    module = next((place for place, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: module + 1]) + ".py", *parts[module + 1 :], name])


def _one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
