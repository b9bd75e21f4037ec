"""New weights from a rank of the trainer: published by one transport, taken by a pool's stack.

Every rank must go through verl's iterator, which gathers a tensor from all of them at each step;
the first one publishes what it sees.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollway.errors import UsageError
from rollway.integrations.verl.options import WeightOptions
from rollway.integrations.verl.stream import Named, Stream, each
from rollway.stack.plan import LOOPBACK
from rollway.weights import leftovers
from rollway.weights.offer import Offer
from rollway.weights.transports.nixl_agent import import_nixl

if TYPE_CHECKING:
    from rollway.weights.transports.collective import CollectivePublisher


@dataclass(frozen=True)
class About:
    """What whoever publishes must know of a pool."""

    stack: str
    secret: str = field(repr=False)
    model: str
    """The directory that its engines started from."""
    addresses: frozenset[str]
    """Of the machines that its engines are on."""
    receivers: int
    """Ranks of all engines that are there now."""
    tied: frozenset[str] = frozenset()
    """Names that verl sends and the model's files do not have: another tensor's second name."""


class Publisher(Protocol):
    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer: ...


class Publishing:
    """Of one rank; the publisher is kept, and with it memory and connections."""

    def __init__(self, options: WeightOptions, bucket_bytes: int, address: str = LOOPBACK) -> None:
        """`address` is this machine's, and `bucket_bytes` what may be in memory on the way, beyond
        what a transport keeps."""
        if options.weights == "nixl":
            check_nixl()  # now, and not after the first step
        self._options, self._bucket_bytes, self._address = options, bucket_bytes, address
        self._publisher: Publisher | None = None
        self._guard: leftovers.Guard | None = None

    async def send(self, weights: Any, pool: Any, step: int | None) -> dict[str, float]:
        """Publish what the iterator has, and have every worker of the pool serve it."""
        version, offer = await self._publish(Stream(weights), pool)
        figures: dict[str, float]
        figures = await self._taken(version, pool.refit.remote(offer.as_json(), step))
        return figures

    async def send_adapter(
        self, weights: Any, pool: Any, step: int | None, config: Mapping[str, Any]
    ) -> None:
        """The same for a LoRA adapter, with PEFT's config of it."""
        version, offer = await self._publish(Stream(weights), pool)
        await self._taken(version, pool.load_adapter.remote(offer.as_json(), plain(config), step))

    async def _taken(self, version: int, taking: Any) -> Any:
        if isinstance(self._publisher, Broadcast):
            return await self._publisher.during(version, taking)
        return await taking

    async def _publish(self, stream: Stream, pool: Any) -> tuple[int, Offer]:
        about: About = await pool.about.remote()
        on_gpu = is_on_gpu(await stream.first())
        version: int = await pool.next_version.remote()

        def publish(tensors: Iterator[Named]) -> Offer:
            # Made here, where whatever goes wrong does not keep the other ranks waiting.
            if self._publisher is None:
                self._publisher = self._made(self._transport(on_gpu, about), about)
            publisher = self._publisher
            if isinstance(publisher, Broadcast):
                publisher.receivers = about.receivers
            return publisher.publish(version, (t for t in tensors if t[0] not in about.tied))

        return version, await stream.through(publish)

    def _transport(self, on_gpu: bool, about: About) -> str:
        if not self._near(about):
            return across_machines(self._options)
        if self._options.weights != "auto":
            return self._options.weights
        return "cuda_ipc" if on_gpu else "shm"

    def _near(self, about: About) -> bool:
        return about.addresses == {self._address}

    def _made(self, name: str, about: About) -> Publisher:
        if name in ("shm", "cuda_ipc"):
            return self._on_this_machine(name)
        host = LOOPBACK if self._near(about) else self._address
        if name == "collective":
            return Broadcast(host)
        if name == "nixl":
            from rollway.weights.transports.nixl import NixlPublisher

            return NixlPublisher(host=host, secret=about.secret)
        return self._in_directory(name, about)

    def _on_this_machine(self, name: str) -> Publisher:
        if name == "shm":
            from rollway.weights.transports.shm import ShmPublisher

            return ShmPublisher()
        from rollway.weights.transports.cuda_ipc import CudaIpcPublisher

        return CudaIpcPublisher(bucket_bytes=self._bucket_bytes)

    def _in_directory(self, name: str, about: About) -> Publisher:
        """In one of this run's own, since versions count from 1 in each; it goes with the run."""
        assert self._options.weights_dir is not None  # the options were checked
        directory = self._options.weights_dir / about.stack
        self._guard = leftovers.Guard(directory)
        if name == "files":
            from rollway.weights.transports.files import FilesPublisher

            return FilesPublisher(directory, Path(about.model), shard_bytes=self._bucket_bytes)
        from rollway.weights.store import Store
        from rollway.weights.transports.delta import DeltaPublisher

        return DeltaFromCpu(DeltaPublisher(Store(directory)))


def is_on_gpu(one: Named | None) -> bool:
    return one is not None and bool(one[1].is_cuda)


def across_machines(options: WeightOptions) -> str:
    """How weights go to engines that are not all on the machine of the rank that has them."""
    if options.weights in ("shm", "cuda_ipc"):
        raise UsageError(
            f"weights={options.weights} goes through the memory of one machine, and engines are "
            "on others.",
            "Use files or delta in a directory that all of them see, or collective, or nixl.",
        )
    if options.weights != "auto":
        return options.weights
    if options.weights_dir is not None:
        return "files"
    try:
        import_nixl()
    except UsageError as error:
        raise UsageError(
            "Engines are on other machines, and nothing says how new weights get there.",
            "Give `weights_dir`, a directory that all of them see, beside `weights`; or install "
            "NIXL with the trainer (pip install rollway[nixl]).",
        ) from error
    return "nixl"


class DeltaFromCpu:
    """It holds the last version: not on the GPU, where verl's trainer has no room for one."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer:
        return self._publisher.publish(version, ((name, one.cpu()) for name, one in tensors))


class Broadcast:
    """A publisher that takes part in the transfer, and so must hear how the refit goes."""

    def __init__(self, host: str) -> None:
        from rollway.weights.transports.collective import CollectivePublisher

        self._publisher: CollectivePublisher = CollectivePublisher(host)
        self.receivers = 1

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer:
        return self._publisher.publish(version, tensors, receivers=self.receivers)

    async def during(self, version: int, taking: Any) -> Any:
        """What the pool answers, when every receiver has said that it has all."""
        try:
            answer = await taking
        except BaseException:
            self._publisher.cancel()
            raise
        await asyncio.to_thread(self._publisher.wait, version)
        return answer


async def base_of(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """The weights below an adapter, under the names of the checkpoint: verl gives those that PEFT
    and vLLM have for a layer that an adapter can be put on."""
    async for name, tensor in each(weights):
        yield name.replace(".base_layer.", "."), tensor


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """PEFT's config as JSON would have it; it has sets and enums."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(config)))
    return found


def for_adapters(options: WeightOptions) -> WeightOptions:
    """An adapter is small, and a directory of the policy's versions is no place for it."""
    in_directory = options.weights in ("files", "delta")
    how = "auto" if in_directory else options.weights
    return options.model_copy(update={"weights": how, "weights_dir": None})


def check_nixl() -> None:
    try:
        import_nixl()
    except UsageError as error:
        raise UsageError(
            f"weights=nixl: the trainer's environment ({sys.executable}) has no NIXL.",
            "pip install rollway[nixl] there, and in the engine's environment.",
        ) from error


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
