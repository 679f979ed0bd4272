"""Text of a stream that is written but not sent yet."""

from __future__ import annotations

import asyncio
import threading


class TextPieces:
    """Queue from the thread that writes to the event loop that sends.

    A client that reads slowly gets larger pieces: the pending text is at most the whole answer. So memory is bounded,
    and a slow client does not hold up others.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._guard = threading.Lock()
        self._waiting: list[str] = []
        self._there = asyncio.Event()
        self._ended = False

    def put(self, text: str) -> None:
        """Add a piece, from any thread."""
        with self._guard:
            first = not self._waiting
            self._waiting.append(text)
        if first:
            self._loop.call_soon_threadsafe(self._there.set)

    def end(self) -> None:
        """Mark the end, from the event loop."""
        self._ended = True
        self._there.set()

    async def get(self) -> str | None:
        """Return the text written since the last call, at least a piece; None at the end."""
        await self._there.wait()
        with self._guard:
            text = "".join(self._waiting)
            self._waiting.clear()
        if not self._ended:
            self._there.clear()
        return text or None
