"""A model of Dynamo's workers, their router and their admin routes, in memory and simulated time.

It records what no real worker reports: which weights sampled each token, and which weights computed
the KV blocks that it read. Violations of the protocol are collected in `World.violations`: raised
inside the protocol, they would be handled as one more fault."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import selectors
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.engine.core import read_version
from rollway.errors import AdminError, RequestFailed, Unreachable, UsageError
from rollway.fleet import fleet, foreign, refit, sleep, updates, worker_refit, workers
from rollway.fleet.admin import (
    AnotherProcess,
    Facts,
    NoSuchMethod,
    RefitRefused,
    StageReply,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.updates import FromDisk
from rollway.fleet.workers import Worker
from rollway.rollout import sender
from rollway.versions import taint_of
from rollway.weights.checkpoint import Checkpoint

OP: ContextVar[int] = ContextVar("OP", default=0)
"""Which operation (a refit, an admit, a user's pause) a call belongs to."""
TOKEN_SECONDS = 0.02
LISTED_DEAD_SECONDS = 10.0
LEASE_SECONDS = 30.0
"""How long a prefill worker holds blocks that nobody fetches."""
STALE_SECONDS = 20.0
"""A decode worker does not fetch blocks that were computed longer ago than this."""
FREED = "blocks that were freed"
PROTOCOL = (fleet, foreign, refit, sender, sleep, updates, worker_refit, workers)
"""The modules that run on simulated time."""


def weights_of(version: int | None) -> str:
    """Return the weights that a version names, always the same ones."""
    return f"w{version}" if version else "base"


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when no task can run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.world: World | None = None
        super().__init__(_Clock(self))

    def time(self) -> float:
        return self.now

    async def create_connection(
        self, factory: Any, _: Any = None, port: Any = None, **__: Any
    ) -> Any:
        """Connect to an admin port; the kernel of a hung worker accepts."""
        if self.world is None or self.world.at(port) is None:
            raise ConnectionRefusedError
        return SimpleNamespace(close=lambda: None, is_closing=lambda: True), factory()


class _Clock(selectors.DefaultSelector):
    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("A task waits for an event that can never happen.")
        self._loop.now += timeout
        return []


@dataclass(eq=False)
class SimRequest:
    prompt: int
    max_tokens: int
    greedy: bool
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    kv: set[str] = field(default_factory=set)
    """The weights that computed the KV blocks it attends to."""
    moved: int = 0
    switches: list[tuple[int, int]] = field(default_factory=list)
    """From which token on which version, after refits that kept it."""
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.Future())
    source: SimWorker | None = None
    """The prefill worker that holds its blocks."""
    computed_at: float = 0.0
    computed_for: int | None = None
    """The version of the prefill worker's engine when it admitted the request."""
    prefilled_by: int | None = None
    is_stamped: bool = False
    """Whether its last worker names versions: only one whose engine has a label does."""


@dataclass(eq=False)
class Call:
    op: int
    route: str
    worker: int
    detail: Any
    ok: bool = False


class SimWorker:
    """The engine of a worker and its admin routes; `fault` names what goes wrong in a call."""

    def __init__(self, world: World, instance_id: int, port: int, role: str = "") -> None:
        rng = world.rng
        self.role = role
        self.held: dict[SimRequest, set[str]] = {}
        """Requests whose blocks decode workers may fetch, with the weights that computed them."""
        self.world, self.instance_id, self.port = world, instance_id, port
        self.weights, self.label = "base", None
        self.staged: str | None = None
        """The staged weights."""
        self.staged_by, self._staged_at = 0, 0.0
        self.ready_at = float("inf") if world.supervised else world.now
        self.taints: tuple[str, ...] = ()
        self.routed: tuple[str, ...] = ()
        """The taints that the router has received."""
        self.routed_after = world.now + world.unknown_seconds
        """Until then the router does not know that the worker has taints, or lacks some."""
        self.lag = rng.choice([0.0, 0.01, 0.03])
        self.load_seconds = rng.choice([0.02, 0.4, 3.0])
        # An engine that cannot drop its cache. Without taints to separate requests, it must; the
        # salt separates versions, and not what a router sent before it knew the worker.
        self.sticky = world.supervised and rng.random() < 0.3 and not world.unknown_seconds
        self.alive, self.paused, self.frozen = True, False, False
        self.died_at = self.hung_at = float("-inf")
        self.cache: dict[str | None, str] = {}
        self.queued: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.late = 0
        """The number of requests that arrived while it was paused."""
        self.issued_by: int | None = None
        """The operation whose update may have failed."""
        self.entering: int | None = None
        self.paused_by, self.served, self.known_to = 0, 0, 0
        self.engine_label: int | None = None
        """The version whose requests the engine admits; None admits all."""
        self.sleep_level = 0
        self.kept: int | None = None
        """The version that a wake restores."""
        self.sleeping: set[str] = set()
        """Which memory is gone: of the weights, of the KV cache."""
        self._is_cancelled = asyncio.Event()
        self._routes = asyncio.Lock()
        """Held by a pause, a resume and an order, as Dynamo does."""
        self.awake, self._drained, self._work = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.awake.set()
        self._engine = asyncio.Lock()
        self._task = world.loop.create_task(self._run())

    def poke(self) -> None:
        runnable = (self.running and not self.frozen) or (self.queued and not self.paused)
        (self._work.set if runnable and self.awake.is_set() else self._work.clear)()
        (self._drained.clear if self.running or self.held else self._drained.set)()

    async def _run(self) -> None:
        while self.alive:
            await self._work.wait()
            await asyncio.sleep(TOKEN_SECONDS)
            if self.alive and self.awake.is_set():
                self._step()
            self.poke()

    def _step(self) -> None:
        if self.sleeping and (self.running or (self.queued and not self.paused)):
            self.world.broken(f"worker {self.instance_id} samples while it sleeps")
        if not self.paused:
            for request in list(self.queued):
                if request.source is not None and self._is_stale(request):
                    self.end(request, "aborted")
                    continue
                request.kv = self._fetch(request)
            self.running, self.queued = self.running + self.queued, []
        for request in [] if self.frozen else list(self.running):
            request.kv.add(self.weights)
            request.tokens.append(self.world.sampled(self.weights, request))
            if len(request.tokens) >= request.max_tokens:
                self.end(request, "length")

    def _is_stale(self, request: SimRequest) -> bool:
        return self.world.now - request.computed_at > STALE_SECONDS

    def _fetch(self, request: SimRequest) -> set[str]:
        """Return the weights that computed the KV of the prompt."""
        if request.source is None:
            return {self.cache.setdefault(self.find_key(request), self.weights)}
        kv, request.source = request.source.release(request) or {FREED}, None
        return kv

    def find_key(self, request: SimRequest) -> str | None:
        """Return under which key the blocks of the prompt are cached."""
        return request.salt

    async def prefill(self, request: SimRequest) -> str:
        """Compute the prompt of a request, and hold its blocks until they are fetched."""
        part = SimRequest(request.prompt, 1, True, request.salt)
        reason = await self.serve(part)
        if reason == "length":
            request.source, request.computed_at = self, self.world.now
            request.computed_for = part.computed_for
            self.held[request] = part.kv
            self.poke()
            self.world.loop.call_later(LEASE_SECONDS, self.release, request)
        return reason

    def release(self, request: SimRequest) -> set[str]:
        kv = self.held.pop(request, set())
        self.poke()
        return kv

    async def serve(self, request: SimRequest) -> str:
        if not self.alive:
            return "died"
        request.done = asyncio.Future()
        if not self.admits(request):
            if request.source is not None:
                self._fetch(request)  # its blocks are freed
            return "aborted"
        request.is_stamped = self.names_versions()
        if request.source is None:
            request.computed_for = self.engine_label
        self.queued.append(request)
        self.late += self.paused
        self.poke()
        return await request.done

    def names_versions(self) -> bool:
        """Return whether answers are stamped: without a label, the engine admits any version."""
        return self.engine_label is not None

    def admits(self, request: SimRequest) -> bool:
        """Return whether the engine takes a request with this salt, and its KV."""
        version = read_version(request.salt)
        if self.engine_label is None or version is None:
            return True
        is_computed_for = request.source is None or request.computed_for == version
        return version == self.engine_label and is_computed_for

    def end(self, request: SimRequest, reason: str) -> None:
        if request in self.queued and request.source is not None and self.alive:
            self._fetch(request)  # the prefill worker hears of it, and frees the blocks
        for requests in (self.queued, self.running):
            if request in requests:
                requests.remove(request)
        if not request.done.done():
            request.done.set_result(reason)
        self.poke()

    def end_all(self, reason: str) -> None:
        for request in self.queued + self.running:
            self.end(request, reason)

    def hang(self, seconds: float) -> None:
        self.hung_at = self.world.now
        self.awake.clear()
        self.world.loop.call_later(seconds, self.recover)

    def recover(self) -> None:
        self.awake.set()
        self.poke()

    def die(self) -> None:
        if self.alive:
            self.alive, self.died_at = False, self.world.now
            self.end_all("died")
            self.recover()

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self.paused, self.paused_by = True, OP.get()
        self.frozen = self.frozen or mode == "keep"
        if mode == "abort":
            self.end_all("aborted")
        self.poke()
        if mode == "wait":
            await self._drained.wait()
        if clear_cache:
            self.clear(None)

    def resume(self) -> None:
        op = OP.get()
        if self.sleeping:
            raise AdminError("It sleeps.")
        if self.entering == op == self.issued_by:
            self.issued_by = None
        # A worker whose load is being verified by a canary may generate.
        if self.issued_by is not None and (self.issued_by != op or self.world.managed):
            self.world.broken(f"worker {self.instance_id} is resumed, its weights are unknown")
        self.paused = self.frozen = False
        self.poke()

    async def sleep(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Do what `engine/sleep_orders.py` does."""
        async with self._routes:
            level, label = order["level"], order["label"]
            if label != self.label:
                raise RefitRefused("It has another label.")
            if self.sleep_level not in (0, level):
                raise AdminError("It sleeps at another level.")
            before = self.memory()
            if not self.sleep_level:
                self.kept = label if level == 1 and label >= 0 else None
                self.label = order["leaving"]
                self.set_taints([])
                await asyncio.sleep(0.05)  # requests that the router placed before
                await self._release(level, order["mode"])
            return {"seconds": self.load_seconds, "before": before, "ranks": self.memory()}

    async def _release(self, level: int, mode: str) -> None:
        self.staged = None
        await self.pause(mode, True)
        self.sleep_level, self.sleeping = level, {"weights", "kv_cache"}
        self.cache = {}
        if level == 2:
            self.weights = "forgotten"
        await asyncio.sleep(self.load_seconds)

    async def wake(self) -> dict[str, Any]:
        async with self._routes:
            level, before = self.sleep_level, self.memory()
            if not level or self.kept is None:
                return {"is_awake": not level, "level": level}
            await self.wake_memory()
            version, self.kept = self.kept, None
            self.set_taints([taint_of(version)])
            self.set_label(version)
            ranks = self.memory()
        return {
            "seconds": 0.0,
            "before": before,
            "ranks": ranks,
            "version": version,
            "level": level,
        }

    async def wake_memory(self) -> None:
        """Take the rest of the memory back; the engine then generates."""
        await asyncio.sleep(self.load_seconds)
        self.sleeping.clear()
        self.sleep_level, self.paused, self.frozen = 0, False, False
        self.poke()

    def memory(self) -> list[dict[str, Any]]:
        asleep = dict.fromkeys(self.sleeping, 45)
        facts = {"device": "sim", "free": 10 + sum(asleep.values()), "asleep_bytes": asleep}
        refusal = "" if self.world.sleep_mode else "no sleep mode"
        return [{**facts, "releases": True, "refusal": refusal}]

    def clear(self, fault: str | None) -> None:
        held = {request.salt for request in self.running}
        if not self.sticky and (fault != "lie" or not self.world.supervised):
            self.cache = {salt: by for salt, by in self.cache.items() if salt in held}

    def set_label(self, version: int) -> None:
        self.ready_at = min(self.ready_at, self.world.now)
        self.label = version
        self.engine_label = version if self.world.managed else None
        self.served = max(self.served, version)

    def declare(self, version: int) -> None:
        if self.label is None or self.label >= 0:
            self.known_to = OP.get()  # a refit that has a canary answer from before
        self.set_label(version)
        if version >= 0:
            self.issued_by = None  # the caller has verified it

    def is_routed(self, required: Sequence[str]) -> bool:
        """Return whether the router may send it a request that requires these taints."""
        return self.world.now < self.routed_after or {*required} <= {*self.routed}

    def set_taints(self, taints: Sequence[str]) -> None:
        if not self.world.tainting:
            return  # an order also works where no router knows taints
        self.taints = tuple(taints)
        self.world.loop.call_later(self.lag, setattr, self, "routed", tuple(taints))

    async def load(self, new: str, label: int, verified: bool, fault: str | None) -> None:
        async with self._engine:
            if not self.paused:
                raise AdminError("It must be paused.")
            if "weights" in self.sleeping:
                self.world.broken(f"worker {self.instance_id} loads into memory that is gone")
                raise AdminError("Its weights sleep.")
            if not new.startswith("w") or int(new[1:]) < self.served:
                self.world.broken(f"worker {self.instance_id} goes from {self.served} to {new}")
            old, self.weights = self.weights, f"{self.weights}|{new}"
            await asyncio.sleep(self.load_seconds)  # half-written meanwhile
            # Of a worker in doubt there is no canary answer from before, so a lie would not show.
            is_lie = fault == "lie" and (self.world.managed or self.known_to == OP.get())
            if fault != "half":
                self.weights = old if is_lie else new
            if verified and self.weights != new:
                raise AdminError("It holds other parameters.")
            self.staged = None
            self.set_label(label)

    async def refit(self, order: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """Do what `engine/refit_orders.py` and `engine/core.py` do."""
        async with self._routes:
            label, seconds = self.label, {"leave": 0.0, "engine": 0.0, "enter": 0.0}
            if label != order["label"]:
                raise RefitRefused("It has another label.")
            self.label = order["leaving"]
            self.set_taints([])
            await asyncio.sleep(self.world.rng.uniform(0.0, 0.3))  # its event loop is busy
            was_paused, before = (self.paused, self.paused_by), self.engine_label
            if self.staged != order["identity"] or not await self._stop(order):
                self.label, self.engine_label = label, before
                (self.paused, self.paused_by), self.frozen = was_paused, False
                self.poke()
                self.set_taints([] if self.paused else order["taints_before"])
                raise RefitRefused("Nothing was staged, or the refit was cancelled.")
            self.kept = None
            self.issued_by = OP.get()
            await self.load(order["identity"], order["leaving"], True, fault)
            self.clear(None)
            self.engine_label, self.issued_by = order["version"], None
            if order["mode"] == "keep":
                self.cache = {}  # the frozen requests lose their blocks, too
                for request in self.queued + self.running:
                    request.kv = {self.weights} if request in self.running else set()
                    request.switches.append((len(request.tokens), order["version"]))
            else:
                for request in [r for r in self.queued if not self.admits(r)]:
                    self.end(request, "aborted")
            memory: dict[str, Any] = {}
            if self.sleep_level:
                memory["asleep"] = self.memory()
                await self.wake_memory()
                memory |= {"after": self.memory(), "seconds": {"wake.kv_cache": 0.0}}
            self.paused = self.frozen = False
            self.poke()
            await asyncio.sleep(self.world.rng.uniform(0.0, 0.3))
            self.set_taints(order["taints"])
            self.set_label(order["version"])
        engine = {"paused_seconds": 0.0, "waited_seconds": 0.0, "stop_seconds": 0.0}
        report = {**engine, "swap_seconds": 0.0, "swap": {}}
        return {"report": report, "seconds": seconds, "memory": memory}

    async def _stop(self, order: Mapping[str, Any]) -> bool:
        """Stop generating; return False if the refit was cancelled while requests ran."""
        self.engine_label, self.paused, self.paused_by = order["leaving"], True, OP.get()
        self._is_cancelled.clear()
        if order["mode"] == "abort":
            self.end_all("aborted")
        elif self.role:
            for request in list(self.queued):
                self.end(request, "aborted")
        if order["release"]:
            for request in list(self.held):
                self.release(request)
        self.frozen = order["mode"] == "keep"
        self.poke()
        if self.frozen and self.sticky:  # blocks of the old version must not be read
            return False
        if self.frozen:
            return True
        idle = self.world.loop.create_task(self._become_idle(order["mode"]))
        cancelled = self.world.loop.create_task(self._is_cancelled.wait())
        await asyncio.wait([idle, cancelled], return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if idle.done():
            return True
        idle.cancel()
        return False

    async def _become_idle(self, mode: str) -> None:
        if mode == "abort":
            await asyncio.sleep(TOKEN_SECONDS)  # vLLM is idle one step after it aborts requests
        await self._drained.wait()

    def cancel_refit(self) -> None:
        self._is_cancelled.set()

    async def run_alone(self, act: Callable[[], Any]) -> None:
        """Run a pause or a resume, after an order that is running."""
        async with self._routes if self.world.managed else nullcontext():
            answer = act()
            if inspect.isawaitable(answer):
                await answer

    async def stage_by_order(self, order: Mapping[str, Any]) -> StageReply:
        """Do what the order `rollway_stage` of `engine/refit_orders.py` does."""
        if order["needs_label"] and self.label is None:
            return StageReply(None, [])
        async with self._routes:
            if "weights" in self.sleeping:
                await asyncio.sleep(self.load_seconds)
                self.sleeping.discard("weights")
        if self.staged != order["identity"]:
            self.stage(Path(order["offer"]["where"]["path"]))
        await asyncio.sleep(min(order["seconds"], max(0.0, self._staged_at - self.world.now)))
        state, error = "ready", ""
        try:
            self.check_staged(order["identity"])
        except AdminError as refusal:
            state, error = "running" if "still" in refusal.message else "failed", refusal.message
        return StageReply(self.label, [{"state": state, "error": error}], self.sleep_level)

    async def discard(self, identity: str) -> None:
        """Do what the order `rollway_discard` does."""
        if self.staged == identity:
            self.staged = None
        async with self._routes:
            if self.sleep_level and self.sleeping != {"weights", "kv_cache"}:
                await self._release(self.sleep_level, "abort")

    def stage(self, path: Path) -> None:
        self.check(path.name)
        if "weights" in self.sleeping:
            self.world.broken(f"worker {self.instance_id} stages while its weights sleep")
        self.staged, self.staged_by = path.name, OP.get()
        self._staged_at = self.world.now + self.load_seconds

    def check_staged(self, identity: str) -> None:
        if self.staged != identity:
            raise AdminError("It has not staged these weights.")
        if self.world.now < self._staged_at:
            raise AdminError("still staging")

    def check(self, name: str) -> None:
        if "unfit" in name:
            raise AdminError("It has other shapes.")


class World:
    """The workers, the router in front of them, and the truth. It also replaces `Http`, the
    membership's listing and the version record."""

    def __init__(
        self,
        loop: SimLoop,
        seed: int,
        *,
        managed: bool,
        shape: str = "stack",
    ) -> None:
        self.loop, self.rng = loop, random.Random(seed)
        loop.world = self
        self.managed = managed
        """Whether workers take orders: they compare their parameters themselves, and their engines
        refuse requests of other versions. Otherwise they are foreign, and canaries must do."""
        self.supervised = shape in ("stack", "pools")
        self.tainting = shape != "plain"
        self.pools = shape == "pools"
        """Whether prefill and decode are apart."""
        self.workers: dict[int, SimWorker] = {}
        self.samples: dict[int, tuple[str, frozenset[str]]] = {}
        self.log: list[Call] = []
        self.ops = itertools.count(1)
        self.users_pauses: set[int] = set()
        self.faults: dict[tuple[str, int], str] = {}
        self.violations: list[str] = []
        self.lock = asyncio.Lock()
        self.recipe: tuple[int, Path] | None = None
        self.claimed: dict[int, str] = {}
        self.listed_by: dict[int, float] = {}
        """When each operation last listed the workers."""
        self.listing_fails, self.listings = 0, 0
        self.sleep_mode = True
        """Whether the engines were started with sleep mode."""
        self.stalling = {"prefill": 0.05, "decode": 0.05}
        """Which part of the requests a router delivers late, with prefill and decode apart."""
        self.unknown_seconds = 0.0
        """How long the router may send anything to a worker that has just joined."""
        self.answer_seconds = 0.0
        """How long an answer takes from its worker to the client; canaries come at once."""

    @property
    def now(self) -> float:
        return self.loop.time()

    def at(self, port: int) -> SimWorker | None:
        return next((w for w in self.workers.values() if w.alive and w.port == port), None)

    def broken(self, what: str) -> None:
        self.violations.append(f"{self.now:.3f} s: {what}")

    def join(self, ready_after: float = 0.0) -> SimWorker:
        """Start a worker on base weights; its launcher taints it and then labels it."""
        return self.join_as(self._choose_role(), ready_after)

    def join_as(self, role: str, ready_after: float = 0.0) -> SimWorker:
        number = len(self.workers) + 1
        # A supervisor starts it with the ports of a worker that died.
        ports = {w.port for w in self.workers.values() if w.role == role}
        free = {port for port in ports if self.at(port) is None}
        worker = SimWorker(self, number, min(free, default=20_000 + number), role)
        self.workers[number] = worker
        if self.supervised:
            self.loop.call_later(ready_after, worker.set_taints, [taint_of(0)])
            self.loop.call_later(ready_after + 0.005, worker.set_label, 0)
        return worker

    def _choose_role(self) -> str:
        """Return the role of the pool with fewer workers."""
        alive = [w.role for w in self.workers.values() if w.alive]
        return min(("prefill", "decode"), key=alive.count) if self.pools else ""

    async def listing(self, *_: Any, **__: Any) -> list[Worker]:
        self.listed_by[OP.get()], self.listings = self.now, self.listings + 1
        hung = any(w.alive and not w.awake.is_set() for w in self.workers.values())
        await asyncio.sleep(5.0 if hung else 0.002)  # the frontend probes them all
        if self.listing_fails:
            self.listing_fails -= 1
            raise Unreachable("The frontend restarts.")
        listed = []
        for w in self.workers.values():
            if w.alive or self.now - w.died_at < LISTED_DEAD_SECONDS:
                error = None if w.alive and w.awake.is_set() else "DeadlineExceeded"
                role: Any = w.role
                listed.append(
                    Worker(w.instance_id, "m", f"http://sim:{w.port}", error=error, role=role)
                )
        return listed

    async def instances(self, *_: Any, **__: Any) -> frozenset[int] | None:
        """Answer without asking the workers, as the frontend's /health does."""
        self.listed_by[OP.get()] = self.now
        await asyncio.sleep(0.001)  # the way to the frontend
        if self.listing_fails:
            return None
        since = self.now - LISTED_DEAD_SECONDS
        return frozenset(i for i, w in self.workers.items() if w.alive or w.died_at > since)

    def sampled(self, weights: str, request: SimRequest) -> int:
        if request.greedy:
            return zlib.crc32(f"{weights} {sorted(request.kv)} {len(request.tokens)}".encode())
        token = len(self.samples) + 1
        self.samples[token] = weights, frozenset(request.kv)
        return token

    async def post(self, url: str, body: Mapping[str, Any], *, timeout: float, **_: Any) -> Any:
        ext, greedy = body["nvext"], body["temperature"] == 0
        length, salt = len(ext["token_data"]), ext.get("cache_salt")
        request = SimRequest(length, body["max_tokens"], greedy, salt)
        taints = ext.get("routing_constraints", {}).get("required_taints", [])
        route = self._route_apart if self.pools else self._route
        try:
            async with asyncio.timeout(timeout):
                worker, reason = await route(request, taints, ext.get("backend_instance_id"))
                await asyncio.sleep(0.0 if greedy else self.answer_seconds)
        except TimeoutError:
            raise Unreachable("no answer") from None
        finally:
            for w in self.workers.values():  # the client has left, or has its answer
                w.end(request, "aborted")
        ids = request.tokens
        return {
            # Apart from each other, so that the canaries of two sets of weights never agree.
            "choices": [{"logprobs": {"token_logprobs": [-(t % 97) / 10 for t in ids]}}],
            "nvext": {
                "completion_token_ids": ids,
                "worker_id": {
                    "decode_worker_id": worker.instance_id,
                    "prefill_worker_id": request.prefilled_by,
                },
                "detailed_finish_reason": reason,
                **self._stamps(request, ext["extra_fields"]),
            },
            "usage": {"prompt_tokens": length + request.moved, "completion_tokens": len(ids)},
        }

    def _stamps(self, request: SimRequest, fields: list[str]) -> dict[str, Any]:
        version = read_version(request.salt)
        if not request.is_stamped or "rollway_versions" not in fields or version is None:
            return {}
        return {"engine_data": {"rollway_versions": [(0, version), *request.switches]}}

    async def _route(
        self, request: SimRequest, taints: list[str], pin: int | None
    ) -> tuple[SimWorker, str]:
        while True:
            alive = [w for w in self.workers.values() if w.alive]
            candidates = [w for w in alive if w.is_routed(taints)]
            if pin is not None:
                candidates = [w for w in alive if w.instance_id == pin]
            if not candidates or (pin is not None and request.moved):
                raise RequestFailed("no worker", status=500)
            worker = self.rng.choice(candidates)
            # From here on no new taint can stop the request, even if the router stalls.
            stalls = self.rng.random() < 0.05
            await asyncio.sleep(self.rng.uniform(0, 1.0 if stalls else 0.03))
            reason = await worker.serve(request)
            if reason != "died":
                return worker, reason
            request.moved = len(request.tokens)  # the router continues it elsewhere

    async def _route_apart(
        self, request: SimRequest, taints: list[str], _: int | None
    ) -> tuple[SimWorker, str]:
        """Route a request to a prefill and then to a decode worker."""
        while True:
            worker = await self._choose("prefill", taints)
            request.prefilled_by = worker.instance_id
            reason = await worker.prefill(request)
            if reason != "length":
                raise RequestFailed(f"the prefill {reason}", status=500)
            worker = await self._choose("decode", taints)
            reason = await worker.serve(request)
            if reason != "died":
                return worker, reason
            request.moved = len(request.tokens)

    async def _choose(self, role: str, taints: list[str]) -> SimWorker:
        """Choose a worker; a router that stalls delivers to it later."""
        workers = [w for w in self.workers.values() if w.alive and w.role == role]
        candidates = [w for w in workers if w.is_routed(taints)]
        if not candidates:
            raise RequestFailed(f"no {role} worker", status=500)
        worker = self.rng.choice(candidates)
        stalls = self.rng.random() < self.stalling[role]
        await asyncio.sleep(self.rng.uniform(0, 1.0 if stalls else 0.03))
        return worker

    async def observe(self, step: str, worker: Worker) -> None:
        await asyncio.sleep(0.001)  # an observer that takes its time
        if step == "resume":
            self.workers[worker.instance_id].entering = OP.get()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Run the real protocol on simulated time, listings and checkpoints."""
        for module in PROTOCOL:
            patch.setattr(module, "time", SimpleNamespace(monotonic=self.loop.time))
        patch.setattr(workers, "discover", self.listing)
        patch.setattr(workers, "list_instances", self.instances)
        patch.setattr(updates, "FromDisk", SimUpdate)

    def put(self, version: int, path: Path) -> None:
        self.recipe = version, path

    def get(self) -> tuple[int, Path] | None:
        return self.recipe

    def claim(self, version: int, identity: str) -> None:
        self.claimed[version] = identity

    def claims(self) -> dict[int, str]:
        return dict(self.claimed)


class SimUpdate(FromDisk):
    """A checkpoint that is only a name."""

    async def prepare(self) -> None:
        if self.path.name.startswith("bad"):
            raise UsageError("No checkpoint.")
        self.checkpoint = Checkpoint(self.path, {}, self.path.name)

    async def _has_changed(self) -> bool:
        return False


class SimAdmin(DynamoAdmin):
    """`DynamoAdmin` over simulated workers, with the faults of `World.faults`. A call reaches the
    worker that listens at the address; over a pinned connection it reaches one worker or none."""

    def __init__(self, world: World, owner: SimAdmin | None = None) -> None:
        self.world, self.taints = world, world.tainting
        self._owner = owner or self
        self._peer: SimWorker | None = None
        self._is_broken = self.crashed = False
        self.calls_left, self.then = 0, lambda: None
        """`then` is called at the last of this number of calls."""

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[SimAdmin]:
        yield SimAdmin(self.world, self._owner)

    async def _call(
        self, worker: Worker, route: str, act: Callable[..., Any], detail: Any, limit: float = 10.0
    ) -> Any:
        owner, sim = self._owner, self._peer or self.world.at(int(worker.admin_url[-5:]))
        if worker.error is not None or sim is None or self._is_broken or owner.crashed:
            raise _lost(worker)
        call = Call(OP.get(), route, sim.instance_id, detail)
        self.world.log.append(call)
        owner.calls_left -= 1
        if owner.calls_left == 0:
            owner.then()
        if route == "update":
            sim.issued_by = call.op
        if owner is not self:
            self._peer, self._is_broken = sim, True  # a call that is cancelled breaks it
        fault = self.world.faults.pop((route, sim.instance_id), None)
        await asyncio.sleep(self.world.rng.uniform(0.0005, 0.003))  # the way to the worker
        if fault == "die":
            sim.die()
        elif fault == "hang":
            sim.hang(self.world.rng.choice([3.0, 30.0, 900.0]))
        if not sim.alive or fault == "before" or owner.crashed:
            raise _lost(worker)

        async def run() -> Any:
            """Run once the worker wakes up, even if the caller has left."""
            await sim.awake.wait()
            if fault == "refuse":
                raise (RefitRefused if route == "refit" else AdminError)(f"{worker} refuses.")
            answer = act(sim, fault) if sim.alive else None
            return await answer if inspect.isawaitable(answer) else answer

        task = self.world.loop.create_task(run())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(limit):
                answer = await asyncio.shield(task)
        except TimeoutError as error:
            raise _lost(worker) from error
        except AdminError:
            self._is_broken = False
            raise
        if fault == "lost" or not sim.alive or owner.crashed:
            raise _lost(worker)
        call.ok, self._is_broken = True, False
        return answer

    async def pause(self, worker: Worker, mode: str = "wait", *, clear_cache: bool = True) -> None:
        def act(sim: SimWorker, _: str | None) -> Any:
            return sim.run_alone(lambda: sim.pause(mode, clear_cache))

        await self._call(worker, "pause", act, mode, 300.0)

    async def resume(self, worker: Worker) -> None:
        def act(sim: SimWorker, _: str | None) -> Any:
            return sim.run_alone(sim.resume)

        await self._call(worker, "resume", act, None, 300.0)

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        def act(sim: SimWorker, _: str | None) -> Any:
            if not self.world.managed:
                raise NoSuchMethod("It takes no orders.")
            return sim.stage_by_order(order)

        reply: StageReply = await self._call(worker, "check", act, None, 10.0 + order["seconds"])
        return reply

    async def refit(self, worker: Worker, order: Mapping[str, Any]) -> Any:
        sim = self.world.at(int(worker.admin_url[-5:]))
        if sim is not None and sim.instance_id != worker.instance_id:
            raise AnotherProcess("The order is for another process.")  # it is signed for one
        return await self._call(worker, "refit", lambda w, f: w.refit(order, f), None, 1020.0)

    async def cancel_refit(self, worker: Worker) -> None:
        await self._call(worker, "cancel", lambda w, _: w.cancel_refit(), None)

    async def flush_cache(self, worker: Worker) -> None:
        await self._call(worker, "flush", lambda w, fault: w.clear(fault), None)

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        def act(sim: SimWorker, fault: str | None) -> Any:
            return sim.load(path.name, version, False, fault)

        await self._call(worker, "update", act, version, 720.0)

    async def discard(self, worker: Worker, identity: str) -> None:
        await self._call(worker, "discard", lambda w, _: w.discard(identity), identity, 300.0)

    async def read(self, worker: Worker) -> Facts:
        def read(sim: SimWorker, _: str | None) -> Facts:
            return Facts(sim.label, self.world.managed, sim.sleep_level)

        facts: Facts = await self._call(worker, "version", read, None)
        return facts

    async def memory(self, worker: Worker, level: int = 0) -> Any:
        if not self.world.managed:
            raise NoSuchMethod("It takes no orders.")
        return await self._call(worker, "memory", lambda w, _: w.memory(), level)

    async def sleep(self, worker: Worker, order: Mapping[str, Any]) -> Any:
        return await self._call(worker, "sleep", lambda w, _: w.sleep(order), None, 300.0)

    async def wake(self, worker: Worker) -> Any:
        return await self._call(worker, "wake", lambda w, _: w.wake(), None, 300.0)

    async def declare_version(self, worker: Worker, version: int) -> None:
        await self._call(worker, "declare", lambda w, _: w.declare(version), version)

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        await self._call(worker, "taint", lambda w, _: w.set_taints(taints), tuple(taints))


def _lost(worker: Worker) -> AdminError:
    error = AdminError(f"{worker} gave no answer.")
    error.__cause__ = Unreachable("gone")
    return error
