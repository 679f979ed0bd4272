"""Verify tokens by the public keys of their issuer: for an operator that has no right to a TokenReview.

Unlike the API server, this does not look up whether the pod still exists. The progress server checks that in the
operator's store, by name and uid, so that the token of a deleted pod opens nothing. A service account that was deleted
while its pod runs on is not noticed until the token's end, an hour at most as the kubelet requests it.

The algorithm is the key's and never the token's alone: a token cannot choose `none`, nor have a public key taken for a
shared secret. Only asymmetric algorithms that Kubernetes signs with are known.

Keys are read again from time to time, and when a token shows an unknown key or issuer, as after a rotation; for that
not more often than every half minute, as anybody can send such tokens. Keys that could not be read again for an hour
are no longer trusted: one of them may have been withdrawn. Nothing here logs any part of a token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jwt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune_operator.controller.servers.tokens import (
    ACCOUNT,
    NOT_BOUND,
    PodIdentity,
    RefusedToken,
    ReviewUnavailableError,
    Verdict,
    not_valid,
)

log = logging.getLogger(__name__)

ALGORITHMS = frozenset({"RS256", "ES256", "ES384", "ES512"})
"""Signature algorithms of an API server, by the kind of its key (pkg/serviceaccount/jwt.go of Kubernetes)."""
LEEWAY_SECONDS = 30
"""Tolerated difference between the clocks of the API server's machine and of ours."""
RENEW_SECONDS = 600.0
AGAIN_SECONDS = 60.0
"""Delay after keys could not be read."""
SOONEST_SECONDS = 30.0
"""Shortest interval between two reads that tokens cause."""
STALE_SECONDS = 3600.0
_REQUIRED = ["iss", "sub", "aud", "exp", "iat", "nbf"]
"""Claims that an API server gives every bound token."""


class KeysUnavailableError(Exception):
    """The issuer's keys cannot be read; the text has the reason and a hint."""


class KeySource(Protocol):
    """Source of the issuer's keys."""

    async def read_issuer(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the issuer's description (OpenID Connect Discovery) and its JSON web key set. Raises
        KeysUnavailableError.
        """
        ...


@dataclass(frozen=True)
class IssuerKeys:
    """Issuer and keys that a token has to come from."""

    issuer: str
    keys: Mapping[str, jwt.PyJWK]
    """Public keys by key id."""

    @classmethod
    def of(cls, description: Mapping[str, Any], key_set: Mapping[str, Any]) -> IssuerKeys:
        """Return the keys that can be used here; others, as of kinds yet to come, are left out. KeysUnavailableError if
        there are none.
        """
        issuer, entries = description.get("issuer"), key_set.get("keys")
        keys = {
            key.key_id: key for key in map(_key, entries if isinstance(entries, list) else ()) if key and key.key_id
        }
        if not isinstance(issuer, str) or not issuer or not keys:
            raise KeysUnavailableError("the API server publishes no issuer or no supported key")
        return cls(issuer, keys)


def _key(entry: object) -> jwt.PyJWK | None:
    """Return a key for verifying signatures; None for anything else."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(entry)
    except jwt.PyJWTError:
        return None
    return key if key.algorithm_name in ALGORITHMS else None


class KeyReviewer:
    """A `tokens.TokenReviewer` that sends no request about a token."""

    def __init__(
        self,
        source: KeySource,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._clock = clock
        self._sleep = sleep
        self._known: IssuerKeys | None = None
        self._known_at = 0.0
        self._tried_at = 0.0
        self._failed = True
        self._reading = asyncio.Lock()

    async def follow(self) -> None:
        """Keep the keys current; for ever."""
        while True:
            await self._sleep(AGAIN_SECONDS if self._failed else RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Read the keys. An error is logged, and the known keys stay for a while."""
        async with self._reading:
            await self._read()

    async def review_token(self, token: str, audience: str) -> Verdict:
        """See `tokens.TokenReviewer`."""
        known = self._usable()
        try:
            return _verified(token, known, audience)
        except _UnknownKeyError:
            renewed = await self._renewed(known)
        try:
            return _verified(token, renewed, audience)
        except _UnknownKeyError:
            return RefusedToken("the token is not signed by a key of this cluster")

    def _usable(self) -> IssuerKeys:
        if self._known is None or self._stale():
            raise ReviewUnavailableError("the issuer's keys could not be read")
        return self._known

    def _stale(self) -> bool:
        return self._clock() - self._known_at > STALE_SECONDS

    async def _renewed(self, before: IssuerKeys) -> IssuerKeys:
        """Return keys that are newer than those that a token did not fit, unless these are new themselves."""
        async with self._reading:
            # The first of many waiters reads for all.
            if self._known is before and self._clock() - self._tried_at >= SOONEST_SECONDS:
                await self._read()
            if self._failed:
                raise ReviewUnavailableError("the issuer's keys could not be read again")
            return self._usable()

    async def _read(self) -> None:
        self._tried_at, self._failed = self._clock(), True
        try:
            fresh = IssuerKeys.of(*await self._source.read_issuer())
        except KeysUnavailableError as error:
            log.warning("The public keys that verify tokens of progress reports cannot be read: %s.", error)
            if self._known is None or self._stale():
                log.warning("Until they can be read, all progress reports are answered with 503.")
            return
        if self._known is None or (self._known.issuer, set(self._known.keys)) != (fresh.issuer, set(fresh.keys)):
            log.info(
                "Tokens of progress reports are verified for issuer %s; public keys: %d.", fresh.issuer, len(fresh.keys)
            )
        self._known, self._known_at, self._failed = fresh, self._clock(), False


# ------------------------------------------------------------------------------------------------------- one token


class _UnknownKeyError(Exception):
    """The token's key or issuer is not a known one."""


class _Bound(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    uid: str = Field(min_length=1)


class _Place(BaseModel):
    model_config = ConfigDict(strict=True)

    namespace: str = Field(min_length=1)
    pod: _Bound
    serviceaccount: _Bound


class _Claims(BaseModel):
    """Claims that an API server writes into a token that is bound to a pod."""

    model_config = ConfigDict(strict=True)

    sub: str
    place: _Place = Field(alias="kubernetes.io")


def _verified(token: str, known: IssuerKeys, audience: str) -> Verdict:
    """Return the verdict on the token's claims, if one of the keys has signed it. Raises _UnknownKeyError."""
    try:
        key_id = jwt.get_unverified_header(token).get("kid")
        if not isinstance(key_id, str):
            return not_valid(audience)
        key = known.keys.get(key_id)
        if key is None:
            raise _UnknownKeyError
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=audience,
            issuer=known.issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": _REQUIRED},
        )
    except jwt.InvalidIssuerError as error:
        raise _UnknownKeyError from error
    except jwt.ExpiredSignatureError:
        return RefusedToken("the token has expired")
    except jwt.ImmatureSignatureError:
        return RefusedToken("the token is not valid yet")
    except (jwt.PyJWTError, RecursionError):
        # A header that nests too deep is one that nobody has signed.
        return not_valid(audience)
    return _identity(claims)


def _identity(claims: Mapping[str, Any]) -> Verdict:
    try:
        parsed = _Claims.model_validate(claims)
    except ValidationError:
        return NOT_BOUND
    place = parsed.place
    if parsed.sub != f"{ACCOUNT}{place.namespace}:{place.serviceaccount.name}":
        return NOT_BOUND
    return PodIdentity(place.namespace, place.pod.name, place.pod.uid)
