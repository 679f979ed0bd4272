"""Token buckets by key: how often somebody may do something.

The number of keys is bounded: the least recently used one is evicted, and so starts with a full bucket again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Bucket:
    tokens: float
    time: float


class Rate:
    """Rate of `burst` times at once, and `per_second` times a second in the long run, for each key."""

    def __init__(
        self, *, burst: int, per_second: float, keys: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._keys = keys
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str) -> bool:
        """Take a token of `key`; return whether there was one."""
        bucket = self._filled(key)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def give_back(self, key: str) -> None:
        """Return a token that turned out not to count."""
        bucket = self._filled(key)
        bucket.tokens = min(self._burst, bucket.tokens + 1)

    def _filled(self, key: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(self._burst, now))
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.time) * self._per_second)
        bucket.time = now
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._keys:
            self._buckets.popitem(last=False)
        return bucket
