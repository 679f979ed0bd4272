"""Numbers that a text means: percentages, durations, counts with a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from finetune_operator.spec.fields.shapes import Shape, accepts

_MINUS = re.compile("[\u2010-\u2015\u2212]")
"""Hyphens and dashes that word processors write for a minus sign."""
_QUOTES = "\u201c\u201d\u201e\u2018\u2019\"'"
"""Quotes of word processors, and quotes inside quotes."""
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:%|percent|per cent)")
_MULTIPLE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmM])")
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", re.IGNORECASE)
_COUNTED = re.compile(r"(?:[<>]=?|about|at (?:least|most)|max|last)?\s*([0-9]+(?:\.[0-9]+)?)\s*(?:x|[A-Za-z]{3,})?")
"""Number with the unit that the field has anyway, or with a word that it implies: `512 tokens`, `last 3`."""
_SECONDS: Mapping[str, float] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_EVERY = re.compile(r"(?:once\s+)?(?:(?:every|each|per|an?|one)\s+)+")
"""Begin of a period, whose number may be missing: `every hour`, `once per day`."""
_PERIOD = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)?\s*(?P<unit>[a-z]+)")
_ADVERBS: Mapping[str, str] = {"hourly": "1 h", "daily": "1 d", "weekly": "7 d"}
_UNIT_WORD = 3
"""Least letters of a unit that has no number before it."""


def number_in(shape: Shape, leaf: str, text: str) -> float | int | None:
    """Return the number that a text in the field `leaf` means and the shape accepts; None: there is none.

    Raise OverflowError for a number beyond floating point.
    """
    text = _MINUS.sub("-", text.strip().strip(_QUOTES).rstrip(",;"))
    return next((number for number in _numbers(text, leaf) if accepts(shape, number)), None)


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration or a period: `90m`, `every 2 hours`, `hourly`; None: it is neither."""
    words = text.strip().lower()
    match = _PERIOD.fullmatch(_EVERY.sub("", _ADVERBS.get(words, words), count=1))
    if match is None or match["unit"] not in _SECONDS or (match["number"] is None and len(match["unit"]) < _UNIT_WORD):
        return None
    return float(match["number"] or 1) * _SECONDS[match["unit"]]


def _numbers(text: str, leaf: str) -> Iterator[float | int]:
    timed = "seconds" in leaf.lower()
    if _NUMBER.fullmatch(text):
        yield from numbers_of(text)
    if match := _PERCENT.fullmatch(text):
        yield float(match[1]) / 100
    if timed and (seconds := seconds_of(text)) is not None:
        yield round(seconds * (1000 if "Milliseconds" in leaf else 1))
    elif match := _MULTIPLE.fullmatch(text):
        yield round(float(match[1]) * (1000 if match[2] in "kK" else 1_000_000))
    elif not timed and (match := _COUNTED.fullmatch(text.lower())):
        yield from numbers_of(match[1])


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
