"""Record which source has which version: trainer ranks announce theirs, receivers look them up.

    trainer ranks ── announce, withdraw ──►  catalog  ◄── look_up ── receivers (which come and go)
                                                      ◄── announce, withdraw ── those that serve

A version can be found once all ranks of the trainer have announced it, or a receiver that serves
peers has all of it. Receivers that all arrive at once wait for a source, and then form a tree:

    trainer ──► r0 ──► r1 ──► r3, r4       the trainer serves one receiver at a time,
                 └───► r2 ──► r5, r6       a receiver that has the version serves two

On the wire, a call is msgpack, and its header has a signed order for its path with the hash of the
body. The server checks the order before it reads the body. The answer has an order of its own, for
the number of the call, so no answer fits another call. Both ends need the secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import msgspec
from aiohttp import web

from rollway.errors import RequestFailed, Unreachable, UsageError, WeightsError
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
from rollway.weights.transports.nixl.listing import Listing, Name
from rollway.weights.untrusted import parse_json

LOOPBACK = "127.0.0.1"
MAX_BYTES = 1 << 30
"""Of a call, and of an answer."""
ORDER_HEADER = "x-rollway-order"
_CALL_SECONDS = 30.0
_PEERS = 2
"""How many peers a receiver serves at the same time."""


class NotYet(WeightsError):
    """The version may still come: not all ranks have announced it, or all sources serve others."""


# --- what it knows -------------------------------------------------------------------------------


class ListedVersions:
    """The listings of each version, and which receiver reads from which source."""

    def __init__(self) -> None:
        self.listed: dict[int, dict[str, Listing]] = {}
        """By version and source."""
        self._newest = -1
        self._reading: dict[str, tuple[int, str]] = {}
        """By receiver that waited for a source: the version, and the first of its sources."""

    def announce(self, listing: Listing) -> None:
        listed = self.listed.setdefault(listing.version, {})
        if listing.role == "trainer":
            # A restarted rank replaces its listing, a trainer of another size all of them.
            for old in [old for old in listed.values() if old.role == "trainer"]:
                if old.rank == listing.rank or old.world != listing.world:
                    del listed[old.source]
        listed[listing.source] = listing
        self._reading.pop(listing.source, None)  # it has read all of the version
        self._newest = max(self._newest, listing.version)

    def withdraw(self, version: int, source: str) -> None:
        """Remove a listing before its bytes are overwritten; a missing listing is no error."""
        self.listed.get(version, {}).pop(source, None)
        if not self.listed.get(version):
            self.listed.pop(version, None)
            self._reading = {n: read for n, read in self._reading.items() if read[0] != version}

    def look_up(self, version: int, without: Sequence[str], receiver: str) -> list[Listing]:
        """Return sources, by rank, that together have all of a version, and none of `without`.

        A `receiver` that is named waits for a source of its own. Raise `NotYet` while ranks are
        missing or all sources serve others, and `WeightsError` if the version is gone."""
        listed = sorted(self.listed.get(version, {}).values(), key=lambda listing: listing.rank)
        ranks = [listing for listing in listed if listing.role == "trainer"]
        groups = [[listing] for listing in listed if listing.role == "receiver"]
        limit = _PEERS
        groups = [group for group in groups if group[0].source not in without]
        if not groups and ranks and len(ranks) == ranks[0].world:
            # The trainer has other work, and one network for all that read from it.
            groups = [ranks] if not any(rank.source in without for rank in ranks) else []
            limit = 1
        if not groups:
            raise self._describe_missing(version, ranks, without)
        if not receiver:
            return random.choice(groups)
        self._reading.pop(receiver, None)
        loads = Counter(source for reads, source in self._reading.values() if reads == version)
        chosen = min(groups, key=lambda group: loads[group[0].source])
        if loads[chosen[0].source] >= limit:
            raise NotYet(f"All sources of version {version} are serving others.")
        self._reading[receiver] = version, chosen[0].source
        return chosen

    def _describe_missing(
        self, version: int, ranks: Sequence[Listing], without: Sequence[str]
    ) -> WeightsError:
        if version not in self.listed and version <= self._newest:
            kept = ", ".join(map(str, sorted(self.listed))) or "none"
            return WeightsError(
                f"Version {version} is not kept any more (kept: {kept}).",
                "Use a newer one, or let the publisher keep more.",
            )
        if without:
            return WeightsError(
                f"Nobody else has version {version}: {len(without)} sources failed.",
                "Publish it again.",
            )
        world = ranks[0].world if ranks else "all"
        return NotYet(f"{len(ranks)} of {world} ranks have announced version {version}.")


# --- over HTTP -----------------------------------------------------------------------------------

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_CALLS: dict[str, Any] = {
    "announce": tuple[Listing],
    "withdraw": tuple[Count, Name],
    "look_up": tuple[Count, list[Name], str],
}
"""The methods of `ListedVersions` that can be called, with their arguments."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a call returned, or its error."""

    result: list[Listing] | None = None
    error: str = ""
    hint: str = ""
    is_early: bool = False
    """Whether the error is `NotYet`."""


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


class CatalogServer:
    """A catalog that runs in a thread of this process."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, *, secret: str | None = None) -> None:
        self.versions = ListedVersions()
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
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_post("/v1/{call}", self._handle)
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
        raw = msgspec.msgpack.encode(answer(self.versions, request.match_info["call"], body))
        return web.Response(body=raw, headers=sign_bytes(self._secret, f"answer {number}", raw))


def answer(versions: ListedVersions, call: str, arguments: bytes) -> Answer:
    """Make a call, and return its result or its error."""
    try:
        checked = msgspec.msgpack.decode(arguments, type=_CALLS[call])
        return Answer(getattr(versions, call)(*checked))
    except (KeyError, *_UNREADABLE) as error:
        return Answer(error=f"This is no call to a catalog: {error}.")
    except WeightsError as error:
        return Answer(None, error.message, error.hint, isinstance(error, NotYet))


class Catalog:
    """A catalog, as trainers and receivers call it. Every call ends in bounded time."""

    def __init__(self, url: str, *, secret: str | None = None) -> None:
        self.url, self._secret = url.rstrip("/"), _need_secret(secret)

    def announce(self, listing: Listing) -> None:
        self._call("announce", listing)

    def withdraw(self, version: int, source: str) -> None:
        self._call("withdraw", version, source)

    def look_up(
        self, version: int, without: Sequence[str] = (), receiver: str = ""
    ) -> list[Listing]:
        return self._call("look_up", version, list(without), receiver) or []

    def wait_for(
        self, version: int, seconds: float, without: Sequence[str] = (), receiver: str = ""
    ) -> list[Listing]:
        """Look up a version that ranks may still be announcing, or whose sources serve others."""
        deadline = time.monotonic() + seconds
        pause = 0.005
        while True:
            try:
                return self.look_up(version, without, receiver)
            except NotYet as error:
                if time.monotonic() + pause > deadline:
                    raise WeightsError(
                        f"{error.message} Rollway waited for {seconds:g} s.",
                        "Check that all ranks of the trainer still run.",
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _call(self, name: str, *arguments: Any) -> Any:
        path, body = f"/v1/{name}", msgspec.msgpack.encode(arguments)
        headers = sign_bytes(self._secret, path, body)
        number = json.loads(headers[ORDER_HEADER])["number"]

        async def post() -> tuple[bytes, Mapping[str, str]]:
            async with Http() as http:
                return await http.post_bytes(
                    self.url + path, body, timeout=_CALL_SECONDS, limit=MAX_BYTES, headers=headers
                )

        try:
            # The caller's thread may run an event loop, and must not wait for this one on Ctrl-C.
            call = start_thread("rollway-catalog-call", lambda: asyncio.run(post()))
            raw, theirs = call.result()
            check_bytes(raw, read_order(Verifier(self._secret), f"answer {number}", theirs)[0])
            answered = msgspec.msgpack.decode(raw, type=Answer)
        except (Unreachable, RequestFailed, OrderRefused, *_UNREADABLE) as error:
            raise self._explain(error) from error
        if answered.error:
            raise (NotYet if answered.is_early else WeightsError)(answered.error, answered.hint)
        return answered.result

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
