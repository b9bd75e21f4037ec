"""The fleet as its workers, for clients that call each of them (`--per-worker`).

    GET /v1/rl/workers                     one entry for each worker, at an address of this server
    POST /workers/<key>/engine/<route>     a part of one operation of the whole fleet

    pause A ┐                 update A ┐                       resume A ┐
    pause B ┘ the gate closes update B ┘ all there: one refit  resume B ┘ all there: the gate opens

No call reaches a single worker: a fleet in which some workers have new weights is what this server
exists to prevent. An update and a resume wait until all workers that were paused have got the same
call; then it is carried out once, and every caller gets its answer. A worker that is paused again
begins a new round: its client was restarted, or has lost the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.virtual_worker import PROTOCOL, Answer, Body, VirtualWorker

PARTS_SECONDS = 60.0
"""How long a call waits for those to the other workers. prime-rl sends them all at once."""
PAUSE, RESUME = "pause_generation", "resume_generation"
_TOGETHER = {"update_weights_from_disk", "update_weights_from_distributed", RESUME}
_SHARED = {"load_lora", "unload_lora", "init_weights_update_group"}


@dataclass(slots=True)
class _Shared:
    """One operation, and the workers that were called for it."""

    body: Body
    task: asyncio.Task[Answer]
    workers: set[str]


@dataclass(slots=True)
class _Round:
    """From the first pause to the last resume."""

    pause: _Shared
    calls: dict[str, dict[str, Body]] = field(default_factory=dict)
    """For each route, the calls that have come, by worker."""
    is_over: bool = False


@dataclass(slots=True)
class WorkerParts:
    """Carries out calls to single workers as parts of one operation."""

    fleet: Fleet
    seconds: float = PARTS_SECONDS
    _known: set[str] = field(default_factory=set)
    _round: _Round | None = None
    _shared: dict[str, _Shared] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def list_workers(self, virtual: VirtualWorker, origin: str) -> Answer:
        """Return the listing, with addresses of this server alone."""
        entries = []
        for worker in await self._list():
            entry: Answer = {
                "model": virtual.model,
                "instance_id": worker.instance_id,
                "world_size": worker.world_size,
                "system_url": f"{origin}/workers/{make_key(worker)}",
                "routes": sorted(virtual.routes),
            }
            entries.append(entry | ({"error": worker.error} if worker.error else {}))
        return {"protocol_version": PROTOCOL, "namespace": "rollway", "workers": entries}

    async def find_worker(self, key: str) -> Worker:
        """Return a worker that answers; one that restarts is a 503, which clients repeat."""
        for worker in await self._list():
            if make_key(worker) == key:
                if worker.error is None:
                    return worker
                raise Refused(503, f"{worker} does not answer: {worker.error}.", kind="starting")
        raise self._make_missing(key)

    async def call_route(self, virtual: VirtualWorker, key: str, route: str, body: Body) -> Answer:
        """Answer a call to one worker, as a part of one operation of the fleet."""
        if key not in self._known:
            await self._list()
        if key not in self._known:
            raise self._make_missing(key)
        if route == PAUSE:
            return await self._pause(virtual, key, body)
        if route in _SHARED:
            return await self._share(virtual, key, route, body)
        if route in _TOGETHER and self._round is not None:
            await self._wait_for_others(self._round, key, route, body)
        # Whoever comes second joins the operation that runs, or gets its answer.
        answer = await virtual.call_route(route, body)
        if route == RESUME and self._round is not None:
            self._round.is_over = True
        return answer

    async def _pause(self, virtual: VirtualWorker, key: str, body: Body) -> Answer:
        current = self._round
        if current is None or current.is_over or key in current.pause.workers:
            current = self._round = _Round(self._start(virtual, PAUSE, body))
        current.pause.workers.add(key)
        async with self._changed:  # calls of an earlier round must not wait any longer
            self._changed.notify_all()
        return await asyncio.shield(current.pause.task)

    async def _share(self, virtual: VirtualWorker, key: str, route: str, body: Body) -> Answer:
        """Carry out a call once for all workers. The same call to the same worker is a new one,
        once the first has ended."""
        # Ranks are the fleet's to give out: it joins a group as a whole.
        content = {**body, "rank_offset": 0} if "rank_offset" in body else dict(body)
        shared = self._shared.get(route)
        if (
            shared is None
            or shared.body != content
            or (key in shared.workers and shared.task.done())
        ):
            shared = self._shared[route] = self._start(virtual, route, content)
        shared.workers.add(key)
        return await asyncio.shield(shared.task)

    def _start(self, virtual: VirtualWorker, route: str, body: Body) -> _Shared:
        task = asyncio.create_task(virtual.call_route(route, body))
        # A failure is reported to whoever asks; nobody may be left to ask.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return _Shared(body, task, set())

    async def _wait_for_others(self, current: _Round, key: str, route: str, body: Body) -> None:
        """Return once all workers that were paused have got the same call."""
        calls, paused = current.calls.setdefault(route, {}), current.pause.workers
        calls[key] = body
        try:
            async with asyncio.timeout(self.seconds), self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(
                    lambda: paused <= calls.keys() or self._round is not current
                )
        except TimeoutError:
            missing = ", ".join(sorted(paused - calls.keys()))
            raise Refused(
                503,
                f"/engine/{route} came to {key}, and not to {missing}, which were paused too.",
                "Call all workers; nothing was changed.",
                kind="incomplete",
            ) from None
        if self._round is not current:
            raise Refused(409, "The workers were paused again.", "Send this after the new pause.")
        if any(other != body for other in calls.values()):
            raise Refused(
                409,
                f"/engine/{route} came to the workers with different bodies; nothing was changed.",
                "Send every worker the same.",
            )

    async def _list(self) -> list[Worker]:
        workers = await self.fleet.workers(fresh=False)
        # By address, and for good: a restarted worker keeps its key, also while it is not listed.
        self._known |= set(map(make_key, workers))
        return workers

    def _make_missing(self, key: str) -> Refused:
        if key in self._known:
            return Refused(503, f"The worker {key} is not listed now.", kind="starting")
        return Refused(
            404,
            f"There is no worker {key[:60]!a}.",
            "GET /v1/rl/workers lists them, if the server was started with --per-worker.",
            kind="not_found",
        )


def make_key(worker: Worker) -> str:
    """Return the name of a worker in addresses. A restart changes its id, and not its address."""
    return hashlib.sha256(worker.admin_url.encode()).hexdigest()[:12]
