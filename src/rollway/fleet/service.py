"""One worker in and out of service: its label, its taints and the process at its address.

    in service ──── label: its version                taint: of its version
        │ leave
        ▼
    leaving ─────── label: negative, `leaving_label`  no taints: routers send it nothing
        │                                             restore: back to the version before
        ▼
    out of service  label: negative                   no taints, paused

Other processes read the state of a worker from its label: a worker is labelled with a version only
while it serves that version. All calls between the pause and the resume go over one pinned
connection: they reach one process, never its successor at the same address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rollway.errors import AdminError, RequestFailed
from rollway.fleet.admin import (
    IN_DOUBT,
    AdminAPI,
    AnotherProcess,
    PauseMode,
    leaving_label,
    unverified_label,
)
from rollway.fleet.workers import Worker, is_dead
from rollway.versions import FleetVersions, taint_of

ROUTING_SECONDS = 0.05
"""A router may still send requests that it placed before it received new taints (10 to 30 ms
measured). `FleetVersions.attributes_to` rejects the answers to requests that arrive even later."""


class Service:
    """The service of one worker."""

    def __init__(self, admin: AdminAPI, versions: FleetVersions, worker: Worker) -> None:
        self.admin = admin
        self.worker = worker
        self.label: int | None = None
        """The label that this process last read or set. If the worker shows a different one,
        another process has its address."""
        self._versions = versions
        self._label_before: int | None = None
        self._connection: AdminAPI | None = None
        self._untainted_at = 0.0

    @property
    def pinned(self) -> AdminAPI:
        """The connection over which the worker left service."""
        assert self._connection is not None
        return self._connection

    async def leave(self, connections: AsyncExitStack) -> None:
        """Connect to the worker, label it as leaving and take it out of the routing."""
        connection = await connections.enter_async_context(self.admin.pin())
        await self.check_process(connection)
        self._connection = connection
        if self.label is not None and self.label >= 0:
            await self.mark_leaving()
        await self.set_taints(connection, [])

    async def mark_leaving(self) -> None:
        """Set a negative label: if this process dies now, others see that no version is served."""
        self._label_before = self.label
        label = IN_DOUBT if self.label is None else leaving_label(self.label)
        await self.declare(self.pinned, label)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Take the worker out of the routing and pause it. It keeps its label."""
        await self.set_taints(self.admin, [])
        await self.admin.pause(self.worker, mode, clear_cache=clear_cache)
        if self._versions.tainted and mode != "keep":
            # Requests that a router sent meanwhile would hang until the resume.
            await asyncio.sleep(ROUTING_SECONDS)
            await self.admin.pause(self.worker, "abort", clear_cache=clear_cache)

    async def put_back(self) -> None:
        """Resume the worker with the version that its label declares, unless it is in doubt."""
        async with self.admin.pin() as connection:
            await self._resume(connection, await connection.weight_version(self.worker))

    async def restore(self) -> None:
        """Resume the worker with the version that it left, unless it was in doubt."""
        # A new connection: the failure may have broken the pinned one.
        async with self.admin.pin() as connection:
            await self.check_process(connection)
            version = self.label if self._label_before is None else self._label_before
            await self._resume(connection, version)
            if version is not None and version >= 0:
                await self.declare(connection, version)

    async def _resume(self, connection: AdminAPI, version: int | None) -> None:
        # A worker in doubt since an earlier refit is never resumed.
        if version is None or version >= 0:
            await connection.resume(self.worker)
            await self.set_taints(connection, [] if version is None else [taint_of(version)])

    async def ensure(self, version: int) -> None:
        """Route to a worker that is labelled with the version, and resume it."""
        async with self.admin.pin() as connection:
            await self.check_process(connection)
            await self.set_taints(connection, [taint_of(version)])
            await connection.resume(self.worker)

    async def abort_late_requests(self) -> None:
        """Abort requests that a router sent before it knew that the worker left."""
        since = time.monotonic() - self._untainted_at
        if since < ROUTING_SECONDS:
            await asyncio.sleep(ROUTING_SECONDS - since)
        await self.pinned.pause(self.worker, "abort")

    async def deny(self, version: int) -> bool:
        """Pause the worker and declare that it serves no version, not even `version`, whatever
        state it is in. Return False if another process has its address."""
        async with self.admin.pin() as connection:
            label = await connection.weight_version(self.worker)
            has_version = label is None or label >= 0
            if has_version and label not in (version, self.label):
                return False
            await self.set_taints(connection, [])
            if has_version:
                # Not `leaving_label`, which promises that nothing was generated since.
                doubt = IN_DOUBT if label is None else unverified_label(version)
                await connection.declare_version(self.worker, doubt)
            await connection.pause(self.worker, "abort")
        return True

    async def declare(self, connection: AdminAPI, label: int) -> None:
        await connection.declare_version(self.worker, label)
        self.label = label

    async def set_taints(self, connection: AdminAPI, taints: Sequence[str]) -> None:
        await set_taints(connection, self._versions, self.worker, taints)
        if not taints:
            self._untainted_at = time.monotonic()

    async def is_lost(self) -> bool:
        """Return whether the worker died or another process has its address."""
        if await is_dead(self.worker):
            return True
        try:
            async with self.admin.pin() as connection:
                await self.check_process(connection)
        except AnotherProcess:
            return True
        except AdminError:
            pass  # something listens there but did not answer: it is not lost
        return False

    async def check_process(self, connection: AdminAPI) -> None:
        """Raise unless the connection reaches the process whose label was read before."""
        label = await connection.weight_version(self.worker)
        before = self._label_before
        # The call that set the label may have worked although its answer was lost.
        is_leaving = before is not None and label == leaving_label(before)
        if label == self.label or is_leaving:
            return
        if label is not None and label < 0:
            # A process starts with no such label: this is the one, and an update that a cancelled
            # refit sent has taken effect since.
            raise AdminError(
                f"{self.worker} took an update of an earlier refit meanwhile.", "Refit again."
            )
        raise AnotherProcess(f"{self.worker} is gone: another process has its address.")


async def set_taints(
    admin: AdminAPI, versions: FleetVersions, worker: Worker, taints: Sequence[str]
) -> None:
    """Set a worker's taints, and record whether a router respects them."""
    is_respected = admin.taints
    if is_respected:
        try:
            await admin.set_taints(worker, taints)
        except AdminError as error:
            cause = error.__cause__
            if not (isinstance(cause, RequestFailed) and cause.status == 404):
                raise
            is_respected = False  # an older Dynamo: only this process's own record counts
    versions.tainted = is_respected
