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
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rollway.errors import NoWorkers, UsageError, WeightsError
from rollway.integrations.verl.spec import ADAPTERS_KEPT, WeightOptions
from rollway.integrations.verl.verl_buckets import (
    NamedTensor,
    WeightStream,
    iterate,
    make_bucket_update,
)
from rollway.observe import end_step
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Publisher
from rollway.weights.transports.choose import LOOPBACK, Destination, open_publisher
from rollway.weights.transports.nixl.agent import import_nixl

if TYPE_CHECKING:  # trainer ranks import this module too
    from rollway.aio import Stack
    from rollway.fleet.updates import Weights


WAIT_SECONDS = 0.5
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
    start_seconds: float
    """How long a worker may take to start again."""
    _receivers: int = 0

    async def describe(self) -> PoolInfo:
        """Count the receivers, and return what a trainer must know. Wait for one: if a pool's only
        worker died, its successor gets the weights."""
        deadline, workers = time.monotonic() + self.start_seconds, 0
        while not workers and time.monotonic() < deadline:
            workers = sum(not worker.error for worker in await self.stack.fleet.workers())
            await asyncio.sleep(0.0 if workers else WAIT_SECONDS)
        self._receivers = workers * self.engine_ranks
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
        version, began = self.versions.add(step), time.monotonic()
        try:
            report = await self.stack.refit(version, update, allow_cast=True)
        except NoWorkers:
            await self.describe()
            report = await self.stack.refit(version, update, allow_cast=True)
        end_step(version if step is None else step, publish=time.monotonic() - began)
        return {"seconds": report.seconds, "paused_seconds": report.paused_seconds}

    async def load_adapter(
        self, offer: Offer, config: Mapping[str, Any], step: int | None, use: Callable[[str], None]
    ) -> UpdateReply:
        """Load a published LoRA adapter into every worker, then call `use` with its name. Each
        version has another name, also in the engines' caches."""
        async with self.control:
            if not await self._is_current(offer):
                return UpdateReply(self._info(), accepted=False)
            version, began = self.versions.add(step), time.monotonic()
            await self.stack.wake()  # unlike a refit, an adapter needs an engine that is awake
            name = await self.stack.fleet.load_adapter(
                ADAPTER, version, offer, config, keep=ADAPTERS_KEPT
            )
            use(name)
            end_step(version if step is None else step, publish=time.monotonic() - began)
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


Kind = Literal["policy", "adapter"]


class WeightSender:
    """Sends the weights of one rank to a pool. It keeps its publishers, with their memory and
    connections, and what it knows of the pool.

    Every rank must walk verl's iterator, which gathers a tensor from all ranks at each step. The
    first rank publishes the tensors; the others discard them.
    """

    def __init__(self, options: WeightOptions, bucket_bytes: int, address: str = LOOPBACK) -> None:
        """`address` is this machine's. `bucket_bytes` limits the memory for tensors in transit,
        beyond what a transport keeps."""
        if options.weights == "nixl":
            check_nixl()  # fail now, not after the first step
        self._options, self._bucket_bytes, self._address = options, bucket_bytes, address
        # Two publishers: a worker that restarts needs the last version of the base as well as that
        # of the adapter.
        self._publishers: dict[Kind, Publisher] = {}
        self._info: PoolInfo | None = None

    async def send(self, weights: Any, pool: Any, step: int | None) -> dict[str, float]:
        """Publish the iterator's tensors, and have every worker of the pool serve them."""
        return await self._update(
            "policy", weights, pool, lambda offer: pool.refit.remote(offer.as_json(), step)
        )

    async def send_adapter(
        self, weights: Any, pool: Any, step: int | None, config: Mapping[str, Any]
    ) -> None:
        """Do the same for a LoRA adapter; `config` is PEFT's."""
        plain = to_plain(config)
        await self._update(
            "adapter",
            weights,
            pool,
            lambda offer: pool.load_adapter.remote(offer.as_json(), plain, step),
        )

    async def _update(
        self, kind: Kind, weights: Any, pool: Any, call: Callable[[Offer], Awaitable[UpdateReply]]
    ) -> dict[str, float]:
        # A broadcast counts its receivers, and holds all tensors until each has them. So they can
        # be published again if the count was wrong; other transports must not keep them.
        tensors: list[NamedTensor] | None = [] if self._options.weights == "collective" else None
        async with WeightStream(weights) as stream:
            info: PoolInfo = self._info or await pool.info.remote()
            self._info = None  # the next update asks again, unless this one succeeds
            offer = await stream.feed(lambda pairs: self._publish(kind, info, pairs, tensors))
        reply = await self._deliver(kind, offer, call)
        if not reply.accepted and tensors is not None:
            info = reply.info
            offer = await asyncio.to_thread(self._publish, kind, info, iter(tensors), None)
            reply = await self._deliver(kind, offer, call)
        if not reply.accepted:
            raise WeightsError(
                "The number of engine ranks changed twice during one update of the weights.",
                "Look at `rollway logs` for engines that restart again and again.",
            )
        self._info = reply.info
        return reply.figures

    def _publish(
        self,
        kind: Kind,
        info: PoolInfo,
        pairs: Iterator[NamedTensor],
        kept: list[NamedTensor] | None,
    ) -> Offer:
        """Publish on the stream's thread, where a failure does not keep the other ranks waiting."""
        publisher = self._publishers.get(kind)
        if publisher is None:
            publisher = self._publishers[kind] = self._open(kind, info)
        publisher.expect(info.receivers)
        tensors = (pair for pair in pairs if pair[0] not in info.tied)
        if kept is None:
            return publisher.publish(info.next_version, tensors)
        kept.extend(tensors)
        return publisher.publish(info.next_version, kept)

    def _open(self, kind: Kind, info: PoolInfo) -> Publisher:
        options = self._options if kind == "policy" else choose_adapter_options(self._options)
        assert options.weights != "verl_buckets"  # BucketSender sends those
        # Versions count from 1 in each run, so each has its own directory, which ends with it.
        directory = options.weights_dir and options.weights_dir / info.destination.stack
        # The trainer's GPUs have no memory left for the version that delta compares with.
        extra = {"hold_on_cpu": True} if options.weights == "delta" else {}
        return open_publisher(
            options.weights,
            replace(info.destination, address=self._address),
            directory=directory,
            temporary=True,
            bucket_bytes=self._bucket_bytes,
            **extra,
        )

    async def _deliver(
        self, kind: Kind, offer: Offer, call: Callable[[Offer], Awaitable[UpdateReply]]
    ) -> UpdateReply:
        """Call the pool, and wait until its workers have the version. Cancel the transfer if the
        pool fails or refuses the offer: a broadcast would wait for receivers that never join."""
        publisher = self._publishers[kind]
        accepted = False
        try:
            reply = await call(offer)
            accepted = reply.accepted
        finally:
            if not accepted:
                publisher.cancel()
        if accepted:
            await asyncio.to_thread(publisher.wait, offer.version)
        return reply


async def strip_base_layer(weights: Any) -> AsyncIterator[NamedTensor]:
    """Rename the weights below an adapter to the checkpoint's names: verl sends the names that PEFT
    and vLLM give to a layer with an adapter."""
    async for name, tensor in iterate(weights):
        yield name.replace(".base_layer.", "."), tensor


def to_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert PEFT's config, which has sets and enums, to JSON's types."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(config)))
    return plain


def choose_adapter_options(options: WeightOptions) -> WeightOptions:
    """Return options for adapters: they are small, and must not be stored among the versions of
    the policy."""
    weights = "auto" if options.weights in ("files", "delta") else options.weights
    return options.model_copy(update={"weights": weights, "weights_dir": None})


def check_nixl() -> None:
    try:
        import_nixl()
    except UsageError as error:
        raise UsageError(
            f"weights=nixl: the trainer's environment ({sys.executable}) has no NIXL.",
            "pip install rollway[nixl] there, and in the engine's environment.",
        ) from error
