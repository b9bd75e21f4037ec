"""A model of Dynamo's workers, their router and their admin routes, in memory and simulated time.

It keeps what no real worker tells: which weights sampled each token, and whose KV it read. Breaches
of the refit protocol that show only here are noted in `World.violations`; raised inside the
protocol they would be handled as one more fault."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import AdminError, RequestFailed, Unreachable, UsageError
from rollway.fleet import fleet, membership, refit
from rollway.fleet.admin import NoSuchMethod
from rollway.fleet.discovery import Worker
from rollway.fleet.updates import CHECK_METHOD, FromDisk
from rollway.fleet.versions import taint_of
from rollway.rollout import client
from rollway.weights.checkpoint import Checkpoint

OP: ContextVar[int] = ContextVar("OP", default=0)
"""Which operation (a refit, an admit, a user's pause) a call belongs to."""
TOKEN_SECONDS = 0.02
LISTED_DEAD_SECONDS = 10.0
TOUCHING = frozenset({"pause", "resume", "flush", "update", "declare", "taint"})


def weights_of(version: int | None) -> str:
    """What a version names; "other" is what it must never come to name."""
    return f"w{version}" if version else "base"


class _Clock(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("Nothing will ever happen again, and somebody waits for it.")
        self.now += timeout
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """Time passes when nobody has anything to do, and then at once."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.worlds: list[World] = []
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any):  # type: ignore[override]
        """What a probe of an admin port meets; a hung worker's kernel accepts."""
        if self.worlds[-1].at(port) is None:
            raise ConnectionRefusedError
        return SimpleNamespace(close=lambda: None, is_closing=lambda: True), factory()


@dataclass(eq=False)
class SimRequest:
    prompt: int
    max_tokens: int
    greedy: bool
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    kv: set[str] = field(default_factory=set)
    """The weights that computed what it attends to."""
    moved: int = 0
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.Future())


@dataclass(eq=False)
class Call:
    op: int
    route: str
    worker: int
    detail: Any
    ok: bool = False


class SimWorker:
    def __init__(self, world: World, instance_id: int, port: int) -> None:
        rng = world.rng
        self.world, self.instance_id, self.port = world, instance_id, port
        self.weights = "base"
        self.label: int | None = None
        self.ready_at = float("inf") if world.supervised else world.now
        self.taints: tuple[str, ...] = ()
        self.routed: tuple[str, ...] = ()
        """The taints as the router knows them."""
        self.lag = rng.choice([0.0, 0.01, 0.03])
        self.load_seconds = rng.choice([0.02, 0.4, 3.0])
        self.sticky = rng.random() < 0.3  # an engine that cannot drop its cache
        self.alive, self.paused, self.frozen = True, False, False
        self.died_at = self.hung_at = float("-inf")
        self.cache: dict[str | None, str] = {}
        self.queued: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.issued_by: int | None = None
        """The operation whose update is not known to have ended well."""
        self.entering: int | None = None
        self.served = 0
        self.awake, self.drained, self._work = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.awake.set()
        self.engine = asyncio.Lock()
        self._task = world.loop.create_task(self._run())

    def poke(self) -> None:
        runnable = (self.running and not self.frozen) or (self.queued and not self.paused)
        (self._work.set if runnable and self.awake.is_set() else self._work.clear)()
        (self.drained.clear if self.running else self.drained.set)()

    async def _run(self) -> None:
        while self.alive:
            await self._work.wait()
            await asyncio.sleep(TOKEN_SECONDS)
            if self.alive and self.awake.is_set():
                self._step()
            self.poke()

    def _step(self) -> None:
        if not self.paused:
            for request in self.queued:
                request.kv = {self.cache.setdefault(request.salt, self.weights)}
            self.running, self.queued = self.running + self.queued, []
        for request in [] if self.frozen else list(self.running):
            request.kv.add(self.weights)
            request.tokens.append(self.world.sampled(self.weights, request))
            if len(request.tokens) >= request.max_tokens:
                self.end(request, "length")

    async def take(self, request: SimRequest) -> str:
        if not self.alive:
            return "died"
        request.done = asyncio.Future()
        self.queued.append(request)
        self.poke()
        return await request.done

    def end(self, request: SimRequest, reason: str) -> None:
        for where in (self.queued, self.running):
            if request in where:
                where.remove(request)
        if not request.done.done():
            request.done.set_result(reason)
        self.poke()

    def end_all(self, reason: str) -> None:
        for request in self.queued + self.running:
            self.end(request, reason)

    def pause(self, mode: str) -> None:
        self.paused = True
        self.frozen = self.frozen or mode == "keep"
        if mode == "abort":
            self.end_all("aborted")
        self.poke()

    def resume(self) -> None:
        self.paused = self.frozen = False
        self.poke()

    def clear(self) -> None:
        held = {request.salt for request in self.running}
        if not self.sticky:
            self.cache = {salt: by for salt, by in self.cache.items() if salt in held}

    def set_label(self, version: int | None) -> None:
        self.ready_at = min(self.ready_at, self.world.now)
        self.label = version

    def set_taints(self, taints: Sequence[str]) -> None:
        self.taints = tuple(taints)
        self.world.loop.call_later(self.lag, setattr, self, "routed", tuple(taints))

    def hang(self, seconds: float) -> None:
        self.hung_at = self.world.now
        self.awake.clear()
        self.poke()
        self.world.loop.call_later(seconds, self.recover)

    def recover(self) -> None:
        self.awake.set()
        self.poke()

    def die(self) -> None:
        if self.alive:
            self.alive, self.died_at = False, self.world.now
            self.end_all("died")
            self.recover()

    async def load(self, new: str, fault: str | None) -> None:
        if not self.paused:
            raise AdminError("It must be paused.")
        if new == "other" or int(new.removeprefix("w")) < self.served:
            self.world.broken(f"worker {self.instance_id} goes from {self.served} to {new}")
        old, self.weights = self.weights, f"{self.weights}|{new}"
        await asyncio.sleep(self.load_seconds)
        if fault != "half":
            self.weights = old if fault == "lie" else new

    async def handle(self, act: Callable[[], Awaitable[Any]]) -> Any:
        """A call in its socket is heard when it wakes up, also when the caller has left."""
        await self.awake.wait()
        return await act() if self.alive else None


class World:
    """The workers, the router in front of them, and the truth. It stands in for `Http` as well."""

    def __init__(self, loop: SimLoop, seed: int, *, proving: bool, shape: str = "stack") -> None:
        self.loop, self.rng = loop, random.Random(seed)
        self.proving = proving
        """Whether the workers compare their parameters themselves; otherwise canaries must do."""
        self.supervised = shape == "stack"
        self.tainting = shape != "untainted"
        self.workers: dict[int, SimWorker] = {}
        self.samples: dict[int, tuple[str, frozenset[str]]] = {}
        self.log: list[Call] = []
        self.ops = itertools.count(1)
        self.faults: dict[tuple[str, int], str] = {}
        self.violations: list[str] = []
        self.lock = asyncio.Lock()
        self.shelf: tuple[int, Path] | None = None
        self.listed_at = 0.0
        self.listing_fails = 0
        loop.worlds.append(self)

    @property
    def now(self) -> float:
        return self.loop.time()

    def at(self, port: int) -> SimWorker | None:
        return next((w for w in self.workers.values() if w.alive and w.port == port), None)

    def broken(self, what: str) -> None:
        self.violations.append(f"{self.now:.3f} s: {what}")

    def join(self, ready_after: float = 0.0) -> SimWorker:
        """A worker on base weights; its launcher taints it and then labels it."""
        number = len(self.workers) + 1
        # A supervisor starts it with the ports of one that died.
        free = {w.port for w in self.workers.values() if self.at(w.port) is None}
        port = min(free, default=20_000 + number)
        worker = self.workers[number] = SimWorker(self, number, port)
        if self.supervised:
            self.loop.call_later(ready_after, worker.set_taints, [taint_of(0)])
            self.loop.call_later(ready_after + 0.005, worker.set_label, 0)
        return worker

    async def listing(self, *_: Any, **__: Any) -> list[Worker]:
        self.listed_at = self.now
        hung = [w for w in self.workers.values() if w.alive and not w.awake.is_set()]
        await asyncio.sleep(5.0 if hung else 0.002)  # the frontend probes them all
        if self.listing_fails:
            self.listing_fails -= 1
            raise Unreachable("The frontend restarts.")
        found = []
        for w in self.workers.values():
            if w.alive or self.now - w.died_at < LISTED_DEAD_SECONDS:
                error = None if w.alive and w.awake.is_set() else "DeadlineExceeded"
                url = f"http://sim:{w.port}"
                found.append(Worker(w.instance_id, "m", url, error=error))
        return found

    def sampled(self, weights: str, request: SimRequest) -> int:
        if request.greedy:
            text = f"{weights} {sorted(request.kv)} {len(request.tokens)}"
            return zlib.crc32(text.encode())
        token = len(self.samples) + 1
        self.samples[token] = weights, frozenset(request.kv)
        return token

    async def post(self, url: str, body: Mapping[str, Any], *, timeout: float, **_: Any) -> Any:
        ext = body["nvext"]
        length = len(ext["token_data"])
        greedy = body["temperature"] == 0
        request = SimRequest(length, body["max_tokens"], greedy, ext.get("cache_salt"))
        taints = ext.get("routing_constraints", {}).get("required_taints", [])
        try:
            async with asyncio.timeout(timeout):
                worker, reason = await self._route(request, taints, ext.get("backend_instance_id"))
        except TimeoutError:
            raise Unreachable("no answer") from None
        finally:
            for w in self.workers.values():  # the client has gone, or has its answer
                w.end(request, "aborted")
        tokens = request.tokens
        return {
            "choices": [{"logprobs": {"token_logprobs": [-1.0 / (1 + t) for t in tokens]}}],
            "nvext": {
                "completion_token_ids": list(tokens),
                "worker_id": {"decode_worker_id": worker.instance_id},
                "detailed_finish_reason": reason,
            },
            "usage": {
                "prompt_tokens": request.prompt + request.moved,
                "completion_tokens": len(tokens),
            },
        }

    async def _route(
        self, request: SimRequest, taints: list[str], pin: int | None
    ) -> tuple[SimWorker, str]:
        while True:
            able = [w for w in self.workers.values() if w.alive and {*taints} <= {*w.routed}]
            if pin is not None:
                able = [w for w in self.workers.values() if w.alive and w.instance_id == pin]
            if not able or (pin is not None and request.moved):
                raise RequestFailed("no worker", status=500)
            worker = self.rng.choice(able)
            await asyncio.sleep(self.rng.uniform(0, 0.03))  # no news can call it back now
            reason = await worker.take(request)
            if reason != "died":
                return worker, reason
            request.moved = len(request.tokens)  # the router goes on elsewhere

    async def observe(self, step: str, worker: Worker) -> None:
        await asyncio.sleep(0.001)
        if step == "resume":
            self.workers[worker.instance_id].entering = OP.get()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put simulated time, listings and checkpoints under the real protocol."""
        for module in (refit, fleet, membership, client):
            patch.setattr(module, "time", SimpleNamespace(monotonic=self.loop.time))
        patch.setattr(membership, "discover", self.listing)
        patch.setattr(fleet, "FromDisk", SimUpdate)
        patch.setattr(client, "random", self.rng)

    def put(self, version: int, path: Path) -> None:
        self.shelf = version, path

    def get(self) -> tuple[int, Path] | None:
        return self.shelf


class SimUpdate(FromDisk):
    """A checkpoint that is only a name."""

    async def prepare(self) -> None:
        if self.path.name.startswith("bad"):
            raise UsageError("No checkpoint.")
        self.checkpoint = Checkpoint(self.path, {}, self.path.name)


@dataclass
class Process:
    """The caller's side, which can die as well."""

    crashed: bool = False
    calls_left: int = 0
    then: Callable[[], object] = lambda: None

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.then()


class SimAdmin:
    """`AdminAPI` over simulated workers, with the faults that the world has in store. A call
    reaches whoever listens at the address; one over a held line reaches one worker or nobody."""

    def __init__(self, world: World, process: Process | None = None, *, line: bool = False) -> None:
        self.world, self.taints = world, world.tainting
        self.process = process or Process()
        self._line = line
        self._end: SimWorker | None = None
        self._cut = False

    @asynccontextmanager
    async def held(self) -> AsyncIterator[SimAdmin]:
        yield SimAdmin(self.world, self.process, line=True)

    async def _call(
        self, worker: Worker, route: str, act: Any, detail: Any = None, limit: float = 10.0
    ) -> Any:
        sim = self._end or self.world.at(int(worker.admin_url.rpartition(":")[2]))
        if worker.error is not None or sim is None or self._cut or self.process.crashed:
            raise _lost(worker)
        call = Call(OP.get(), route, sim.instance_id, detail)
        self.world.log.append(call)
        self.process.count()
        if route == "update":
            sim.issued_by = call.op
        if self._line:
            self._end, self._cut = sim, True  # a call that is given up breaks its connection
        said, self._cut = await self._heard(worker, sim, call, act, limit), False
        call.ok = True
        return said

    async def _heard(
        self, worker: Worker, sim: SimWorker, call: Call, act: Any, limit: float
    ) -> Any:
        fault = self.world.faults.pop((call.route, sim.instance_id), None)
        await asyncio.sleep(self.world.rng.uniform(0.0005, 0.003))
        if fault == "die":
            sim.die()
        elif fault == "hang":
            sim.hang(self.world.rng.choice([3.0, 30.0, 900.0]))
        if not sim.alive or fault == "before" or self.process.crashed:
            raise _lost(worker)
        if fault == "refuse":
            self._cut = False
            raise AdminError(f"{worker} refuses.")
        task = self.world.loop.create_task(sim.handle(lambda: act(sim, fault)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(limit):
                said = await asyncio.shield(task)
        except TimeoutError:
            raise _lost(worker) from None
        except AdminError:
            self._cut = False
            raise
        if fault == "lost" or not sim.alive or self.process.crashed:
            raise _lost(worker)
        return said

    async def pause(self, worker: Worker, mode: str = "wait", *, clear_cache: bool = True) -> None:
        async def act(sim: SimWorker, _: str | None) -> None:
            sim.pause(mode)
            if mode == "wait":
                await sim.drained.wait()
            if clear_cache:
                sim.clear()

        await self._call(worker, "pause", act, mode, 300.0)

    async def resume(self, worker: Worker) -> None:
        async def act(sim: SimWorker, _: str | None) -> None:
            if sim.entering == OP.get() == sim.issued_by:
                sim.issued_by = None
            sim.served = max(sim.served, sim.label or 0)
            if sim.issued_by is not None and (sim.issued_by != OP.get() or self.world.proving):
                self.world.broken(f"{worker} is resumed while its weights are unknown")
            sim.resume()

        await self._call(worker, "resume", act, limit=300.0)

    async def flush_cache(self, worker: Worker) -> None:
        async def act(sim: SimWorker, fault: str | None) -> None:
            if fault != "lie":
                sim.clear()

        await self._call(worker, "flush", act)

    async def update_from_disk(
        self, worker: Worker, path: Path, version: int, *, method: str | None = None
    ) -> None:
        async def act(sim: SimWorker, fault: str | None) -> None:
            async with sim.engine:
                await sim.load(path.name, fault)
                if method is not None and sim.weights != path.name:
                    raise AdminError(f"{worker} holds other parameters.")
                sim.set_label(version)

        await self._call(worker, "update", act, version, 720.0)

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        async def act(sim: SimWorker, _: str | None) -> None:
            if not self.world.proving:
                raise NoSuchMethod(f"{worker} has no {method}.")
            if "unfit" in str(arguments["path"]):
                raise AdminError(f"{worker} has other shapes.")

        assert method == CHECK_METHOD
        await self._call(worker, "check", act, limit=300.0)

    async def weight_version(self, worker: Worker) -> int | None:
        async def act(sim: SimWorker, _: str | None) -> int | None:
            return sim.label

        said: int | None = await self._call(worker, "version", act)
        return said

    async def declare_version(self, worker: Worker, version: int) -> None:
        async def act(sim: SimWorker, _: str | None) -> None:
            sim.set_label(version)
            if version >= 0:
                sim.issued_by = None  # the caller vouches for it

        await self._call(worker, "declare", act, version)

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        async def act(sim: SimWorker, _: str | None) -> None:
            sim.set_taints(taints)

        await self._call(worker, "taint", act, tuple(taints))


def _lost(worker: Worker) -> AdminError:
    error = AdminError(f"{worker} gave no answer.")
    error.__cause__ = Unreachable("gone")
    return error
