"""Parser of the pages of `kubectl explain` and `finetune explain`, for tests that compare two of them."""

from __future__ import annotations

import re
from typing import Any

_FIELD = re.compile(r"^  (\w+)\t<(.+?)>( -required-)?$")
_WITHOUT_A_TYPE = ("integer or string", "any")
"""kubectl's names of an Object."""


def read(page: str) -> dict[str, Any]:
    """Return the field's type and text, and for each field in it the type, True if it is required, and its text."""
    head, _, rest = page.partition("DESCRIPTION:\n")
    text, _, fields_text = rest.partition("FIELDS:\n")
    kind = re.search(r"^FIELD: \w+ <(.+?)>", head, re.MULTILINE)
    fields: dict[str, Any] = {}
    for line in fields_text.splitlines():
        if found := _FIELD.match(line):
            words: list[str] = []
            fields[found[1]] = (_type(found[2]), bool(found[3]), words)
        elif not line.startswith("  enum: "):  # kubectl omits all but four
            words.extend(line.split())
    enum = head.partition("ENUM:\n")[2].split()
    return {"type": kind and _type(kind[1]), "enum": enum, "text": text.split(), "fields": fields}


def _type(written: str) -> str:
    for name in _WITHOUT_A_TYPE:
        written = written.replace(name, "Object")
    return written
