"""JSON that an API server sends, read whatever anybody has stored in it.

An API server keeps objects that nest thousands of levels deep; Python's reader gives up at its recursion limit, and
with it everything else in the same list. So what lies too deep for anybody to read is cut out first.
"""

from __future__ import annotations

import json
import re

from pydantic import JsonValue

DEEPEST = 300
"""Levels that are kept: more than a job may have (`finetune_operator.api.problems.MAX_DEPTH`), so that a job of which
something was cut out is refused for its depth, and far from Python's limit.
"""
CUT = b'"(cut: nested too deep)"'
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)


def loads(text: bytes) -> JsonValue:
    """The value of `text`. ValueError for what is no JSON."""
    try:
        value: JsonValue = json.loads(text)
    except RecursionError:
        value = json.loads(cut(text))
    return value


def cut(text: bytes) -> bytes:
    """The text with CUT in place of each object and list that lies deeper than DEEPEST levels; one pass over it."""
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in (b"{", b"["):
            depth += 1
            if depth == DEEPEST + 1:
                kept += text[start : token.start()], CUT
        elif sign in (b"}", b"]"):
            if depth == DEEPEST + 1:
                start = token.end()
            depth -= 1
    if depth <= DEEPEST:
        kept.append(text[start:])
    return b"".join(kept)
