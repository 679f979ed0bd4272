"""A path to the API server whose open connections can die in silence, as when one of several API servers loses power
or a node forgets its connections: no packet is answered any more, and new connections work.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from contextlib import suppress
from urllib.parse import urlsplit

from cluster_support.api_access import Access
from cluster_support.background import Background
from cluster_support.control_plane import free_port

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Program of the classic packet filter with one instruction: accept 0 bytes of each packet (linux/filter.h)."""


class DeafProxy:
    """TCP proxy on loopback."""

    def __init__(self, access: Access, background: Background) -> None:
        self._target = urlsplit(access.host)
        self._background = background
        self._port = free_port()
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._dead: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def up(self) -> None:
        self._background.run(self._up())

    def down(self) -> None:
        self._background.run(self._down())

    def go_deaf(self) -> int:
        """Drop all packets of the connections that are open now; return their number."""
        return self._background.run(self._go_deaf())

    async def _up(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def _down(self) -> None:
        assert self._server is not None
        self._server.close()
        for task, client in list(self._open.items()):
            task.cancel()
            client.close()
        for client in self._dead:
            client.transport.abort()

    async def _go_deaf(self) -> int:
        dying, self._open = self._open, {}
        for task, client in dying.items():
            task.cancel()
            _drop_all_packets(client.get_extra_info("socket"))
            self._dead.append(client)
        return len(dying)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        with suppress(OSError, asyncio.CancelledError):
            to_server, from_client = await asyncio.open_connection(self._target.hostname, self._target.port)
            try:
                await asyncio.gather(_copy(reader, from_client), _copy(to_server, writer))
            finally:
                from_client.close()
        if self._open.pop(task, None) is not None:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


def _drop_all_packets(connection: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
