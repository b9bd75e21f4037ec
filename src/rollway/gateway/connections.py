"""Limit open connections: their number, their idle time, and which are closed first.

A connection without a complete request costs a file descriptor. Thousands of them would lock every
other client out. So each has a time limit, and when there are too many, the oldest idle connections
are closed. A connection whose request is being answered is never closed for another.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import ssl
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from rollway.errors import PortInUse, UsageError
from rollway.processes import raise_file_limit

HEADER_SECONDS = 20.0
"""The time from the connection to the end of the first request's headers."""
BODY_SECONDS = 120.0
# Not aiohttp's `keepalive_timeout`: it closes a connection only once its client has read the whole
# answer. A client that does not read would keep socket and answer for ever.
IDLE_SECONDS = 75.0
"""The time between two requests; longer than clients keep a connection, so they close it first."""
_HANDSHAKE_SECONDS = 5.0
_BACKLOG = 4096
_FEW_FILES = 4096  # with a lower limit, the gateway warns
_RESERVED_FILES = 64
"""Descriptors for the store, the listener and the interpreter."""
# aiohttp logs malformed requests with their raw text: keys would be in the log, and strangers could
# fill it. Servers themselves log what fails in a handler.
_NO_LOG = logging.getLogger("rollway.gateway.http")
_NO_LOG.setLevel(logging.CRITICAL + 1)


class Listener:
    """A server that listens on a port."""

    def __init__(
        self, runner: web.AppRunner, server: asyncio.Server, watch: asyncio.Task[None]
    ) -> None:
        self._runner, self._server, self._watch = runner, server, watch
        self.port = int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop accepting connections, and give running requests 5 s to end."""
        self._server.close()
        self._watch.cancel()
        await self._runner.cleanup()


class ServerConnections:
    """The open connections of one server."""

    def __init__(
        self,
        limit: int = 0,
        *,
        header_seconds: float = HEADER_SECONDS,
        body_seconds: float = BODY_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.limit = limit or get_connection_limit()
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._idle_seconds = idle_seconds
        self._waiting: dict[Any, _Wait] = {}
        """Connections that wait for their client, the longest wait first."""
        self._busy: set[Any] = set()
        """Connections whose request is being answered."""

    async def listen(
        self, app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> Listener:
        """Serve an application within these bounds.

        The application marks its requests: by `follow`, or itself."""
        # handler_cancellation: when a client disconnects, its request must end on the worker too.
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_NO_LOG,
            shutdown_timeout=5.0,
            handler_cancellation=True,
            # The gateway refuses compressed bodies; aiohttp would unpack them anyway.
            auto_decompress=False,
            lingering_time=2.0,
        )
        await runner.setup()
        make_connection = runner.server
        assert make_connection is not None
        end_connection = make_connection.connection_lost

        def forget(handler: Any, exc: BaseException | None = None) -> None:
            self._waiting.pop(handler, None)
            self._busy.discard(handler)
            end_connection(handler, exc)

        # At once: connections that are gone must not count against the limit.
        make_connection.connection_lost = forget  # type: ignore[method-assign]

        def accept() -> asyncio.BaseProtocol:
            connection = make_connection()
            self._wait(connection, self._header_seconds)
            if len(self._waiting) + len(self._busy) > self.limit:
                # An eighth of the limit at once, so that this runs rarely.
                for waiting in list(self._waiting)[: 1 + self.limit // 8]:
                    self._close(waiting)
            return connection

        try:
            server = await asyncio.get_running_loop().create_server(
                accept,
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS if tls else None,
                # The event loop accepts this many connections in one step. With more, it would
                # exceed the limit before any can be closed.
                backlog=min(_BACKLOG, max(1, self.limit // 4)),
            )
        except OSError as error:
            await runner.cleanup()
            is_taken = error.errno == errno.EADDRINUSE
            raise (PortInUse if is_taken else UsageError)(
                f"Nothing can listen on port {port} of {host}: {error.strerror or error}.",
                "Choose another port with --port, 0 for a free one, or an address with --host.",
            ) from error
        return Listener(runner, server, asyncio.create_task(self._watch()))

    @web.middleware
    async def follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Mark the requests of a server whose requests have no body."""
        self.mark_answering(request.protocol)
        try:
            return await handler(request)
        finally:
            self.mark_idle(request.protocol)

    def mark_receiving(self, connection: Any) -> None:
        """Record that the headers of a request have arrived, but not yet its body."""
        self._wait(connection, self._body_seconds)

    def mark_answering(self, connection: Any) -> None:
        """Record that a request is complete: from now on the client waits, not the gateway."""
        self._waiting.pop(connection, None)
        self._busy.add(connection)

    def mark_idle(self, connection: Any) -> None:
        """Record that a request is answered, and that the connection waits for the next one."""
        self._busy.discard(connection)
        if connection.transport is not None:
            self._wait(connection, self._idle_seconds)

    async def _watch(self) -> None:
        """Close connections that have waited too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._header_seconds / 4))
            now = time.monotonic()
            for connection, wait in list(self._waiting.items()):
                if wait.is_over(connection, now):
                    self._close(connection)

    def _wait(self, connection: Any, seconds: float) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = _Wait(time.monotonic(), seconds)

    def _close(self, connection: Any) -> None:
        self._waiting.pop(connection, None)
        transport = connection.transport
        connection.force_close()
        if transport is not None:
            transport.abort()  # a plain close would wait until the client has read everything


@dataclass(slots=True)
class _Wait:
    """How long a connection has waited for its client, and how long it may."""

    _since: float
    _seconds: float
    _unsent: int = 0

    def is_over(self, connection: Any, now: float) -> bool:
        """Return whether the time is up. A client that is still reading an answer is not idle."""
        transport = connection.transport  # None in a TLS handshake
        unsent = 0 if transport is None else transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return now - self._since > self._seconds


def raise_connection_limit() -> str:
    """Raise the limit of open files, and so of clients; return a warning if it stays low."""
    if (hard := raise_file_limit()) < _FEW_FILES:
        return (
            f"This process may open {hard} files, so at most {get_connection_limit()} clients can "
            "be connected. Raise the hard limit (ulimit -Hn) for more."
        )
    return ""


def get_connection_limit() -> int:
    """Return how many clients may connect: each needs a second descriptor, to the frontend."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, (soft - _RESERVED_FILES) // 2)
