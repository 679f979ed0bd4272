"""Access checks on requests to the local page.

The page shows logs and settings, so neither a web site that the user visits nor another user of the machine may read
it. A site can make the user's browser send requests to 127.0.0.1, and can point a name of its own there (DNS
rebinding): the Host header reveals that name, and browsers send a request's origin. Another user of the machine can
connect, but does not know the token that the command prints, as in Jupyter.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from threading import Lock

NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Refusal:
    """Reason why a request is not answered, and a hint."""

    code: int
    text: str


@dataclass
class Keys:
    """Token of this server, and one that is valid only once."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _once: str | None = None
    _lock: Lock = field(default_factory=Lock)

    def for_one_use(self) -> str:
        """Return a token for the command line of a browser, which other users of the machine can see."""
        with self._lock:
            self._once = secrets.token_urlsafe(24)
            return self._once

    def fits(self, token: str) -> bool:
        """Return True if the token of a URL is valid; a one-time token is consumed by it."""
        with self._lock:
            once = self._once
            if once is not None and _same(once, token):
                self._once = None
                return True
        return self.is_token(token)

    def is_token(self, token: str) -> bool:
        """Return True for the token of this server."""
        return _same(self.token, token)


def _same(right: str, given: str) -> bool:
    return hmac.compare_digest(right.encode(), given.encode(errors="surrogateescape"))


def cookie_name(port: int) -> str:
    """Return the name of the cookie: browsers keep one jar for all ports of a host."""
    return f"finetune-ui-{port}"


def refusal(headers: Mapping[str, str], port: int, keys: Keys) -> Refusal | None:
    """Return why a request with these headers is refused; None if it comes from the page or the user. The caller checks
    the token of a URL.
    """
    return foreign(headers, port) or _without_token(headers, port, keys)


def foreign(headers: Mapping[str, str], port: int) -> Refusal | None:
    """Return why a request that another site or name may have caused is refused; None if it is not."""
    host = headers.get("Host", "")
    hosts = [f"{name}:{port}" for name in NAMES] + ([*NAMES] if port == 80 else [])
    if host.lower() not in hosts:
        return Refusal(
            421,
            f"This page is served at {' and '.join(hosts)} only. "
            f"With SSH, forward the same port: ssh -L {port}:127.0.0.1:{port} HOST",
        )
    origin = headers.get("Origin")
    if origin is not None and origin.lower() not in [f"http://{name}" for name in hosts]:
        return Refusal(403, "Requests of other sites are refused.")
    opened = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not opened:
        return Refusal(403, "Requests of other sites are refused.")
    return None


def _without_token(headers: Mapping[str, str], port: int, keys: Keys) -> Refusal | None:
    try:
        cookies: SimpleCookie = SimpleCookie(headers.get("Cookie", ""))
    except CookieError:
        cookies = SimpleCookie()
    held = cookies.get(cookie_name(port))
    if held is not None and keys.is_token(held.value):
        return None
    return Refusal(
        403,
        "Open the complete URL that finetune ui has printed. Its token keeps out other users of this machine.",
    )
