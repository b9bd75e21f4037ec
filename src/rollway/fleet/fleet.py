"""All workers of a model as one object: list, pause, refit and resume them, know what each serves.

`refit` runs the protocol of rollway.fleet.refit. `watch` maintains the fleet between refits: a
worker that joins or restarts has the base checkpoint, and is moved to the current version before it
gets any requests.
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
from rollway.errors import AdminError, RollwayError, UsageError
from rollway.fleet.adapters import Adapters
from rollway.fleet.admin import (
    AdminAPI,
    PauseMode,
    call_all,
    leaving_label,
    no_workers_error,
    silent_workers_error,
    unverified_label,
)
from rollway.fleet.canary import Answer, Ask, CanaryCheck
from rollway.fleet.discovery import RlListing, Source, Worker, is_dead
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.membership import POLL_SECONDS, Membership
from rollway.fleet.refit import Refit, Supervised
from rollway.fleet.report import RefitMode, RefitReport, WorkerReport
from rollway.fleet.stages import split_in_stages
from rollway.fleet.updates import FromDisk, Offered, Update, Weights
from rollway.fleet.worker_refit import (
    ROUTING_SECONDS,
    Observer,
    RefitPlan,
    Replace,
    run_to_the_end,
    set_taints,
)
from rollway.http import Http
from rollway.orders import read_stack_secret
from rollway.versions import FleetVersions, Ticket, taint_of
from rollway.weights.checkpoint import TensorHeader, check_checkpoint, read_headers
from rollway.weights.offer import Offer

__all__ = ["Fleet", "RefitReport", "WorkerReport"]

log = logging.getLogger(__name__)

Guard = Callable[[], AbstractAsyncContextManager[Any]]
"""Returns a lock that keeps refits of one fleet apart, also those of several processes."""

_REFRESH_SECONDS = 1.0
_SHARE_SECONDS = 0.02
"""Answers that arrive within this time share one question to their worker."""


class VersionRecord(Protocol):
    """A record, shared with other processes, of the versions and of how to load the current one."""

    def put(self, version: int, path: Path) -> None: ...

    def get(self) -> tuple[int, Path] | None: ...

    def claim(self, version: int, identity: str) -> None:
        """Record which weights a version names."""
        ...

    def claims(self) -> dict[int, str]: ...

    def newest(self) -> int | None:
        """Return the newest claimed version; cheap, because it is called for every answer."""
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
        record: VersionRecord | None = None,
        secret: str | None = None,
    ) -> None:
        self.model = model
        self.versions = FleetVersions()
        self._secret = read_stack_secret() if secret is None else secret
        self.admin: AdminAPI = admin or DynamoAdmin(http, timeouts, self._secret)
        self.membership = Membership(
            http,
            RlListing(source) if isinstance(source, str) else source,
            model,
            note_roles=self.versions.note_roles,
        )
        self.membership.on_leave(self._forget)
        self.observer: Observer | None = None
        """Called with each step of a refit and its worker, before the step."""
        self.adapters = Adapters(self.admin, self._secret)
        self._roots = roots
        self._reference = reference
        self._canary = canary
        self._replace = replace
        self._guard = guard
        self._supervised = supervised
        self._record = record
        self._lock = asyncio.Lock()
        self._recipe: tuple[int, Update] | None = None
        """The last version that this process refitted to, and its update."""
        self._doubtful: set[int] = set()
        self._refreshed_at = float("-inf")
        self._claimed_before: int | None = None
        """The newest claim when this process last began to change weights."""
        self._questions: dict[int, asyncio.Task[int | None]] = {}

    def set_supervisor(self, replace: Replace) -> None:
        """Declare that every worker has a supervisor, which `replace` reaches."""
        self._replace, self._supervised = replace, lambda _: True

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        """Return the workers that are listed, also those in error.

        Args:
            fresh: ask the frontend now; False may return a list that is a moment old.

        Returns:
            The workers; `error` says why one of them does not answer.

        Raises:
            Unreachable: the RL worker listing does not answer.
        """
        return await self.membership.workers(fresh=fresh)

    async def pause(self, mode: PauseMode = "wait", *, clear_cache: bool = True) -> None:
        """Pause every worker and remove it from routing, so that no request waits at a paused
        worker.

        If one worker fails, the others are resumed.

        Args:
            mode: "wait" lets running requests finish, "abort" ends them, "keep" freezes them.
            clear_cache: clear the prefix caches.

        Raises:
            AdminError: a worker refused, or does not answer.
            NoWorkers: no worker is listed.
        """
        async with self._lock, self._guard():
            workers = await self._list_usable()

            async def pause(worker: Worker) -> None:
                await set_taints(self.admin, self.versions, worker, [])
                await self.admin.pause(worker, mode, clear_cache=clear_cache)
                if self.versions.tainted and mode != "keep":
                    # Requests that a router sent meanwhile would hang until the resume.
                    await asyncio.sleep(ROUTING_SECONDS)
                    await self.admin.pause(worker, "abort", clear_cache=clear_cache)

            async def undo() -> None:
                await call_all(workers, self._put_back)
                self.versions.open()

            self.versions.close()
            try:
                for stage in split_in_stages(workers, mode, lambda worker: worker.role):
                    await self._call_all(stage, pause)
            except BaseException:
                await run_to_the_end(undo())
                raise

    async def resume(self) -> None:
        """Resume every worker whose weights are known.

        Raises:
            AdminError: a worker does not answer, or a refit left it between two versions; it
                stays paused.
        """
        async with self._lock, self._guard():
            workers = await self.workers()
            answering = [worker for worker in workers if worker.error is None]
            labels = await self._read_labels(answering)
            doubtful = [w for w in answering if (labels[w.instance_id] or 0) < 0]
            try:
                await self._call_all([w for w in answering if w not in doubtful], self._put_back)
            finally:
                self.versions.open()
            silent = [w for w in workers if w.error is not None and not await is_dead(w, workers)]
            if silent:
                raise silent_workers_error(silent, len(workers))
            if doubtful:
                raise AdminError(
                    f"{len(doubtful)} of {len(workers)} workers were left between two versions and "
                    f"stay paused: {'; '.join(map(str, doubtful))}.",
                    "Refit them, or restart them.",
                )

    async def flush_cache(self) -> None:
        """Clear the prefix cache of every worker.

        Raises:
            AdminError: a worker refused, or does not answer.
            NoWorkers: no worker is listed.
        """
        await self._call_all(await self._list_usable(), self.admin.flush_cache)

    async def read_versions(self) -> dict[int, int | None]:
        """Return the version that each worker declares, by instance id.

        Returns:
            The version; None where a worker declares none or does not answer, `IN_DOUBT` (a
                negative
            number) while its weights change or after that failed.

        Raises:
            NoWorkers: no worker is listed.
            Unreachable: the RL worker listing does not answer.
        """
        epoch = self.versions.epoch
        workers = await self.workers()
        if not workers:
            raise no_workers_error(self.membership.source)
        labels = await self._read_labels(workers)
        # A refit of this process knows better than labels that were read while it ran.
        if self.versions.epoch == epoch and not self.versions.changing:
            self.versions.learn({i: v for i, v in labels.items() if v is not None and v >= 0})
        return labels

    async def refresh(self, *, now: bool = False) -> None:
        """Read the versions again, at most once a second unless `now`; never raise."""
        if not now and time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        try:
            await self.read_versions()
        except RollwayError as error:
            log.debug("versions cannot be read: %s", error.message)

    async def still_serves(self, ticket: Ticket, instance: int | None) -> bool:
        """Return whether the worker that has just answered still serves the ticket's version; with
        `instance` None, whether all workers do."""
        # `FleetVersions.attributes_to` covers refits by this process, this covers refits by others.
        # Versions only go up, so a worker whose label is still the ticket's version *after* the
        # answer has served nothing else in between.
        assert ticket.version is not None
        accepted = {ticket.version}
        if ticket.taint is not None:
            if self._record is not None:
                # Every process records its claim before it touches a worker. If the newest claim
                # is not above the ticket's version, nobody has begun, and no question is needed.
                # During a refit of this process the newest claim is its own, so the claim from
                # before counts (the guard keeps other processes out meanwhile).
                is_ours = self.versions.changing > 0
                claimed = self._claimed_before if is_ours else self._record.newest()
                if claimed is None or claimed <= ticket.version:
                    return True
            # With a taint, only a worker on the version got the request. These labels say that it
            # left service after that version and has not generated since, or has loaded these
            # very weights and not entered service.
            accepted |= {leaving_label(ticket.version), unverified_label(ticket.version)}
        # Without taints any worker may have answered, even one that joined a moment ago and is
        # missing from a recent listing.
        may_be_new = instance is None and ticket.taint is None
        try:
            candidates = [
                worker
                for worker in await self.workers(fresh=may_be_new)
                if instance in (None, worker.instance_id) and worker.error is None
            ]
            labels = [await self._read_label_from_now(worker) for worker in candidates]
        except RollwayError:
            return False  # without an answer nothing is known, and the rollout is repeated
        return bool(labels) and accepted.issuperset(labels)

    async def _read_label_from_now(self, worker: Worker) -> int | None:
        """Return a worker's label, read after this call began. Calls at the same time share it."""

        async def ask() -> int | None:
            await asyncio.sleep(_SHARE_SECONDS)
            # Before the question: a caller that comes later must not get an older label.
            del self._questions[worker.instance_id]
            return await self._read_label(worker)

        task = self._questions.get(worker.instance_id)
        if task is None:
            task = self._questions[worker.instance_id] = asyncio.create_task(ask())
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
        """Load new weights into every worker, and return when all of them serve the version.

        A second refit waits for the first. `Stack.refit` also completes transfers in which the
        publisher takes part; prefer it.

        Args:
            version: the number of the version, higher than all before.
            update: an offer of a publisher, or a checkpoint directory that all workers can read.
            mode: "pause-all", "rolling" or "in-flight", see `Stack.refit`.
            share: with "rolling", the share of the workers that is updated at a time.
            expected: what the canary must answer afterwards; by default the workers must agree.
            allow_cast: accept another dtype than the served one.

        Returns:
            The state and the times of every worker.

        Raises:
            RefitError: not every worker serves the version; its `report` says which do.
            UsageError: a wrong argument, or weights that do not fit the model.
            WeightsError: published weights that are damaged, incomplete or gone.
        """
        if mode not in get_args(RefitMode) or not 0.0 < share <= 1.0:
            raise UsageError(
                f"A refit is not possible with mode {mode!r} and share {share!r}.",
                f"Modes are {', '.join(get_args(RefitMode))}; a share is above 0 and at most 1.",
            )
        chosen = await self._make_update(update, allow_cast)
        async with self._lock, self._guard():
            refit = self._make_refit(version, chosen, expected)
            refit.mode, refit.share = mode, share
            self._learn_claims()
            try:
                return await refit.run()
            finally:
                if refit.is_claimed and self.versions.newest == version:
                    self._recipe = (version, chosen)
                    if self._record is not None and isinstance(chosen, FromDisk):
                        self._record.put(version, chosen.path)
                self._note_doubts(refit)

    async def load_adapter(
        self, name: str, version: int, offer: Offer, config: Mapping[str, Any], *, keep: int = 2
    ) -> str:
        """Load a LoRA adapter into every worker, beside its older versions.

        Args:
            name: the name of the adapter.
            version: the number of its version, higher than all before.
            offer: what a publisher returned for the adapter's tensors.
            config: PEFT's config of the adapter (adapter_config.json).
            keep: how many versions stay loaded.

        Returns:
            The name that requests use, `name@version`.

        Raises:
            AdminError: a worker refused, or does not answer.
            WeightsError: published weights that are damaged, incomplete or gone.
        """
        if offer.transport == "files":
            path = Path(offer.where["path"])
            await asyncio.to_thread(check_checkpoint, path, roots=self._roots, whole=False)
        async with self._lock, self._guard():
            workers = await self._list_usable()
            return await self.adapters.load(workers, name, version, offer, config, keep)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests end first.

        Args:
            name: `name` for all versions, `name@version` for one.

        Raises:
            AdminError: a worker refused, or does not answer.
        """
        async with self._lock, self._guard():
            await self.adapters.unload(await self._list_usable(), name)

    async def admit(self) -> RefitReport | None:
        """Bring workers that joined or restarted to the current version, while the others serve.

        Returns:
            The report; None when no worker is behind, or the current weights cannot be published
                again.

        Raises:
            RefitError: a worker could not be brought to the version.
        """
        async with self._lock, self._guard():
            self._learn_claims()
            await self.read_versions()
            listed = await self.workers(fresh=False)
            recipe = self._find_recipe()
            if recipe is None or not recipe[1].repeatable:
                return None
            version, update = recipe
            if self.versions.newest != version or all(
                self.versions.by_worker.get(w.instance_id) == version for w in listed if not w.error
            ):
                return None
            refit = self._make_refit(version, update, None)
            try:
                return await refit.catch_up()
            finally:
                self._note_doubts(refit)

    async def watch(self, seconds: float = POLL_SECONDS) -> None:
        """Notice joins and leaves, and admit workers that join, until cancelled."""
        while True:
            if await self.membership.poll() and await self._is_any_behind():
                try:
                    await self.admit()
                except RollwayError as error:
                    log.warning("a worker could not be moved to the current version: %s", error)
                except Exception:
                    log.exception("a worker could not be moved to the current version")
            try:
                await self._admit_to_adapters()
            except RollwayError as error:
                log.warning("a worker could not load the adapters: %s", error)
            await asyncio.sleep(seconds)

    async def _admit_to_adapters(self) -> None:
        """Load the adapters on workers that have joined and are on the current version."""
        if not self.adapters.loaded:
            return
        listed = await self.workers(fresh=False)
        if self.adapters.missing(listed):
            async with self._lock, self._guard():
                current, served = self.versions.newest, self.versions.by_worker
                ready = [w for w in listed if served.get(w.instance_id) == current]
                await self.adapters.catch_up(ready)

    async def _is_any_behind(self) -> bool:
        served, current = self.versions.by_worker, self.versions.newest
        return any(
            worker.error is None and (current is None or served.get(worker.instance_id) != current)
            for worker in await self.workers(fresh=False)
        )

    async def _put_back(self, worker: Worker) -> None:
        """Resume a worker with its own version, unless it is in doubt."""
        async with self.admin.pinned() as connection:
            version = await connection.weight_version(worker)
            if version is None or version >= 0:
                await connection.resume(worker)
                taints = [] if version is None else [taint_of(version)]
                await set_taints(connection, self.versions, worker, taints)

    async def _make_update(self, weights: Weights, allow_cast: bool) -> Update:
        if isinstance(weights, Offer) and weights.transport == "files":
            weights = Path(weights.where["path"])  # workers without the extension can load it too
        if isinstance(weights, Offer):
            return Offered(weights, self._secret, allow_cast)
        if isinstance(weights, str | Path):
            served = await self._read_served_headers()
            return FromDisk(Path(weights), self._roots, served, allow_cast, secret=self._secret)
        if isinstance(weights, FromDisk) and not weights.secret:
            weights.secret = self._secret
        return weights

    def _make_refit(self, version: int, update: Update, expected: Answer | None) -> Refit:
        plan = RefitPlan(
            self.admin,
            self.versions,
            update,
            version,
            canaries=None if self._canary is None else CanaryCheck(self._canary, expected),
            replace=self._replace,
            observer=self.observer,
        )
        return Refit(
            plan,
            self.membership,
            supervised=self._supervised,
            skip=frozenset(self._doubtful),
            record=None if self._record is None else self._record.claim,
        )

    def _learn_claims(self) -> None:
        if self._record is not None:
            self._claimed_before = self._record.newest()
            self.versions.learn_claims(self._record.claims())

    def _find_recipe(self) -> tuple[int, Update] | None:
        """Return the newest version and its update, from this process or from the record."""
        current = self.versions.newest
        if self._recipe is not None and self._recipe[0] == current:
            return self._recipe
        recorded = self._record.get() if self._record is not None else None
        if recorded is None or recorded[0] != current:
            return None
        return current, FromDisk(recorded[1], self._roots, secret=self._secret)

    def _note_doubts(self, refit: Refit) -> None:
        for instance, worker in refit.workers.items():
            if worker.report.state == "in doubt":
                self._doubtful.add(instance)
            elif worker.report.state != "untouched":
                self._doubtful.discard(instance)

    async def _read_served_headers(self) -> dict[str, TensorHeader] | None:
        """Return the tensor headers of the served model; None if this process cannot know them."""
        if self._reference is not None and self._reference.is_dir():
            return await asyncio.to_thread(read_headers, self._reference)
        if self._recipe is not None and isinstance(self._recipe[1], FromDisk):
            checkpoint = self._recipe[1].checkpoint
            return None if checkpoint is None else checkpoint.tensors
        return None

    async def _forget(self, worker: Worker) -> None:
        self.versions.forget(worker.instance_id)

    async def _read_labels(self, workers: Sequence[Worker]) -> dict[int, int | None]:
        answering = [worker for worker in workers if worker.error is None]
        results = await call_all(answering, self._read_label)
        labels: dict[int, int | None] = {worker.instance_id: None for worker in workers}
        for worker, label in zip(answering, results, strict=True):
            if isinstance(label, int):
                labels[worker.instance_id] = label
        return labels

    async def _read_label(self, worker: Worker) -> int | None:
        label = await self.admin.weight_version(worker)
        if self.admin.enforces_versions(worker):
            self.versions.mark_enforced(worker.instance_id)
        return label

    async def _list_usable(self) -> list[Worker]:
        """Return all workers; raise if any does not answer."""
        workers = await self.workers()
        silent = [worker for worker in workers if worker.error is not None]
        if silent:
            raise silent_workers_error(silent, len(workers))
        if not workers:
            raise no_workers_error(self.membership.source)
        return workers

    async def _call_all(self, workers: Sequence[Worker], call: Callable[[Worker], Any]) -> None:
        """Make one call on every worker at once, and raise the first failure at the end."""
        for result in await call_all(workers, call):
            if isinstance(result, BaseException):
                raise result
