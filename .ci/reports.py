"""Read JUnit reports of pytest, with the properties that tests/suite_plugins/times.py adds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

CRASH = re.compile(r"worker '[^']+' crashed")
"""pytest-xdist's message for a test whose process died."""


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class BadReportError(Exception):
    """A report is missing or cut short."""


@dataclass(frozen=True)
class Result:
    """One test of a report."""

    node_id: str
    """Node id of pytest; for a module that cannot be imported its file."""
    outcome: Outcome
    seconds: float
    """Sum of set-up, call and tear-down."""
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
    def good(self) -> bool:
        return self.outcome is not Outcome.FAILED

    @property
    def crashed(self) -> bool:
        return CRASH.search(self.message) is not None

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the test itself, as measured."""
        return sum(self.number(f"cpu.{part}") for part in ("process", "children", "daemons"))

    def number(self, name: str) -> float:
        """Return a property; 0 without it."""
        return float(self.properties.get(name, 0))


@dataclass(frozen=True)
class Report:
    """Results of one run of pytest."""

    suite: str
    """Name of the file without its ending."""
    results: Sequence[Result]
    shared: float = 0.0
    """CPU seconds of servers and pods that all its tests share (tests/box_support/phases.py)."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all tests, of imports and collection, and of what is shared, as measured."""
        return self.shared + sum(each.cpu_seconds + each.number("cpu.before") for each in self.results)

    @property
    def bad(self) -> list[Result]:
        return [result for result in self.results if not result.good]


def read_report(file: Path) -> Report:
    """Read one report; raise BadReportError if it cannot be read."""
    try:
        root = ElementTree.parse(file).getroot()
    except FileNotFoundError:
        raise BadReportError(f"{file} is missing") from None
    except (OSError, ElementTree.ParseError) as error:
        raise BadReportError(f"{file} cannot be read: {error}") from None
    shared = file.with_suffix(".cpu")
    return Report(file.stem, _merged(root.iter("testcase")), float(shared.read_text()) if shared.exists() else 0.0)


def _merged(cases: Iterable[ElementTree.Element]) -> list[Result]:
    """Return one result for each test: if a test and its tear-down fail, pytest writes two cases."""
    found: dict[tuple[str, str], Result] = {}
    for case in cases:
        name, result = (case.get("classname", ""), case.get("name", "")), _result(case)
        if (first := found.get(name)) is not None:
            bad, other = (first, result) if not first.good else (result, first)
            result = replace(
                bad,
                node_id=(first if first.properties else result).node_id,
                seconds=first.seconds + result.seconds,
                message=next((each.message for each in (bad, other) if each.crashed), bad.message),
                text="\n".join(filter(None, (first.text, result.text))),
                properties={**first.properties, **result.properties},
            )
        found[name] = result
    return list(found.values())


def _result(case: ElementTree.Element) -> Result:
    properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
    failures = [*case.findall("error"), *case.findall("failure")]
    parts = failures or case.findall("skipped")
    messages = [part.get("message") or (part.text or "").strip() for part in parts]
    texts = [f"{message}\n\n{part.text or ''}" for message, part in zip(messages, parts, strict=True)]
    for stream in ("system-out", "system-err"):
        texts += [f"---- {stream}\n{found.text or ''}" for found in case.findall(stream)]
    return Result(
        # A module that cannot be imported has only a name, and a test whose process died no node id.
        node_id=properties.get("nodeid") or (case.get("classname") or case.get("name", "")).replace(".", "/") + ".py",
        outcome=Outcome.FAILED if failures else Outcome.SKIPPED if parts else Outcome.PASSED,
        seconds=float(case.get("time", 0)),
        message=" ".join(messages[0].split())[:160] if messages else "",
        text="\n".join(texts) if failures else "",
        in_setup=case.find("error") is not None and "on teardown with" not in messages[0],
        properties=properties,
    )
