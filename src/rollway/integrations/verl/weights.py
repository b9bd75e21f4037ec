"""The weights of a pool: its versions, and the updates that trainer ranks send.

    trainer, first rank                                   pool
    publish version n for r receivers ── offer, step ──►  r and n are up to date: refit, reply
                                                          r changed: refuse; the reply has the new r
    publish again, once               ── offer, step ──►  …

The trainer gets a `PoolInfo` before its first update and with each reply, so an update costs one
call. `Versions` is the only counter: the trainer publishes under the number that it assigns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.errors import WeightsError
from rollway.integrations.verl.spec import ADAPTERS_KEPT
from rollway.integrations.verl.verl_buckets import make_bucket_update
from rollway.weights.offer import Offer
from rollway.weights.transports.choose import Destination

if TYPE_CHECKING:  # trainer ranks import this module too
    from rollway.aio import Stack
    from rollway.fleet.updates import Weights

ADAPTER = "policy"
"""The stack's name for the LoRA adapter that verl trains."""


class Versions:
    """The counter of a pool's versions, with the trainer's step of each."""

    def __init__(self) -> None:
        self.current = 0
        self._steps: dict[int, int | None] = {}

    def add(self, step: int | None) -> int:
        self.current += 1
        self._steps[self.current] = step
        return self.current

    def set_step(self, step: int) -> None:
        """Set the trainer's step of the current version."""
        self._steps[self.current] = step

    def step_of(self, version: int | None) -> int | None:
        return None if version is None else self._steps.get(version)


@dataclass(frozen=True)
class PoolInfo:
    """What a rank must know of a pool to publish weights to it."""

    destination: Destination
    receivers: int
    """Ranks of all engines that receive the next version."""
    next_version: int
    tied: frozenset[str] = frozenset()
    """Names that verl sends although the model's files lack them: second names of other tensors."""


@dataclass(frozen=True)
class UpdateReply:
    """The pool's answer to an update."""

    info: PoolInfo
    """What the next update must use."""
    accepted: bool = True
    """False: the number of receivers has changed, and no engine has received anything."""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class PoolWeights:
    """The versions of a pool, and updates of all its workers."""

    stack: Stack
    versions: Versions
    control: asyncio.Lock
    """Held during an update, so that an abort waits for it."""
    destination: Destination
    engine_ranks: int
    """Tensor parallelism of each worker."""
    tied: frozenset[str]
    _receivers: int = 0

    async def describe(self) -> PoolInfo:
        """Count the receivers, and return what a trainer must know."""
        workers = [worker for worker in await self.stack.fleet.workers() if not worker.error]
        self._receivers = len(workers) * self.engine_ranks
        return self._info()

    def _info(self) -> PoolInfo:
        return PoolInfo(self.destination, self._receivers, self.versions.current + 1, self.tied)

    async def refit(self, offer: Offer, step: int | None) -> UpdateReply:
        """Refit every worker from a published version."""
        async with self.control:
            if not await self._is_current(offer):
                return UpdateReply(self._info(), accepted=False)
            figures = await self._run_refit(offer, step)
            return UpdateReply(self._info(), figures=figures)

    async def receive_buckets(self, sockets: Sequence[str], step: int | None) -> dict[str, float]:
        """Refit every worker from the trainer ranks that send at these sockets."""
        async with self.control:
            version, model = self.versions.current + 1, Path(self.destination.model)
            update = make_bucket_update(version, sockets, model, self.destination.secret)
            return await self._run_refit(update, step)

    async def _run_refit(self, update: Weights, step: int | None) -> dict[str, float]:
        # The version is used up even if the refit fails: some workers may serve it by then.
        version = self.versions.add(step)
        report = await self.stack.refit(version, update, allow_cast=True)
        return {"seconds": report.seconds, "paused_seconds": report.paused_seconds}

    async def load_adapter(
        self, offer: Offer, config: Mapping[str, Any], step: int | None, use: Callable[[str], None]
    ) -> UpdateReply:
        """Load a published LoRA adapter into every worker, then call `use` with its name. Each
        version has another name, also in the engines' caches."""
        async with self.control:
            if not await self._is_current(offer):
                return UpdateReply(self._info(), accepted=False)
            version = self.versions.add(step)
            await self.stack.wake()  # unlike a refit, an adapter needs an engine that is awake
            name = await self.stack.fleet.load_adapter(
                ADAPTER, version, offer, config, keep=ADAPTERS_KEPT
            )
            use(name)
            return UpdateReply(self._info())

    async def _is_current(self, offer: Offer) -> bool:
        """Return whether an offer counts its receivers right. Most offers do not count them; with a
        wrong count, a broadcast would wait for ranks that never join, or leave some out."""
        expected = self.versions.current + 1
        if offer.version != expected:
            raise WeightsError(
                f"Version {offer.version} was published, and the pool expects {expected}.",
                "Publish to a pool from one rank alone.",
            )
        counted = offer.where.get("receivers")
        return counted is None or counted == (await self.describe()).receivers
