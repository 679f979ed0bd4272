"""JSON that an API server sends, read whatever anybody has stored in it.

An API server keeps objects that nest thousands of levels deep; Python's reader gives up at its recursion limit,
pydantic at 200 levels, and with it everything else in the same list. So what lies too deep for anybody to read is cut
out first.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate

from pydantic import JsonValue

DEEPEST = 150
"""Levels that are kept: more than a list of jobs may have (MAX_DEPTH each), so that a job of which something was cut
out is refused for its depth; and fewer than any reader of ours takes.
"""
CUT = b'"(cut: nested too deep)"'
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_TOKEN = re.compile(_STRING.pattern + rb"|[{}\[\]]", re.DOTALL)


def loads(text: bytes) -> JsonValue:
    """The value of `text`, at most DEEPEST levels deep. ValueError for what is no JSON."""
    # Nearly all texts have few brackets, which are counted quickly.
    may_be_deep = text.count(b"{") + text.count(b"[") > DEEPEST
    value: JsonValue = json.loads(cut(text) if may_be_deep and depth(text) > DEEPEST else text)
    return value


def depth(text: bytes) -> int:
    """Levels of JSON; at least as many as a reader comes to where it is none."""
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def cut(text: bytes) -> bytes:
    """The text with CUT in place of each object and list that lies deeper than DEEPEST levels; one pass over it."""
    kept: list[bytes] = []
    level = start = 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in (b"{", b"["):
            level += 1
            if level == DEEPEST + 1:
                kept += text[start : token.start()], CUT
        elif sign in (b"}", b"]"):
            if level == DEEPEST + 1:
                start = token.end()
            level -= 1
    if level <= DEEPEST:
        kept.append(text[start:])
    return b"".join(kept)
