"""Repairs of common YAML mistakes: a message names the repair, and the repaired text shows what else is wrong.

Only lines are changed, never their number, so that positions stay those of the file. A repair is proposed only if the
text can then be read further than before; nobody but the user applies it to the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

_MOST_TRIED = 24
"""Maximum number of repairs that are tried: each reads the text again."""
_FIELD = re.compile(r"(?P<indent> *)(?P<dash>- +)?(?P<name>[\w\"'./-]+):(?:\s+(?P<value>\S.*?))?\s*$")
_NO_SPACE = re.compile(r"(?P<begin>\s*(?:- )?)(?P<name>[A-Za-z]\w*):(?P<value>[^\s:/'\"#][^\s:#]{0,60})\s*(?:#.*)?$")
"""A field whose colon has no space after it, and no address."""
_NO_COLON = re.compile(r"(?P<begin>\s*(?:- )?)(?P<name>[A-Za-z]\w*)(?P<sign>\s*=\s*|\s+)(?P<value>[^\s:=]+)\s*$")
_TEXT = re.compile(r"(?P<begin>\s*(?:- )?[\w./-]+: )(?P<value>[^'\"|>&*{\[#\s].*)$")
_UNQUOTED = re.compile(r"(?P<begin>\s*(?:- )?(?P<name>\w+): )(?P<value>[@`%][\w@./:-]{1,60})\s*$")
"""A field whose value begins with a character that YAML keeps for itself."""
_OPEN = {"{": "}", "[": "]"}


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
    if line >= len(lines):
        line = len(lines) - 1
    repairs = chain(
        _spaces(lines, line),
        _tabs(lines, line),
        _escapes(lines, line, begin),
        _columns(lines, line),
        _signs(lines, line, begin),
    )
    for each in islice(repairs, _MOST_TRIED):
        reached = furthest(each.text)
        if reached is None or reached > max(line, each.line):
            return each
    return None


def _changed(lines: Sequence[str], at: int, new: str) -> str:
    return "\n".join([*lines[:at], new, *lines[at + 1 :]])


def _spaces(lines: Sequence[str], line: int) -> Iterator[Repair]:
    """Yield a space after a colon, and quotes around a reserved character, at a line or the one above."""
    for at in (line, line - 1):
        if at < 0:
            continue
        if found := _NO_SPACE.match(lines[at]):
            fixed = f"{found['name']}: {found['value']}"
            yield Repair(at, _hint(f"put a space after the colon in line @: {fixed}", at),
                         _changed(lines, at, f"{found['begin']}{fixed}"))  # fmt: skip
        if at == line and (found := _UNQUOTED.match(lines[at])):
            name, value = found["name"], found["value"]
            hint = f'write {name}: "{value}": YAML reserves {value[0]} at the start of a value'
            if name == "name":
                plain = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")
                hint = f"write name: {plain}: YAML reserves {value[0]}, and a name has a-z, 0-9 and -"
            yield Repair(at, _hint(hint), _changed(lines, at, f'{found["begin"]}"{value}"'))


def _hint(text: str, *lines: int) -> Callable[[int], str]:
    """Return a function that puts the numbers of `lines`, from 0 in the text, in the place of each `line @`."""
    begin, *rest = text.split("line @") if lines else [text]
    return lambda first: begin + "".join(f"line {first + at}{part}" for at, part in zip(lines, rest, strict=False))


def _columns(lines: Sequence[str], line: int) -> Iterator[Repair]:
    """Yield a field moved to the column of a field above it: deeper ones first, as a block and alone."""
    field = _FIELD.match(lines[line])
    if field is None:
        return
    indent = len(field["indent"])
    end = next(
        (at for at in range(line + 1, len(lines)) if lines[at].strip() and _indent(lines[at]) <= indent), len(lines)
    )
    columns: dict[int, int] = {}
    for at in range(line - 1, -1, -1):
        above = _FIELD.match(lines[at])
        if above is not None and len(above["indent"]) <= min(columns, default=1000):
            columns.setdefault(len(above["indent"]), at)
    for column in sorted(columns, key=lambda each: (abs(each - indent), -each)):
        other = lines[columns[column]].strip().partition(":")[0]
        hint = _hint(f"begin {field['name']} in the column of line @: {other}", columns[column])
        whole = [_shifted(each, column - indent) for each in lines[line:end]]
        yield Repair(line, hint, "\n".join([*lines[:line], *whole, *lines[end:]]))
        yield Repair(line, hint, _changed(lines, line, _shifted(lines[line], column - indent)))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _shifted(line: str, by: int) -> str:
    """Return a line with another indentation; a blank one unchanged."""
    if not line.strip():
        return line
    return " " * max(0, _indent(line) + by) + line.lstrip(" ")


def _signs(lines: Sequence[str], line: int, begin: int) -> Iterator[Repair]:
    """Yield a colon, quotes around text, and the bracket, brace or quote that closes a value on its line."""
    for at in dict.fromkeys((line, line - 1, begin)):
        if at < 0:
            continue
        if (found := _NO_COLON.match(lines[at])) and found["name"] != "-":
            fixed = f"{found['name']}: {found['value']}"
            yield Repair(at, _hint(f"write in line @: {fixed}, with a colon", at),
                         _changed(lines, at, f"{found['begin']}{fixed}"))  # fmt: skip
        if found := _TEXT.match(lines[at]):
            value = found["value"].rstrip().replace("\\", "\\\\").replace('"', '\\"')
            hint = _hint("put the value of line @ in quotes, as it contains ': '", at)
            if ": " in value or value.endswith(":"):
                yield Repair(at, hint, _changed(lines, at, f'{found["begin"]}"{value}"'))
        yield from _closed(lines, at)


def _closed(lines: Sequence[str], at: int) -> Iterator[Repair]:
    """Yield the line with the quote, or the brackets and braces, that it leaves open."""
    bare = lines[at].rstrip()
    for quote in ('"', "'"):
        if bare.count(quote) % 2:
            yield Repair(at, _hint(f"close the quote in line @, with {quote}", at), _changed(lines, at, bare + quote))
    missing: list[str] = []
    for letter in bare:
        if letter in _OPEN:
            missing.append(_OPEN[letter])
        elif missing and letter == missing[-1]:
            missing.pop()
    if missing:
        signs = "".join(reversed(missing))
        yield Repair(at, _hint(f"close what line @ opens, with {signs}", at), _changed(lines, at, bare + signs))


def _tabs(lines: Sequence[str], line: int) -> Iterator[Repair]:
    """Yield spaces in place of the tabs at the start of lines: as many as put the first in the column of the next line
    with spaces or below the line above, then usual numbers.
    """
    tabbed = [at for at, each in enumerate(lines) if "\t" in each[: len(each) - len(each.lstrip())]]
    if line not in tabbed:
        return
    places = ", ".join("line @" for _ in tabbed[:_MOST_NAMED]) + (", ..." if tabbed[_MOST_NAMED:] else "")
    hint = _hint(f"indent with spaces: {places} {'begin' if tabbed[1:] else 'begins'} with a tab", *tabbed)
    above = next((_indent(lines[at]) for at in range(line - 1, -1, -1) if lines[at].strip()), 0)
    after = next((_indent(each) for each in lines[line:] if each.strip() and not each.startswith("\t")), 0)
    tabs = max(1, lines[line].count("\t", 0, len(lines[line]) - len(lines[line].lstrip())))
    columns = [after] if after > above else []
    for width in dict.fromkeys([*(column // tabs for column in (*columns, above + 2)), 8, 4, 2]):
        yield Repair(line, hint, "\n".join(_expanded(each, width) for each in lines))


def _expanded(line: str, width: int) -> str:
    """Return a line with spaces in place of the tabs at its start."""
    rest = line.lstrip()
    return line[: len(line) - len(rest)].expandtabs(width) + rest


_MOST_NAMED = 3
"""Number of lines that a hint names."""
_ESCAPED = re.compile(r"\"(?P<value>[^\"']*\\[^\"']*)\"\s*$")
"""A value in double quotes with a backslash, at the end of a line."""


def _escapes(lines: Sequence[str], line: int, begin: int) -> Iterator[Repair]:
    """Yield single quotes, in which a backslash stands for itself, in place of double quotes."""
    for at in dict.fromkeys((line, line - 1, begin)):
        if at >= 0 and (found := _ESCAPED.search(lines[at])):
            fixed = f"'{found['value']}'"
            hint = _hint(f"write in line @: {fixed}, as a backslash in double quotes begins an escape", at)
            yield Repair(at, hint, _changed(lines, at, lines[at][: found.start()] + fixed))
