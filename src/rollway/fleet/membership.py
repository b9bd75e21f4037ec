"""The workers of a fleet, remembered between listings.

Every listing makes the frontend probe all workers: a hung worker delays it by 5 s, and one with
many streams by up to a second. So a listing is reused for a moment, and callers at the same time
share one. `confirm` and `has_changed` ask only whether somebody joined or left since. `poll` lists
again and says who joined and left. A listing that failed changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollway.errors import AdminError, RollwayError
from rollway.fleet.admin import no_workers_error, silent_workers_error
from rollway.fleet.discovery import Source, Worker, discover, is_dead, lacks_routes, list_instances
from rollway.http import Http
from rollway.model_spec import WorkerRole

log = logging.getLogger(__name__)

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
