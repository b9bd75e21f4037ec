"""The workers as one thing: list, pause, refit, resume all of them, and know what each serves.

`refit` is the heart; its protocol is in rollway.fleet.refit. `watch` keeps the fleet whole between
refits: a worker that joins, also one that was restarted, starts from the base checkpoint, and is
brought to the current version before it gets any traffic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, get_args

from rollway.config import AdminTimeouts
from rollway.errors import AdminError, NoWorkers, RollwayError, UsageError
from rollway.fleet.adapters import Adapters
from rollway.fleet.admin import (
    AdminAPI,
    DynamoAdmin,
    PauseMode,
    leaving,
    not_answering,
    on_all,
    unproven,
)
from rollway.fleet.canary import Agreement, Answer, Ask
from rollway.fleet.discovery import RlListing, Source, Worker
from rollway.fleet.membership import POLL_SECONDS, Membership
from rollway.fleet.moves import (
    ROUTING_SECONDS,
    Observer,
    Replace,
    Supervised,
    is_dead,
    route,
    to_the_end,
)
from rollway.fleet.refit import Refit
from rollway.fleet.report import RefitMode, RefitReport, WorkerRefit
from rollway.fleet.updates import FromDisk, Offered, Update, Weights
from rollway.http import Http
from rollway.orders import stack_secret
from rollway.versions import Ticket, VersionBook, taint_of
from rollway.weights.checkpoint import TensorHeader, check_checkpoint, read_headers
from rollway.weights.offer import Offer

__all__ = ["Fleet", "RefitReport", "WorkerRefit"]

log = logging.getLogger(__name__)

Guard = Callable[[], AbstractAsyncContextManager[Any]]
"""Keeps two refits of one fleet apart, also those of two processes."""

_REFRESH_SECONDS = 1.0
_CONFIRM_SECONDS = 0.02
"""Answers that come within this time share one question to their worker."""


class Shelf(Protocol):
    """Where other processes find how the current version was made."""

    def put(self, version: int, path: Path) -> None: ...

    def get(self) -> tuple[int, Path] | None: ...

    def claim(self, version: int, identity: str) -> None:
        """Record which weights a version names."""
        ...

    def claims(self) -> dict[int, str]: ...

    def newest(self) -> int | None:
        """The newest version that anybody has claimed; cheap."""
        ...


class Fleet:
    """All RL workers of one model."""

    def __init__(
        self,
        http: Http,
        source: Source | str,
        *,
        model: str | None = None,
        timeouts: AdminTimeouts | None = None,
        admin: AdminAPI | None = None,
        roots: Sequence[Path] = (),
        reference: Path | None = None,
        canary: Ask | None = None,
        replace: Replace | None = None,
        guard: Guard = nullcontext,
        supervised: Supervised = lambda _: False,
        shelf: Shelf | None = None,
        secret: str | None = None,
    ) -> None:
        self.model = model
        self.versions = VersionBook()
        self._secret = stack_secret() if secret is None else secret
        self.admin: AdminAPI = admin or DynamoAdmin(http, timeouts, self._secret)
        self.membership = Membership(
            http, RlListing(source) if isinstance(source, str) else source, model
        )
        self.membership.on_leave(self._left)
        self.observer: Observer | None = None
        """Told of each step of a refit, with its worker, before it is taken."""
        self._roots = roots
        self._reference = reference
        self._canary = canary
        self._replace = replace
        self._guard = guard
        self._supervised = supervised
        self._shelf = shelf
        self.adapters = Adapters(self.admin, self._secret)
        self._refitting = asyncio.Lock()
        self._recipe: tuple[int, Update] | None = None
        self._doubtful: set[int] = set()
        self._refreshed_at = float("-inf")
        self._claimed_before: int | None = None
        """What was claimed when this process last began to change weights."""
        self._asking: dict[int, asyncio.Task[int | None]] = {}

    def supervised_by(self, replace: Replace) -> None:
        """Say that every worker has a supervisor, wherever it is, which `replace` reaches."""
        self._replace, self._supervised = replace, lambda _: True

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        """Who is there, those in error included; `fresh=False` may be a moment old."""
        return await self.membership.workers(fresh=fresh)

    async def pause(self, mode: PauseMode = "wait", *, clear_cache: bool = True) -> None:
        """Pause every worker and take it out of the routing, where it would only collect requests
        that hang; if one fails the others are resumed again."""
        async with self._refitting, self._guard():
            workers = await self._usable()

            async def pause(worker: Worker) -> None:
                await route(self.admin, self.versions, worker, [])
                await self.admin.pause(worker, mode, clear_cache=clear_cache)
                if self.versions.tainted and mode != "keep":
                    # What a router sent before it heard of it would hang until the resume.
                    await asyncio.sleep(ROUTING_SECONDS)
                    await self.admin.pause(worker, "abort", clear_cache=clear_cache)

            async def undo() -> None:
                await on_all(workers, self._back)
                self.versions.open()

            self.versions.close()
            try:
                await self._all(workers, pause)
            except BaseException:
                await to_the_end(undo())
                raise

    async def resume(self) -> None:
        """Resume every worker whose weights are known; one that a refit left in doubt stays
        paused, and is named in the error, as is one that does not answer."""
        async with self._refitting, self._guard():
            workers = await self.workers()
            there = [worker for worker in workers if worker.error is None]
            declared = await self._declared(there)
            doubtful = [w for w in there if (declared[w.instance_id] or 0) < 0]
            try:
                await self._all([w for w in there if w not in doubtful], self._back)
            finally:
                self.versions.open()
            silent = [w for w in workers if w.error is not None and not await is_dead(w, workers)]
            if silent:
                raise not_answering(silent, len(workers))
            if doubtful:
                raise AdminError(
                    f"{len(doubtful)} of {len(workers)} workers were left between two versions and "
                    f"stay paused: {'; '.join(map(str, doubtful))}.",
                    "Refit them, or restart them.",
                )

    async def flush_cache(self) -> None:
        await self._all(await self._usable(), self.admin.flush_cache)

    async def read_versions(self) -> dict[int, int | None]:
        """The version each worker declares, by instance id; None where it declares none or does not
        answer, `IN_DOUBT` where a change of its weights is under way or has failed. Also brings
        the book up to date, unless this process is changing weights right now."""
        epoch = self.versions.epoch
        workers = await self.workers()
        if not workers:
            raise self._no_workers()
        by_id = await self._declared(workers)
        if self.versions.epoch == epoch and not self.versions.changing:
            self.versions.learn({i: v for i, v in by_id.items() if v is not None and v >= 0})
        return by_id

    async def refresh(self, *, now: bool = False) -> None:
        """Look again, at most once a second unless told to, and never raising; for a request that
        found nobody: another process may have refitted, or a worker may have caught up."""
        if not now and time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        try:
            await self.read_versions()
        except RollwayError as error:
            log.debug("versions cannot be read: %s", error.message)

    async def confirms(self, ticket: Ticket, instance: int | None) -> bool:
        """Whether what a worker has just answered is of its ticket's version, as far as other
        processes go. Since versions only go up, one that still declares it has served nothing
        else in between."""
        assert ticket.version is not None
        fine = {ticket.version}
        if ticket.taint is not None:
            if self._shelf is not None:
                # What this process is changing itself, its own book knows.
                mine = self.versions.changing > 0
                claimed = self._claimed_before if mine else self._shelf.newest()
                if claimed is None or claimed <= ticket.version:
                    return True  # nobody else has begun to change anything
            # Out of the routing and not generating again yet, or with these very weights.
            fine |= {leaving(ticket.version), unproven(ticket.version)}
        # Anybody may have answered where no router was told otherwise, also who has just joined.
        anybody = instance is None and ticket.taint is None
        try:
            asked = [
                worker
                for worker in await self.workers(fresh=anybody)
                if instance in (None, worker.instance_id) and worker.error is None
            ]
            told = [await self._label_from_now(worker) for worker in asked]
        except RollwayError:
            return False
        return bool(told) and fine.issuperset(told)

    async def _label_from_now(self, worker: Worker) -> int | None:
        """What a worker declares, asked after this call; callers at the same time share it."""

        async def ask() -> int | None:
            await asyncio.sleep(_CONFIRM_SECONDS)
            del self._asking[worker.instance_id]
            return await self.admin.weight_version(worker)

        task = self._asking.get(worker.instance_id)
        if task is None:
            task = self._asking[worker.instance_id] = asyncio.create_task(ask())
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)

    async def refit(
        self,
        version: int,
        update: Weights,
        *,
        mode: RefitMode = "pause-all",
        share: float = 0.5,
        expected: Answer | None = None,
        allow_cast: bool = False,
    ) -> RefitReport:
        """Bring every worker to `version`; `update` is what a publisher offered, a checkpoint
        directory that all of them can read, or another `Update`. A second refit waits for the
        first."""
        if mode not in get_args(RefitMode) or not 0.0 < share <= 1.0:
            raise UsageError(
                f"A refit cannot be made with mode {mode!r} and share {share!r}.",
                f"Modes are {', '.join(get_args(RefitMode))}; a share is above 0 and at most 1.",
            )
        if isinstance(update, Offer) and update.transport == "files":
            update = Path(update.where["path"])  # any worker that sees the directory can take it
        if isinstance(update, Offer):
            update = Offered(update, self._secret, allow_cast)
        if isinstance(update, str | Path):
            update = FromDisk(Path(update), self._roots, await self._served(), allow_cast)
        if isinstance(update, FromDisk) and not update.secret:
            update.secret = self._secret
        async with self._refitting, self._guard():
            refit = self._new_refit(version, update, expected)
            refit.mode, refit.share = mode, share
            if self._shelf is not None:
                self._claimed_before = self._shelf.newest()
                self.versions.claimed(self._shelf.claims())
                refit.record = self._shelf.claim
            try:
                return await refit.run()
            finally:
                if refit.claimed and self.versions.current == version:
                    self._keep_recipe(version, update)
                self._note_doubts(refit)

    async def load_adapter(
        self, name: str, version: int, offer: Offer, config: Mapping[str, Any], *, keep: int = 2
    ) -> str:
        """Bring a LoRA adapter that a publisher offered to every worker, beside the versions of it
        that are served; returns the name that requests for it have, `name@version`. The newest
        `keep` versions stay loaded."""
        if offer.transport == "files":
            where = Path(offer.where["path"])
            await asyncio.to_thread(check_checkpoint, where, roots=self._roots, whole=False)
        async with self._refitting, self._guard():
            workers = await self._usable()
            return await self.adapters.load(workers, name, version, offer, config, keep)

    async def unload_adapter(self, name: str) -> None:
        """Unload all versions of an adapter, or one, `name@version`; their requests end first."""
        async with self._refitting, self._guard():
            await self.adapters.unload(await self._usable(), name)

    async def admit(self) -> RefitReport | None:
        """Bring workers that are not on the current version to it, the others going on; None when
        there is nothing to do, or nothing to do it with."""
        async with self._refitting, self._guard():
            if self._shelf is not None:
                self._claimed_before = self._shelf.newest()
                self.versions.claimed(self._shelf.claims())
            await self.read_versions()
            listed = await self.workers(fresh=False)
            recipe = self._current_recipe()
            if recipe is None or not recipe[1].repeatable:
                return None
            version, update = recipe
            if self.versions.current != version or all(
                self.versions.by_worker.get(w.instance_id) == version for w in listed if not w.error
            ):
                return None
            refit = self._new_refit(version, update, None)
            try:
                return await refit.catch_up()
            finally:
                self._note_doubts(refit)

    async def watch(self, seconds: float = POLL_SECONDS) -> None:
        """Until cancelled: notice who joins and leaves, and admit those who join."""

        while True:
            if await self.membership.poll() and await self._somebody_is_behind():
                try:
                    await self.admit()
                except RollwayError as error:
                    log.warning("a worker could not be brought up to date: %s", error)
                except Exception:
                    log.exception("a worker could not be brought up to date")
            try:
                await self._admit_to_adapters()
            except RollwayError as error:
                log.warning("a worker could not be given its adapters: %s", error)
            await asyncio.sleep(seconds)

    async def _admit_to_adapters(self) -> None:
        """Give workers that have joined, and are up to date, the adapters that the others have."""
        if not self.adapters.loaded:
            return
        listed = await self.workers(fresh=False)
        if self.adapters.missing(listed):
            async with self._refitting, self._guard():
                current, had = self.versions.current, self.versions.by_worker
                there = [w for w in listed if had.get(w.instance_id) == current]
                await self.adapters.catch_up(there)

    async def _somebody_is_behind(self) -> bool:
        known, current = self.versions.by_worker, self.versions.current
        return any(
            worker.error is None and (current is None or known.get(worker.instance_id) != current)
            for worker in await self.workers(fresh=False)
        )

    async def _back(self, worker: Worker) -> None:
        """Into service as what it is."""
        async with self.admin.held() as line:
            version = await line.weight_version(worker)
            if version is not None and version < 0:
                return  # nobody knows what it would serve
            await line.resume(worker)
            await route(line, self.versions, worker, [] if version is None else [taint_of(version)])

    def _new_refit(self, version: int, update: Update, expected: Answer | None) -> Refit:
        agreement = None
        if self._canary is not None:
            agreement = Agreement(self._canary, expected)
        return Refit(
            self.admin,
            self.membership,
            self.versions,
            update,
            version,
            agreement=agreement,
            replace=self._replace,
            observer=self.observer,
            skip=frozenset(self._doubtful),
            supervised=self._supervised,
        )

    def _keep_recipe(self, version: int, update: Update) -> None:
        self._recipe = (version, update)
        if self._shelf is not None and isinstance(update, FromDisk):
            self._shelf.put(version, update.path)

    def _current_recipe(self) -> tuple[int, Update] | None:
        """How to make the current version: of this process, or left by the one that made it."""
        current = self.versions.current
        if self._recipe is not None and self._recipe[0] == current:
            return self._recipe
        found = self._shelf.get() if self._shelf is not None else None
        if found is None or found[0] != current:
            return None
        return current, FromDisk(found[1], self._roots, secret=self._secret)

    def _note_doubts(self, refit: Refit) -> None:
        doubtful = {i for i, state in refit.states.items() if state.state == "in doubt"}
        self._doubtful = (self._doubtful - refit.states.keys()) | doubtful

    async def _served(self) -> dict[str, TensorHeader] | None:
        """Names, shapes and dtypes of what is served, if this process can tell."""
        if self._reference is not None and self._reference.is_dir():
            return await asyncio.to_thread(read_headers, self._reference)
        if self._recipe is not None and isinstance(self._recipe[1], FromDisk):
            checkpoint = self._recipe[1].checkpoint
            return None if checkpoint is None else checkpoint.tensors
        return None

    async def _left(self, worker: Worker) -> None:
        self.versions.gone(worker.instance_id)

    async def _declared(self, workers: Sequence[Worker]) -> dict[int, int | None]:
        answering = [worker for worker in workers if worker.error is None]
        told = await on_all(answering, self.admin.weight_version)
        by_id: dict[int, int | None] = {worker.instance_id: None for worker in workers}
        for worker, version in zip(answering, told, strict=True):
            if isinstance(version, int):
                by_id[worker.instance_id] = version
        return by_id

    async def _usable(self) -> list[Worker]:
        """The workers, all of them answering; a worker in error must not be passed over."""
        workers = await self.workers()
        silent = [worker for worker in workers if worker.error is not None]
        if silent:
            raise not_answering(silent, len(workers))
        if not workers:
            raise self._no_workers()
        return workers

    def _no_workers(self) -> NoWorkers:
        return NoWorkers(
            f"No RL worker is listed at {self.membership.source}.",
            "Workers need --enable-rl, and the mocker engine has no admin routes.",
        )

    async def _all(self, workers: Sequence[Worker], call: Callable[[Worker], Any]) -> None:
        """One call on every worker at once; the first failure is raised at the end."""
        for result in await on_all(workers, call):
            if isinstance(result, BaseException):
                raise result
