"""The control: refits as in Dynamo's own guide, without any protection of Rollway.

It pauses with requests and cache kept, loads, and resumes, without any check. If a chaos run finds
no stale token here, it could not find any."""

from __future__ import annotations

from pathlib import Path

from rollway.fleet.admin import AdminAPI, call_all
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.versions import FleetVersions, Ticket


class NaiveBook(FleetVersions):
    """Attributes every answer to the current version."""

    def ticket(self, version: int | None = None) -> Ticket:
        return Ticket(self.current, None, None, self.epoch)

    def attributes_to(self, ticket: Ticket, worker: int | None) -> bool:
        return True


async def naive_refit(fleet: Fleet, version: int, path: Path) -> None:
    """Refit without protections."""
    admin: AdminAPI = fleet.admin
    workers = [worker for worker in await fleet.workers() if worker.error is None]

    async def move(worker: Worker) -> None:
        await admin.pause(worker, "keep", clear_cache=False)
        await admin.update_from_disk(worker, path, version)
        await admin.resume(worker)

    await call_all(workers, move)
    fleet.versions.current = version
