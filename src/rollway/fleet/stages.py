"""Stages of a refit: workers of one role change weights together, prefill and decode in order.

    wait:   prefill pool ─────► decode pool         prefill workers drain: decode workers, which
                                                    still serve, fetch all KV that they hold
    abort:  decode pool ──────► prefill pool        decode workers drop what they have and wait
                                 release            for; nobody reads the prefill pool's blocks
                                                    any more, so they are released at once

A decode worker samples a request with the KV that a prefill worker computed, so both must have the
version that the request names. Four rules hold that together:

1. The router sends a request only to workers with the taint of its version, in both pools.
2. Each engine admits a request only if its cache salt names the version that the engine has; a
   decode engine that refuses one tells the prefill worker to release its blocks.
3. A prefill engine swaps only when it holds no blocks for others: what is fetched from it was
   computed by the weights that it has.
4. A version counts as served when both pools have a worker on it (`FleetVersions.is_served`).

`keep` is refused: a decode worker would compute a frozen request's prompt again by itself, while
transfers of other requests are in flight, and vLLM does not clear its cache then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import zip_longest
from typing import Any, TypeVar

from rollway.errors import AdminError
from rollway.fleet.admin import PauseMode, collect_failures, run_to_the_end
from rollway.fleet.worker_order import WorkerOrder
from rollway.fleet.worker_refit import WorkerRefit

W = TypeVar("W")
GetRole = Callable[[W], str]

_DRAINING = ("", "prefill", "decode")
_DROPPING = ("", "decode", "prefill")


def split_in_stages(workers: Sequence[W], mode: str, get_role: GetRole[W]) -> list[list[W]]:
    """Return the workers by role, in the order in which the roles change weights."""
    order = _DROPPING if mode == "abort" else _DRAINING
    stages = ([w for w in workers if get_role(w) == role] for role in order)
    return [stage for stage in stages if stage]


def split_in_shares(workers: Sequence[W], share: float, get_role: GetRole[W]) -> list[list[W]]:
    """Return groups with a share of the workers of each role."""
    chunks = []
    for stage in split_in_stages(workers, "wait", get_role):
        size = max(1, min(len(stage) - 1, round(len(stage) * share)))
        chunks.append([stage[start : start + size] for start in range(0, len(stage), size)])
    return [[worker for part in parts for worker in part or ()] for parts in zip_longest(*chunks)]


class Stage:
    """Workers of one role, which a refit moves at the same time."""

    def __init__(self, workers: Sequence[WorkerRefit], mode: PauseMode) -> None:
        self._mode = mode
        self._by_order = [worker for worker in workers if worker.takes_order]
        self._by_calls = [worker for worker in workers if not worker.takes_order]

    async def move(self) -> None:
        """Move the workers to the version of their refit, each by one order where it takes one."""
        work = [WorkerOrder(worker).run(self._mode) for worker in self._by_order]
        if self._by_calls:
            work.append(self._move_by_calls())
        await _run_all(work)

    async def _move_by_calls(self) -> None:
        """Pause the workers as a whole, then install the update in each of them."""
        began = time.monotonic()
        async with AsyncExitStack() as connections:
            paused = await self._pause(connections)
            # The connections close here: not before every worker is in service or out.
            await _run_all([worker.install() for worker in paused])
        waited = max((worker.report.waited_seconds for worker in paused), default=0.0)
        for worker in paused:
            worker.report.paused_seconds = time.monotonic() - began - waited

    async def _pause(self, connections: AsyncExitStack) -> list[WorkerRefit]:
        """Take workers out of service, and return those that are there. A worker that has died
        needs no pause. If any other cannot be paused, restore all of them and raise."""

        async def pause(worker: WorkerRefit) -> None:
            await worker.leave_service(connections)
            await worker.pause(self._mode)

        failures: list[tuple[WorkerRefit, BaseException]] = []
        is_complete = False
        try:
            for worker, error in await collect_failures(self._by_calls, pause):
                if not await worker.note_if_lost():
                    failures.append((worker, error))
            is_complete = not failures
        finally:
            if not is_complete:
                # A pause that timed out or was cancelled here may still take effect in the worker,
                # so all are resumed; that does no harm to a worker that was not paused.
                await run_to_the_end(self._restore())
        for worker, error in failures:
            worker.report.error = str(error)
        if failures:
            raise AdminError(
                f"Not every worker could be paused: {failures[0][1]}",
                "The others were put back into service.",
            )
        return [worker for worker in self._by_calls if worker.report.state == "paused"]

    async def _restore(self) -> None:
        for worker, error in await collect_failures(self._by_calls, WorkerRefit.restore):
            if not await worker.note_if_lost():
                worker.mark_in_doubt(error)
                worker.plan.versions.forget(worker.instance_id)


async def _run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once to the end, also those beside one that fails; raise its error then."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
