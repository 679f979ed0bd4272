"""Connections within bounds, from accept on: a client with many loses some, a client with a request is served."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from finetune_operator.controller.servers.certificates import TlsContexts, make, server_names
from finetune_operator.controller.servers.listener import Bounds, Listener, network_of
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.probes import BOUNDS, Endpoints
from finetune_operator.controller.servers.request_bodies import SMALL_BYTES, Bodies, BodyError
from suite_plugins.patience import patient

CERTIFICATES = make(server_names("ops", None), datetime.now(UTC))
ATTACKER = "127.0.0.2"
KEEP = b"keep"
LIFE = patient(60.0)


class Echo(asyncio.Protocol):
    """Echoes the bytes that it receives; KEEP makes the listener keep the connection."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data == KEEP:
            self.listener.keep(self.transport)
        self.transport.write(data)


@dataclass
class Running:
    """A listener, and connections to it that are closed at the end."""

    listener: Listener
    port: int
    tls: ssl.SSLContext | None
    dropped: list[int]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self, local: str = "127.0.0.1", *, silent: bool = False) -> asyncio.StreamReader:
        """Open a connection from that address; a silent one does not even start TLS."""
        tls = None if silent else self.tls
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(local, 0), ssl=tls, server_hostname="localhost" if tls else None
        )
        self.writers.append(writer)
        return reader

    async def is_answered(self, reader: asyncio.StreamReader) -> bool:
        """Return whether the newest connection is answered."""
        try:
            self.writers[-1].write(b"word")
            return await asyncio.wait_for(reader.readexactly(4), LIFE) == b"word"
        except (ConnectionError, asyncio.IncompleteReadError):
            return False

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIFE):
            while not holds():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(connections: int, seconds: float = LIFE, *, tls: bool = False) -> AsyncIterator[Running]:
    dropped: list[int] = []
    contexts = TlsContexts(CERTIFICATES) if tls else None
    listener = Listener(
        "test",
        lambda: Echo(listener),
        Bounds(connections, seconds, handshake_seconds=LIFE),
        tls=None if contexts is None else contexts.server,
        dropped=lambda: dropped.append(1),
    )
    port = await listener.start("127.0.0.1", 0)
    client = ssl.create_default_context(cadata=CERTIFICATES.authority) if tls else None
    running = Running(listener, port, client, dropped)
    try:
        yield running
    finally:
        for writer in running.writers:
            writer.transport.abort()
        await listener.stop()
        listener.close()


def play(scene: Callable[[Running], Awaitable[Any]], connections: int = 3, **how: Any) -> Any:
    async def go() -> Any:
        async with listening(connections, **how) as running:
            return await scene(running)

    return asyncio.run(go())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_one_more_takes_the_place_of_the_oldest(tls: bool) -> None:
    async def scene(running: Running) -> None:
        first, *_ = [await running.open() for _ in range(3)]
        await running.until(lambda: len(running.listener) == 3)
        assert running.dropped == []
        assert await running.is_answered(await running.open())
        assert await asyncio.wait_for(_end(first), LIFE)
        assert (len(running.listener), running.dropped) == (3, [1])

    play(scene, tls=tls)


async def _end(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_connections_without_a_tls_start_are_counted_and_dropped_first() -> None:
    async def scene(running: Running) -> None:
        for _ in range(20):
            await running.open(ATTACKER, silent=True)
        await running.until(lambda: len(running.dropped) == 17)
        assert len(running.listener) == 3
        assert await running.is_answered(await running.open())

    play(scene, tls=True)


def test_of_two_addresses_the_one_with_more_connections_loses_them() -> None:
    async def scene(running: Running) -> None:
        honest = await running.open()
        for _ in range(10):
            await running.open(ATTACKER)
        await running.until(lambda: len(running.dropped) == 8)
        running.writers[0].write(b"word")
        assert await asyncio.wait_for(honest.readexactly(4), LIFE) == b"word"

    play(scene)


def test_a_connection_with_our_certificate_stays() -> None:
    async def scene(running: Running) -> None:
        running.tls = TlsContexts(CERTIFICATES).relay
        replica = await running.open(ATTACKER)
        running.tls = ssl.create_default_context(cadata=CERTIFICATES.authority)
        for _ in range(6):
            await running.open(ATTACKER)
        await running.until(lambda: len(running.dropped) == 4)
        running.writers[0].write(b"word")
        assert await asyncio.wait_for(replica.readexactly(4), LIFE) == b"word"

    play(scene, tls=True)


def test_connections_of_known_senders_stay_up_to_half_of_all() -> None:
    async def scene(running: Running) -> None:
        kept = [await running.open() for _ in range(3)]
        for reader, writer in zip(kept, running.writers, strict=True):
            writer.write(KEEP)
            assert await asyncio.wait_for(reader.readexactly(4), LIFE) == KEEP
        for _ in range(6):
            await running.open()
        assert await asyncio.wait_for(_end(kept[2]), LIFE)
        await running.until(lambda: len(running.dropped) == 5)
        for reader, writer in zip(kept[:2], running.writers[:2], strict=True):
            writer.write(b"word")
            assert await asyncio.wait_for(reader.readexactly(4), LIFE) == b"word"

    play(scene, connections=4)


@pytest.mark.parametrize("silent", [False, True], ids=["opened", "in the handshake"])
def test_a_connection_ends_after_its_time(silent: bool) -> None:
    async def scene(running: Running) -> None:
        reader = await running.open(silent=silent)
        assert await asyncio.wait_for(_end(reader), LIFE)
        await running.until(lambda: len(running.listener) == 0)

    play(scene, seconds=patient(0.5), tls=True)


def test_a_closed_connection_makes_room() -> None:
    async def scene(running: Running) -> None:
        for _ in range(10):
            assert await running.is_answered(await running.open())
            running.writers[-1].close()
            await running.until(lambda: len(running.listener) == 0)
        assert running.dropped == []

    play(scene, connections=1)


def test_taken_port_raises_an_error() -> None:
    async def scene(running: Running) -> None:
        with pytest.raises(OSError, match="in use"):
            await Listener("other", asyncio.Protocol, Bounds(1, 1.0)).start("127.0.0.1", running.port)

    play(scene)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("nonsense", "nonsense"),
    ],
)
def test_an_ipv6_address_counts_with_its_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_probes_are_answered_while_a_client_fills_the_port() -> None:
    class Health:
        async def faults(self) -> list[str]:
            return []

        def missing(self) -> list[str]:
            return []

    async def go() -> tuple[int, str]:
        endpoints = Endpoints(Health(), Health(), Metrics())
        port = await endpoints.start("127.0.0.1", 0)
        writers: list[asyncio.StreamWriter] = []
        try:
            for number in range(2 * BOUNDS.connections):
                _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
                writer.write(b"GET /healthz HT" if number % 2 else b"")
                writers.append(writer)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/healthz") as answer,
            ):
                return answer.status, answer.headers["Connection"]
        finally:
            for writer in writers:
                writer.transport.abort()
            await endpoints.stop()

    assert asyncio.run(go()) == (200, "close")


# -------------------------------------------------------------------------------------------------------------- bodies


@asynccontextmanager
async def reading(bodies: Bodies) -> AsyncIterator[str]:
    async def handle(request: web.BaseRequest) -> web.Response:
        try:
            return web.Response(text=str(len(await bodies.read(request))))
        except BodyError as error:
            return web.Response(status=error.status, text=str(error))

    runner = web.ServerRunner(web.Server(handle))  # type: ignore[arg-type]
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def slowly(size: int, began: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield all of a body but its end."""
    yield b"x" * size
    began.set()
    await asyncio.Event().wait()


def test_slow_bodies_do_not_keep_out_a_large_one_and_few_are_in_memory() -> None:
    bodies = Bodies(limit_bytes=1_000_000, seconds=LIFE, large=2)

    async def go() -> tuple[int, str, int]:
        async with reading(bodies) as url, aiohttp.ClientSession() as session:
            sending = []
            for _ in range(6):
                began = asyncio.Event()
                sending.append(asyncio.create_task(_posted(session, url, slowly(SMALL_BYTES + 1, began))))
                await began.wait()
            async with session.post(url, data=b"x" * 500_000) as answer:
                found = answer.status, await answer.text(), len(bodies._reading)
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            return found

    status, text, left = asyncio.run(go())
    assert (status, text) == (200, "500000")
    assert left <= 2


async def _posted(session: aiohttp.ClientSession, url: str, body: AsyncIterator[bytes]) -> int:
    async with session.post(url, data=body) as answer:
        return answer.status
