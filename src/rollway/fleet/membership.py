"""Who belongs to the fleet, remembered between listings.

Every listing makes the frontend probe all workers, and one that hangs holds it up for 5 s, so what
was found is kept for a moment, and callers who ask at once share one listing. `poll` asks again and
tells who joined and who left; a listing that failed tells nothing, and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rollway.errors import RollwayError
from rollway.fleet.discovery import Source, Worker, discover
from rollway.http import Http

log = logging.getLogger(__name__)

Listener = Callable[[Worker], Awaitable[None]]

KEEP_SECONDS = 2.0
POLL_SECONDS = 5.0


class Membership:
    """The workers of one model at one source."""

    def __init__(
        self,
        http: Http,
        source: Source,
        model: str | None = None,
        *,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self.source = source
        self._http = http
        self._model = model
        self._keep = keep_seconds
        self._known: list[Worker] = []
        self._models: dict[int, str] = {}
        self._listed_at = float("-inf")
        self._listing: asyncio.Task[list[Worker]] | None = None
        self._joined: list[Listener] = []
        self._left: list[Listener] = []
        self._announced: dict[int, Worker] = {}
        self._reachable = True

    def on_join(self, listener: Listener) -> None:
        self._joined.append(listener)

    def on_leave(self, listener: Listener) -> None:
        self._left.append(listener)

    async def workers(self, *, fresh: bool = False) -> list[Worker]:
        """Who is there; `fresh` asks now, otherwise a recent answer will do."""
        if not fresh and time.monotonic() - self._listed_at < self._keep:
            return list(self._known)
        if fresh or self._listing is None or self._listing.done():
            # A fresh one must not be an answer to an older question.
            self._listing = asyncio.create_task(self._list())
            # A caller may have gone before it fails; that is not worth a word.
            self._listing.add_done_callback(lambda t: t.cancelled() or t.exception())
        return list(await asyncio.shield(self._listing))

    async def poll(self) -> bool:
        """List once and tell the listeners; the first listing is news too. False when there was
        no listing to be had."""
        try:
            now = {worker.instance_id: worker for worker in await self.workers(fresh=True)}
        except RollwayError as error:
            if self._reachable:
                log.warning("the workers cannot be listed: %s", error.message)
            self._reachable = False
            return False
        self._reachable = True
        await self._announce(now)
        return True

    async def _announce(self, now: dict[int, Worker]) -> None:
        before, self._announced = self._announced, now
        for instance, worker in before.items():
            if instance not in now:
                await _tell(self._left, worker)
        for instance, worker in now.items():
            # One that could not be probed when it first showed has not really joined yet.
            was = before.get(instance)
            if worker.error is None and (was is None or was.error is not None):
                await _tell(self._joined, worker)

    async def _list(self) -> list[Worker]:
        found = await discover(self._http, self.source)
        # One in error may be listed without its model; whose it was is remembered.
        self._models = {
            w.instance_id: w.model or self._models.get(w.instance_id, "") for w in found
        }
        ours = (self._model, "") if self._model is not None else self._models.values()
        self._known = [w for w in found if self._models[w.instance_id] in ours]
        self._listed_at = time.monotonic()
        return self._known


async def _tell(listeners: list[Listener], worker: Worker) -> None:
    for listener in listeners:
        try:
            await listener(worker)
        except RollwayError as error:
            log.warning("%s: %s", worker, error)
