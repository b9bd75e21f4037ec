"""Which workers are there, from whichever place can tell: `discover(http, source)`.

Three sources. The RL listing of a Dynamo frontend knows most: instance ids, admin addresses, routes
and models. The frontend's `/health` knows instances and their addresses, from which the admin
address follows. A static list of admin addresses knows only these. A worker that cannot be used is
listed with the reason in `error`, never left out: who is missing from a list cannot be waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rollway.errors import RequestFailed, Unreachable, UsageError
from rollway.http import IDEMPOTENT, Http, Retry

# The frontend gives a hung worker 5 s before it lists it with an error.
LISTING_SECONDS = 15.0
DEFAULT_SYSTEM_PORT = 9090
NEEDED_ROUTES = frozenset({"pause_generation", "resume_generation"})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: who it is, what it serves, and where its admin routes are."""

    instance_id: int
    """Dynamo's id, an unsigned 64-bit number: exact in Python, not in a double. Negative where the
    source does not tell: then requests cannot be pinned to this worker."""
    model: str
    admin_url: str
    routes: frozenset[str] = frozenset()
    """Empty where the source does not tell."""
    world_size: int = 1
    error: str | None = None

    def __str__(self) -> str:
        return f"worker {self.instance_id} ({self.admin_url or 'no admin address'})"


@dataclass(frozen=True, slots=True)
class RlListing:
    """`GET /v1/rl/workers`, which the frontend serves on a port of its own."""

    url: str


@dataclass(frozen=True, slots=True)
class HealthListing:
    """The instances in the frontend's `GET /health`; for stacks without the RL listing."""

    url: str
    namespace: str = ""
    """Only workers of this namespace, or of one that begins with it and a dash: deployments add a
    suffix of their own. All of them when empty."""
    system_port: int = DEFAULT_SYSTEM_PORT


@dataclass(frozen=True, slots=True)
class StaticList:
    """Admin addresses that somebody wrote down."""

    urls: tuple[str, ...]
    model: str = ""


Source = RlListing | HealthListing | StaticList


async def discover(http: Http, source: Source, *, retry: Retry = IDEMPOTENT) -> list[Worker]:
    """The workers of a source, ordered by instance id."""
    if isinstance(source, RlListing):
        found = await _rl_listing(http, source.url, retry)
    elif isinstance(source, HealthListing):
        found = await _health_listing(http, source, retry)
    else:
        found = await _static_list(http, source)
    return sorted(found, key=lambda worker: worker.instance_id)


async def find(workers: Iterable[Worker], address: str) -> Worker | None:
    """The worker at an admin address or host:port, by name or by what the name resolves to; None
    rather than a guess."""
    wanted = _host_and_port(address)
    candidates = list(workers)
    for worker in candidates:
        if _host_and_port(worker.admin_url) == wanted:
            return worker
    resolved = await _addresses(*wanted)
    matching = [w for w in candidates if resolved & await _addresses(*_host_and_port(w.admin_url))]
    if len(matching) > 1:
        raise UsageError(
            f"{address} is the address of {len(matching)} workers.", "Name one by its port as well."
        )
    return matching[0] if matching else None


async def _rl_listing(http: Http, base: str, retry: Retry) -> list[Worker]:
    url = f"{base.rstrip('/')}/v1/rl/workers"
    try:
        listing = await http.get(url, timeout=LISTING_SECONDS, retry=retry)
    except Unreachable as error:
        raise Unreachable(
            f"No RL worker listing: {error.message}",
            "The frontend serves it on a port of its own (DYN_ENABLE_RL=true, DYN_RL_PORT); "
            "pass that address as `rl_url`.",
        ) from error
    entries = listing.get("workers") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        raise RequestFailed(f"{url} answered without a list of workers.", status=200)
    return [_listed(entry) for entry in entries]


def _listed(entry: Any) -> Worker:
    error = entry.get("error") if isinstance(entry, dict) else None
    worker = Worker(
        instance_id=_instance_id(entry),
        model=entry.get("model") or "",
        admin_url=(entry.get("system_url") or "").rstrip("/"),
        routes=frozenset(entry.get("routes") or ()),
        world_size=entry.get("world_size") or 1,
        error=str(error) if error else None,
    )
    if worker.error is None and not worker.admin_url:
        return replace(worker, error="it is listed without an admin address (DYN_SYSTEM_PORT)")
    return _checked_routes(worker)


async def _health_listing(http: Http, source: HealthListing, retry: Retry) -> list[Worker]:
    url = f"{source.url.rstrip('/')}/health"
    answer = await http.get(url, timeout=LISTING_SECONDS, retry=retry)
    instances = answer.get("instances") if isinstance(answer, dict) else None
    if not isinstance(instances, list):
        raise RequestFailed(f"{url} answered without a list of instances.", status=200)
    found: dict[int, Worker] = {}
    for entry in instances:  # an instance is there once for each of its endpoints
        instance = _instance_id(entry)
        if not _in_namespace(str(entry.get("namespace", "")), source.namespace):
            continue
        if entry.get("endpoint") not in (None, "generate", "rl") or instance in found:
            continue
        host = _transport_host(entry.get("transport"))
        admin = f"http://{host}:{source.system_port}" if host else ""
        error = None if host else "its transport names no address"
        found[instance] = Worker(instance, "", admin, error=error)
    probed = await asyncio.gather(*(_probed(http, worker) for worker in found.values()))
    return list(probed)


async def _static_list(http: Http, source: StaticList) -> list[Worker]:
    urls = dict.fromkeys(url.rstrip("/") for url in source.urls)
    workers = [Worker(_stand_in_id(url), source.model, url) for url in urls]
    return list(await asyncio.gather(*(_probed(http, worker) for worker in workers)))


async def _probed(http: Http, worker: Worker) -> Worker:
    """The worker, with an error if its admin address does not answer."""
    if worker.error is not None:
        return worker
    try:
        await http.get_text(f"{worker.admin_url}/health", timeout=5.0)
    except RequestFailed:
        return worker  # something answers; a worker's /health says 503 while it serves, too
    except Unreachable as error:
        return replace(worker, error=error.message)
    return worker


def _checked_routes(worker: Worker) -> Worker:
    names = {route.rpartition("/")[2] for route in worker.routes}
    lacking = sorted(NEEDED_ROUTES - names)
    if worker.error is None and lacking:
        return replace(worker, error=f"it does not offer {', '.join(lacking)} (--enable-rl)")
    return worker


def _instance_id(entry: Any) -> int:
    instance = entry.get("instance_id") if isinstance(entry, dict) else None
    if not isinstance(instance, int) or isinstance(instance, bool):
        raise RequestFailed(
            f"The worker listing has an entry whose instance_id is {instance!r}.", status=200
        )
    return instance


def _stand_in_id(url: str) -> int:
    digest = hashlib.sha256(url.encode()).digest()
    return -int.from_bytes(digest[:7], "big") - 1


def _in_namespace(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}-")


def _transport_host(transport: Any) -> str:
    """The host in `{"tcp": "10.0.0.7:43601/…"}` or `{"nats_tcp": …}`; empty when there is none."""
    said = transport.get("tcp") if isinstance(transport, dict) else transport
    host, port = _host_and_port(str(said).partition("/")[0]) if said else ("", None)
    if not host or port is None:
        return ""
    return f"[{host}]" if ":" in host else host


def _host_and_port(address: str) -> tuple[str, int | None]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        return (parts.hostname or ""), parts.port
    except ValueError:
        return "", None


async def _addresses(host: str, port: int | None) -> set[tuple[str, int | None]]:
    """Every (address, port) that a name stands for; none when it does not resolve."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {(str(entry[4][0]), port) for entry in found}
