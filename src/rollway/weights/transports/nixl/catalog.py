"""Record which source has which version: trainer ranks announce theirs, receivers look them up.

    trainer ranks ── announce ──►  catalog  ◄── look_up ── receivers     (which come and go)
                ◄─ list_receivers ─   │     ◄── acknowledge ──
                                      └─────◄── announce ── a receiver that serves peers

A version can be found once all ranks of the trainer have announced it, or a receiver has all of it.
A receiver is sent to the least busy source, and becomes a source if it announces itself. Receivers
that all arrive at once ask for a `fanout`, and then form a tree:

    trainer ──► r0 ──► r1 ──► r3, r4       the trainer serves one receiver at a time,
                 └───► r2 ──► r5, r6       a receiver that has the version serves `fanout`

The catalog does not interpret the `body` of a listing, which says how to read the bytes.

On the wire, a call is msgpack, and its header has a signed order for its path with the hash of the
body. The server checks the order before it reads the body. The answer has an order of its own, for
the number of the call, so no answer fits another call. Both ends need the secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal, Protocol, Self
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from rollway.errors import RequestFailed, RollwayError, Unreachable, UsageError, WeightsError
from rollway.http import Http
from rollway.signed_calls import (
    FRESH_SECONDS,
    SECRET,
    OrderRefused,
    Verifier,
    is_same,
    read_stack_secret,
    sign,
)
from rollway.weights.offer import Count
from rollway.weights.transports.group import start_thread
from rollway.weights.untrusted import parse_json

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
LOOPBACK = "127.0.0.1"
MAX_RANKS = 1 << 16
MAX_REQUEST = 64 << 20
MAX_ANSWER = 1 << 30
ORDER_HEADER = "x-rollway-order"
_MAX_VERSIONS = 64
_MAX_BYTES = 2 << 30
_READING_SECONDS = 600.0
"""How long a receiver counts as load of its source if it never acknowledges."""


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source has of one version."""

    version: Count
    source: Name
    """A unique name; a receiver that serves peers uses the name that it looks up with."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    role: Literal["trainer", "receiver"]
    body: bytes


class NotYet(WeightsError):
    """The version may still come: not all ranks have announced it, or all sources are busy."""


class Catalog(Protocol):
    """A directory of versions. All calls return within a bounded time."""

    def announce(self, listing: Listing) -> None: ...

    def withdraw(self, version: int, source: str) -> None:
        """Remove a listing before its bytes are overwritten; a missing listing is no error."""

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), fanout: int = 0
    ) -> list[Listing]:
        """Return sources, by rank, that together have all of a version, and none of `without`.

        Raise `NotYet` while some are missing, and `WeightsError` if the version is gone. With a
        `fanout`, also raise `NotYet` until a source is free for `member`."""

    def acknowledge(self, version: int, member: str) -> None:
        """Record that `member` has received the version."""

    def list_receivers(self, version: int) -> list[str]:
        """Return the receivers that have the version."""

    def leave(self, member: str) -> None:
        """Forget a source or a receiver, with all its listings."""

    def where(self) -> dict[str, Any]:
        """Return the fields of an offer that say how to reach this catalog."""


class MemoryCatalog:
    """The catalog itself, in one process; `CatalogServer` makes it reachable."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[str, Listing]] = {}
        """Listings by version and source."""
        self._lock = threading.Lock()
        self._newest = -1
        self._reading: dict[str, tuple[int, str, float]] = {}
        """By receiver: the version that it reads, the first of its sources, and since when."""
        self._acknowledged: dict[int, set[str]] = {}

    def announce(self, listing: Listing) -> None:
        if listing.rank >= listing.world:
            raise UsageError(f"There is no rank {listing.rank} among {listing.world}.")
        if listing.role == "receiver" and listing.world != 1:
            raise UsageError("A receiver serves peers only if it has all of a version.")
        with self._lock:
            self._check_limits(listing)
            listed = self.versions.setdefault(listing.version, {})
            if listing.role == "trainer":
                # A restarted rank replaces its listing, a trainer of another size all of them.
                for old in [old for old in listed.values() if old.role == "trainer"]:
                    if old.rank == listing.rank or old.world != listing.world:
                        del listed[old.source]
            listed[listing.source] = listing
            self._newest = max(self._newest, listing.version)

    def withdraw(self, version: int, source: str) -> None:
        with self._lock:
            self._remove(version, source)

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), fanout: int = 0
    ) -> list[Listing]:
        with self._lock:
            # A receiver that asks again no longer reads from its previous source.
            self._reading.pop(member, None)
            sets = self._find_sets(version, member, without)
            if not sets:
                raise self._describe_missing(version, without)
            since = time.monotonic() - _READING_SECONDS
            self._reading = {m: read for m, read in self._reading.items() if read[2] > since}
            loads = Counter(read[1] for read in self._reading.values() if read[0] == version)
            if fanout:
                # The trainer serves one receiver, and only while no receiver has the version,
                # because its network would limit all of them.
                receivers = [group for group in sets if group[0].role == "receiver"]
                limit = fanout if receivers else 1
                sets = [group for group in receivers or sets if loads[group[0].source] < limit]
                if not sets:
                    raise NotYet(f"All sources of version {version} are serving others.")
            # Prefer a receiver to the trainer, which has other work.
            chosen = min(
                sets, key=lambda group: (loads[group[0].source], group[0].role == "trainer")
            )
            # A trainer rank that looks up its own version reads nothing: it asks whether all ranks
            # have announced it.
            if all(listing.source != member for listing in chosen):
                self._reading[member] = version, chosen[0].source, time.monotonic()
            return chosen

    def acknowledge(self, version: int, member: str) -> None:
        with self._lock:
            if version in self.versions:  # or it was withdrawn meanwhile
                self._acknowledged.setdefault(version, set()).add(member)
                self._reading.pop(member, None)

    def list_receivers(self, version: int) -> list[str]:
        with self._lock:
            return sorted(self._acknowledged.get(version, ()))

    def leave(self, member: str) -> None:
        with self._lock:
            for version in list(self.versions):
                self._remove(version, member)
            self._reading.pop(member, None)

    def where(self) -> dict[str, Any]:
        return {}

    def _check_limits(self, listing: Listing) -> None:
        if listing.version not in self.versions and len(self.versions) >= _MAX_VERSIONS:
            raise UsageError(
                f"The catalog holds {_MAX_VERSIONS} versions already.", "Withdraw old ones."
            )
        versions = self.versions.values()
        nbytes = sum(len(item.body) for listed in versions for item in listed.values())
        if nbytes + len(listing.body) > _MAX_BYTES:
            raise UsageError(f"The catalog is full: {nbytes} bytes.", "Keep fewer versions.")

    def _find_sets(self, version: int, member: str, without: Sequence[str]) -> list[list[Listing]]:
        """Return sets of listings that each make up the whole version."""
        listed = sorted(self.versions.get(version, {}).values(), key=lambda listing: listing.rank)
        ranks = [listing for listing in listed if listing.role == "trainer"]
        receivers = [listing for listing in listed if listing.role == "receiver"]
        sets = [[listing] for listing in receivers if listing.source != member]
        if ranks and len(ranks) == ranks[0].world:
            sets.append(ranks)
        return [group for group in sets if all(item.source not in without for item in group)]

    def _describe_missing(self, version: int, without: Sequence[str]) -> WeightsError:
        listed = self.versions.get(version)
        if listed and without:
            return WeightsError(
                f"Nobody else has version {version}: {len(without)} sources failed.",
                "Publish it again.",
            )
        if listed:
            ranks = [listing for listing in listed.values() if listing.role == "trainer"]
            world = ranks[0].world if ranks else 1
            return NotYet(f"{len(ranks)} of {world} ranks have announced version {version}.")
        if version > self._newest:
            return NotYet(f"Nobody has announced version {version}.")
        versions = ", ".join(map(str, sorted(self.versions))) or "none"
        return WeightsError(
            f"Version {version} is not kept any more (kept: {versions}).",
            "Use a newer one, or let the publisher keep more.",
        )

    def _remove(self, version: int, source: str) -> None:
        listed = self.versions.get(version, {})
        listed.pop(source, None)
        for member, (reads, read_source, _) in list(self._reading.items()):
            if (reads, read_source) == (version, source):
                del self._reading[member]
        if not listed:
            self.versions.pop(version, None)
            self._acknowledged.pop(version, None)


def wait_for(
    catalog: Catalog,
    version: int,
    member: str,
    timeout: float,
    without: Sequence[str] = (),
    *,
    fanout: int = 0,
) -> list[Listing]:
    """Look up a version that ranks may still be announcing, or whose sources may be busy."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        try:
            return catalog.look_up(version, member, without, fanout=fanout)
        except NotYet as error:
            if time.monotonic() + pause > deadline:
                raise WeightsError(
                    f"{error.message} Rollway waited for {timeout:g} s.",
                    "Check that all ranks of the trainer still run.",
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


# --- over HTTP -----------------------------------------------------------------------------------

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ERRORS: dict[str, type[RollwayError]] = {
    kind.__name__: kind for kind in (NotYet, WeightsError, UsageError)
}
"""By the name in an answer; the first that fits is sent."""
_CALLS: dict[str, Any] = {
    "announce": tuple[Listing],
    "withdraw": tuple[Count, Name],
    "look_up": tuple[Count, Name, list[Name], Count],
    "acknowledge": tuple[Count, Name],
    "list_receivers": tuple[Count],
    "leave": tuple[Name],
}
"""The methods of a catalog that can be called, with their arguments."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a call returned, or the name of its error and what that says."""

    result: list[Listing | Name] | None = None
    error: str = ""
    message: str = ""
    hint: str = ""


def sign_bytes(secret: str, purpose: str, content: bytes) -> dict[str, str]:
    """Return the header of a message: an order for `purpose`, with the hash of the content."""
    body = {"sha256": hashlib.sha256(content).hexdigest()}
    return {ORDER_HEADER: json.dumps(sign(secret, purpose, "", body))}


def read_order(verifier: Verifier, purpose: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the hash that a message's content must have, and the number of its order."""
    try:
        order = parse_json(headers.get(ORDER_HEADER, ""))
    except ValueError:
        order = None
    return str(verifier.open(purpose, order).get("sha256")), order["number"]


def check_bytes(content: bytes, expected: str) -> None:
    if not is_same(hashlib.sha256(content).hexdigest(), expected):
        raise OrderRefused("the message is not what was signed")


def _need_secret(secret: str | None) -> str:
    """Return the secret, by default this stack's own; a catalog never runs without one."""
    secret = read_stack_secret() if secret is None else secret
    if not secret:
        raise UsageError(
            "A catalog of weights needs a secret.", f"Set {SECRET} to the workers' secret."
        )
    return secret


class CatalogServer(MemoryCatalog):
    """A catalog that others can reach; it runs in a thread of this process."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, *, secret: str | None = None) -> None:
        super().__init__()
        self._secret = _need_secret(secret)
        self._verifier = Verifier(self._secret)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        bound: Future[int] = Future()
        work = self._serve(host, port, bound)
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(work,), name="rollway-catalog", daemon=True
        )
        self._thread.start()
        try:
            port = bound.result(timeout=30)
        except (OSError, OverflowError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"The catalog cannot listen on {host}:{port}: {reason}.",
                "Choose another port, or 0 for any.",
            ) from error
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def where(self) -> dict[str, Any]:
        return {"catalog": self.url}

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout=30)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def _serve(self, host: str, port: int, bound: Future[int]) -> None:
        app = web.Application(client_max_size=MAX_REQUEST)
        for name in _CALLS:
            app.router.add_post(f"/v1/{name}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            bound.set_result(int(runner.addresses[0][1]))
            await self._ended.wait()
        except (OSError, OverflowError) as error:  # of a port beyond 65535
            bound.set_exception(error)
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            expected, number = read_order(self._verifier, request.path, request.headers)
            body = await request.read()
            check_bytes(body, expected)
        except OrderRefused as error:
            return web.Response(status=401, text=f"This call is refused: {error}.")
        raw = msgspec.msgpack.encode(self.answer(request.path.removeprefix("/v1/"), body))
        return web.Response(body=raw, headers=sign_bytes(self._secret, f"answer {number}", raw))

    def answer(self, name: str, arguments: bytes) -> Answer:
        """Make a call, and return its result or its error."""
        try:
            checked = msgspec.msgpack.decode(arguments, type=_CALLS[name])
            return Answer(getattr(self, name)(*checked))
        except _UNREADABLE as error:
            return Answer(None, "UsageError", f"This is no call to a catalog: {error}.")
        except RollwayError as error:
            kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
            return Answer(None, kind, error.message, error.hint)


class HttpCatalog:
    """A client of a catalog that runs in another process."""

    def __init__(self, url: str, *, secret: str | None = None, timeout: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme == "http" and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise UsageError(f"`{url}` is not the address of a catalog.", "Use http://host:port.")
        self.url, self._secret, self._timeout = url.rstrip("/"), _need_secret(secret), timeout

    def announce(self, listing: Listing) -> None:
        self._call("announce", listing)

    def withdraw(self, version: int, source: str) -> None:
        self._call("withdraw", version, source)

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), fanout: int = 0
    ) -> list[Listing]:
        return self._call("look_up", version, member, list(without), fanout) or []

    def acknowledge(self, version: int, member: str) -> None:
        self._call("acknowledge", version, member)

    def list_receivers(self, version: int) -> list[str]:
        return self._call("list_receivers", version) or []

    def leave(self, member: str) -> None:
        self._call("leave", member)

    def where(self) -> dict[str, Any]:
        return {"catalog": self.url}

    def _call(self, name: str, *arguments: Any) -> Any:
        path, body = f"/v1/{name}", msgspec.msgpack.encode(arguments)
        if len(body) > MAX_REQUEST:
            raise UsageError(
                f"The description of this rank's tensors takes {len(body)} bytes, more than "
                f"{MAX_REQUEST}."
            )
        headers = sign_bytes(self._secret, path, body)
        number = json.loads(headers[ORDER_HEADER])["number"]
        try:
            # The caller's thread may run an event loop, and must not wait for this one on Ctrl-C.
            post = start_thread(
                "rollway-catalog-call", lambda: asyncio.run(self._post(path, body, headers))
            )
            raw, theirs = post.result()
            check_bytes(raw, read_order(Verifier(self._secret), f"answer {number}", theirs)[0])
            answer = msgspec.msgpack.decode(raw, type=Answer)
        except (Unreachable, RequestFailed, OrderRefused, *_UNREADABLE) as error:
            raise self._explain(error) from error
        if answer.error:
            raise _ERRORS.get(answer.error, WeightsError)(answer.message, answer.hint)
        return answer.result

    async def _post(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        async with Http() as http:
            url, timeout = self.url + path, self._timeout
            return await http.post_bytes(
                url, body, timeout=timeout, limit=MAX_ANSWER, headers=headers
            )

    def _explain(self, error: Exception) -> WeightsError:
        if isinstance(error, OrderRefused) or getattr(error, "status", 0) == 401:
            whose = "its answer" if isinstance(error, OrderRefused) else "401"
            return WeightsError(
                f"The catalog at {self.url} does not have this stack's secret ({whose}).",
                f"Set {SECRET} to the same value at both ends; clocks may differ by at most "
                f"{FRESH_SECONDS:g} s.",
            )
        if isinstance(error, Unreachable):
            return WeightsError(
                f"The catalog at {self.url} does not answer: {error.message}",
                "It runs in the trainer's rank 0, or where it was named; check that it still runs.",
            )
        return WeightsError(
            f"The catalog at {self.url} sent an answer that cannot be read: {error}",
            "Use the same Rollway at both ends.",
        )
