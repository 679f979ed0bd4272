"""Repairs of common YAML mistakes: a message names the repair, and the repaired text shows what else is wrong.

Three are known: tabs, a missing space after a colon, and brackets or quotes that are not closed. Only lines are
changed, never their number, so that positions stay those of the file. A repair is proposed only if the text can then be
read further than before; nobody but the user applies it to the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

_MOST_TRIED = 24
"""Maximum number of repairs that are tried: each reads the text again."""
_MOST_NAMED = 3
"""Number of lines that a hint names."""
_NO_SPACE = re.compile(r"(?P<begin>\s*(?:- )?)(?P<name>[A-Za-z]\w*):(?P<value>[^\s:/'\"#][^\s:#]{0,60})\s*(?:#.*)?$")
"""A field whose colon has no space after it, and no address."""
_CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Repair:
    """One change of a text."""

    line: int
    """Changed line, from 0; the first of several."""
    hint: Callable[[int], str]
    """Function that returns the hint, given the number in the file of the text's first line."""
    text: str
    """Repaired text."""


def repair(text: str, line: int, begin: int, furthest: Callable[[str], int | None]) -> Repair | None:
    """Return the first repair of a syntax error at `line` (from 0), whose construct began at `begin`; None: there is
    none.

    `furthest` returns the line of a text's first syntax error, None for a text without one.
    """
    lines = text.split("\n")
    line = min(line, len(lines) - 1)
    near = [at for at in dict.fromkeys((line, line - 1, begin)) if at >= 0]
    repairs = chain(
        *(_space_repairs(lines, at) for at in near),
        _tab_repairs(lines, line),
        *(_closing_repairs(lines, at) for at in near),
    )
    for candidate in islice(repairs, _MOST_TRIED):
        reached = furthest(candidate.text)
        if reached is None or reached > max(line, candidate.line):
            return candidate
    return None


def _line_repair(lines: Sequence[str], at: int, hint: str, new: str) -> Repair:
    """Return the repair that puts `new` in place of a line, whose number is the first `@` in the hint."""
    text = "\n".join([*lines[:at], new, *lines[at + 1 :]])
    return Repair(at, lambda first: hint.replace("@", str(first + at), 1), text)


def _space_repairs(lines: Sequence[str], at: int) -> Iterator[Repair]:
    """Yield a space after a colon."""
    if match := _NO_SPACE.match(lines[at]):
        fixed = f"{match['name']}: {match['value']}"
        yield _line_repair(lines, at, f"put a space after the colon in line @: {fixed}", f"{match['begin']}{fixed}")


def _closing_repairs(lines: Sequence[str], at: int) -> Iterator[Repair]:
    """Yield the line with the quote, or the brackets and braces, that it leaves open."""
    bare = lines[at].rstrip()
    for quote in ('"', "'"):
        if bare.count(quote) % 2:
            yield _line_repair(lines, at, f"close the quote in line @, with {quote}", bare + quote)
    missing: list[str] = []
    for letter in bare:
        if letter in _CLOSING:
            missing.append(_CLOSING[letter])
        elif missing and letter == missing[-1]:
            missing.pop()
    if missing:
        signs = "".join(reversed(missing))
        yield _line_repair(lines, at, f"close what line @ opens, with {signs}", bare + signs)


def _tab_repairs(lines: Sequence[str], line: int) -> Iterator[Repair]:
    """Yield spaces in place of the tabs at the start of lines: as many as put the first in the column of the next line
    with spaces or below the line above, then usual numbers.
    """
    tabbed = [at for at, text in enumerate(lines) if "\t" in text[: len(text) - len(text.lstrip())]]
    if line not in tabbed:
        return

    def hint(first: int) -> str:
        named = ", ".join(f"line {first + at}" for at in tabbed[:_MOST_NAMED])
        more = ", ..." if tabbed[_MOST_NAMED:] else ""
        return f"indent with spaces: {named}{more} {'begin' if tabbed[1:] else 'begins'} with a tab"

    above = next((_indent(lines[at]) for at in range(line - 1, -1, -1) if lines[at].strip()), 0)
    after = next((_indent(text) for text in lines[line:] if text.strip() and not text.startswith("\t")), 0)
    tabs = max(1, lines[line].count("\t", 0, len(lines[line]) - len(lines[line].lstrip())))
    columns = [after] if after > above else []
    for width in dict.fromkeys([*(column // tabs for column in (*columns, above + 2)), 8, 4, 2]):
        yield Repair(line, hint, "\n".join(_expanded(text, width) for text in lines))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _expanded(line: str, width: int) -> str:
    """Return a line with spaces in place of the tabs at its start."""
    rest = line.lstrip()
    return line[: len(line) - len(rest)].expandtabs(width) + rest
