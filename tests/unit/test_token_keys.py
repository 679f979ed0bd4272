"""Tokens verified by public keys: which are accepted, which are refused and why, and how keys are renewed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from finetune_operator.controller.servers.token_keys import (
    AGAIN_SECONDS,
    LEEWAY_SECONDS,
    RENEW_SECONDS,
    SOONEST_SECONDS,
    STALE_SECONDS,
    IssuerKeys,
    KeyReviewer,
    KeysUnavailableError,
)
from finetune_operator.controller.servers.tokens import (
    NOT_BOUND,
    PodIdentity,
    RefusedToken,
    ReviewUnavailableError,
    Verdict,
)
from finetune_operator.jobs.render.render_types import PROGRESS_AUDIENCE

ISSUER = "https://kubernetes.default.svc.cluster.local"
POD = PodIdentity("team", "tune-train-1", "pod-uid")
NOT_VALID = RefusedToken("the token is not valid for audience finetune.dev/progress")
STRANGER = RefusedToken("the token is not signed by a key of this cluster")


@dataclass(frozen=True)
class Key:
    """A key of an issuer."""

    name: str
    private: Any
    algorithm: str

    def public(self) -> dict[str, Any]:
        """Return the key as an API server publishes it."""
        kind = RSAAlgorithm if self.algorithm.startswith("RS") else ECAlgorithm
        written: dict[str, Any] = kind.to_jwk(self.private.public_key(), as_dict=True)
        return {**written, "kid": self.name, "use": "sig", "alg": self.algorithm}

    def sign(self, payload: Mapping[str, Any], **header: Any) -> str:
        return jwt.encode(dict(payload), self.private, self.algorithm, headers={"kid": self.name, **header})

    def pem(self) -> bytes:
        public: bytes = self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return public


def rsa_key(name: str) -> Key:
    return Key(name, rsa.generate_private_key(public_exponent=65537, key_size=2048), "RS256")


RSA = rsa_key("rsa-1")
OTHER = rsa_key("rsa-2")
CURVES = {
    "ES256": Key("ec-256", ec.generate_private_key(ec.SECP256R1()), "ES256"),
    "ES384": Key("ec-384", ec.generate_private_key(ec.SECP384R1()), "ES384"),
    "ES512": Key("ec-521", ec.generate_private_key(ec.SECP521R1()), "ES512"),
}


def claims(**changes: Any) -> dict[str, Any]:
    """Return an API server's claims in the token of a pod; None removes a claim."""
    now = int(time.time())
    payload = {
        "aud": [PROGRESS_AUDIENCE],
        "exp": now + 3600,
        "iat": now,
        "nbf": now,
        "iss": ISSUER,
        "jti": "3f1c",
        "kubernetes.io": {
            "namespace": POD.namespace,
            "node": {"name": "n", "uid": "node-uid"},
            "pod": {"name": POD.name, "uid": POD.uid},
            "serviceaccount": {"name": "default", "uid": "account-uid"},
        },
        "sub": f"system:serviceaccount:{POD.namespace}:default",
        **changes,
    }
    return {name: value for name, value in payload.items() if value is not None}


def place(**changes: Any) -> dict[str, Any]:
    """Return the claims with another pod, namespace or account."""
    there = {**claims()["kubernetes.io"], **changes}
    return claims(**{"kubernetes.io": {name: value for name, value in there.items() if value is not None}})


def encoded(part: Any) -> str:
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def tampered(token: str, **changes: Any) -> str:
    head, _, signature = token.split(".")
    return f"{head}.{encoded(claims(**changes))}.{signature}"


def by_public_key(key: Key) -> str:
    """Return a token signed with the public key, which everybody has, as a shared secret."""
    text = f"{encoded({'alg': 'HS256', 'typ': 'JWT', 'kid': key.name})}.{encoded(claims())}"
    return f"{text}.{encoded(hmac.new(key.pem(), text.encode(), hashlib.sha256).digest())}"


@dataclass
class Issuer:
    """An API server that publishes its keys, and a clock."""

    keys: list[Any] = field(default_factory=lambda: [RSA.public()])
    name: str = ISSUER
    away: bool = False
    reads: int = 0
    now: float = 1000.0
    slow: Callable[[], Awaitable[None]] | None = None

    async def read_issuer(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        self.reads += 1
        if self.slow is not None:
            await self.slow()
        if self.away:
            raise KeysUnavailableError("get /openid/v1/jwks: 403 Forbidden")
        return {"issuer": self.name, "jwks_uri": "https://elsewhere.example.com"}, {"keys": self.keys}

    def reviewer(self) -> KeyReviewer:
        return KeyReviewer(self, clock=lambda: self.now)


async def review(reviewer: KeyReviewer, token: str) -> Verdict | str:
    """Return the verdict, or the reason for having none."""
    try:
        return await reviewer.review_token(token, PROGRESS_AUDIENCE)
    except ReviewUnavailableError as error:
        return str(error)


def judged(token: str, issuer: Issuer | None = None) -> Verdict | str:
    async def go() -> Verdict | str:
        reviewer = (issuer or Issuer()).reviewer()
        await reviewer.renew()
        return await review(reviewer, token)

    return asyncio.run(go())


# ------------------------------------------------------------------------------------------------------------ claims

GOOD: dict[str, Callable[[], str]] = {
    "a pod's token": lambda: RSA.sign(claims()),
    "for several audiences": lambda: RSA.sign(claims(aud=["https://other", PROGRESS_AUDIENCE])),
    "an audience that is no list": lambda: RSA.sign(claims(aud=PROGRESS_AUDIENCE)),
    "that expired by the clock of this machine a moment ago": lambda: RSA.sign(
        claims(exp=int(time.time()) - LEEWAY_SECONDS // 2)
    ),
    "made by a clock that is a little ahead": lambda: RSA.sign(
        claims(nbf=int(time.time()) + LEEWAY_SECONDS // 2, iat=int(time.time()) + LEEWAY_SECONDS // 2)
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_good_token_names_its_pod(case: str) -> None:
    assert judged(GOOD[case]()) == POD


@pytest.mark.parametrize("algorithm", CURVES)
def test_keys_on_curves_are_known(algorithm: str) -> None:
    key = CURVES[algorithm]
    assert judged(key.sign(claims()), Issuer([RSA.public(), key.public()])) == POD


NOW = int(time.time())
"""Time of this module's import: a busy machine may start its tests an hour later."""
A_DAY = 86_400
BAD: dict[str, tuple[Callable[[], str], Verdict]] = {
    "for another audience": (lambda: RSA.sign(claims(aud=[ISSUER])), NOT_VALID),
    "for no audience": (lambda: RSA.sign(claims(aud=None)), NOT_VALID),
    "of another issuer": (lambda: RSA.sign(claims(iss="https://elsewhere.example.com")), STRANGER),
    "of an issuer whose name begins the same": (lambda: RSA.sign(claims(iss=f"{ISSUER}.example.com")), STRANGER),
    "of no issuer": (lambda: RSA.sign(claims(iss=None)), NOT_VALID),
    "that has expired": (lambda: RSA.sign(claims(exp=NOW - 120)), RefusedToken("the token has expired")),
    "that never expires": (lambda: RSA.sign(claims(exp=None)), NOT_VALID),
    "not valid yet": (lambda: RSA.sign(claims(nbf=NOW + A_DAY)), RefusedToken("the token is not valid yet")),
    "whose end is no number": (lambda: RSA.sign(claims(exp=[NOW + 60])), NOT_VALID),
    "whose end is beyond all numbers": (lambda: RSA.sign(claims(exp=float("inf"))), NOT_VALID),
    "that does not say since when": (lambda: RSA.sign(claims(nbf=None)), NOT_VALID),
    "without a signature": (lambda: jwt.encode(claims(), None, "none", headers={"kid": RSA.name}), NOT_VALID),
    "whose signature was cut off": (lambda: RSA.sign(claims()).rpartition(".")[0] + ".", NOT_VALID),
    "signed by the public key as a secret": (lambda: by_public_key(RSA), NOT_VALID),
    "by a key that is not published": (lambda: OTHER.sign(claims()), STRANGER),
    "by a key that is not published, under the name of one that is": (
        lambda: OTHER.sign(claims(), kid=RSA.name), NOT_VALID),
    "of another algorithm than the key's": (
        lambda: jwt.encode(claims(), RSA.private, "PS256", headers={"kid": RSA.name}), NOT_VALID),
    "by a key without a name": (lambda: jwt.encode(claims(), RSA.private, "RS256"), NOT_VALID),
    "with another payload": (lambda: tampered(RSA.sign(claims()), sub="system:serviceaccount:other:x"), NOT_VALID),
    "with a later end": (lambda: tampered(RSA.sign(claims()), exp=NOW + 99_999), NOT_VALID),
    "bound to no pod": (lambda: RSA.sign(place(pod=None)), NOT_BOUND),
    "bound to a pod without a uid": (lambda: RSA.sign(place(pod={"name": POD.name})), NOT_BOUND),
    "bound to a pod with an empty uid": (lambda: RSA.sign(place(pod={"name": POD.name, "uid": ""})), NOT_BOUND),
    "of no service account": (lambda: RSA.sign(place(serviceaccount=None)), NOT_BOUND),
    "of another namespace than its account's": (lambda: RSA.sign(place(namespace="other")), NOT_BOUND),
    "of something else than a service account": (lambda: RSA.sign(claims(sub="alice")), NOT_BOUND),
    "that says nothing of Kubernetes": (lambda: RSA.sign(claims(**{"kubernetes.io": None})), NOT_BOUND),
    "that is none": (lambda: "garbage", NOT_VALID),
    "that is empty": (lambda: "", NOT_VALID),
    "whose head is a list": (lambda: f"{encoded([])}.{encoded({})}.", NOT_VALID),
    "whose head is deeper than can be read": (lambda: f"{encoded(b'[' * 5000)}.{encoded({})}.", NOT_VALID),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_token_is_refused_that_is(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, verdict = BAD[case]
    token = make()
    with caplog.at_level(logging.DEBUG):
        assert judged(token) == verdict
    assert [part for part in token.split(".") if part and part in caplog.text] == []


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_any_text_is_refused_and_none_makes_the_reviewer_fail(text: str) -> None:
    assert judged(text) in (NOT_VALID, STRANGER)


SECRET = {"kty": "oct", "kid": "secret", "k": encoded(b"s" * 64), "alg": "HS256"}
USELESS: dict[str, list[Any]] = {
    "none": [],
    "a shared secret": [SECRET],
    "one for encryption": [{**RSA.public(), "use": "enc"}],
    "one for another algorithm": [{**RSA.public(), "alg": "PS256"}],
    "one without a name": [{name: value for name, value in RSA.public().items() if name != "kid"}],
    "what is no key": ["a", None, {"kty": "RSA", "kid": "rsa-1", "n": "!", "e": "AQAB"}, {}],
}


@pytest.mark.parametrize("case", USELESS)
def test_unusable_keys_are_skipped_and_required_to_leave_one(case: str) -> None:
    described = {"issuer": ISSUER}
    assert set(IssuerKeys.of(described, {"keys": [*USELESS[case], OTHER.public()]}).keys) == {"rsa-2"}
    with pytest.raises(KeysUnavailableError, match="no supported key"):
        IssuerKeys.of(described, {"keys": USELESS[case]})


def test_a_token_that_is_signed_by_a_published_secret_opens_nothing() -> None:
    token = jwt.encode(claims(), b"s" * 64, "HS256", headers={"kid": "secret"})
    assert judged(token, Issuer([SECRET, RSA.public()])) == STRANGER


@pytest.mark.parametrize("described", [{}, {"issuer": ""}, {"issuer": ["a"]}])
def test_an_issuer_without_a_name_is_none(described: dict[str, Any]) -> None:
    with pytest.raises(KeysUnavailableError, match="publishes no issuer"):
        IssuerKeys.of(described, {"keys": [RSA.public()]})


# ------------------------------------------------------------------------------------------------- keys are kept new


def test_a_rotated_key_is_found_when_a_token_shows_it() -> None:
    async def go() -> list[Any]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        issuer.keys = [RSA.public(), OTHER.public()]
        issuer.now += SOONEST_SECONDS
        found = [await review(reviewer, OTHER.sign(claims())), issuer.reads]
        issuer.keys = [OTHER.public()]
        await reviewer.renew()
        issuer.now += SOONEST_SECONDS
        return [*found, await review(reviewer, RSA.sign(claims()))]

    assert asyncio.run(go()) == [POD, 2, STRANGER]


def test_another_issuer_is_found_when_a_token_shows_it() -> None:
    async def go() -> list[Any]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        issuer.name = "https://new.example.com"
        issuer.now += SOONEST_SECONDS
        return [await review(reviewer, RSA.sign(claims(iss=issuer.name))), issuer.reads]

    assert asyncio.run(go()) == [POD, 2]


def test_unknown_key_ids_refresh_the_keys_at_most_every_half_minute() -> None:
    async def go() -> list[Any]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        found: list[Any] = []
        for _ in range(3):
            for _ in range(20):
                assert await review(reviewer, OTHER.sign(claims())) == STRANGER
            found.append(issuer.reads)
            issuer.now += SOONEST_SECONDS
        # Known keys are not delayed by that.
        return [*found, await review(reviewer, RSA.sign(claims()))]

    assert asyncio.run(go()) == [1, 2, 3, POD]


def test_one_read_answers_all_tokens_that_wait_for_it() -> None:
    async def go() -> tuple[list[Any], int]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        issuer.keys = [OTHER.public()]
        issuer.now += SOONEST_SECONDS
        go_on = asyncio.Event()

        async def wait() -> None:
            await go_on.wait()
            issuer.now += SOONEST_SECONDS

        issuer.slow = wait
        waiting = [asyncio.create_task(review(reviewer, OTHER.sign(claims()))) for _ in range(5)]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*waiting), issuer.reads

    assert asyncio.run(go()) == ([POD] * 5, 2)


def test_tokens_cannot_be_reviewed_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer(away=True)
    assert judged(RSA.sign(claims()), issuer) == "the issuer's keys could not be read"
    assert [record.getMessage() for record in caplog.records] == [
        "The public keys that verify tokens of progress reports cannot be read: get /openid/v1/jwks: 403 Forbidden.",
        "Until they can be read, all progress reports are answered with 503.",
    ]


def test_keys_that_cannot_be_read_again_are_believed_for_an_hour() -> None:
    async def go() -> list[Any]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        issuer.away = True
        found: list[Any] = []
        for after in (STALE_SECONDS, 1):
            issuer.now += after
            await reviewer.renew()
            found.append(await review(reviewer, RSA.sign(claims())))
        issuer.away = False
        await reviewer.renew()
        return [*found, await review(reviewer, RSA.sign(claims()))]

    assert asyncio.run(go()) == [POD, "the issuer's keys could not be read", POD]


def test_a_key_that_may_be_new_is_not_refused_while_keys_cannot_be_read() -> None:
    async def go() -> list[Any]:
        issuer = Issuer()
        reviewer = issuer.reviewer()
        await reviewer.renew()
        issuer.away = True
        issuer.now += SOONEST_SECONDS
        return [await review(reviewer, OTHER.sign(claims())) for _ in range(2)] + [issuer.reads]

    assert asyncio.run(go()) == ["the issuer's keys could not be read again"] * 2 + [2]


def test_keys_are_read_from_time_to_time_and_sooner_after_a_failure() -> None:
    issuer, waits = Issuer(away=True), []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            raise asyncio.CancelledError
        issuer.away = len(waits) == 3

    async def go() -> None:
        reviewer = KeyReviewer(issuer, sleep=sleep)
        await reviewer.renew()
        await reviewer.follow()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    assert waits == [AGAIN_SECONDS, RENEW_SECONDS, RENEW_SECONDS, AGAIN_SECONDS]
    assert issuer.reads == 4
