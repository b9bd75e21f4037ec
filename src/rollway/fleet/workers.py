"""The workers of a fleet: who is listed, who joined and left, and who is dead.

`discover(http, source)` lists the workers of a source. There are four kinds: the RL listing of a
Dynamo frontend, the frontend's `/health`, the name of a headless Service, and a static list. A
worker that cannot be used is listed with the reason in `error` and never left out: a refit must
wait for it.

`Membership` remembers them between listings. Every listing makes the frontend probe all workers: a
hung worker delays it by 5 s, and one with many streams by up to a second. So a listing is reused
for a moment, and callers at the same time share one. `confirm` and `has_changed` ask only whether
somebody joined or left since. `poll` lists again and says who joined and left. A listing that
failed changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rollway.errors import AdminError, NoWorkers, RequestFailed, RollwayError, Unreachable
from rollway.http import IDEMPOTENT, ONCE, Http, Retry
from rollway.model_spec import WorkerRole, find_role

log = logging.getLogger(__name__)

# The frontend gives a hung worker 5 s before it lists it with an error.
LISTING_SECONDS = 15.0
PROBE_SECONDS = 2.0
_WORKER_HASH = re.compile(r"-[0-9a-f]{8}$")
"""What Dynamo's operator appends to the namespace of a deployment's workers."""
_NO_ENGINES = frozenset({"router", "global_router", "planner", "globalplanner", "epp"})
"""Components of Dynamo that serve an endpoint `generate` and have no weights. Others with one count
as workers, also under a name of their own: a worker must not be left out."""
NEEDED_ROUTES = frozenset({"pause_generation", "resume_generation"})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: its id, its model and the address of its admin routes."""

    instance_id: int
    """Dynamo's id, an unsigned 64-bit number: exact in Python, not in a double. Negative if the
    source has no ids; then requests cannot be pinned to this worker."""
    model: str
    admin_url: str
    routes: frozenset[str] = frozenset()
    """Empty if the source lists no routes."""
    world_size: int = 1
    error: str | None = None
    role: WorkerRole = ""
    """With prefill and decode apart, which of them it does."""
    request_address: str = ""
    """Where the frontend sends its requests, if the source says so. A worker in error is listed
    with this address alone, and its successor has another one."""

    def __str__(self) -> str:
        return f"worker {self.instance_id} ({self.admin_url or 'no admin address'})"


@dataclass(frozen=True, slots=True)
class RlListing:
    """`GET /v1/rl/workers`, which the frontend serves on a separate port."""

    url: str
    frontend_url: str = ""
    """The frontend's own address. Its `/health` names the instances without asking them."""

    async def list_workers(self, http: Http, retry: Retry) -> list[Worker]:
        url = f"{self.url.rstrip('/')}/v1/rl/workers"
        try:
            entries = await _read_entries(http, url, "workers", LISTING_SECONDS, retry)
        except Unreachable as error:
            raise Unreachable(
                f"No RL worker listing: {error.message}",
                "The frontend serves it on a separate port (DYN_ENABLE_RL=true, DYN_RL_PORT); "
                "pass that address as `rl_url`.",
            ) from error
        return [_parse_entry(entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class HealthListing:
    """The instances in the frontend's `GET /health`; for stacks without the RL listing."""

    url: str
    namespaces: tuple[str, ...] = ()
    """Only workers of these namespaces; all if there are none. Deployments add a dash and eight hex
    digits to the namespace of their workers, which counts as the same."""
    system_port: int = 9090

    def covers(self, namespace: str) -> bool:
        """Return whether workers of a namespace belong to this listing. A longer name is another
        deployment's: `rl-2` is not `rl`."""
        base = _WORKER_HASH.sub("", namespace)
        return not self.namespaces or namespace in self.namespaces or base in self.namespaces

    async def list_workers(self, http: Http, retry: Retry) -> list[Worker]:
        url = f"{self.url.rstrip('/')}/health"
        workers: dict[int, Worker] = {}
        # An instance is listed once for each of its endpoints.
        for entry in await _read_entries(http, url, "instances", LISTING_SECONDS, retry):
            instance, component = entry["instance_id"], str(entry.get("component") or "")
            if component.lower() in _NO_ENGINES or not self.covers(str(entry.get("namespace", ""))):
                continue
            if entry.get("endpoint") not in (None, "generate", "rl") or instance in workers:
                continue
            host, port = _split_address(_get_transport_address(entry))
            host = f"[{host}]" if ":" in host else host
            error = None if host and port else "its transport names no address"
            admin_url = "" if error else f"http://{host}:{self.system_port}"
            role = find_role(component)
            workers[instance] = Worker(instance, "", admin_url, error=error, role=role)
        return list(await asyncio.gather(*(_probe(http, worker) for worker in workers.values())))


@dataclass(frozen=True, slots=True)
class DnsListing:
    """The pods of a headless Service: all addresses that its name stands for."""

    hostname: str
    listings: tuple[RlListing, ...]
    """Where the admin addresses of the pods are listed."""

    async def list_workers(self, http: Http, retry: Retry) -> list[Worker]:
        pods = await resolve_addresses(self.hostname)
        parts = await asyncio.gather(*(each.list_workers(http, retry) for each in self.listings))
        # Several frontends may list the same worker.
        listed = {worker.admin_url: worker for part in parts for worker in part if worker.admin_url}
        homes = await asyncio.gather(*(resolve_addresses(_split_address(url)[0]) for url in listed))
        workers = []
        for pod in pods:
            inside = [w for w, home in zip(listed.values(), homes, strict=True) if pod in home]
            if len(inside) != 1:
                # Any other worker would get another pod's calls.
                error = (
                    f"The admin address of the pod {pod} is unknown: {len(inside)} of "
                    f"{len(listed)} listed workers are there. Workers must list the address of "
                    "their pod (DYN_SYSTEM_HOST), one worker in each."
                )
                inside = [Worker(_make_stand_in_id(pod), "", "", error=error)]
            workers += inside
        return workers


@dataclass(frozen=True, slots=True)
class StaticList:
    """A fixed list of admin addresses."""

    urls: tuple[str, ...]
    model: str = ""

    async def list_workers(self, http: Http, _: Retry) -> list[Worker]:
        urls = dict.fromkeys(url.rstrip("/") for url in self.urls)
        workers = [Worker(_make_stand_in_id(url), self.model, url) for url in urls]
        return list(await asyncio.gather(*(_probe(http, worker) for worker in workers)))


Source = RlListing | HealthListing | DnsListing | StaticList


async def discover(http: Http, source: Source, *, retry: Retry = IDEMPOTENT) -> list[Worker]:
    """Return the workers of a source, ordered by instance id."""
    workers = await source.list_workers(http, retry)
    return sorted(_name_decoders(workers), key=lambda worker: worker.instance_id)


def _name_decoders(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers, with the role of those that decode what prefill workers computed. Dynamo
    itself names only the component of prefill workers after their role."""
    models = {worker.model for worker in workers if worker.role == "prefill"}
    return [
        replace(worker, role="decode") if not worker.role and worker.model in models else worker
        for worker in workers
    ]


async def list_instances(http: Http, source: Source) -> frozenset[int] | None:
    """Return the ids of the workers that have joined; None if the source cannot tell. Unlike
    `discover` this asks no worker, so it takes a millisecond also if the workers are busy."""
    if not isinstance(source, RlListing) or not source.frontend_url:
        return None
    url = f"{source.frontend_url.rstrip('/')}/health"
    try:
        entries = await _read_entries(http, url, "instances", PROBE_SECONDS, ONCE)
    except (RequestFailed, Unreachable):
        return None
    return frozenset(entry["instance_id"] for entry in entries if entry.get("endpoint") == "rl")


async def is_dead(worker: Worker, listed: Sequence[Worker] = ()) -> bool:
    """Return whether a silent worker is dead and not just slow: nothing listens at one of its
    addresses, or its successor answers in `listed`."""
    if _has_successor(worker, listed):
        return True
    addresses = (worker.request_address, worker.admin_url)
    return any([await _is_refused(address) for address in addresses])


def _has_successor(worker: Worker, listed: Sequence[Worker]) -> bool:
    """Return whether another worker answers at a worker's admin address: a restarted worker gets
    the same port."""
    at_address = [w for w in listed if w.admin_url == worker.admin_url and w.error is None]
    ids = {w.instance_id for w in at_address}
    return bool(ids) and worker.instance_id not in ids


async def _is_refused(address: str) -> bool:
    host, port = _split_address(address)
    if port is None:
        return False
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False  # a network error or a full backlog: it may be alive
    writer.close()
    return False


async def _lacks_routes(http: Http, worker: Worker) -> bool:
    """Return whether the process at a worker's address lacks a route that the worker had: it is a
    successor that is starting. It listens long before it is listed."""
    route = next((path for path in worker.routes if path.endswith("liveness_probe")), None)
    if route is None:
        return False
    try:
        await http.get(f"{worker.admin_url}/engine/{route}", timeout=PROBE_SECONDS, retry=ONCE)
    except RequestFailed as error:
        return error.status == 404
    except Unreachable:
        return False
    return False


async def resolve_addresses(hostname: str) -> list[str]:
    """Return the addresses that a name stands for now; none for a Service without pods."""
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(
            hostname, None, type=socket.SOCK_STREAM
        )
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        # The name server does not answer: that says nothing about the pods.
        raise Unreachable(f"{hostname} cannot be resolved: {error.strerror}.") from error
    # A Service of two families names every pod twice.
    family = min(entry[0] for entry in entries)
    return sorted({str(entry[4][0]) for entry in entries if entry[0] == family})


async def _read_entries(
    http: Http, url: str, key: str, seconds: float, retry: Retry
) -> list[dict[str, Any]]:
    """Return the entries of a listing; raise if one has no instance id."""
    answer = await http.get(url, timeout=seconds, retry=retry)
    entries = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise RequestFailed(f"{url} answered without a list of {key}.", status=200)
    for entry in entries:
        instance = entry.get("instance_id") if isinstance(entry, dict) else None
        if not isinstance(instance, int):
            raise RequestFailed(f"{url} lists the instance_id {instance!r}.", status=200)
    return entries


def _parse_entry(entry: dict[str, Any]) -> Worker:
    admin_url = (entry.get("system_url") or "").rstrip("/")
    routes = frozenset(entry.get("routes") or ())
    missing = sorted(NEEDED_ROUTES - {route.rpartition("/")[2] for route in routes})
    error = entry.get("error")
    if not error and not admin_url:
        error = "it is listed without an admin address (DYN_SYSTEM_PORT)"
    elif not error and missing:
        error = f"it does not offer {', '.join(missing)} (--enable-rl)"
    return Worker(
        instance_id=entry["instance_id"],
        model=entry.get("model") or "",
        admin_url=admin_url,
        routes=routes,
        world_size=entry.get("world_size") or 1,
        error=str(error) if error else None,
        role=find_role(str(entry.get("component") or "")),
        request_address=_get_transport_address(entry),
    )


async def _probe(http: Http, worker: Worker) -> Worker:
    """Return the worker, with an error if its admin address does not answer."""
    if worker.error is not None:
        return worker
    try:
        await http.get_text(f"{worker.admin_url}/health", timeout=5.0)
    except RequestFailed:
        return worker  # it answers; a worker's /health may be 503 while it serves
    except Unreachable as error:
        return replace(worker, error=error.message)
    return worker


def _make_stand_in_id(address: str) -> int:
    """Return a stable negative id for a worker whose instance id is unknown."""
    digest = hashlib.sha256(address.encode()).digest()
    return -int.from_bytes(digest[:7], "big") - 1


def _get_transport_address(entry: dict[str, Any]) -> str:
    """Return host and port in `{"tcp": "10.0.0.7:43601/…"}`; empty for other transports."""
    transport = entry.get("transport")
    address = transport.get("tcp") if isinstance(transport, dict) else transport
    return str(address or "").partition("/")[0]


def _split_address(address: str) -> tuple[str, int | None]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        return (parts.hostname or ""), parts.port
    except ValueError:
        return "", None


KEEP_SECONDS = 2.0
POLL_SECONDS = 5.0
LOOK_SECONDS = 0.2
"""Between two questions whether somebody joined or left. Only the frontend answers, and it takes a
millisecond."""
RELIST_SECONDS = 1.0
"""How soon workers that a listing did not show are listed again."""
DYING_SECONDS = (0.0, 0.3, 0.7, 1.5)
"""The waits before each check whether a silent worker has died."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Who joined and left between two listings."""

    joined: list[Worker]
    left: list[Worker]


class Membership:
    """The workers of one model at one source."""

    def __init__(
        self,
        http: Http,
        source: Source,
        model: str | None = None,
        *,
        note_roles: Callable[[Mapping[int, WorkerRole]], None] = lambda _: None,
    ) -> None:
        self.source = source
        self._http = http
        self._model = model
        self._listed: dict[int, Worker] = {}
        """The workers in the last listing, of other models too."""
        self._note_roles = note_roles
        self._left_out: set[int] = set()
        self._listed_at = float("-inf")
        self._looked: frozenset[int] | None = None
        """The ids that the last look saw, if they were not those of the listing."""
        self._listing: asyncio.Task[list[Worker]] | None = None
        self._polled: list[Worker] | None = None
        """The workers of the last poll."""
        self._is_reachable = True

    @property
    def known(self) -> list[Worker]:
        """The workers of the last listing, without asking anybody."""
        # A worker whose model was never listed may be ours, so it is kept.
        models = None if self._model is None else (self._model, "")
        return [
            worker
            for instance, worker in self._listed.items()
            if instance not in self._left_out and (models is None or worker.model in models)
        ]

    async def workers(self, *, fresh: bool = False) -> list[Worker]:
        """Return the workers; `fresh` lists them now, otherwise a recent listing is used."""
        if not fresh and time.monotonic() - self._listed_at < KEEP_SECONDS:
            return self.known
        # A fresh listing must start now: one that is already running may show an older state.
        if fresh or self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
            # If every caller was cancelled, nobody reads the exception.
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return list(await asyncio.shield(self._listing))

    async def list_answering(self) -> list[Worker]:
        """List the workers now, without those that have died; raise if there is none, or one that
        does not answer."""
        listed = await self.workers(fresh=True)
        await refuse_silent(listed)
        answering = [worker for worker in listed if worker.error is None]
        if not answering:
            raise no_workers_error(self.source)
        return answering

    def leave_out(self, worker: Worker, error: AdminError) -> None:
        """Forget a worker that takes no orders: nothing is sent to it, and no answer of its is
        used, because it has none of this stack's versions."""
        log.warning("left out, because it has another secret: %s", error)
        self._left_out.add(worker.instance_id)

    async def confirm(self) -> list[Worker] | None:
        """Return the workers of the last listing, if all of them answered it and nobody has joined
        or left since; else None. This asks no worker: whether they still answer is unknown."""
        known, listed = self.known, self._listed
        if not known or any(worker.error is not None for worker in known):
            return None
        return known if await list_instances(self._http, self.source) == listed.keys() else None

    async def has_changed(self) -> bool:
        """Return whether somebody joined or left since the last listing, as far as the source can
        tell. This asks no worker. What a listing does not show either is no news for a while: each
        listing makes the frontend ask all workers."""
        instances = await list_instances(self._http, self.source)
        if instances is None or instances == self._listed.keys():
            return False
        was_seen = instances == self._looked
        self._looked = instances
        return not was_seen or time.monotonic() - self._listed_at >= RELIST_SECONDS

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until somebody joins or leaves, at most so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(LOOK_SECONDS, left))
            if await self.has_changed():
                return

    async def poll(self) -> Changes | None:
        """List the workers; return who has joined and left since the last poll, or, at the first,
        since the last listing. None if the listing failed."""
        before = self.known if self._polled is None else self._polled
        try:
            listed = await self.workers(fresh=True)
        except RollwayError as error:
            if self._is_reachable:  # log an outage once
                log.warning("the workers cannot be listed: %s", error.message)
            self._is_reachable = False
            return None
        self._is_reachable, self._polled = True, listed
        ids = {worker.instance_id for worker in listed}
        left = [worker for worker in before if worker.instance_id not in ids]
        # A worker that could not be probed when it was first listed joins now.
        were_there = {worker.instance_id for worker in before if worker.error is None}
        answering = [worker for worker in listed if worker.error is None]
        return Changes([w for w in answering if w.instance_id not in were_there], left)

    async def has_died(self, worker: Worker) -> bool:
        """Return whether a worker that did not answer has died. A process takes a moment to exit,
        and its successor may already listen at the same address."""
        for seconds in DYING_SECONDS:
            await asyncio.sleep(seconds)
            if await is_dead(worker) or await _lacks_routes(self._http, worker):
                return True
            if _has_successor(worker, await self.workers(fresh=True)):
                return True
        return False

    async def _list(self) -> list[Worker]:
        listed = await discover(self._http, self.source)
        before = self._listed
        self._listed = {w.instance_id: _complete(w, before.get(w.instance_id, w)) for w in listed}
        self._listed_at = time.monotonic()
        known = self.known
        self._note_roles({worker.instance_id: worker.role for worker in known})
        return known


def _complete(worker: Worker, before: Worker) -> Worker:
    """Return a worker with what is remembered of it: one in error may be listed without its model,
    and a decode worker is known as such by the prefill workers beside it, which may die."""
    return replace(worker, model=worker.model or before.model, role=worker.role or before.role)


async def refuse_silent(listed: Sequence[Worker]) -> None:
    """Raise if a worker does not answer, unless it is known to be dead."""
    silent = [w for w in listed if w.error is not None and not await is_dead(w, listed)]
    if silent:
        raise silent_workers_error(silent, len(listed))


def silent_workers_error(silent: Sequence[Worker], listed: int) -> AdminError:
    reasons = "; ".join(f"{worker}: {worker.error}" for worker in silent)
    return AdminError(
        f"{len(silent)} of {listed} workers do not answer: {reasons}.",
        "Wait until they recover or leave (a dead worker is listed for about 10 s).",
    )


def no_workers_error(source: object) -> NoWorkers:
    return NoWorkers(
        f"No RL worker is listed at {source}.",
        "Start workers with --enable-rl; the mocker engine has no admin routes.",
    )
