"""The HTTP client: JSON in both directions, bounded time, one retry policy, typed errors.

Integers stay exact: Dynamo's instance ids exceed 2^53, which is why msgspec decodes the answers.
Dynamo's `/engine` routes send JSON as text/plain, so the content type is ignored.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import aiohttp
import msgspec

from rollway.errors import RequestFailed, Unreachable


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to try a call that is safe to repeat, and how long to wait in between."""

    attempts: int = 1
    wait_seconds: float = 0.2
    max_wait_seconds: float = 5.0
    total_seconds: float = math.inf
    """No attempt begins later than this after the first."""
    after_silence: bool = True
    """Whether to repeat a call that got no answer: it may still be running."""
    statuses: frozenset[int] = frozenset()
    """Statuses below 500 that a repetition may cure."""

    def wait(self, attempt: int) -> float:
        return min(self.wait_seconds * 2.0**attempt, self.max_wait_seconds)

    def may_cure(self, error: Unreachable | RequestFailed) -> bool:
        """Return whether a repetition may succeed after this error."""
        if isinstance(error, Unreachable):
            return self.after_silence
        return error.status >= 500 or error.status in self.statuses


Headers: TypeAlias = Mapping[str, str] | None
ONCE = Retry()
IDEMPOTENT = Retry(attempts=4)


class Http:
    """A pool of connections with `get` and `post`; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[Http]:
        """Yield a client that sends all its calls over one connection, and so to one process.

        Its calls fail once the connection breaks: a moment later the address may belong to another
        process."""
        client = _OneConnection(self)
        try:
            yield client
        finally:
            await client.close()

    async def get(
        self, url: str, *, timeout: float, retry: Retry = IDEMPOTENT, headers: Headers = None
    ) -> Any:
        return await self._call("GET", url, None, headers, timeout, retry)

    async def get_text(self, url: str, *, timeout: float, headers: Headers = None) -> str:
        raw, _ = await self._attempt("GET", url, None, headers, timeout)
        return raw.decode(errors="replace")

    async def get_bounded(self, url: str, *, timeout: float, limit: int) -> bytes:
        """GET a page that may be of any size; raise RequestFailed beyond `limit` bytes."""
        return (await self._attempt("GET", url, None, None, timeout, limit))[0]

    async def post(
        self, url: str, body: Any, *, timeout: float, retry: Retry = ONCE, headers: Headers = None
    ) -> Any:
        """POST a body. A function makes a new body for each attempt: a signed one is valid once."""
        return await self._call("POST", url, body, headers, timeout, retry)

    async def post_bytes(
        self, url: str, body: bytes, *, timeout: float, limit: int, headers: Headers = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """POST bytes once; return those of the answer, at most `limit`, and its headers."""
        return await self._attempt("POST", url, body, headers, timeout, limit)

    @asynccontextmanager
    async def stream_lines(
        self, url: str, body: Any, *, timeout: float, headers: Headers = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST, and yield the lines of the response (server-sent events)."""
        with _convert_errors("POST", url, timeout):
            async with self._request("POST", url, body, headers, timeout) as response:
                if response.status >= 400:
                    raise _make_error("POST", url, response.status, await response.read())
                yield response.content

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self, method: str, url: str, body: Any, headers: Headers, timeout: float, retry: Retry
    ) -> Any:
        attempt, began = 0, time.monotonic()
        while True:
            try:
                raw, _ = await self._attempt(method, url, body, headers, timeout)
                return _decode(raw, method, url)
            except (Unreachable, RequestFailed) as error:
                wait = retry.wait(attempt)
                is_late = time.monotonic() + wait - began > retry.total_seconds
                if not retry.may_cure(error) or attempt + 1 >= retry.attempts or is_late:
                    raise
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(
        self, method: str, url: str, body: Any, headers: Headers, timeout: float, limit: int = 0
    ) -> tuple[bytes, Mapping[str, str]]:
        payload = body() if callable(body) else body
        await self.before_request(method, url, payload)
        with _convert_errors(method, url, timeout):
            async with self._request(method, url, payload, headers, timeout) as response:
                raw = await (_read_bounded(response, limit) if limit else response.read())
        if response.status >= 400:
            raise _make_error(method, url, response.status, raw)
        return raw, response.headers

    async def before_request(self, method: str, url: str, body: Any) -> None:
        """Run before each request; a subclass overrides it to delay or fail requests."""

    def _new_session(self) -> aiohttp.ClientSession:
        # No limit: the callers bound their concurrency, and a limit here would be a hidden queue.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20, trust_env=False
        )

    def _request(self, method: str, url: str, body: Any, headers: Headers, timeout: float) -> Any:
        if self._closed:
            raise Unreachable(f"{method} {url}: this client is closed.")
        if self._session is None:
            self._session = self._new_session()
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        return self._session.request(
            method,
            url,
            data=data,
            headers={"content-type": "application/json", **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 10.0)),
        )


class _OneConnection(Http):
    """The client of `Http.pin`."""

    def __init__(self, parent: Http) -> None:
        super().__init__()
        self._parent = parent
        self._used = False

    async def before_request(self, method: str, url: str, body: Any) -> None:
        await self._parent.before_request(method, url, body)

    def _new_session(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(self._refuse_second)
        return aiohttp.ClientSession(
            # aiohttp's default closes a connection that was idle for 15 s.
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=24 * 3600.0),
            trace_configs=[trace],
            trust_env=False,
        )

    async def _refuse_second(self, *_: object) -> None:
        if self._used:
            raise ConnectionResetError("the connection broke; a new one may reach another process")
        self._used = True


@contextmanager
def _convert_errors(method: str, url: str, timeout: float) -> Iterator[None]:
    """Turn the errors of aiohttp into `Unreachable`, with the address and the cause."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable(f"{method} {url} gave no answer within {timeout:g} s.") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unreachable(f"{method} {url} failed: {_describe(error)}.") from error


async def _read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > limit:
            what = f"{response.method} {response.url} answered with more than {limit} bytes."
            raise RequestFailed(what, status=response.status)
    return bytes(content)


def _describe(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"no connection ({os.strerror(number) if number else error.os_error})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection before it answered"
    return str(error) or type(error).__name__


def _make_error(method: str, url: str, status: int, raw: bytes) -> RequestFailed:
    text = raw.decode(errors="replace").strip()
    return RequestFailed(
        f"{method} {url} answered {status}: {read_error_message(text)}", status=status, body=text
    )


def read_error_message(text: str) -> str:
    """Return the message in the JSON of an error answer, or the start of its text."""
    try:
        body = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text[:500] or "(empty body)"
    if not isinstance(body, dict):
        return text[:500]
    message = next((body[key] for key in ("message", "error", "detail") if body.get(key)), text)
    if isinstance(message, dict):
        message = message.get("message", text)
    details = body.get("details")  # Dynamo's message may be a bare "Invalid request"
    if isinstance(details, dict):
        message = f"{message} ({', '.join(f'{key} {value}' for key, value in details.items())})"
    return str(message)[:500]


def _decode(raw: bytes, method: str, url: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = raw[:120].decode(errors="replace")
        raise RequestFailed(
            f"{method} {url} answered with something that is not JSON ({error}): {start!r}",
            status=200,
            body=start,
        ) from error
