"""Accept connections within limits, from the moment of accept on: before a TLS handshake, and before a request.

A listener has a maximum of connections at a time. One more replaces the oldest one of the address that has most of
them: a client that opens many and sends nothing loses them, and one that sends a single request is served, also when
they share an address (as pods behind one that masquerades do). A connection with a certificate of ours is never evicted
for others, nor is one that the handler keeps because it knows the sender. Each has a bounded life.

An IPv6 address counts with its /64, all of which one machine may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

BACKLOG = 256
SHUTDOWN_SECONDS = 2.0
"""Limit for the end of TLS."""
AGAIN_SECONDS = 0.5
"""Delay before the next try when nothing can be accepted, as for want of file descriptors."""
LOG_INTERVAL_SECONDS = 60.0
"""Interval between two log lines about evicted connections."""
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


@dataclass(frozen=True)
class Bounds:
    """Limits on the number of connections at a time, and on their life."""

    connections: int
    """asyncio's TLS takes about 300 KiB for each."""
    seconds: float
    """Life of a connection, from its accept or its last `renew` on."""
    handshake_seconds: float = 10.0


class Listener:
    """One port."""

    def __init__(
        self,
        name: str,
        handler: Callable[[], asyncio.Protocol],
        bounds: Bounds,
        *,
        tls: ssl.SSLContext | None = None,
        dropped: Callable[[], None] = lambda: None,
        refused: Callable[[str], None] = lambda why: None,
        trusted: Callable[[asyncio.BaseTransport], bool] | None = None,
    ) -> None:
        """`handler` creates the protocol of each connection; `dropped` is called when one is evicted for another;
        `refused` is called with the reason that a client's certificate was not accepted; `trusted` returns whether a
        connection must not be evicted for others (None: each one with a verified certificate).
        """
        self._name = name
        self._handler = handler
        self._bounds = bounds
        self._tls = tls
        self._dropped = dropped
        self._refused = refused
        self._trusted = trusted or _has_certificate
        self._of_address: dict[str, dict[_Connection, None]] = {}
        """Connections without a client certificate by address, the oldest first."""
        self._known: set[_Connection] = set()
        """Connections with a verified client certificate, and those that the handler keeps."""
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._logged_at = float("-inf")
        self._dropped_unlogged = 0

    async def start(self, host: str | None, port: int) -> int:
        """Listen on `host` (None: all addresses); return the port, which is chosen if `port` is 0. OSError if it is in
        use.
        """
        self._sockets = await asyncio.to_thread(_listening, host, port)
        self._accepting = [
            asyncio.create_task(self._accept(sock), name=f"accepting for {self._name}") for sock in self._sockets
        ]
        bound_port: int = self._sockets[0].getsockname()[1]
        return bound_port

    async def stop(self) -> None:
        """Accept no more; open connections stay, and are the handler's."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        self._accepting, self._sockets = [], []

    def close(self) -> None:
        """End the connections that are still open."""
        for connection in [*self._known, *(one for these in self._of_address.values() for one in these)]:
            connection.drop()

    def __len__(self) -> int:
        return len(self._known) + sum(map(len, self._of_address.values()))

    def renew(self, transport: asyncio.BaseTransport | None) -> None:
        """Count the connection as new after a request, for the next one."""
        connection = None if transport is None else self._by_transport.get(transport)
        if connection is not None:
            if connection not in self._known:
                self._forget(connection)
                self._of_address.setdefault(connection.address, {})[connection] = None
            connection.live(self._bounds.seconds)

    def keep(self, transport: asyncio.BaseTransport | None) -> None:
        """Do not evict the connection for others, because its sender is known. At most half of all connections are
        kept, so that new ones find a place.
        """
        connection = None if transport is None else self._by_transport.get(transport)
        if connection is not None and len(self._known) < self._bounds.connections // 2:
            self._forget(connection)
            self._known.add(connection)

    def keeps(self, transport: asyncio.BaseTransport | None) -> bool:
        """Return whether the connection is not evicted for others."""
        return transport is not None and self._by_transport.get(transport) in self._known

    # -------------------------------------------------------------------------------------------- of each connection

    def opened(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """Register the connection before its handler gets it."""
        self._by_transport[transport] = connection
        if self._trusted(transport):
            # TLS has verified its certificate: another replica, or the API server.
            self._forget(connection)
            self._known.add(connection)

    def closed(self, connection: _Connection) -> None:
        """Count the connection no longer."""
        if connection.transport is not None:
            self._by_transport.pop(connection.transport, None)
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        self._known.discard(connection)
        these = self._of_address.get(connection.address, {})
        these.pop(connection, None)
        if not these:
            self._of_address.pop(connection.address, None)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("%s: cannot accept connections: %s", self._name, error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            # Accepting connections that wait already never yields to other tasks.
            await asyncio.sleep(0)
            address = network_of(str(peer[0]))
            if len(self) >= self._bounds.connections and not self._evicted_one():
                accepted.close()
                continue
            connection = _Connection(self, address, self._handler())
            self._of_address.setdefault(address, {})[connection] = None
            connection.live(self._bounds.seconds)
            connection.opening = asyncio.create_task(self._open(connection, accepted), name=f"opening for {self._name}")

    def _evicted_one(self) -> bool:
        """Evict a connection for a new one; return whether there was one, else the new one is closed."""
        self._dropped()
        self._log_dropped()
        if not self._of_address:
            return False
        most = max(self._of_address.values(), key=len)
        next(iter(most)).drop()
        return True

    def _log_dropped(self) -> None:
        self._dropped_unlogged += 1
        if time.monotonic() > self._logged_at + LOG_INTERVAL_SECONDS:
            log.warning(
                "%s: the limit of %d connections is reached; %d were closed for new ones",
                self._name, self._bounds.connections, self._dropped_unlogged,
            )  # fmt: skip
            self._logged_at, self._dropped_unlogged = time.monotonic(), 0

    async def _open(self, connection: _Connection, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._bounds.handshake_seconds,
                ssl_shutdown_timeout=None if self._tls is None else SHUTDOWN_SECONDS,
            )
        except OSError as error:
            # Also a handshake that failed.
            log.debug("%s: a connection was not opened: %s", self._name, type(error).__name__)
            if (why := _certificate_fault(error)) is not None:
                self._refused(why)
        finally:
            connection.opening = None
            if connection.transport is None:
                accepted.close()
                connection.end()


class _Connection(asyncio.Protocol):
    """A connection of a handler, counted by its listener."""

    def __init__(self, listener: Listener, address: str, handler: asyncio.Protocol) -> None:
        self.address = address
        self.transport: asyncio.BaseTransport | None = None
        self.opening: asyncio.Task[None] | None = None
        self._listener = listener
        self._handler = handler
        self._end: asyncio.TimerHandle | None = None

    def live(self, seconds: float) -> None:
        """End the connection after that time."""
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(seconds, self.drop)

    def drop(self) -> None:
        """End the connection now."""
        self.end()
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def end(self) -> None:
        """Count the connection no longer."""
        if self._end is not None:
            self._end.cancel()
        self._listener.closed(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._listener.opened(self, transport)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


def _has_certificate(transport: asyncio.BaseTransport) -> bool:
    return bool(transport.get_extra_info("peercert"))


def _certificate_fault(error: OSError) -> str | None:
    """Return why the client's certificate was not accepted; None for a connection that failed otherwise."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it presented no certificate"
    return None


def network_of(address: str) -> str:
    """Return the key under which an address is counted: an IPv4 address itself, an IPv6 address by its /64."""
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(ip, ipaddress.IPv6Address):
            return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
    return address


def _listening(host: str | None, port: int) -> list[socket.socket]:
    """Return sockets that listen on one port, of IPv4 and of IPv6 if `host` is None."""
    hosts: list[tuple[socket.AddressFamily, str]] = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    if host is not None:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        hosts = [(resolved[0], str(resolved[4][0]))]
    sockets: list[socket.socket] = []
    try:
        for family, address in hosts:
            try:
                created = socket.create_server((address, port), family=family, backlog=BACKLOG)
            except OSError as error:
                if sockets and error.errno in _NO_IPV6:
                    continue
                raise
            created.setblocking(False)
            sockets.append(created)
            port = created.getsockname()[1]
    except OSError:
        for created in sockets:
            created.close()
        raise
    return sockets
