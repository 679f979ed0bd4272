"""Cached verdicts on tokens, and rate limits by client."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.controller.servers import tokens
from finetune_operator.controller.servers.tokens import (
    PodIdentity,
    RefusedToken,
    ReviewUnavailableError,
    TokenChecker,
    Verdict,
    expiry,
)
from finetune_operator.controller.store.rate_limit import Rate

POD = PodIdentity("team", "pod-0", "uid-0")
REFUSAL = RefusedToken("the token is not valid for audience finetune.dev/progress")


def token(end: float, name: str = "t") -> str:
    return f"{name}.{base64.urlsafe_b64encode(json.dumps({'exp': end}).encode()).decode().rstrip('=')}.signature"


@dataclass
class Reviews:
    """Answers by token, a clock, and the recorded requests."""

    good: set[str] = field(default_factory=set)
    now: float = 1000.0
    reviewed: list[str] = field(default_factory=list)
    wait: Callable[[], Awaitable[None]] | None = None

    async def review_token(self, token: str, audience: str) -> Verdict:
        self.reviewed.append(token)
        if self.wait is not None:
            await self.wait()
        return POD if token in self.good else REFUSAL

    def checker(self, **sizes: int) -> TokenChecker:
        return TokenChecker(self, clock=lambda: self.now, **sizes)


REMEMBERED: dict[str, tuple[str, bool, float, int]] = {
    "a good token until a moment before its end": (token(1100), True, 99, 1),
    "a good token not beyond its end": (token(1100), True, 101, 2),
    "a good token that lives for long, ten minutes": (token(9999), True, 599, 1),
    "a good token that lives for long, not longer": (token(9999), True, 601, 2),
    "a good token that tells no end, shortly": ("opaque", True, 11, 2),
    "a bad token for ten seconds": (token(9999), False, 9, 1),
    "a bad token not for longer": (token(9999), False, 11, 2),
}


@pytest.mark.parametrize("case", REMEMBERED)
def test_a_verdict_is_remembered(case: str) -> None:
    one, good, after, count = REMEMBERED[case]
    reviews = Reviews(good={one} if good else set())

    async def go() -> list[Any]:
        checker = reviews.checker()
        first = await checker.check(one)
        reviews.now += after
        return [first, await checker.check(one)]

    assert asyncio.run(go()) == [POD if good else REFUSAL] * 2
    assert len(reviews.reviewed) == count


def test_remembered_tokens_are_bounded_and_guesses_evict_no_good_ones() -> None:
    good = [token(9999, f"good-{number}") for number in range(3)]
    reviews = Reviews(good=set(good))

    async def go() -> list[bool]:
        checker = reviews.checker(remember=2, remember_refused=2)
        for one in good:
            await checker.check(one)
        for number in range(50):
            await checker.check(f"guess-{number}")
        known = [*good, "guess-47", "guess-48", "guess-49"]
        return [checker.remembered(one) is not None for one in known]

    assert asyncio.run(go()) == [False, True, True, False, True, True]


def test_one_review_answers_all_waiters_of_a_token() -> None:
    async def go() -> tuple[list[Any], int]:
        go_on = asyncio.Event()

        async def wait() -> None:
            await go_on.wait()

        reviews = Reviews(good={"a"}, wait=wait)
        checker = reviews.checker()
        waiting = [asyncio.create_task(checker.check("a")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*waiting[1:]), len(reviews.reviewed)

    assert asyncio.run(go()) == ([POD, POD], 1)


def test_no_answer_is_no_verdict_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "REVIEW_SECONDS", 0.01)

    async def go() -> tuple[str, Any]:
        async def for_ever() -> None:
            await asyncio.Event().wait()

        reviews = Reviews(good={"a"}, wait=for_ever)
        checker = reviews.checker()
        with pytest.raises(ReviewUnavailableError) as caught:
            await checker.check("a")
        reviews.wait = None
        return str(caught.value), await checker.check("a")

    message, verdict = asyncio.run(go())
    assert message == "no review of a token within 0 s"
    assert verdict == POD


@given(st.text())
def test_any_text_has_an_end_or_none(text: str) -> None:
    end = expiry(text)
    assert end is None or isinstance(end, float)


ENDS: dict[str, tuple[str, float | None]] = {
    "a web token": (token(1234), 1234.0),
    "one without an end": ("a." + base64.urlsafe_b64encode(b"{}").decode() + ".c", None),
    "one whose payload is a list": ("a." + base64.urlsafe_b64encode(b"[1]").decode() + ".c", None),
    "one whose payload is no JSON": ("a.b.c", None),
    "plain text": ("abc", None),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_token_is_read_from_its_payload(case: str) -> None:
    text, expected = ENDS[case]
    assert expiry(text) == expected


def test_rate_allows_a_burst_and_then_refills_for_each_key() -> None:
    now = [0.0]
    rate = Rate(burst=3, per_second=1, clock=lambda: now[0])
    assert [rate.take("a") for _ in range(4)] == [True, True, True, False]
    assert rate.take("b")
    now[0] = 0.9
    assert not rate.take("a")
    now[0] = 1.0
    assert [rate.take("a") for _ in range(2)] == [True, False]
    now[0] = 1000.0
    assert [rate.take("a") for _ in range(4)] == [True, True, True, False]


def test_returned_tokens_never_exceed_the_burst() -> None:
    rate = Rate(burst=1, per_second=0, clock=lambda: 0.0)
    assert rate.take("a")
    rate.give_back("a")
    rate.give_back("a")
    assert [rate.take("a") for _ in range(2)] == [True, False]


def test_a_rate_remembers_only_so_many_keys() -> None:
    rate = Rate(burst=1, per_second=0, keys=10, clock=lambda: 0.0)
    for number in range(1000):
        rate.take(str(number))
    assert len(rate) == 10
    assert not rate.take("999")
