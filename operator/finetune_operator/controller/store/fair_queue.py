"""Queue that is fair to namespaces: jobs of one tenant, however many, hold up those of another by one at most.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights: each namespace counts what its items have cost
so far, and the one with the lowest count comes next. One that comes back after a while begins at the count of those
that are served, so that nobody saves up.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items by namespace; those of one namespace come out in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}
        self._cost: dict[str, float] = {}
        """Cost so far by namespace; one that is below the present and waits for nothing is forgotten."""
        self._present = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, namespace: str) -> int:
        """Return how many items of a namespace wait."""
        return len(self._waiting.get(namespace, ()))

    def add(self, namespace: str, item: Item) -> None:
        """Append an item to those of its namespace."""
        if namespace not in self._waiting:
            self._waiting[namespace] = deque()
            self._cost[namespace] = max(self._cost.get(namespace, 0.0), self._present)
        self._waiting[namespace].append(item)
        self._size += 1

    def take(self, cost: float = 1.0, busy: Container[str] = ()) -> Item | None:
        """Return the item that is next, at that cost; None if none waits but those of `busy` namespaces."""
        free = [namespace for namespace in self._waiting if namespace not in busy]
        if not free:
            return None
        namespace = min(free, key=self._cost.__getitem__)
        self._present = max(self._present, self._cost[namespace])
        items = self._waiting[namespace]
        item = items.popleft()
        self._size -= 1
        if not items:
            del self._waiting[namespace]
        self.charge(namespace, cost)
        return item

    def charge(self, namespace: str, cost: float) -> None:
        """Add a cost that is known only afterwards."""
        self._cost[namespace] = max(self._cost.get(namespace, 0.0), self._present) + cost
        for idle in [one for one, sofar in self._cost.items() if sofar <= self._present and one not in self._waiting]:
            del self._cost[idle]


class FairAsyncQueue(asyncio.Queue[tuple[str, Item]]):
    """asyncio.Queue of pairs of a namespace and an item, in the order of a FairQueue."""

    # These three are what asyncio.PriorityQueue overrides, too.
    def _init(self, maxsize: int) -> None:
        self._queue: FairQueue[tuple[str, Item]] = FairQueue()

    def _put(self, item: tuple[str, Item]) -> None:
        self._queue.add(item[0], item)

    def _get(self) -> tuple[str, Item]:
        pair = self._queue.take()
        assert pair is not None, "asyncio.Queue asks only for what is there"
        return pair


class TooManyWaitError(Exception):
    """As many of the namespace wait as may."""


class Turns:
    """Turns at work that few can do at the same time, one of each namespace at most, in the order of a FairQueue."""

    def __init__(self, at_once: int, most_waiting: int = sys.maxsize) -> None:
        """`most_waiting`: maximum number of those of one namespace that wait."""
        self._free = at_once
        self._most_waiting = most_waiting
        self._queue: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue()
        self._waiting: Counter[str] = Counter()
        self._running: set[str] = set()

    def asked(self, namespace: str) -> int:
        """Return how many of a namespace have a turn or wait for one."""
        return self._waiting[namespace] + self.runs(namespace)

    def runs(self, namespace: str) -> bool:
        """Return whether the namespace has a turn."""
        return namespace in self._running

    async def take(self, namespace: str) -> None:
        """Wait for a turn, which `give_back` ends. TooManyWaitError."""
        if self._waiting[namespace] >= self._most_waiting:
            raise TooManyWaitError
        turn = asyncio.get_running_loop().create_future()
        self._queue.add(namespace, (namespace, turn))
        self._waiting[namespace] += 1
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(namespace)
            raise
        finally:
            self._waiting -= Counter({namespace: 1})

    def give_back(self, namespace: str) -> None:
        """End a turn."""
        self._running.discard(namespace)
        self._free += 1
        self._hand_out()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Wait for a turn, and end it at the end of the block. TooManyWaitError."""
        await self.take(namespace)
        try:
            yield
        finally:
            self.give_back(namespace)

    def _hand_out(self) -> None:
        while self._free and (following := self._queue.take(busy=self._running)) is not None:
            namespace, turn = following
            if not turn.done():  # else nobody waits for it any more
                self._free -= 1
                self._running.add(namespace)
                turn.set_result(None)
