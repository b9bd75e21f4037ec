"""The control: refits as Dynamo's own guide has them, with every protection of Rollway left out.

Pause with requests kept and the cache kept, load, resume; no check before, none after, nothing on
the requests. A chaos run that finds no stale token here could not find any."""

from __future__ import annotations

from pathlib import Path

from rollway.fleet.admin import AdminAPI, on_all
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.versions import Ticket, VersionBook


class NaiveBook(VersionBook):
    """Believes that every answer came from the version that is current."""

    def ticket(self, version: int | None = None) -> Ticket:
        return Ticket(self.current, None, None, self.epoch)

    def vouches(self, ticket: Ticket, worker: int | None) -> bool:
        return True


async def naive_refit(fleet: Fleet, version: int, path: Path) -> None:
    admin: AdminAPI = fleet.admin
    workers = [worker for worker in await fleet.workers() if worker.error is None]

    async def move(worker: Worker) -> None:
        await admin.pause(worker, "keep", clear_cache=False)
        await admin.update_from_disk(worker, path, version)
        await admin.resume(worker)

    await on_all(workers, move)
    fleet.versions.current = version
