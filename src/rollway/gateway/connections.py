"""Open connections: how many, how long idle, and which are closed to let others in.

A connection without a complete request costs a file descriptor. Thousands of them would keep every
other client out, so each has a time limit, and at the limit of connections the oldest idle ones
are closed. A connection whose request is being answered is never closed for another.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

from aiohttp import web

HEADER_SECONDS = 20.0
"""From the connection to the end of the first request's headers."""
BODY_SECONDS = 120.0
IDLE_SECONDS = 75.0
"""Between two requests; longer than clients keep a connection, so that they close it first."""
_FEW_FILES = 4096
_RESERVED_FILES = 64
"""For the journal, the listener, the interpreter's own."""


class Connections:
    """The open connections of one server."""

    def __init__(
        self,
        limit: int = 0,
        *,
        header_seconds: float = HEADER_SECONDS,
        body_seconds: float = BODY_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.limit = limit or connection_limit()
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._idle_seconds = idle_seconds
        self._server: web.Server | None = None
        self._waiting: dict[Any, _Wait] = {}
        """Connections that wait for their client, the one that waits longest first."""
        self._busy: set[Any] = set()
        self._handshakes: dict[Any, float] = {}
        """Connections that the server does not know before their TLS handshake, with their time."""
        self._handshake_seconds = 0.0
        self._open = 0
        """At most so many are open: those of the last look, and those accepted since."""

    def attach(self, server: web.Server, *, handshake_seconds: float = 0.0) -> None:
        """Begin to watch the connections of a server; with TLS, those that shake hands too."""
        self._server = server
        self._handshake_seconds = handshake_seconds

    def accept(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection; for `loop.create_server`."""
        assert self._server is not None
        self._open += 1
        if self._open > self.limit:
            self._make_room()
        connection = self._server()
        if self._handshake_seconds:
            self._handshakes[connection] = time.monotonic()
        return connection

    def receive(self, connection: Any) -> None:
        """Note that the headers of a request have come, and its body is to come."""
        self._wait(connection, self._body_seconds)

    def answer(self, connection: Any) -> None:
        """Note that a request has come: the client waits now."""
        if self._server is not None:
            self._waiting.pop(connection, None)
            self._busy.add(connection)

    def rest(self, connection: Any) -> None:
        """Note that a request is answered."""
        self._busy.discard(connection)
        self._wait(connection, self._idle_seconds)

    async def watch(self) -> None:
        """Close what has waited too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._header_seconds / 4))
            self._look()
            now = time.monotonic()
            for connection, wait in list(self._waiting.items()):
                if not wait.over(connection, now):
                    continue
                self._close(connection)

    def _wait(self, connection: Any, seconds: float) -> None:
        if self._server is not None and connection is not None:
            self._waiting.pop(connection, None)
            self._waiting[connection] = _Wait(time.monotonic(), seconds)

    def _look(self) -> None:
        """Find new connections, and drop those that are gone."""
        assert self._server is not None
        # What is being closed stays listed for a moment, without a transport.
        current = [c for c in self._server.connections if c.transport is not None]
        known = set(current)
        oldest = time.monotonic() - self._handshake_seconds
        self._handshakes = {
            connection: since
            for connection, since in self._handshakes.items()
            if connection not in known and since > oldest
        }
        self._open = len(current) + len(self._handshakes)
        self._busy &= known
        for connection in [gone for gone in self._waiting if gone not in known]:
            del self._waiting[connection]
        for connection in current:
            if connection not in self._waiting and connection not in self._busy:
                self._wait(connection, self._header_seconds)

    def _make_room(self) -> None:
        """Close an eighth of all connections, of those that wait, so that this runs seldom."""
        self._look()
        excess = self._open + 1 - self.limit
        if excess <= 0:
            return
        for connection in list(self._waiting)[: excess + self.limit // 8]:
            self._close(connection)
            self._open -= 1
        self._open += 1  # the new one

    def _close(self, connection: Any) -> None:
        self._waiting.pop(connection, None)
        transport = connection.transport
        connection.force_close()
        if transport is not None:
            transport.abort()  # a plain close waits until the client has read all


class _Wait:
    """Since when a connection waits for its client, and for how long it may."""

    __slots__ = ("_seconds", "_since", "_unsent")

    def __init__(self, since: float, seconds: float) -> None:
        self._since, self._seconds, self._unsent = since, seconds, 0

    def over(self, connection: Any, now: float) -> bool:
        """Tell whether the time is up. A client that still reads an answer is not idle."""
        transport = connection.transport
        unsent = 0 if transport is None else transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return now - self._since > self._seconds


def raise_file_limit() -> str:
    """Raise the soft limit of open files to the hard one. Return a warning if that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        return (
            f"This process may open {hard} files, so at most {connection_limit()} clients can be "
            "connected. Raise the hard limit (ulimit -Hn) for more."
        )
    return ""


def connection_limit() -> int:
    """Return how many connections leave a file for each of their requests to the frontend."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 100_000
    return max(8, (soft - _RESERVED_FILES) // 2)
