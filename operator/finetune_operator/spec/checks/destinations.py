"""Servers that a job names by URL, for the NetworkPolicy of its pods: trackers, object stores, proxies, mirrors.

Only URLs in plain sight count: `spec.template.env` and `spec.predict.server`. Those in Secrets are not known.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from finetune_operator.spec.settings.settings import Network
from finetune_operator.spec.types import FineTuneJobSpec

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Destination:
    """A server outside of the job's pods."""

    field: str
    """Place of the URL, with the variable's name."""
    host: str
    port: int


def destinations(spec: FineTuneJobSpec) -> Iterator[Destination]:
    """Yield the servers that the job names, except those on its pods' own loopback interface."""
    urls = [
        (f"spec.template.env[{index}].value ({variable.get('name')})", variable.get("value"))
        for index, variable in enumerate(spec.template.env)
    ]
    if spec.predict is not None:
        urls.append(("spec.predict.server", spec.predict.server))
    for field, url in urls:
        host, port = _address(url) if isinstance(url, str) and "://" in url else (None, None)
        if host and port and host != "localhost" and not host.startswith("127."):
            yield Destination(field, host, port)


def _address(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None, None


def opened_by_host(destination: Destination, network: Network) -> bool:
    """Return whether the settings open the ports of URLs to this host."""
    return any(fnmatch.fnmatchcase(destination.host, glob) for glob in network.url_hosts)


def may_be_reached(destination: Destination, network: Network) -> bool:
    """Return whether a rule opens the port. The peers of `extraEgress` are not compared: a host may be any of them."""
    port = destination.port
    return (
        not network.enabled
        or port in network.egress_ports
        or opened_by_host(destination, network)
        or any(
            not rule.ports or any(one.port <= port <= (one.end_port or one.port) for one in rule.ports)
            for rule in network.extra_egress
        )
    )
