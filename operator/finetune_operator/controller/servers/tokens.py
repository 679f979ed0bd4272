"""Identify the pod that a token was issued for, in one of two ways, and remember the answer for a while.

Either the API server is asked (TokenReview), which is a right in the cluster, or the token is verified here by the API
server's public keys (token_keys.py). An administrator chooses; neither replaces the other by itself.

A token is remembered by its SHA-256, never by itself, and good answers at most until the token expires. Refused tokens
are kept apart from good ones and for a short time, so that guessing neither evicts good ones nor repeats the review of
the same guess. Nothing here logs, and no message holds any part of a token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from finetune_operator.jobs.render.render_types import PROGRESS_AUDIENCE
from finetune_operator.spec.json_text import loads

REMEMBER_SECONDS = 600.0
"""Limit for a good answer: a deleted pod's token stays known that long, but the pod also has to be in the store."""
REMEMBER_REFUSED_SECONDS = 10.0
REVIEW_SECONDS = 10.0
"""Limit for one review, requests to the API server included."""
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True)
class PodIdentity:
    """Pod that a token was issued for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class RefusedToken:
    """Reason that a token is refused."""

    reason: str


Verdict: TypeAlias = PodIdentity | RefusedToken


class ReviewUnavailableError(Exception):
    """A review is not possible now; nothing is known about the token."""


class TokenReviewer(Protocol):
    """One way to identify the pod of a token."""

    async def review_token(self, token: str, audience: str) -> Verdict:
        """Return the pod that the token was issued for, or the refusal. Raises ReviewUnavailableError."""
        ...


NOT_BOUND = RefusedToken("the token is not bound to a pod; use the token mounted into the pod")


def not_valid(audience: str) -> RefusedToken:
    """Return the refusal of a token for which there is no better reason."""
    return RefusedToken(f"the token is not valid for audience {audience}")


def verdict(status: Mapping[str, Any], audience: str) -> Verdict:
    """Return the verdict in the status of a TokenReview."""
    if status.get("authenticated") is not True:
        return not_valid(audience)
    # An API server that does not know audiences answers `authenticated` without any: such a token may be meant for
    # somebody else.
    if audience not in (status.get("audiences") or ()):
        return RefusedToken(f"the token is not for audience {audience}")
    user = status.get("user") or {}
    extra = user.get("extra") or {}
    account = str(user.get("username", ""))
    names, uids = extra.get(_POD_NAME) or [], extra.get(_POD_UID) or []
    if not account.startswith(ACCOUNT) or len(names) != 1 or len(uids) != 1:
        return NOT_BOUND
    return PodIdentity(account.removeprefix(ACCOUNT).partition(":")[0], str(names[0]), str(uids[0]))


def expiry(token: str) -> float | None:
    """Return `exp` of a JSON web token in Unix seconds, unverified; None if it cannot be read."""
    try:
        return float(_claims(token)["exp"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def claimed(token: str) -> PodIdentity | None:
    """Return the pod that a JSON web token claims to be bound to, unverified; None if it names none."""
    try:
        claims = _claims(token)["kubernetes.io"]
        return PodIdentity(str(claims["namespace"]), str(claims["pod"]["name"]), str(claims["pod"]["uid"]))
    except (ValueError, TypeError, KeyError):
        return None


def _claims(token: str) -> Any:
    """Return the claims of a JSON web token, unverified. Raises ValueError."""
    payload = token.partition(".")[2].partition(".")[0]
    return loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


class TokenChecker:
    """Verdicts about tokens; the same token is reviewed once at a time."""

    def __init__(
        self,
        reviewer: TokenReviewer,
        *,
        clock: Callable[[], float] = time.time,
        remember: int = 10_000,
        remember_refused: int = 1_000,
    ) -> None:
        self._reviewer = reviewer
        self._clock = clock
        self._accepted = _Memory(remember, clock)
        self._refused = _Memory(remember_refused, clock)
        self._reviewing: dict[bytes, asyncio.Task[Verdict]] = {}

    def remembered(self, token: str) -> Verdict | None:
        """Return the verdict, if it is known without a review."""
        key = _key(token)
        return self._accepted.get(key) or self._refused.get(key)

    async def check(self, token: str) -> Verdict:
        """Return the verdict. Raises ReviewUnavailableError."""
        if (known := self.remembered(token)) is not None:
            return known
        key = _key(token)
        task = self._reviewing.get(key)
        if task is None:
            task = self._reviewing[key] = asyncio.create_task(self._review(key, token), name="token-review")
            task.add_done_callback(lambda done: self._reviewed(key, done))
        # A waiter that is cancelled must not cancel the review for the others.
        return await asyncio.shield(task)

    def _reviewed(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        self._reviewing.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved, also if nobody waits for it any more

    async def _review(self, key: bytes, token: str) -> Verdict:
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                reviewed = await self._reviewer.review_token(token, PROGRESS_AUDIENCE)
        except TimeoutError as error:
            raise ReviewUnavailableError(f"no review of a token within {REVIEW_SECONDS:.0f} s") from error
        now = self._clock()
        if isinstance(reviewed, RefusedToken):
            self._refused.put(key, reviewed, now + REMEMBER_REFUSED_SECONDS)
        else:
            end = expiry(token)
            # A token that names no end is reviewed again soon.
            until = now + (REMEMBER_REFUSED_SECONDS if end is None else REMEMBER_SECONDS)
            self._accepted.put(key, reviewed, until if end is None else min(until, end))
        return reviewed


class _Memory:
    """Verdicts until a time each; the least recently used one is evicted first."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._size = size
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()

    def get(self, key: bytes) -> Verdict | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[1] <= self._clock():
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: Verdict, until: float) -> None:
        self._entries[key] = (value, until)
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
