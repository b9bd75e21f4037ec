"""An address that leads to another one, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def forwarded(host: str, port: int, bind: str = "127.0.0.1") -> AsyncIterator[str]:
    """A free port whose connections go to `host:port`, as "host:port"."""
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        open_now.update((writer, back))
        try:
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            for one in (writer, back):
                open_now.discard(one)
                one.close()

    server = await asyncio.start_server(serve, bind, 0)
    try:
        yield f"{bind}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for one in list(open_now):
            one.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
