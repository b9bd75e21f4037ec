"""LoRA adapters of a fleet: what a publisher offered, brought to every worker and served by name.

    offer + config ─► every worker takes and proves it      refused here: nothing was touched
                              │
                              ▼
    every worker loads it as `name@version` and proves that it computes with it
                              │            └─ one failed: unloaded again everywhere, raised
                              ▼
    versions of the name beyond `keep` are unloaded, once their requests have ended

Generation goes on all the while. A version never changes what an older one answers: it has a name
of its own, also for the KV cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import AdminAPI, NoSuchMethod, on_all
from rollway.fleet.discovery import Worker
from rollway.fleet.moves import is_dead
from rollway.fleet.updates import errand
from rollway.weights.adapter import Adapter, attached, check_config, directory_of, served_name
from rollway.weights.offer import Offer

log = logging.getLogger(__name__)

BRING, READY = "rollway_adapter", "rollway_adapter_ready"
LOADED, DROP = "rollway_adapter_loaded", "rollway_adapter_drop"
"""Of `rollway.engine.worker.WorkerExtension`."""


@dataclass(slots=True)
class Version:
    """One version of an adapter, as it was offered."""

    served: str
    number: int
    offer: Offer
    config: dict[str, Any]
    workers: set[int] = field(default_factory=set)
    """Those that were asked to take it."""

    def on(self, worker: Worker) -> Adapter:
        return Adapter(self.served, self.config, f"{worker.instance_id} {worker.admin_url}")


class Adapters:
    """What this process has loaded."""

    def __init__(self, admin: AdminAPI, secret: str) -> None:
        self._admin = admin
        self._secret = secret
        self._versions: dict[str, list[Version]] = {}

    @property
    def loaded(self) -> list[str]:
        """Every version that is kept, by its full name."""
        return [version.served for version in self._all()]

    def newest(self, name: str) -> str:
        """What requests for an adapter are sent to; a full name is taken as it is."""
        if "@" in name:
            return name
        if not self._versions.get(name):
            raise UsageError(
                f"This process has loaded no adapter `{name}`.",
                "Load one, or name the version too: `name@version`.",
            )
        return self._versions[name][-1].served

    async def load(
        self,
        workers: Sequence[Worker],
        name: str,
        version: int,
        offer: Offer,
        config: Mapping[str, Any],
        keep: int,
    ) -> str:
        check_config(config)
        if keep < 1:
            raise UsageError(f"keep is {keep}.", "Keep at least the version that is loaded.")
        new = Version(served_name(name, version), version, offer, dict(config))
        known = self._versions.setdefault(name, [])
        if known and version < known[-1].number:
            raise UsageError(
                f"Version {version} is older than {known[-1].served}, which is loaded.",
                "Versions only go up; give the next number.",
            )
        try:
            await self._everywhere(workers, partial(self._bring, new))
            await self._everywhere(workers, partial(self._serve, new))
        except BaseException:
            if not any(one.served == new.served for one in known):
                await on_all(workers, partial(self._remove, new.served))
            raise
        new.workers = {worker.instance_id for worker in workers}
        known[:] = [one for one in known if one.served != new.served] + [new]
        while len(known) > keep:
            await self._unload(workers, known.pop(0).served)
        return new.served

    async def unload(self, workers: Sequence[Worker], name: str) -> None:
        """All versions of an adapter, or one (`name@version`)."""
        plain, _, version = name.partition("@")
        known = self._versions.get(plain, [])
        chosen = [one for one in known if not version or one.served == name]
        known[:] = [one for one in known if one not in chosen]
        for served in [one.served for one in chosen] or [name]:
            await self._unload(workers, served)

    def missing(self, workers: Sequence[Worker]) -> dict[str, list[Worker]]:
        """Who was not asked to take a version that can still be had, by its name."""
        found = {}
        for version in self._all():
            new = [w for w in workers if w.instance_id not in version.workers and not w.error]
            if new and version.offer.repeatable:
                found[version.served] = new
        return found

    async def catch_up(self, workers: Sequence[Worker]) -> None:
        """Bring what is loaded to workers that have joined since. What they refuse (its publisher
        may have ended) they go without: nobody sends them requests for it."""
        missing = self.missing(workers)
        for version in self._all():
            new = missing.get(version.served, [])
            try:
                await self._everywhere(new, partial(self._bring, version))
                await self._everywhere(new, partial(self._serve, version))
            except UsageError as error:
                log.warning("%s is not on every worker: %s", version.served, error.message)
            version.workers |= {worker.instance_id for worker in new}

    def _all(self) -> list[Version]:
        return [version for known in self._versions.values() for version in known]

    async def _bring(self, version: Version, worker: Worker) -> None:
        offer = attached(version.offer, version.on(worker)).signed(self._secret)
        begin, done = {"offer": offer.as_json()}, {"served": version.served}
        try:
            await errand(self._admin, worker, (BRING, begin), (READY, done))
        except NoSuchMethod as error:
            raise UsageError(
                f"{worker} cannot take adapters this way: {error.message}",
                "Start it with --worker-extension-cls rollway.engine.worker.WorkerExtension, or "
                "load the adapter from files (AdminAPI.load_lora).",
            ) from error

    async def _serve(self, version: Version, worker: Worker) -> None:
        directory = directory_of(version.offer, version.on(worker))
        number = await self._admin.load_lora(worker, version.served, directory, fresh=True)
        arguments = {"served": version.served, "number": number}
        await self._admin.call(worker, LOADED, arguments)

    async def _unload(self, workers: Sequence[Worker], served: str) -> None:
        for result in await on_all(workers, partial(self._unload_one, served)):
            if isinstance(result, AdminError):
                log.warning("%s is still loaded: %s", served, result.message)
            elif isinstance(result, BaseException):
                raise result

    async def _unload_one(self, served: str, worker: Worker) -> None:
        await self._admin.unload_lora(worker, served)
        await self._admin.call(worker, DROP, {"served": served})

    async def _remove(self, served: str, worker: Worker) -> None:
        """After a failure: it may be loaded, or only brought, or neither."""
        with contextlib.suppress(AdminError):
            await self._admin.unload_lora(worker, served)
        with contextlib.suppress(AdminError):
            await self._admin.call(worker, DROP, {"served": served})

    async def _everywhere(
        self, workers: Sequence[Worker], call: Callable[[Worker], Awaitable[None]]
    ) -> None:
        """The first failure is raised, unless its worker has died meanwhile."""
        for worker, result in zip(workers, await on_all(workers, call), strict=True):
            if isinstance(result, BaseException):
                if isinstance(result, AdminError) and await is_dead(worker):
                    continue
                raise result
