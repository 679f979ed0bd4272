"""Text of others on a terminal: a pod's report or log may hold sequences that move the cursor or reorder the line."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""C0 but tab and newline, DEL, C1, and the controls of bidirectional text (Unicode Standard Annex 9, table 4)."""


def printable(text: str) -> str:
    """Return the text with each control character as a replacement character; line ends become newlines."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))
