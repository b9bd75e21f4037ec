"""The labels of the workers: what each of them declares to serve, to this process and to others.

Refits of this process write `FleetVersions`. Other processes refit the same workers, and only the
labels and the record of claims show that: `read_all` learns versions from the labels, and
`still_serves` decides by them whether an answer is of the version that its ticket names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from rollway.errors import RollwayError
from rollway.fleet.admin import (
    AdminAPI,
    call_all,
    leaving_label,
    unverified_label,
    version_left,
)
from rollway.fleet.workers import Membership, Worker, no_workers_error
from rollway.versions import FleetVersions, Ticket, VersionRecord

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
_SHARE_SECONDS = 0.02
"""Answers that arrive within this time share one question to their worker."""


class Labels:
    """Reads the labels of one fleet's workers, and the claims of all processes."""

    def __init__(
        self,
        admin: AdminAPI,
        versions: FleetVersions,
        membership: Membership,
        record: VersionRecord | None = None,
    ) -> None:
        self._admin = admin
        self._versions = versions
        self._membership = membership
        self._record = record
        self._refreshed_at = float("-inf")
        self._claimed_before: int | None = None
        """The newest claim when this process last began to change weights."""
        self._questions: dict[int, asyncio.Task[int | None]] = {}

    async def read_all(self) -> dict[int, int | None]:
        """Return the label of each worker by its id, and learn the versions that they serve."""
        epoch = self._versions.epoch
        workers = await self._membership.workers(fresh=True)
        if not workers:
            raise no_workers_error(self._membership.source)
        labels = await self.read_from(workers)
        # A refit of this process knows better than labels that were read while it ran.
        if self._versions.epoch == epoch and not self._versions.changing:
            serving = {i: v for i, v in labels.items() if v is not None and v >= 0}
            asleep = [w.instance_id for w in workers if self._admin.sleep_level(w)]
            paused = [w.instance_id for w in workers if self._admin.is_paused(w)]
            self._versions.learn(serving, asleep, paused)
            # Of workers that sleep, or that a refit is about to change: no version goes back.
            for label in labels.values():
                if (version := version_left(label)) is not None:
                    self._versions.note_served(version)
        return labels

    async def refresh(self, *, now: bool) -> None:
        """Read the labels again, at most once a second unless `now`; never raise."""
        if not now and time.monotonic() - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = time.monotonic()
        try:
            await self.read_all()
        except RollwayError as error:
            log.debug("versions cannot be read: %s", error.message)

    async def still_serves(self, ticket: Ticket, instance: int | None) -> bool:
        """Return whether the worker that has just answered still serves the ticket's version; with
        `instance` None, whether all workers do."""
        # `FleetVersions.attributes_to` covers refits by this process, this covers refits by others.
        # Versions only go up, so a worker that served the ticket's version before the request, and
        # whose label is still that version *after* the answer, has served nothing else in between.
        assert ticket.version is not None
        accepted = {ticket.version}
        if ticket.taint is not None:
            if self._record is not None and instance is not None:
                # Every process records its claim before it touches a worker. If the newest claim
                # is not above the ticket's version, nobody has begun, and no question is needed.
                # During a refit of this process the newest claim is its own, so the claim from
                # before counts (the guard keeps other processes out meanwhile).
                is_ours = self._versions.changing > 0
                claimed = self._claimed_before if is_ours else await self._record.newest()
                if claimed is None or claimed <= ticket.version:
                    return True
            # With a taint, only a worker on the version got the request. These labels say that it
            # left service after that version and has not generated since, or has loaded these
            # very weights and not entered service.
            accepted |= {leaving_label(ticket.version), unverified_label(ticket.version)}
        try:
            # Any worker may have given an answer without a name, even one that joined a moment ago
            # and is missing from a recent listing.
            candidates = [
                worker
                for worker in await self._membership.workers(fresh=instance is None)
                if instance in (None, worker.instance_id) and worker.error is None
            ]
            if not all(self._versions.knew(ticket, worker.instance_id) for worker in candidates):
                return False
            labels = [await self._read_label_from_now(worker) for worker in candidates]
        except RollwayError:
            return False  # without an answer nothing is known, and the rollout is repeated
        return bool(labels) and accepted.issuperset(labels)

    async def is_any_behind(self) -> bool:
        """Return whether a worker that answers is not known to serve the current version."""
        served, current = self._versions.by_worker, self._versions.newest
        return any(
            worker.error is None and (current is None or served.get(worker.instance_id) != current)
            for worker in await self._membership.workers(fresh=False)
        )

    def learn_claims(self) -> None:
        """Learn the versions that other processes have claimed, before this one changes weights."""
        if self._record is not None:
            claims = self._record.claims()
            self._claimed_before = max(claims, default=None)
            self._versions.learn_claims(claims)

    async def read_from(self, workers: Sequence[Worker]) -> dict[int, int | None]:
        """Return the labels of these workers by their ids; None for those that do not answer."""
        answering = [worker for worker in workers if worker.error is None]
        results = await call_all(answering, self._read_label)
        labels: dict[int, int | None] = {worker.instance_id: None for worker in workers}
        for worker, label in zip(answering, results, strict=True):
            if isinstance(label, int):
                labels[worker.instance_id] = label
        return labels

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

    async def _read_label(self, worker: Worker) -> int | None:
        label = await self._admin.weight_version(worker)
        if self._admin.enforces_versions(worker):
            self._versions.mark_enforced(worker.instance_id)
        return label
