"""The control of chaos: refits as in Dynamo's own guide, without any protection of Rollway."""

from __future__ import annotations

from pathlib import Path

from rollway.fleet.admin import AdminAPI, call_all
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.rollout.client import Rollouts
from rollway.rollout.completion import Completion
from rollway.versions import FleetVersions, Ticket


class NaiveBook(FleetVersions):
    """Attributes every answer to the current version."""

    def ticket(self, version: int | None = None) -> Ticket:
        return Ticket(self.current, None, None, self.epoch)

    def attributes_to(self, ticket: Ticket, worker: int | None) -> bool:
        return True


class NaiveRollouts(Rollouts):
    """Accepts every answer. With prefill and decode apart, the mixed answers are those of requests
    that a refit came between, which `Rollouts` drops; a stale prefix is not found there, because
    prefill workers are idle often enough to clear their caches."""

    async def _is_attributed(self, ticket: Ticket, answer: Completion | int | None) -> bool:
        return True


async def naive_refit(fleet: Fleet, version: int, path: Path) -> None:
    """Pause with requests and cache kept, load, and resume, without any check. If chaos finds no
    stale token here, it could not find any."""
    admin: AdminAPI = fleet.admin
    workers = [worker for worker in await fleet.workers() if worker.error is None]

    async def move(worker: Worker) -> None:
        await admin.pause(worker, "keep", clear_cache=False)
        await admin.update_from_disk(worker, path, version)
        await admin.resume(worker)

    await call_all(workers, move)
    fleet.versions.current = version
