"""The workers as one thing: pause, refit, resume all of them, and know what each serves.

A refit, seen from the trainer:

    save v7 ──► check files ──► pause all ──► load v7 ──► flush KV ──► verify ──► resume ──► sample
                  │ refused        │ failed      └──────── failed ───────┘
                  ▼                ▼                         ▼
              nothing touched   resume all        that worker stays paused, RefitError

Generation stands still only between `pause all` and `resume`; the report says for how long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import AdminError, NoWorkers, RefitError, RollwayError, UsageError
from rollway.fleet.admin import Admin, AdminTimeouts, PauseMode
from rollway.fleet.discovery import Worker, discover
from rollway.fleet.versions import VersionBook, taint_of
from rollway.http import Http
from rollway.weights.checkpoint import check_checkpoint

MAX_PARALLEL_CALLS = 64


@dataclass(slots=True)
class WorkerRefit:
    """What a refit did to one worker."""

    instance_id: int
    state: str = "untouched"
    version: int | None = None
    pause_seconds: float = 0.0
    update_seconds: float = 0.0
    resume_seconds: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class RefitReport:
    """The outcome of one refit."""

    version: int
    seconds: float = 0.0
    paused_seconds: float = 0.0
    """How long generation stood still, from the first pause to the last resume."""
    workers: list[WorkerRefit] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Fleet:
    """All RL workers behind one frontend."""

    def __init__(
        self,
        http: Http,
        rl_url: str,
        *,
        model: str | None = None,
        timeouts: AdminTimeouts | None = None,
    ) -> None:
        self.rl_url = rl_url.rstrip("/")
        self.model = model
        self.versions = VersionBook()
        self.admin = Admin(http, timeouts)
        self._http = http
        self._refitting = asyncio.Lock()

    async def workers(self) -> list[Worker]:
        """Who is there now; with a `model`, only those that serve it."""
        found = await discover(self._http, self.rl_url)
        return [w for w in found if self.model is None or w.model in (self.model, "")]

    async def pause(self, mode: PauseMode = "wait", *, clear_cache: bool = True) -> None:
        """Pause every worker; if one fails the others are resumed again."""
        workers = await self._usable()
        await self._pause_all(workers, mode, clear_cache)

    async def resume(self) -> None:
        await self._all(await self._usable(), self.admin.resume)

    async def flush_cache(self) -> None:
        await self._all(await self._usable(), self.admin.flush_cache)

    async def read_versions(self) -> dict[int, int | None]:
        """The version each worker declares, by instance id; None where it declares none or does
        not answer. Also brings the book up to date, unless weights moved meanwhile: the newest
        version becomes the fleet's, and workers on another are not used until the next refit."""
        epoch = self.versions.epoch
        workers = await self.workers()
        if not workers:
            raise self._no_workers()
        answering = [worker for worker in workers if worker.error is None]
        told = await asyncio.gather(
            *(self.admin.weight_version(worker) for worker in answering), return_exceptions=True
        )
        by_id: dict[int, int | None] = {worker.instance_id: None for worker in workers}
        for worker, version in zip(answering, told, strict=True):
            if isinstance(version, int):
                by_id[worker.instance_id] = version
        known = {i: v for i, v in by_id.items() if v is not None}
        if self.versions.epoch == epoch and not self.versions.moving:
            newest = max(known.values(), default=None)
            self.versions.note(known, newest if self.versions.current is None else None)
        return by_id

    async def refit(
        self, checkpoint: Path | str, version: int, *, mode: PauseMode = "wait"
    ) -> RefitReport:
        """Bring every worker to `version` from a checkpoint directory all of them can read."""
        path = Path(checkpoint).expanduser().resolve()
        check_checkpoint(path)
        async with self._refitting:
            current = self.versions.current
            if current is not None and version <= current:
                raise UsageError(
                    f"Version {version} is not newer than {current}, which the fleet serves.",
                    "Versions only go up; give the next number.",
                )
            return await self._refit(path, version, mode)

    async def _refit(self, path: Path, version: int, mode: PauseMode) -> RefitReport:
        began = time.monotonic()
        workers = await self._usable()
        states = {worker.instance_id: WorkerRefit(worker.instance_id) for worker in workers}
        report = RefitReport(version, workers=list(states.values()))
        self.versions.close()
        pausing = time.monotonic()
        try:
            await self._pause_all(workers, mode, clear_cache=True, states=states)
            self.versions.updates_begin()
            try:
                await asyncio.gather(
                    *(self._update_one(w, path, version, states[w.instance_id]) for w in workers)
                )
            finally:  # also when this call is cancelled: some workers may have moved already
                done = all(state.state == "serving" for state in report.workers)
                serving = {i: s.version for i, s in states.items() if s.version is not None}
                self.versions.note(serving, version if done else None)
                self.versions.tainted = True
        finally:
            self.versions.open()
        report.seconds = time.monotonic() - began
        report.paused_seconds = time.monotonic() - pausing
        if not done:
            raise _refit_error(report)
        return report

    async def _update_one(
        self, worker: Worker, path: Path, version: int, state: WorkerRefit
    ) -> None:
        """Load, flush, verify, resume. On any failure the worker is left paused: what it would
        serve is unknown, and no sample is better than a wrong one."""
        started = time.monotonic()
        try:
            state.state = "updating"
            await self.admin.set_taints(worker, [])  # from here on it serves no known version
            await self.admin.update_from_disk(worker, path, version)
            await self.admin.flush_cache(worker)
            declared = await self.admin.weight_version(worker)
            state.update_seconds = time.monotonic() - started
            if declared != version:
                raise AdminError(f"{worker} declares version {declared} after the update.")
            await self.admin.set_taints(worker, [taint_of(version)])
            state.state = "updated"
            started = time.monotonic()
            await self.admin.resume(worker)
            state.resume_seconds = time.monotonic() - started
            state.state, state.version = "serving", version
        except RollwayError as error:
            state.error = str(error)

    async def _pause_all(
        self,
        workers: list[Worker],
        mode: PauseMode,
        clear_cache: bool,
        states: dict[int, WorkerRefit] | None = None,
    ) -> None:
        async def pause(worker: Worker) -> None:
            started = time.monotonic()
            await self.admin.pause(worker, mode, clear_cache=clear_cache)
            if states is not None:
                state = states[worker.instance_id]
                state.state = "paused"
                state.pause_seconds = time.monotonic() - started

        try:
            await self._all(workers, pause)
        except BaseException:
            # A pause that timed out, or was cancelled here, may still take effect there: all are
            # resumed, which does no harm to one that was not paused.
            await asyncio.shield(
                asyncio.gather(*map(self.admin.resume, workers), return_exceptions=True)
            )
            raise

    async def _usable(self) -> list[Worker]:
        """The workers, all of them answering; a worker in error must not be passed over."""
        workers = await self.workers()
        broken = [worker for worker in workers if worker.error is not None]
        if broken:
            raise AdminError(
                f"{len(broken)} of {len(workers)} workers do not answer: "
                + "; ".join(f"{worker}: {worker.error}" for worker in broken)
                + ".",
                "Wait for them to recover or leave (a dead one is listed for about 10 s).",
            )
        if not workers:
            raise self._no_workers()
        return workers

    def _no_workers(self) -> NoWorkers:
        return NoWorkers(
            f"No RL worker is listed at {self.rl_url}.",
            "Workers need --enable-rl, and the mocker engine has no admin routes.",
        )

    async def _all(
        self, workers: Iterable[Worker], call: Callable[[Worker], Awaitable[Any]]
    ) -> list[Any]:
        """One call on every worker at once, bounded; the first failure is raised at the end."""
        slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)

        async def bounded(worker: Worker) -> Any:
            async with slots:
                return await call(worker)

        results = await asyncio.gather(*map(bounded, workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return list(results)


def _refit_error(report: RefitReport) -> RefitError:
    states = "; ".join(
        f"worker {s.instance_id}: {s.state}" + (f" ({s.error})" if s.error else "")
        for s in report.workers
    )
    return RefitError(
        f"Not every worker is on version {report.version}: {states}.",
        "Workers that are not `serving` stay paused, so that nothing is sampled from them. Refit "
        "again with a good checkpoint, or restart them.",
        report=report,
    )
