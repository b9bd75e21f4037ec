"""Pause and resume all workers of a fleet, without new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollway.errors import AdminError
from rollway.fleet.admin import (
    AdminAPI,
    PauseMode,
    call_all,
    call_living,
    run_to_the_end,
)
from rollway.fleet.discovery import Worker
from rollway.fleet.labels import Labels
from rollway.fleet.membership import refuse_silent
from rollway.fleet.service import Service
from rollway.fleet.sleep import asleep_error
from rollway.fleet.stages import split_in_stages
from rollway.versions import FleetVersions


@dataclass(frozen=True, slots=True)
class Pauser:
    """Takes the workers of a fleet out of service and back; the caller holds the fleet's lock."""

    admin: AdminAPI
    versions: FleetVersions
    labels: Labels

    async def pause(self, workers: Sequence[Worker], mode: PauseMode, clear_cache: bool) -> None:
        """Pause workers, one role after the other; if one fails, resume all."""

        async def undo() -> None:
            await call_all(workers, self._put_back)
            self.versions.open()

        self.versions.close(is_pause=True)
        try:
            for stage in split_in_stages(workers, mode, lambda worker: worker.role):
                await call_living(
                    stage, lambda w: self._service_of(w).pause(mode, clear_cache=clear_cache)
                )
        except BaseException:
            await run_to_the_end(undo())
            raise

    async def resume(self, workers: Sequence[Worker]) -> None:
        """Resume the workers whose weights are known; raise if others stay paused."""
        answering = [worker for worker in workers if worker.error is None]
        labels = await self.labels.read_from(answering)
        asleep = [w for w in answering if self.admin.sleep_level(w)]
        awake = [w for w in answering if w not in asleep]
        doubtful = [w for w in awake if (labels[w.instance_id] or 0) < 0]
        try:
            await call_living([w for w in awake if w not in doubtful], self._put_back)
        finally:
            self.versions.open()
        await refuse_silent(workers)
        if doubtful:
            raise AdminError(
                f"{len(doubtful)} of {len(workers)} workers were left between two versions and "
                f"stay paused: {'; '.join(map(str, doubtful))}.",
                "Refit them, or restart them.",
            )
        if asleep:
            raise asleep_error(asleep, len(workers))

    def _service_of(self, worker: Worker) -> Service:
        return Service(self.admin, self.versions, worker)

    async def _put_back(self, worker: Worker) -> None:
        await self._service_of(worker).put_back()
