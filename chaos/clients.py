"""HTTP clients that misbehave on purpose: slow senders, slow readers, and clients that vanish.

They send one request per connection over plain sockets, because an HTTP library cannot misbehave.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_SEND_PIECES = 12
_SMALL_BUFFER = 1024
"""The buffer of a slow reader, so small that the server soon notices."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client treats its connection."""

    send_pause: float = 0.0
    """Seconds between pieces of the body."""
    read_pause: float = 0.0
    """Seconds between single bytes of the answer; 0 reads as fast as possible."""
    vanish: Literal["", "request", "answer"] = ""
    """Reset the connection in the middle of the request, or once the answer has begun."""


POLITE = Manner()


class Vanished(Exception):
    """The client reset its connection, as its manner demands."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gateway listens."""

    host: str
    port: int


async def call(
    address: Address,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    manner: Manner = POLITE,
    begun: asyncio.Event | None = None,
) -> Reply:
    """Send one request and read its whole answer; set `begun` when the answer begins.

    Raises OSError or EOFError if the connection ends before the answer is complete."""
    limit = _SMALL_BUFFER if manner.read_pause else 2**20
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.setblocking(False)
    try:
        if manner.read_pause:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        await asyncio.get_running_loop().sock_connect(raw, (address.host, address.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=limit)
    except BaseException:
        raw.close()
        raise
    try:
        await _send(writer, _head(address, method, path, len(body), headers or {}), body, manner)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise OSError("the head of the answer is too long") from error
        first = await reader.read(1)
        if begun is not None:
            begun.set()
        if manner.vanish == "answer":
            _reset(writer)
        return _parse(head + first + await _read_rest(reader, manner.read_pause))
    finally:
        writer.transport.abort()


def _head(
    address: Address, method: str, path: str, length: int, headers: Mapping[str, str]
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"host: {address.host}:{address.port}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def _send(writer: asyncio.StreamWriter, head: bytes, body: bytes, manner: Manner) -> None:
    writer.write(head)
    pieces = 2 if manner.vanish == "request" else _SEND_PIECES if manner.send_pause else 1
    step = max(1, -(-len(body) // pieces))
    for start in range(0, len(body), step):
        writer.write(body[start : start + step])
        await writer.drain()
        if manner.vanish == "request":
            _reset(writer)
        await asyncio.sleep(manner.send_pause)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a reset, as if the machine had died."""
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise Vanished


async def _read_rest(reader: asyncio.StreamReader, pause: float) -> bytes:
    if not pause:
        return await reader.read(-1)
    parts = []
    while byte := await reader.read(1):
        parts.append(byte)
        await asyncio.sleep(pause)
    return b"".join(parts)


class _Received:
    """Bytes that were received, as `http.client` reads them from a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parse(raw: bytes) -> Reply:
    """Parse a whole answer; raise EOFError if a part is missing."""
    response = http.client.HTTPResponse(_Received(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        return Reply(response.status, response.read())
    except http.client.HTTPException as error:
        raise EOFError("the answer was cut") from error
