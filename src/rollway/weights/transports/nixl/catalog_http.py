"""The catalog over HTTP: msgpack both ways, of bounded size, every message signed.

A request carries its time, a number used once, the hash of its body and a MAC over all of these
and its path; these are checked before the body is read. An answer's MAC covers the request's
number, so that no answer can be passed off as one to another request. Both ends need the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
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
from rollway.orders import FRESH_SECONDS, SECRET, UsedNumbers, stack_secret
from rollway.weights.catalog import Catalog, Listing, MemoryCatalog, Name, NotYet
from rollway.weights.offer import Count

LOOPBACK = "127.0.0.1"
MOST_REQUEST = 64 << 20
MOST_ANSWER = 1 << 30
_MOST_URL = 2048
_MOST_WITHOUT = 1 << 16
_READ = 1 << 20
_CALLS = ("announce", "withdraw", "look_up", "acknowledge", "acknowledged", "leave")


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments of any of the calls; each reads its own."""

    version: Count = 0
    member: Name = "-"
    without: Annotated[list[Name], msgspec.Meta(max_length=_MOST_WITHOUT)] = []
    listing: Listing | None = None
    fanout: Count = 0


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    message: str = ""
    hint: str = ""
    listings: list[Listing] = []
    members: list[Name] = []


def given_secret(secret: str | None) -> str:
    """The one that was given, or that of this stack; a catalog never runs without."""
    found = stack_secret() if secret is None else secret
    if not found:
        raise UsageError(
            "A catalog of weights needs a secret.", f"Set {SECRET} to the one the workers have."
        )
    return found


class Seal:
    """Makes and checks MACs; each number is accepted once."""

    def __init__(self, secret: str) -> None:
        self._key = secret.encode()
        self.used = UsedNumbers()

    def mac(self, *parts: str) -> str:
        return hmac.new(self._key, msgspec.json.encode(parts), hashlib.sha256).hexdigest()

    def request_headers(self, path: str, body: bytes) -> dict[str, str]:
        sent, number = f"{time.time():.3f}", secrets.token_hex(16)
        said = hashlib.sha256(body).hexdigest()
        return {
            "x-rollway-time": sent,
            "x-rollway-number": number,
            "x-rollway-body": said,
            "x-rollway-mac": self.mac("request", path, sent, number, said),
        }

    def check_request(self, path: str, headers: Any) -> str:
        """The hash that the body must have; raises for a request that is not ours, or not new."""
        sent, number, said, mac = (
            headers.get(f"x-rollway-{name}", "") for name in ("time", "number", "body", "mac")
        )
        if not all(part.isascii() for part in (sent, number, said, mac)):
            raise PermissionError("not signed with this catalog's secret")
        if not _same(mac, self.mac("request", path, sent, number, said)):
            raise PermissionError("not signed with this catalog's secret")
        self.used.use(number, sent)
        return str(said)

    def answer_mac(self, number: str, status: int, body: bytes) -> str:
        return self.mac("answer", number, str(status), hashlib.sha256(body).hexdigest())


class CatalogServer(MemoryCatalog):
    """A catalog that others can reach; runs in a thread of the process that made it."""

    def __init__(
        self, host: str = LOOPBACK, port: int = 0, *, secret: str | None = None, public: str = ""
    ) -> None:
        """`public` is the host name that receivers use, this machine's when `host` is 0.0.0.0."""
        super().__init__()
        self._seal = Seal(given_secret(secret))
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.name = "rollway-catalog"
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
        everywhere = host in ("0.0.0.0", "::")
        named = public or (socket.gethostname() if everywhere else host)
        self.url = f"http://[{named}]:{bound}" if ":" in named else f"http://{named}:{bound}"

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
        app = web.Application(client_max_size=MOST_REQUEST)
        for name in _CALLS:
            app.router.add_post(f"/v1/{name}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            said = self._seal.check_request(request.path, request.headers)
        except PermissionError as error:
            return web.Response(status=401, text=f"This request is {error}.")
        if (request.content_length or 0) > MOST_REQUEST:
            return self._sealed(request, 413, Answer(f"More than {MOST_REQUEST} bytes."))
        body = await request.read()
        if not _same(hashlib.sha256(body).hexdigest(), said):
            return web.Response(status=401, text="This request is not what was signed.")
        try:
            call = msgspec.msgpack.decode(body, type=Call)
            answer = self._answer(request.path.removeprefix("/v1/"), call)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._sealed(request, 400, Answer(f"This is no call to a catalog: {error}."))
        except RollwayError as error:
            return self._sealed(request, _status(error), Answer(error.message, error.hint))
        return self._sealed(request, 200, answer)

    def _answer(self, name: str, call: Call) -> Answer:
        if name == "look_up":
            found = self.look_up(call.version, call.member, call.without, fanout=call.fanout)
            return Answer(listings=found)
        if name == "acknowledged":
            return Answer(members=self.acknowledged(call.version))
        if name == "announce":
            if call.listing is None:
                raise UsageError("Nothing is announced.")
            self.announce(call.listing)
        elif name == "withdraw":
            self.withdraw(call.version, call.member)
        elif name == "acknowledge":
            self.acknowledge(call.version, call.member)
        else:
            self.leave(call.member)
        return Answer()

    def _sealed(self, request: web.Request, status: int, answer: Answer) -> web.Response:
        body = msgspec.msgpack.encode(answer)
        mac = self._seal.answer_mac(request.headers["x-rollway-number"], status, body)
        return web.Response(status=status, body=body, headers={"x-rollway-mac": mac})


class HttpCatalog:
    """A catalog that runs elsewhere."""

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
        self._seal = Seal(given_secret(secret))
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

    def acknowledged(self, version: int) -> list[str]:
        return list(self._call("acknowledged", Call(version)).members)

    def leave(self, member: str) -> None:
        self._call("leave", Call(member=member))

    def where(self) -> dict[str, Any]:
        return {"catalog": self.url}

    def _call(self, name: str, call: Call) -> Answer:
        path, body = f"/v1/{name}", msgspec.msgpack.encode(call)
        if len(body) > MOST_REQUEST:
            raise UsageError(
                f"The description of this rank's tensors takes {len(body)} bytes, more than "
                f"{MOST_REQUEST}."
            )
        headers = self._seal.request_headers(path, body)
        try:
            status, mac, raw = self._post(path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsError(
                f"The catalog at {self.url} cannot be asked: {error or type(error).__name__}.",
                "It runs in the trainer's first rank; see whether that still runs.",
            ) from error
        if not _same(mac, self._seal.answer_mac(headers["x-rollway-number"], status, raw)):
            raise WeightsError(
                f"The catalog at {self.url} does not have this stack's secret ({status}).",
                f"Set {SECRET} to the same at both ends; their clocks may differ by at most "
                f"{FRESH_SECONDS:g} s.",
            )
        try:
            answer = msgspec.msgpack.decode(raw, type=Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"The catalog at {self.url} gave an answer that cannot be read: {error}.",
                "Use the same Rollway at both ends.",
            ) from error
        if status != 200:
            raise _ERRORS.get(status, WeightsError)(answer.message, answer.hint)
        return answer

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        deadline = time.monotonic() + self._timeout
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        connection.connect()
        # The socket's own timeout begins anew with every byte, also of the answer's headers.
        limit = threading.Timer(self._timeout, _shut_down, [connection.sock])
        limit.daemon = True
        limit.start()
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            parts, held = [], 0
            while part := answer.read1(_READ):  # what is there: the deadline counts meanwhile
                parts.append(part)
                held += len(part)
                if held > MOST_ANSWER:
                    raise OSError(f"it answers more than {MOST_ANSWER} bytes")
                if time.monotonic() > deadline:
                    break
            if time.monotonic() > deadline:  # also when the timer has ended the connection
                raise TimeoutError
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return answer.status, answer.headers.get("x-rollway-mac", ""), b"".join(parts)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() < deadline:
                raise
            raise TimeoutError(f"no whole answer within {self._timeout:g} s") from error
        finally:
            limit.cancel()
            connection.close()


_ERRORS: dict[int, type[RollwayError]] = {400: UsageError, 404: WeightsError, 409: NotYet}


def _status(error: RollwayError) -> int:
    return next((s for s, kind in reversed(_ERRORS.items()) if isinstance(error, kind)), 500)


def _shut_down(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        line.shutdown(socket.SHUT_RDWR)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def open_catalog(where: dict[str, Any], *, secret: str | None = None) -> Catalog:
    """The catalog that an offer names."""
    url = where.get("catalog")
    if not isinstance(url, str) or len(url) > _MOST_URL:
        raise WeightsError("The offer does not say where its catalog is.")
    listings = HttpCatalog(url, secret=secret)
    if "modelexpress" not in where:
        return listings
    from rollway.weights.catalog_modelexpress import ModelExpressCatalog

    return ModelExpressCatalog(listings, str(where["modelexpress"]), str(where.get("model", "")))
