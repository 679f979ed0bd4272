"""Checks that keep web sites that a user visits away from an HTTP server of ours.

A site can have the user's browser send requests to 127.0.0.1 or to a server in the user's network, and can point a name
of its own there (DNS rebinding). The Host header reveals that name, and browsers say from where a request comes: all of
them by Origin, and to local or encrypted servers by Sec-Fetch-Site as well. Other clients send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Refusal:
    """Reason why a request is not answered, and a hint."""

    code: int
    text: str


def is_loopback(address: str) -> bool:
    """Return whether only programs of this machine reach a server that listens on `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def foreign(headers: Mapping[str, str], port: int) -> Refusal | None:
    """Return why a request to a local page is refused that another site or name may have caused; None if it is not."""
    hosts = [f"{name}:{port}" for name in LOCAL_NAMES] + ([*LOCAL_NAMES] if port == 80 else [])
    if headers.get("Host", "").lower() not in hosts:
        return Refusal(
            421,
            f"This page is served at {' and '.join(hosts)} only. "
            f"With SSH, forward the same port: ssh -L {port}:127.0.0.1:{port} HOST",
        )
    return of_other_site(headers)


def of_other_name(headers: Mapping[str, str]) -> Refusal | None:
    """Return why a request to a local server is refused; None if it calls the server by a local name. The port may be
    that of a tunnel.
    """
    try:
        name = urlsplit(f"//{headers.get('Host', '')}").hostname or ""
    except ValueError:
        name = ""
    if is_loopback(name):
        return None
    return Refusal(421, f"This server is called {' or '.join(LOCAL_NAMES)} only, as it listens on this machine alone.")


def of_other_site(headers: Mapping[str, str], method: str = "GET") -> Refusal | None:
    """Return why a request that another site has caused is refused; None if the server's own page, a person who opens
    an address, or a client that is no browser has sent it.
    """
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is None:
        host = headers.get("Host", "").lower()
        own = origin is None or origin.lower() in (f"http://{host}", f"https://{host}")
    else:
        opened = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        own = site in ("none", "same-origin") or (opened and method in ("GET", "HEAD"))
    return None if own else Refusal(403, "Requests of other sites are refused.")
