"""prime-rl's adapter: one constant name, new weights at every step.

An engine keeps an adapter's old weights when the same name is loaded again, and Dynamo reports
success. So every broadcast is loaded as `name@number`, and the constant name is an alias of the
newest. Requests that run end on the version that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.fleet.fleet import Fleet
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import (
    BroadcastRules,
    read_adapter_config,
    read_step,
)
from rollway.integrations.prime_rl.memory import LoadedAdapter, Memory
from rollway.observe import end_step
from rollway.publishing import AsyncPublisher
from rollway.weights.adapter import check_config, served_name

log = logging.getLogger(__name__)

KEEP = 2
"""Versions that stay loaded: the newest, and the one that running requests began with."""
WEIGHTS = "adapter_model.safetensors"


@dataclass(slots=True)
class AdapterAliases:
    """The adapters that the trainer has broadcast, by its own names."""

    fleet: Fleet
    rules: BroadcastRules
    memory: Memory
    open_publisher: Callable[[], AsyncPublisher]
    """Opens the transport that carries the adapters to the workers."""
    _publisher: AsyncPublisher | None = None
    _published: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def find(self, name: str) -> str | None:
        """Return the full name that an alias or a full name stands for; None if it is unknown."""
        plain, _, number = name.partition("@")
        loaded = self.memory.record.adapters.get(plain)
        if loaded is None:
            return None
        if number and number not in map(str, (loaded.number, *loaded.older)):
            return None
        return name if number else served_name(plain, loaded.number)

    def list_models(self, parent: str) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: each alias with the directory of its newest version."""
        return [
            {"id": name, "object": "model", "parent": parent, "root": loaded.directory}
            for name, loaded in self.memory.record.adapters.items()
        ]

    async def load(self, name: str, directory: str) -> str:
        """Load an adapter into every worker; the alias changes when all of them have it."""
        path = await self.rules.find(directory)
        config = read_adapter_config(path)
        check_config(config)
        async with self._lock:
            known = self.memory.record.adapters.get(name)
            number = self._choose_number(known, path)
            served_name(name, number)  # refuses a name that an engine cannot have
            own = set(self.fleet.adapters.loaded)  # the fleet unloads these itself
            began = time.monotonic()
            try:
                served = await self._load(name, number, path, config)
            except (UsageError, WeightsError):
                raise
            except RollwayError as error:
                # Some workers may have it: the alias stays, so nobody asks for it. prime-rl repeats
                # the loading of an adapter after a 500, and after no other 5xx.
                raise Refused(500, str(error), kind="adapter_error") from error
            older = [] if known is None else [*known.older, known.number]
            self.memory.record.adapters[name] = LoadedAdapter(number, str(path), older[1 - KEEP :])
            self.memory.save()
            if len(self.memory.record.adapters) == 1:  # of several, each has steps of its own
                end_step(number, publish=time.monotonic() - began)
            dropped = {served_name(name, number) for number in older[: 1 - KEEP]}
            await self._unload_forgotten(dropped - own)
        return served

    async def unload(self, name: str) -> None:
        """Unload all versions of an adapter; its running requests end first."""
        async with self._lock:
            loaded = self.memory.record.adapters.pop(name, None)
            if loaded is None:
                raise Refused(404, f"There is no adapter `{name}`.", kind="not_found")
            self.memory.save()
            for number in (*loaded.older, loaded.number):
                await self.fleet.unload_adapter(served_name(name, number))

    async def close(self) -> None:
        """Close the transport; the workers have copies of their own."""
        if self._publisher is not None:
            await self._publisher.__aexit__(None, None, None)

    def _choose_number(self, known: LoadedAdapter | None, path: Path) -> int:
        step = read_step(path)
        if known is None:
            return step or 0
        if step is not None and step > known.number:
            return step
        log.warning(
            "the adapter of step %s comes after %d: it gets a new number", step, known.number
        )
        return known.number + 1

    async def _load(self, name: str, number: int, path: Path, config: dict[str, Any]) -> str:
        tensors = await asyncio.to_thread(_read_tensors, path)
        if self._publisher is None:
            self._publisher = await self.open_publisher().__aenter__()
        # The publisher has its own numbers, because all adapters share it.
        self._published += 1
        offer = await self._publisher.publish(self._published, tensors.items())
        served = await self.fleet.load_adapter(name, number, offer, config, keep=KEEP)
        if not offer.repeatable:
            await self._publisher.wait(offer.version)
        return served

    async def _unload_forgotten(self, names: Iterable[str]) -> None:
        """Unload versions of an earlier process of this server."""
        for served in names:
            try:
                await self.fleet.unload_adapter(served)
            except RollwayError as error:
                log.warning("%s may still be loaded: %s", served, error)


def _read_tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Any] = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{path / WEIGHTS} cannot be read: {error}.", "Broadcast the adapter again."
        ) from error
    return tensors
