"""Text from a model to a client: up to a stop, and in pieces that a slow client gets together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from finetune_trainer.serving.protocols.text_pieces import TextPieces
from finetune_trainer.serving.stop_texts import StopFilter, first_stop


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a b ", "c"], ["a b ", "c"]),
        (["a E", "N", "D b", "c"], ["a ", "", "", ""]),
        (["a E", "Nd", ""], ["a ", "ENd", ""]),
        (["a E"], ["a E"]),
        (["a E", ""], ["a ", "E"]),
        (["a ENEND b"], ["a EN"]),
        (["a\n", "\nb"], ["a", ""]),
    ],
)
def test_text_passes_up_to_a_stop(pieces: list[str], shown: list[str]) -> None:
    stops = StopFilter(["END", "\n\n"])

    assert [stops.passed(each, last=each is pieces[-1]) for each in pieces] == shown


def test_first_of_several_stops_counts() -> None:
    assert first_stop("a b c", ["c", "b"]) == 2
    assert first_stop("a b c", ["d"]) is None
    assert first_stop("a", []) is None


def test_slow_client_gets_larger_pieces_and_one_wake_up() -> None:
    async def read() -> tuple[list[str | None], list[Any]]:
        loop: Any = asyncio.get_running_loop()
        pieces, woken, call = TextPieces(), [], loop.call_soon_threadsafe

        def counted(*given: Any) -> Any:
            woken.append(given[0])
            return call(*given)

        def write() -> None:
            for _ in range(10_000):
                pieces.put("piece ")

        loop.call_soon_threadsafe = counted
        writer = threading.Thread(target=write)
        writer.start()
        writer.join()  # the client reads nothing meanwhile
        first = await pieces.get()
        pieces.put("last")
        found = [first, await pieces.get()]
        pieces.end()
        return [*found, await pieces.get()], [each for each in woken if each == pieces._there.set]

    found, woken = asyncio.run(read())

    assert found == ["piece " * 10_000, "last", None]
    assert len(woken) == 2
