"""Access checks on requests to the local page.

The page shows logs and settings, so neither a web site that the user visits (`browser_requests`) nor another user of
the machine may read it. Another user can connect, but does not know the token that the command prints, as in Jupyter.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from threading import Lock

from finetune_contract.browser_requests import Refusal, foreign


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
