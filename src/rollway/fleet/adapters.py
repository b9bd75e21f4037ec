"""LoRA adapters of a fleet: every worker receives a published adapter and serves it by name.

    offer + config ─► every worker receives and verifies it      refused: dropped, raised
                              │
                              ▼
    every worker loads it as `name@version` and verifies that it computes with it
                              │            └─ one failed: unloaded everywhere, raised
                              ▼
    older versions of the name beyond `keep` are unloaded, once their requests have ended

Generation continues meanwhile. A new version never changes the answers of an older one: each
version has its own name, also in the KV cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import NoSuchMethod, call_all, call_living, start_and_wait
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.updates import STAGE_SECONDS
from rollway.fleet.workers import Worker
from rollway.weights.adapter import Adapter, attach_adapter, check_config, directory_of, served_name
from rollway.weights.offer import Offer

log = logging.getLogger(__name__)

# Methods of `rollway.engine.worker.WorkerExtension`.
RECEIVE_METHOD, READY_METHOD = "rollway_adapter", "rollway_adapter_ready"
LOADED_METHOD, DROP_METHOD = "rollway_adapter_loaded", "rollway_adapter_drop"


@dataclass(slots=True)
class AdapterVersion:
    """One version of an adapter, as it was offered."""

    served: str
    number: int
    offer: Offer
    config: dict[str, Any]
    workers: set[int] = field(default_factory=set)
    """Workers that were asked to load it."""

    def on(self, worker: Worker) -> Adapter:
        return Adapter(self.served, self.config, f"{worker.instance_id} {worker.admin_url}")


class Adapters:
    """The adapters that this process has loaded."""

    def __init__(self, admin: DynamoAdmin, secret: str) -> None:
        self._admin = admin
        self._secret = secret
        self._versions: dict[str, list[AdapterVersion]] = {}

    @property
    def loaded(self) -> list[str]:
        """The full names of all loaded versions."""
        return [version.served for version in self._list_versions()]

    @property
    def counts(self) -> dict[str, int]:
        """How many versions of each adapter are loaded."""
        return {name: len(versions) for name, versions in self._versions.items() if versions}

    def newest(self, name: str) -> str:
        """Return the full name of the newest version of an adapter; a full name stays as it is."""
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
        """Load a version on all workers or on none, and return its full name."""
        check_config(config)
        if keep < 1:
            raise UsageError(f"keep is {keep}.", "Keep at least the version that is loaded.")
        new = AdapterVersion(served_name(name, version), version, offer, dict(config))
        known = self._versions.setdefault(name, [])
        if known and version < known[-1].number:
            raise UsageError(
                f"Version {version} is older than {known[-1].served}, which is loaded.",
                "Versions only go up; use the next number.",
            )
        others = [version for version in known if version.served != new.served]
        try:
            await call_living(workers, partial(self._send, new))
            await call_living(workers, partial(self._serve, new))
        except BaseException:
            if len(others) == len(known):  # else it was loaded before, and stays
                await call_all(workers, partial(self._remove, new.served))
            raise
        new.workers = {worker.instance_id for worker in workers}
        known[:] = [*others, new]
        while len(known) > keep:
            await self._unload(workers, known.pop(0).served)
        return new.served

    async def unload(self, workers: Sequence[Worker], name: str) -> None:
        """Unload all versions of an adapter, or one version (`name@version`)."""
        plain, _, number = name.partition("@")
        known = self._versions.get(plain, [])
        chosen = [version for version in known if not number or version.served == name]
        known[:] = [version for version in known if version not in chosen]
        # A full name that another process has loaded can be unloaded as well.
        for served in [version.served for version in chosen] or [name]:
            await self._unload(workers, served)

    def missing(self, workers: Sequence[Worker]) -> dict[str, list[Worker]]:
        """Return by full name the workers that can still load a version and were never asked."""
        missing = {}
        for version in self._list_versions():
            new = [w for w in workers if w.instance_id not in version.workers and not w.error]
            if new and version.offer.repeatable:
                missing[version.served] = new
        return missing

    async def catch_up(self, workers: Sequence[Worker]) -> None:
        """Load the adapters on workers that joined later."""
        missing = self.missing(workers)
        for version in self._list_versions():
            new = missing.get(version.served, [])
            try:
                await call_living(new, partial(self._send, version))
                await call_living(new, partial(self._serve, version))
            except UsageError as error:
                # Its publisher may have ended. Workers without the adapter get no requests for it.
                log.warning("%s is not on every worker: %s", version.served, error.message)
            version.workers |= {worker.instance_id for worker in new}

    def _list_versions(self) -> list[AdapterVersion]:
        return [version for known in self._versions.values() for version in known]

    async def _send(self, version: AdapterVersion, worker: Worker) -> None:
        """Have a worker receive and verify the adapter's files."""
        offer = attach_adapter(version.offer, version.on(worker)).sign(self._secret)
        start = RECEIVE_METHOD, {"offer": offer.as_json()}

        async def check() -> None:
            await self._admin.call(worker, READY_METHOD, {"served": version.served})

        try:
            await start_and_wait(self._admin, worker, start, check, STAGE_SECONDS)
        except NoSuchMethod as error:
            raise UsageError(
                f"{worker} cannot receive adapters: {error.message}",
                "Start it with --worker-extension-cls rollway.engine.worker.WorkerExtension, or "
                "load the adapter from files (Fleet.admin.load_lora).",
            ) from error

    async def _serve(self, version: AdapterVersion, worker: Worker) -> None:
        """Have a worker load the adapter and verify that its layers hold it."""
        directory = directory_of(version.offer, version.on(worker))
        number = await self._admin.load_lora(worker, version.served, directory, fresh=True)
        arguments = {"served": version.served, "number": number}
        await self._admin.call(worker, LOADED_METHOD, arguments)

    async def _unload(self, workers: Sequence[Worker], served: str) -> None:
        async def unload(worker: Worker) -> None:
            await self._admin.unload_lora(worker, served)
            await self._admin.call(worker, DROP_METHOD, {"served": served})

        for result in await call_all(workers, unload):
            if isinstance(result, AdminError):
                log.warning("%s is still loaded: %s", served, result.message)
            elif isinstance(result, BaseException):
                raise result

    async def _remove(self, served: str, worker: Worker) -> None:
        """Clean up after a failure: the adapter may be loaded, only received, or neither."""
        with contextlib.suppress(AdminError):
            await self._admin.unload_lora(worker, served)
        with contextlib.suppress(AdminError):
            await self._admin.call(worker, DROP_METHOD, {"served": served})
