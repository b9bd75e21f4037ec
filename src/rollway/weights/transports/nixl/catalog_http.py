"""The catalog over HTTP: msgpack both ways, bounded sizes, every message signed.

A request carries its time, a number used once, the hash of its body, and a MAC over all of these
and its path. The server checks them before it reads the body. The MAC of an answer covers the
request's number, so no answer fits another request. Both ends need the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
from aiohttp import web

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.signed_calls import (
    FRESH_SECONDS,
    SECRET,
    UsedNumbers,
    is_same,
    make_mac,
    read_stack_secret,
)
from rollway.weights.offer import Count
from rollway.weights.transports.nixl.catalog import (
    Catalog,
    Listing,
    MemoryCatalog,
    Name,
    NotYet,
)
from rollway.weights.transports.nixl.modelexpress import ModelExpressCatalog

LOOPBACK = "127.0.0.1"
MAX_REQUEST = 64 << 20
MAX_ANSWER = 1 << 30
_MAX_URL = 2048
_MAX_WITHOUT = 1 << 16
_CALLS = ("announce", "withdraw", "look_up", "acknowledge", "acknowledged", "leave")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ERRORS: dict[int, type[RollwayError]] = {409: NotYet, 404: WeightsError, 400: UsageError}
"""By status; the first that fits is sent."""


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments of all calls; each call reads its own."""

    version: Count = 0
    member: Name = "-"
    without: Annotated[list[Name], msgspec.Meta(max_length=_MAX_WITHOUT)] = []
    listing: Listing | None = None
    fanout: Count = 0


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    message: str = ""
    hint: str = ""
    listings: list[Listing] = []
    members: list[Name] = []


class Seal:
    """Signs and checks messages; accepts each number once.

    Without `secret` it uses this stack's own; a catalog never runs without one."""

    def __init__(self, secret: str | None) -> None:
        secret = read_stack_secret() if secret is None else secret
        if not secret:
            raise UsageError(
                "A catalog of weights needs a secret.", f"Set {SECRET} to the workers' secret."
            )
        self._secret = secret
        self.used = UsedNumbers()

    def mac(self, *parts: str) -> str:
        return make_mac(self._secret, msgspec.json.encode(parts))

    def request_headers(self, path: str, body: bytes) -> dict[str, str]:
        sent, number = f"{time.time():.3f}", secrets.token_hex(16)
        body_hash = hashlib.sha256(body).hexdigest()
        return {
            "x-rollway-time": sent,
            "x-rollway-number": number,
            "x-rollway-body": body_hash,
            "x-rollway-mac": self.mac("request", path, sent, number, body_hash),
        }

    def check_request(self, path: str, headers: Any) -> str:
        """Return the hash that the body must have; raise for a forged or repeated request."""
        fields = [
            headers.get(f"x-rollway-{name}", "") for name in ("time", "number", "body", "mac")
        ]
        sent, number, body_hash, mac = fields
        # A header that is not ASCII cannot be encoded for the MAC.
        is_signed = all(field.isascii() for field in fields) and is_same(
            mac, self.mac("request", path, sent, number, body_hash)
        )
        if not is_signed:
            raise PermissionError("not signed with this catalog's secret")
        self.used.use(number, sent)  # after the MAC: a stranger must not fill the set
        return str(body_hash)

    def answer_mac(self, number: str, status: int, body: bytes) -> str:
        return self.mac("answer", number, str(status), hashlib.sha256(body).hexdigest())


class CatalogServer(MemoryCatalog):
    """A catalog that others can reach; it runs in a thread of this process."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, *, secret: str | None = None) -> None:
        super().__init__()
        self._seal = Seal(secret)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="rollway-catalog", daemon=True)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop)
        try:
            bound = starting.result(timeout=30)
        except OSError as error:
            self.close()
            raise UsageError(
                f"The catalog cannot listen on {host}:{port}: {error.strerror}.",
                "Choose another port, or 0 for any.",
            ) from error
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

    def where(self) -> dict[str, Any]:
        return {"catalog": self.url}

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def _start(self, host: str, port: int) -> int:
        app = web.Application(client_max_size=MAX_REQUEST)
        for name in _CALLS:
            app.router.add_post(f"/v1/{name}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            body_hash = self._seal.check_request(request.path, request.headers)
        except PermissionError as error:
            return web.Response(status=401, text=f"This request is {error}.")
        if (request.content_length or 0) > MAX_REQUEST:
            return self._sign(request, 413, Answer(f"More than {MAX_REQUEST} bytes."))
        body = await request.read()
        if not is_same(hashlib.sha256(body).hexdigest(), body_hash):
            return web.Response(status=401, text="This request is not what was signed.")
        try:
            call = msgspec.msgpack.decode(body, type=Call)
            answer = self._answer(request.path.removeprefix("/v1/"), call)
        except _UNREADABLE as error:
            return self._sign(request, 400, Answer(f"This is no call to a catalog: {error}."))
        except RollwayError as error:
            status = next((s for s, kind in _ERRORS.items() if isinstance(error, kind)), 500)
            return self._sign(request, status, Answer(error.message, error.hint))
        return self._sign(request, 200, answer)

    def _answer(self, name: str, call: Call) -> Answer:
        match name:
            case "look_up":
                listings = self.look_up(call.version, call.member, call.without, fanout=call.fanout)
                return Answer(listings=listings)
            case "acknowledged":
                return Answer(members=self.list_receivers(call.version))
            case "announce":
                if call.listing is None:
                    raise UsageError("The call announces nothing.")
                self.announce(call.listing)
            case "withdraw":
                self.withdraw(call.version, call.member)
            case "acknowledge":
                self.acknowledge(call.version, call.member)
            case "leave":
                self.leave(call.member)
        return Answer()

    def _sign(self, request: web.Request, status: int, answer: Answer) -> web.Response:
        body = msgspec.msgpack.encode(answer)
        mac = self._seal.answer_mac(request.headers["x-rollway-number"], status, body)
        return web.Response(status=status, body=body, headers={"x-rollway-mac": mac})


class HttpCatalog:
    """A client of a catalog that runs in another process."""

    def __init__(self, url: str, *, secret: str | None = None, timeout: float = 30.0) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or 80
        except ValueError:
            parts, port = urllib.parse.urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise UsageError(f"`{url}` is not the address of a catalog.", "Use http://host:port.")
        self.url = url
        self._host, self._port = parts.hostname, port
        self._seal = Seal(secret)
        self._timeout = timeout

    def announce(self, listing: Listing) -> None:
        self._call("announce", Call(listing=listing))

    def withdraw(self, version: int, source: str) -> None:
        self._call("withdraw", Call(version, source))

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        call = Call(version, member, list(without), fanout=fanout)
        return self._call("look_up", call).listings

    def acknowledge(self, version: int, member: str) -> None:
        self._call("acknowledge", Call(version, member))

    def list_receivers(self, version: int) -> list[str]:
        return list(self._call("acknowledged", Call(version)).members)

    def leave(self, member: str) -> None:
        self._call("leave", Call(member=member))

    def where(self) -> dict[str, Any]:
        return {"catalog": self.url}

    def _call(self, name: str, call: Call) -> Answer:
        path, body = f"/v1/{name}", msgspec.msgpack.encode(call)
        if len(body) > MAX_REQUEST:
            raise UsageError(
                f"The description of this rank's tensors takes {len(body)} bytes, more than "
                f"{MAX_REQUEST}."
            )
        headers = self._seal.request_headers(path, body)
        try:
            status, mac, raw = self._post(path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsError(
                f"The catalog at {self.url} does not answer: {error or type(error).__name__}.",
                "It runs in the trainer's rank 0, or where it was named; check that it still runs.",
            ) from error
        if not is_same(mac, self._seal.answer_mac(headers["x-rollway-number"], status, raw)):
            raise WeightsError(
                f"The catalog at {self.url} does not have this stack's secret ({status}).",
                f"Set {SECRET} to the same value at both ends; clocks may differ by at most "
                f"{FRESH_SECONDS:g} s.",
            )
        try:
            answer = msgspec.msgpack.decode(raw, type=Answer)
        except _UNREADABLE as error:
            raise WeightsError(
                f"The catalog at {self.url} sent an answer that cannot be read: {error}.",
                "Use the same Rollway at both ends.",
            ) from error
        if status != 200:
            raise _ERRORS.get(status, WeightsError)(answer.message, answer.hint)
        return answer

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        deadline = time.monotonic() + self._timeout
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        connection.connect()
        # The socket's own timeout restarts with every byte, also with those of the headers.
        limit = threading.Timer(self._timeout, _shut_down, [connection.sock])
        limit.daemon = True
        limit.start()
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            raw = answer.read(MAX_ANSWER + 1)
            if len(raw) > MAX_ANSWER:
                raise OSError(f"it answers more than {MAX_ANSWER} bytes")
            if answer.length:  # the connection was shut down
                raise http.client.IncompleteRead(b"", answer.length)
            return answer.status, answer.headers.get("x-rollway-mac", ""), raw
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() < deadline:
                raise
            raise TimeoutError(f"no whole answer within {self._timeout:g} s") from error
        finally:
            limit.cancel()
            connection.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def open_catalog(where: dict[str, Any], *, secret: str | None = None) -> Catalog:
    """Return the catalog that an offer names."""
    url = where.get("catalog")
    if not isinstance(url, str) or len(url) > _MAX_URL:
        raise WeightsError("The offer does not say where its catalog is.")
    listings = HttpCatalog(url, secret=secret)
    if "modelexpress" not in where:
        return listings
    server, model, run = (str(where.get(key, "")) for key in ("modelexpress", "model", "run"))
    return ModelExpressCatalog(listings, server, model, run)
