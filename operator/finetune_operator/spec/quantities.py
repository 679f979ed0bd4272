"""Kubernetes quantities as numbers, and numbers of bytes as text for people.

Units are those of apimachinery's `resource.Quantity`: `m` is a thousandth, `k M G T P E` are powers of 1000, `Ki` to
`Ei` powers of 1024.
"""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>m|[kMGTPE]|[KMGTPE]i)?")
_UNITS: dict[str | None, Decimal] = {
    None: Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** (power + 1) for power, unit in enumerate("kMGTPE")},
    **{f"{unit}i": Decimal(1024) ** (power + 1) for power, unit in enumerate("KMGTPE")},
}


def parse_quantity(text: str) -> Decimal:
    """Parse `500m` as 0.5, `64Gi` as 68719476736; raise ValueError for anything that Kubernetes would not accept."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 8, 500m or 64Gi")
    return Decimal(match["number"]) * _UNITS[match["unit"]]


def too_small_rule(least: str) -> str:
    """Return the rule on a size too small to be meant."""
    return f"is less than {least}: a number without a unit counts bytes"


def size_hint(text: str, least: str, usual: str) -> str:
    """Return the hint for a number whose unit is missing, or `m`: 64Gi for `64`; `usual` if the meaning is unclear."""
    match = re.fullmatch(r"0*([1-9][0-9]*)(m?)", text)
    if match is None:
        return f"write a size such as {usual}"
    units = ("Mi", "Gi") if match[2] or int(match[1]) >= 1024 else ("Gi",)
    candidates = (f"{match[1]}{unit}" for unit in units)
    large = (candidate for candidate in candidates if parse_quantity(candidate) >= parse_quantity(least))
    return f"write {next(large, usual)}"


def human_seconds(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def short_duration(seconds: float) -> str:
    """Format a duration in one word, as kubectl's columns do: `45s`, `12m`, `3h20m`, `2d4h`."""
    return human_seconds(seconds).replace("min", "m").replace(" ", "")


def human_count(count: int) -> str:
    """Format a count of parameters or tokens: `22.7 million`, `355 million`, `6.7 billion`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"
