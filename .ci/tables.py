"""Lay out rows as text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: numbers to the right, text to the left; the last one is not padded."""
    lines = [list(heading), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(heading))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def seconds(value: float) -> str:
    """Format seconds with one decimal; empty below 0.05."""
    return f"{value:.1f}" if value >= 0.05 else ""


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() or not text
