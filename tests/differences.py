"""Differences between two JSON documents, as lines that a reviewer reads.

A line has a path and its value: `spec.replicas: 4` sets a value, `+ spec.paused: true` adds one, `- spec.paused`
removes one. Items of a list are named by their key, not by their position, so that an inserted item moves no other:
`+ env[HF_HOME] before HOME: {"value": "/cache"}`. `order env: [...]` lists the keys of a list that is in another order.
Only the new value is written, so that a line does not change with the base document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

KEYS = ("mountPath", "name", "key")
"""Fields that name the items of a list, in order of preference."""
FLAGS = "(flags)"
"""Form of an argument vector, with items named by their flags."""
LONGEST = 100
"""Most characters of an added object on one line; a longer one has a line for each field."""
_PLAIN_FIELD = re.compile(r"[\w-]+")
_PLAIN_ITEM = re.compile(r"[\w./@=#-]+")
Difference = dict[str, Any]
"""Head of a line, before its colon -> the value after it; None for a removal."""


def same(one: Any, other: Any) -> bool:
    """Compare as JSON does: True is not 1, and the order of fields does not matter."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def difference(base: dict[str, Any], new: dict[str, Any]) -> Difference:
    """Return the changes from `base` to `new`."""
    return dict(_compared(base, new, ""))


def written(changes: Difference) -> list[str]:
    """Return the changes as lines."""
    return [head if head.startswith("- ") else f"{head}: {_json(value)}" for head, value in changes.items()]


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


def _compared_items(base: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
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
    flags = any(isinstance(each, str) and each.startswith("--") for each in items)
    return next((form for form in ((FLAGS,) if flags else KEYS) if _keyed(items, form) is not None), None)


def _keyed(items: Any, form: str | None) -> dict[str, Any] | None:
    """Return the items by their names in this form; None if a name is missing or occurs twice."""
    if form is None or not isinstance(items, list):
        return None
    if form == FLAGS and all(isinstance(each, str) for each in items):
        pairs: list[tuple[str, Any]] = _flags(items)
    elif all(isinstance(each, dict) and isinstance(each.get(form), str) for each in items):
        pairs = [(each[form], {key: value for key, value in each.items() if key != form}) for each in items]
    else:
        return None
    return dict(pairs) if len(dict(pairs)) == len(pairs) else None


def _flags(arguments: list[str]) -> list[tuple[str, str | None]]:
    """Return each flag with its value, and each other word alone."""
    found: list[tuple[str, str | None]] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before.startswith("--") and not argument.startswith("--"):
            found[-1] = (before, argument)
        else:
            found.append((argument, None))
    return found


def _field(path: str, key: str) -> str:
    field = key if _PLAIN_FIELD.fullmatch(key) else _json(key)
    return f"{path}.{field}" if path else field


def _item(key: str) -> str:
    return key if _PLAIN_ITEM.fullmatch(key) else _json(key)


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
