"""Differences between two JSON documents, as lines that a reviewer reads and a program applies.

A line has a path and its value: `spec.replicas: 4` sets a value, `+ spec.paused: true` adds one, `- spec.paused`
removes one. Items of a list are named by their key, not by their position, so that an inserted item moves no other:
`+ env[HF_HOME] before HOME: {"value": "/cache"}`. `order env: [...]` lists the keys of a list that is in another order.
Only the new value is written, so that a line does not change with the base document.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

KEYS = ("mountPath", "name", "key")
"""Fields that name the items of a list, in order of preference."""
FLAGS, SENTENCES = "(flags)", "(sentences)"
"""Forms of lists: an argument vector, with items named by their flags, and sentences, named by their first word."""
LONGEST = 100
"""Most characters of an added object on one line; a longer one has a line for each field."""
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_PLAIN_FIELD = re.compile(r"[\w-]+")
_PLAIN_ITEM = re.compile(r"[\w./@=#-]+")
_STEP = re.compile(rf"\.?(?P<field>{_PLAIN_FIELD.pattern}|{_QUOTED})|\[(?P<item>{_PLAIN_ITEM.pattern}|{_QUOTED})\]")
_BEFORE = re.compile(rf" before (?P<item>{_PLAIN_ITEM.pattern}|{_QUOTED})")
_WORD = re.compile(r"[A-Za-z]{5,}")
Difference = dict[str, Any]
"""Head of a line, before its colon -> the value after it; None for a removal."""


class _Items(dict[str, Any]):
    """Items of a list by their keys."""

    def __init__(self, form: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.form = form


def same(one: Any, other: Any) -> bool:
    """Compare as JSON does: True is not 1, and the order of fields does not matter."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def difference(base: dict[str, Any], new: dict[str, Any]) -> Difference:
    """Return the changes from `base` to `new`; `patched` applies them."""
    return dict(_compared(base, new, ""))


def patched(base: dict[str, Any], changes: Difference) -> dict[str, Any]:
    """Return `base` with the changes applied."""
    root: dict[str, Any] = copy.deepcopy(base)
    for head, value in changes.items():
        _apply(root, head, copy.deepcopy(value))
    found: dict[str, Any] = _plain(root)
    return found


def written(changes: Difference) -> list[str]:
    """Return the changes as lines."""
    return [head if head.startswith("- ") else f"{head}: {_json(value)}" for head, value in changes.items()]


def read(lines: Iterable[str]) -> Difference:
    """Parse the lines of `written` into changes."""
    found: Difference = {}
    for line in lines:
        if line.startswith("- "):
            found[line] = None
        else:
            *_, end = _parsed(line)
            found[line[:end]] = json.loads(line[end + 1 :])
    return found


# ------------------------------------------------------------------------------------------------------------ comparing


def _compared(base: Any, new: Any, path: str) -> Iterator[tuple[str, Any]]:
    if same(base, new):
        return
    if isinstance(base, dict) and isinstance(new, dict):
        for key in base | new:
            inner = _field(path, key)
            if key not in new:
                yield f"- {inner}", None
            elif key not in base:
                yield from _added(new[key], inner)
            else:
                yield from _compared(base[key], new[key], inner)
        return
    form = _form(base)
    old, now = (_keyed(each, form) for each in (base, new))
    if old is None or now is None:
        yield path, new
        return
    yield from _compared_items(old, now, path)


def _compared_items(base: _Items, new: _Items, path: str) -> Iterator[tuple[str, Any]]:
    for key in base:
        if key not in new:
            yield f"- {path}[{_item(key)}]", None
    kept = [key for key in new if key in base]
    moved = kept != [key for key in base if key in new]
    for index, (key, value) in enumerate(new.items()):
        inner = f"{path}[{_item(key)}]"
        if key in base:
            yield from _compared(base[key], value, inner)
            continue
        following = next((later for later in list(new)[index:] if later in base), None)
        yield f"+ {inner}" + ("" if moved or following is None else f" before {_item(following)}"), value
    if moved:
        yield f"order {path}", list(new)


def _added(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and len(_json(value)) > LONGEST:
        for key, inner in value.items():
            yield from _added(inner, _field(path, key))
    else:
        yield f"+ {path}", value


# ------------------------------------------------------------------------------------------------------- items by a key


def _form(items: Any) -> str | None:
    """Return the form by which a list's items are named; None if there is none: such a list is written whole."""
    if not isinstance(items, list) or not items:
        return None
    if all(isinstance(each, str) for each in items):
        forms = [FLAGS] if any(each.startswith("--") for each in items) else []
        forms += [SENTENCES] if any(" " in each for each in items) else []
    else:
        forms = list(KEYS)
    return next((form for form in forms if _keyed(items, form) is not None), None)


def _keyed(items: Any, form: str | None) -> _Items | None:
    if form is None or not isinstance(items, list):
        return None
    texts = all(isinstance(each, str) for each in items)
    if form in (FLAGS, SENTENCES):
        pairs = _flags(items) if form == FLAGS and texts else _topics(items) if texts else None
    elif all(isinstance(each, dict) and isinstance(each.get(form), str) for each in items):
        pairs = [(each[form], {key: value for key, value in each.items() if key != form}) for each in items]
    else:
        pairs = None
    if pairs is None or len(dict(pairs)) < len(pairs):
        return None
    return _Items(form, dict(pairs))


def _flags(arguments: list[str]) -> list[tuple[str, str | None]]:
    """Return each flag with its value, and each other word alone."""
    found: list[tuple[str, str | None]] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before.startswith("--") and not argument.startswith("--"):
            found[-1] = (before, argument)
        else:
            found.append((argument, None))
    return found


def _topics(sentences: list[str]) -> list[tuple[str, str]]:
    """Return each sentence by its first long word, numbered from the second sentence with that word on."""
    counts: dict[str, int] = {}
    found = []
    for each in sentences:
        word = match.group() if (match := _WORD.search(each)) else each
        counts[word] = counts.get(word, 0) + 1
        found.append((word if counts[word] == 1 else f"{word}#{counts[word]}", each))
    return found


def _plain(node: Any) -> Any:
    """Convert keyed items back to lists."""
    if isinstance(node, _Items):
        match node.form:
            case "(flags)":
                return [part for pair in node.items() for part in pair if part is not None]
            case "(sentences)":
                return list(node.values())
            case field:
                return [{field: key, **_plain(value)} for key, value in node.items()]
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(each) for each in node] if isinstance(node, list) else node


# ------------------------------------------------------------------------------------------------------------- applying


def _apply(root: dict[str, Any], head: str, value: Any) -> None:
    sign, steps, before, _ = _parsed(head)
    node: Any = root
    for step in steps[:-1]:
        node = _entered(node, step)
    last = steps[-1]
    if sign == "order ":
        items = _entered(node, last)
        arranged = {key: items[key] for key in value}
        items.clear()
        items.update(arranged)
    elif sign == "- ":
        del node[last]
    elif before is None:
        node[last] = value
    else:
        later = {key: node.pop(key) for key in list(node)[list(node).index(before) :]}
        node[last] = value
        node.update(later)


def _entered(node: Any, key: str) -> Any:
    """Return the part of an object or a keyed list with this key; add a missing object."""
    inner = node.setdefault(key, {})
    if isinstance(inner, list):
        inner = node[key] = _keyed(inner, _form(inner))
    return inner


def _parsed(line: str) -> tuple[str, list[str], str | None, int]:
    """Return a line's sign, the steps of its path, the key that it precedes, and the start of its value."""
    sign = next((each for each in ("+ ", "- ", "order ") if line.startswith(each)), "")
    end, steps, before = len(sign), [], None
    while match := _STEP.match(line, end):
        steps.append(_unquoted(match["field"] or match["item"]))
        end = match.end()
    if match := _BEFORE.match(line, end):
        before, end = _unquoted(match["item"]), match.end()
    if not steps or line[end : end + 2] not in ("", ": "):
        raise ValueError(f"this is no line of a difference: {line}")
    return sign, steps, before, end


def _field(path: str, key: str) -> str:
    field = key if _PLAIN_FIELD.fullmatch(key) else _json(key)
    return f"{path}.{field}" if path else field


def _item(key: str) -> str:
    return key if _PLAIN_ITEM.fullmatch(key) else _json(key)


def _unquoted(name: str) -> str:
    text: str = json.loads(name) if name.startswith('"') else name
    return text


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
