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
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from rollway.errors import AdminError, NoWorkers, RequestFailed, RollwayError, Unreachable
from rollway.http import IDEMPOTENT, ONCE, Http, Retry
from rollway.model_spec import WorkerRole, find_role

log = logging.getLogger(__name__)

# The frontend gives a hung worker 5 s before it lists it with an error.
LISTING_SECONDS = 15.0
INSTANCES_SECONDS = 2.0
PROBE_SECONDS = 2.0
DEFAULT_SYSTEM_PORT = 9090
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
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """What the listing wants besides, such as a token; errors name the source without them."""


@dataclass(frozen=True, slots=True)
class HealthListing:
    """The instances in the frontend's `GET /health`; for stacks without the RL listing."""

    url: str
    namespace: str | tuple[str, ...] = ""
    """Only workers of this namespace, or of several. Deployments add a dash and eight hex digits to
    the namespace of their workers, which counts as the same. Empty means all workers."""
    system_port: int = DEFAULT_SYSTEM_PORT

    def covers(self, namespace: str) -> bool:
        """Return whether workers of a namespace belong to this listing. A longer name is another
        deployment's: `rl-2` is not `rl`."""
        names = (self.namespace,) if isinstance(self.namespace, str) else self.namespace
        base = _WORKER_HASH.sub("", namespace)
        return not any(names) or namespace in names or base in names


@dataclass(frozen=True, slots=True)
class DnsListing:
    """The pods of a headless Service: all addresses that its name stands for."""

    hostname: str
    port: int = 8000
    """Where the pods answer."""
    listings: tuple[RlListing, ...] = ()
    """Where the admin addresses of pods are listed. Without any, pods take admin calls at `port`,
    as prime-rl's own servers do."""


@dataclass(frozen=True, slots=True)
class StaticList:
    """A fixed list of admin addresses."""

    urls: tuple[str, ...]
    model: str = ""


Source = RlListing | HealthListing | DnsListing | StaticList


async def discover(http: Http, source: Source, *, retry: Retry = IDEMPOTENT) -> list[Worker]:
    """Return the workers of a source, ordered by instance id."""
    if isinstance(source, RlListing):
        workers = await _read_rl_listing(http, source, retry)
    elif isinstance(source, HealthListing):
        workers = await _read_health_listing(http, source, retry)
    elif isinstance(source, DnsListing):
        workers = await _read_dns_listing(http, source, retry)
    else:
        urls = dict.fromkeys(url.rstrip("/") for url in source.urls)
        workers = [Worker(_make_stand_in_id(url), source.model, url) for url in urls]
        workers = await asyncio.gather(*(_probe(http, worker) for worker in workers))
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
        answer = await http.get(url, timeout=INSTANCES_SECONDS, retry=ONCE)
        entries = answer["instances"]
        return frozenset(_get_instance_id(e) for e in entries if e.get("endpoint") == "rl")
    except (RequestFailed, Unreachable, LookupError, TypeError, AttributeError):
        return None


async def is_dead(worker: Worker, listed: Sequence[Worker] = ()) -> bool:
    """Return whether a silent worker is dead and not just slow.

    It is dead if nothing listens at one of its addresses, or if another worker in `listed` has its
    admin address and answers: a restarted worker gets the same admin port."""
    if any(w.admin_url == worker.admin_url and w.error is None for w in listed):
        return worker.error is not None
    addresses = (worker.request_address, worker.admin_url)
    return any([await _is_refused(address) for address in addresses])


async def _is_refused(address: str) -> bool:
    host, port = _split_address(address)
    if port is None:
        return False
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False  # a network error or a full backlog: it may be alive
    writer.close()
    return False


async def lacks_routes(http: Http, worker: Worker) -> bool:
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
        pass
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


async def find_pod_worker(address: str, listed: Sequence[Worker]) -> Worker:
    """Return the one listed worker of a pod, by the address or the name in its admin address.
    Raise if there is none: any other worker would get another pod's calls."""
    hosts = [_split_address(worker.admin_url)[0] for worker in listed]
    names = await asyncio.gather(*(_resolve_host(host) for host in hosts))
    matches = [w for w, known in zip(listed, names, strict=True) if address in known]
    if len(matches) == 1:
        return matches[0]
    raise Unreachable(
        f"The admin address of the pod {address} is unknown: {len(matches)} of {len(listed)} "
        "listed workers are there.",
        "Workers must list the address of their pod (DYN_SYSTEM_HOST), one worker in each.",
    )


async def _resolve_host(host: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        return await resolve_addresses(host) if host else []
    except Unreachable:
        return []


async def _read_dns_listing(http: Http, source: DnsListing, retry: Retry) -> list[Worker]:
    pods = await resolve_addresses(source.hostname)
    parts = await asyncio.gather(*(_read_rl_listing(http, each, retry) for each in source.listings))
    listed = list({worker.admin_url: worker for part in parts for worker in part}.values())

    async def find(address: str) -> Worker:
        url = f"http://[{address}]" if ":" in address else f"http://{address}"
        url = f"{url}:{source.port}"
        pod = Worker(_make_stand_in_id(url), "", url)
        if not source.listings:
            return await _probe(http, pod)
        try:
            return await find_pod_worker(address, listed)
        except Unreachable as error:
            return replace(pod, admin_url="", error=str(error))

    return list(await asyncio.gather(*map(find, pods)))


async def _read_rl_listing(http: Http, source: RlListing, retry: Retry) -> list[Worker]:
    url, headers = f"{source.url.rstrip('/')}/v1/rl/workers", dict(source.headers)
    try:
        listing = await http.get(url, timeout=LISTING_SECONDS, retry=retry, headers=headers)
    except Unreachable as error:
        raise Unreachable(
            f"No RL worker listing: {error.message}",
            "The frontend serves it on a separate port (DYN_ENABLE_RL=true, DYN_RL_PORT); "
            "pass that address as `rl_url`.",
        ) from error
    entries = listing.get("workers") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        raise RequestFailed(f"{url} answered without a list of workers.", status=200)
    return [_parse_entry(entry) for entry in entries]


def _parse_entry(entry: Any) -> Worker:
    error = entry.get("error") if isinstance(entry, dict) else None
    worker = Worker(
        instance_id=_get_instance_id(entry),
        model=entry.get("model") or "",
        admin_url=(entry.get("system_url") or "").rstrip("/"),
        routes=frozenset(entry.get("routes") or ()),
        world_size=entry.get("world_size") or 1,
        error=str(error) if error else None,
        role=find_role(str(entry.get("component") or "")),
        request_address=_get_transport_address(entry.get("transport")),
    )
    if worker.error is not None:
        return worker
    if not worker.admin_url:
        return replace(worker, error="it is listed without an admin address (DYN_SYSTEM_PORT)")
    missing = sorted(NEEDED_ROUTES - {route.rpartition("/")[2] for route in worker.routes})
    if missing:
        return replace(worker, error=f"it does not offer {', '.join(missing)} (--enable-rl)")
    return worker


async def _read_health_listing(http: Http, source: HealthListing, retry: Retry) -> list[Worker]:
    url = f"{source.url.rstrip('/')}/health"
    answer = await http.get(url, timeout=LISTING_SECONDS, retry=retry)
    instances = answer.get("instances") if isinstance(answer, dict) else None
    if not isinstance(instances, list):
        raise RequestFailed(f"{url} answered without a list of instances.", status=200)
    workers: dict[int, Worker] = {}
    for entry in instances:  # an instance is listed once for each of its endpoints
        instance = _get_instance_id(entry)
        namespace = str(entry.get("namespace", ""))
        if not source.covers(namespace):
            continue
        if entry.get("endpoint") not in (None, "generate", "rl") or instance in workers:
            continue
        component = str(entry.get("component") or "")
        if component.lower() in _NO_ENGINES:
            continue
        host = _get_transport_host(entry.get("transport"))
        admin = f"http://{host}:{source.system_port}" if host else ""
        error = None if host else "its transport names no address"
        role = find_role(component)
        workers[instance] = Worker(instance, "", admin, error=error, role=role)
    return list(await asyncio.gather(*(_probe(http, worker) for worker in workers.values())))


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


def _get_instance_id(entry: Any) -> int:
    instance = entry.get("instance_id") if isinstance(entry, dict) else None
    if not isinstance(instance, int) or isinstance(instance, bool):
        raise RequestFailed(
            f"The worker listing has an entry whose instance_id is {instance!r}.", status=200
        )
    return instance


def _make_stand_in_id(url: str) -> int:
    """Return a stable negative id for a worker whose instance id is unknown."""
    digest = hashlib.sha256(url.encode()).digest()
    return -int.from_bytes(digest[:7], "big") - 1


def _get_transport_address(transport: Any) -> str:
    """Return host and port in `{"tcp": "10.0.0.7:43601/…"}`; empty for other transports."""
    address = transport.get("tcp") if isinstance(transport, dict) else transport
    return str(address or "").partition("/")[0]


def _get_transport_host(transport: Any) -> str:
    host, port = _split_address(_get_transport_address(transport))
    if not host or port is None:
        return ""
    return f"[{host}]" if ":" in host else host


def _split_address(address: str) -> tuple[str, int | None]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        return (parts.hostname or ""), parts.port
    except ValueError:
        return "", None


KEEP_SECONDS = 2.0
POLL_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""Between two questions whether somebody joined or left, which only the frontend answers."""
CLOSE_LOOK_SECONDS, CLOSE_SECONDS = 0.2, 10.0
"""The same, during an admission and for how long after a join: where one joins, more may follow. A
look takes the frontend a millisecond."""
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
        self._joined_at = float("-inf")
        self._looked: frozenset[int] | None = None
        """The ids that the last look saw which was news."""
        self._listing: asyncio.Task[list[Worker]] | None = None
        self._polled: dict[int, Worker] | None = None
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
        was_listed = time.monotonic() - self._listed_at < LOOK_SECONDS
        if instances == self._looked and was_listed:
            return False
        self._looked = instances
        return True

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until somebody joins or leaves, at most so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            is_close = time.monotonic() - self._joined_at < CLOSE_SECONDS
            await asyncio.sleep(min(CLOSE_LOOK_SECONDS if is_close else LOOK_SECONDS, left))
            if await self.has_changed():
                return

    async def poll(self) -> Changes | None:
        """List the workers; return who has joined and left since the last poll, or, at the first,
        since the last listing. None if the listing failed."""
        before = {worker.instance_id: worker for worker in self.known}
        if self._polled is not None:
            before = self._polled
        try:
            listed = {worker.instance_id: worker for worker in await self.workers(fresh=True)}
        except RollwayError as error:
            if self._is_reachable:  # log an outage once
                log.warning("the workers cannot be listed: %s", error.message)
            self._is_reachable = False
            return None
        self._is_reachable, self._polled = True, listed
        left = [worker for instance, worker in before.items() if instance not in listed]
        # A worker that could not be probed when it was first listed joins now.
        were_there = {instance for instance, worker in before.items() if worker.error is None}
        answering = [worker for worker in listed.values() if worker.error is None]
        return Changes([w for w in answering if w.instance_id not in were_there], left)

    async def has_died(self, worker: Worker) -> bool:
        """Return whether a worker that did not answer has died. A process takes a moment to exit,
        and its successor may already listen at the same address."""
        for seconds in DYING_SECONDS:
            await asyncio.sleep(seconds)
            if await is_dead(worker) or await lacks_routes(self._http, worker):
                return True
            listed = await self.workers(fresh=True)
            at_address = {w.instance_id for w in listed if w.admin_url == worker.admin_url}
            if at_address and worker.instance_id not in {w.instance_id for w in listed}:
                return True
        return False

    async def _list(self) -> list[Worker]:
        listed = await discover(self._http, self.source)
        before = self._listed
        self._listed = {w.instance_id: _complete(w, before.get(w.instance_id)) for w in listed}
        self._listed_at = time.monotonic()
        if self._listed.keys() - before.keys():
            self._joined_at = self._listed_at
        known = self.known
        self._note_roles({worker.instance_id: worker.role for worker in known})
        return known


def _complete(worker: Worker, before: Worker | None) -> Worker:
    """Return a worker with what is remembered of it: one in error may be listed without its model,
    and a decode worker is known as such by the prefill workers beside it, which may die."""
    if before is None:
        return worker
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
