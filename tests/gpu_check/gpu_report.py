"""Result of one check, and the report of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

Outcome = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """Outcome of one check."""

    group: str
    name: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    """Error, or why it was skipped; empty for a check that succeeded."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Measured values by name with its unit, and the planned ones beside them."""


class SkippedError(Exception):
    """Raised by a check that this machine cannot run; its text is the reason."""


def checked(group: str, name: str, check: Callable[[], Mapping[str, Any]]) -> Result:
    """Run a check, and return its outcome with the figures that it returns: an error is a result like any other."""
    started = monotonic()
    try:
        figures = check()
    except SkippedError as reason:
        return Result(group, name, "skipped", monotonic() - started, str(reason))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Result(group, name, "failed", monotonic() - started, f"{type(error).__name__}: {lines[-1]}"[:500])
    return Result(group, name, "ok", monotonic() - started, figures=figures)


def write_report(folder: Path, machine: Mapping[str, Any], results: Sequence[Result]) -> tuple[Path, Path]:
    """Write `gpu-check.json` and `gpu-check.md` into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, page = folder / "gpu-check.json", folder / "gpu-check.md"
    content = {"machine": machine, "results": [asdict(each) for each in results]}
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page.write_text(as_markdown(machine, results), encoding="utf-8")
    return whole, page


def as_markdown(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Return the report as a page: the machine, then a table for each group of checks."""
    counts = ", ".join(
        f"{sum(each.outcome == outcome for each in results)} {outcome}" for outcome in ("ok", "failed", "skipped")
    )
    lines = ["# Check of a machine with GPUs", "", f"{counts}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_shown(value)} |" for name, value in machine.items()]
    for group in dict.fromkeys(each.group for each in results):
        lines += ["", f"## {group}", "", "| check | outcome | s | figures |", "|---|---|---|---|"]
        for each in results:
            if each.group == group:
                text = "; ".join(f"{name} {_shown(value)}" for name, value in each.figures.items()) or each.reason
                text = text.replace("|", "\\|")
                lines.append(f"| {each.name} | {each.outcome} | {each.seconds:.1f} | {text} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
