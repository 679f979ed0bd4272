"""Numbers that a text means: percentages, durations, powers, counts with a unit, ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.shapes import Number, Shape, accepts

MINUS = re.compile("[\u2010-\u2015\u2212]")
"""Hyphens and dashes that word processors write for a minus sign."""
_QUOTES = "\u201c\u201d\u201e\u2018\u2019\"'"
"""Quotes of word processors, and quotes inside quotes."""
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:%|percent|per cent)")
_BOUND = re.compile(r"[<>]=?\s*(.+)")
_MULTIPLE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmM])")
_A_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?"
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", re.IGNORECASE)
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", re.IGNORECASE)
_POWER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*[*x\u00d7]\s*10\s*(?:\^|\*\*)\s*\(?(-?[0-9]+)\)?")
"""Power of ten as in a paper: `2*10^-5`."""
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_COMMA = re.compile(r"[0-9]+,[0-9]+")
_COUNTED = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)\s*(?:x\s*)?"
    r"(?:x|tokens?|epochs?|ep|steps?|rows?|examples?|samples?|sequences?|gpus?|nodes?|machines?|pods?|workers?|replicas?|"
    r"process(?:es)?|layers?|stages?|beams?|checkpoints?|times|restarts?|retries|bits?)",
    re.IGNORECASE,
)
"""Number with the unit that the field has anyway: `512 tokens`."""
_LETTER_NUMBER = re.compile(r"[A-Za-z]{1,2}[ =:]?([0-9]+(?:\.[0-9]+)?)")
"""Number behind the letter of a formula: `r16`."""
_ABOUT = re.compile(
    r"(?:about|around|approx\.?|last|max(?:imum)?|min(?:imum)?|at most|at least|up to|exactly|the last|~)\s*"
    r"([0-9]+(?:\.[0-9]+)?)",
    re.IGNORECASE,
)
"""Number behind a word that the field implies: `last 3`."""
_SECONDS: Mapping[str, int] = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
EVERY = re.compile(r"(?:once\s+)?(?:(?:every|each|per|an?|one)\s+)+")
"""Begin of a period, whose number may be missing: `every hour`, `once per day`."""
_PERIOD = re.compile(r"(?P<half>half\s+(?:an?\s+)?)?(?P<number>[0-9]+(?:\.[0-9]+)?)?\s*(?P<unit>[a-z]+)")
_ADVERBS: Mapping[str, str] = {"hourly": "1 h", "daily": "1 d", "nightly": "1 d", "weekly": "7 d"}
_RANGE = re.compile(rf"({_A_NUMBER})\s*(?:-|\u2013|\.\.+|to|or|until)\s*({_A_NUMBER})")
"""Range in place of a number: `1-4`, `1e-5 to 5e-5`."""

Shown = Callable[[JsonValue, str], str]
"""Function that writes a value for the field of that name, without secrets."""


def number_hint(shape: Shape, leaf: str, value: str, shown: Shown) -> str | None:
    """Return the hint for a text in place of a number; None: the field accepts no number that it may mean."""
    text = MINUS.sub("-", value.strip().strip(_QUOTES).rstrip(",;"))
    bound = shape.body if isinstance(shape.body, Number) else None
    if bound and bound.minimum == 0 and not bound.exclusive_minimum and text.lower() in ("none", "never", "no", "off"):
        return "write 0"
    for intended in _numbers(text, leaf):
        if accepts(shape, intended):
            return (
                "remove the quotes" if text == value and _NUMBER.fullmatch(text) else f"write {shown(intended, leaf)}"
            )
    if plain(text) in ("auto", "all", "default", "none", "max", "unlimited") and not shape.required:
        return "leave it out to take the default"
    return None


def range_ends(value: JsonValue) -> tuple[str, str] | None:
    """Return both ends of a range, written as text or as an object with a minimum and a maximum; None: it is none."""
    if isinstance(value, str):
        found = _RANGE.fullmatch(value.strip().lower())
        return None if found is None else (found[1], found[2])
    given = {plain(name): each for name, each in value.items()} if isinstance(value, dict) else {}
    least = next((given[name] for name in ("min", "minimum", "from", "low", "start") if name in given), None)
    most = next((given[name] for name in ("max", "maximum", "to", "high", "end") if name in given), None)
    return None if least is None or most is None else (str(least), str(most))


def range_hint(shape: Shape, path: str, ends: tuple[str, str] | None) -> str | None:
    """Return the hint for a range in place of one number; None: the field accepts no end of it."""
    for least in () if ends is None else numbers_of(ends[0]):
        most = next(numbers_of(str(ends and ends[1])), None)
        if not accepts(shape, least) or most is None or not accepts(shape, most):
            continue
        if path == "spec.endpoint.replicas":
            return f"set {path} to {least} and spec.endpoint.maxReplicas to {most}"
        return f"write {least:g}, or another number up to {most:g}: a range is not supported here"
    return None


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration or a period: `90m`, `every 2 hours`, `hourly`; None: it is neither."""
    words = text.strip().lower()
    rest = EVERY.sub("", _ADVERBS.get(words, words), count=1)
    found = _PERIOD.fullmatch(rest)
    if found is None or found["unit"] not in _SECONDS or (found["number"] is None and len(found["unit"]) < _UNIT_WORD):
        return None
    return float(found["number"] or 1) * _SECONDS[found["unit"]] / (2 if found["half"] else 1)


_UNIT_WORD = 3
"""Least letters of a unit that has no number before it."""


def _numbers(text: str, leaf: str) -> Iterator[float | int]:
    if _NUMBER.fullmatch(text):
        yield from numbers_of(text)
    if found := _BOUND.fullmatch(text):
        yield from _numbers(found[1], leaf)
    if text.lower() in _NUMBERS:
        yield _NUMBERS.index(text.lower())
    if found := _PERCENT.fullmatch(text):
        yield float(found[1]) / 100
    if found := _POWER.fullmatch(text):
        yield from numbers_of(f"{found[1]}e{found[2]}")
    if _GROUPED.fullmatch(text):
        yield int(text.replace(",", ""))
    if _COMMA.fullmatch(text):
        yield from numbers_of(text.replace(",", "."))
    if "Seconds" not in leaf and (found := _COUNTED.fullmatch(text)):
        yield from numbers_of(found["number"])
    if "Seconds" not in leaf and (found := _ABOUT.fullmatch(text)):
        yield from numbers_of(found[1])
    if found := _LETTER_NUMBER.fullmatch(text):
        yield from numbers_of(found[1])
    if leaf.endswith("Milliseconds") and (found := DURATION.fullmatch(text)):
        unit = found[2].lower()
        yield round(float(found[1]) * (1 if unit.startswith(("ms", "milli")) else 1000 * _SECONDS.get(unit, 0)))
    elif "Seconds" in leaf and (seconds := seconds_of(text)) is not None:
        yield round(seconds)
    elif found := _MULTIPLE.fullmatch(text):
        yield round(float(found[1]) * (1000 if found[2] in "kK" else 1_000_000))


def numbers_of(text: str) -> Iterator[float | int]:
    """Yield the number that a text is, first as an integer if it is whole; nothing if it is none."""
    try:
        number = float(text)
    except ValueError:
        return
    if number.is_integer():
        yield int(number)
    if math.isfinite(number):
        yield number
