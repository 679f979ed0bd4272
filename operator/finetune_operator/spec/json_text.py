"""Reader of JSON from an API server, safe for any content stored in it.

An API server keeps objects that nest thousands of levels deep; Python's reader fails at its recursion limit, pydantic
at 200 levels, and with the object fails everything else in the same list. So values that are too deep are cut out
first.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate

from pydantic import JsonValue

DEEPEST = 150
"""Maximum levels: more than a list of jobs may have (MAX_DEPTH each), so that a job that was cut is refused for its
depth; and fewer than any of our readers accepts.
"""
CUT = b'"(cut: nested too deep)"'
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_TOKEN = re.compile(_STRING.pattern + rb"|[{}\[\]]", re.DOTALL)


def loads(text: bytes) -> JsonValue:
    """Return the value of `text`, at most DEEPEST levels deep. Raise ValueError for invalid JSON."""
    value: JsonValue = json.loads(bounded(text))
    return value


def bounded(text: bytes) -> bytes:
    """Return JSON that is at most DEEPEST levels deep."""
    # Nearly all texts have few brackets, which are counted quickly.
    may_be_deep = text.count(b"{") + text.count(b"[") > DEEPEST
    return cut(text) if may_be_deep and depth(text) > DEEPEST else text


def depth(text: bytes) -> int:
    """Return the number of levels; for invalid JSON at least as many as a reader reaches."""
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def cut(text: bytes) -> bytes:
    """Return the text with CUT in place of each object and list deeper than DEEPEST levels, in one pass."""
    pieces: list[bytes] = []
    level = start = 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in (b"{", b"["):
            level += 1
            if level == DEEPEST + 1:
                pieces += text[start : token.start()], CUT
        elif sign in (b"}", b"]"):
            if level == DEEPEST + 1:
                start = token.end()
            level -= 1
    if level <= DEEPEST:
        pieces.append(text[start:])
    return b"".join(pieces)
