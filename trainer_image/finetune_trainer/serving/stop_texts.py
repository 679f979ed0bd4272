"""Stop texts: they end a written text, and are no part of it."""

from __future__ import annotations

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first of `stops` in `text`; None if there is none."""
    return min((at for at in map(text.find, stops) if at >= 0), default=None)


class StopFilter:
    """Passes pieces of a text up to a stop, and holds back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._stopped = False

    def passed(self, piece: str, *, last: bool) -> str:
        """Return the text that may be shown once `piece` was written. `last`: nothing follows."""
        if self._stopped:
            return ""
        text = self._held + piece
        end = first_stop(text, self._stops)
        if end is None:
            end = len(text) - (0 if last else self._begun(text))
        else:
            self._stopped = True
        self._held = text[end:]
        return text[:end]

    def _begun(self, text: str) -> int:
        """Return the number of characters at the end of `text` with which a stop begins."""
        return max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
