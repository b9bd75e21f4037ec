"""Publish new weights from the trainer's first rank, and have a pool's workers receive them.

Every rank must walk verl's iterator, which gathers a tensor from all ranks at each step. The first
rank publishes the tensors; the others discard them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.integrations.verl.spec import WeightOptions
from rollway.integrations.verl.verl_buckets import NamedTensor, WeightStream, iterate
from rollway.integrations.verl.weights import PoolInfo, UpdateReply
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Publisher
from rollway.weights.transports.choose import LOOPBACK, open_publisher
from rollway.weights.transports.nixl.agent import import_nixl

Kind = Literal["policy", "adapter"]


class WeightSender:
    """Sends the weights of one rank to a pool. It keeps its publishers, with their memory and
    connections, and what it knows of the pool."""

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
