"""A TCP proxy: a local port whose connections lead to another address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def open_proxy(host: str, port: int, bind: str = "127.0.0.1") -> AsyncIterator[str]:
    """Forward a free port of `bind` to `host:port`; yield its address, as "host:port"."""
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        writers = {writer, upstream_writer}
        open_writers.update(writers)
        try:
            await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))
        finally:
            open_writers.difference_update(writers)
            for side in writers:
                side.close()

    server = await asyncio.start_server(serve, bind, 0)
    try:
        yield f"{bind}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(open_writers):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
