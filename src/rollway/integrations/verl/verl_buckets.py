"""`weights: verl_buckets`: each rank of the trainer sends to the engine beside it, as verl does.

    every rank    BucketedWeightSender ── shared memory, a local socket ──► its engine's rank
    rank 0        pool.receive_buckets ── the sockets of all ranks ───────► engines stage, then swap

verl's sender waits for its receiver without a limit; here each wait has one.

`WeightStream` is verl's iterator of weights for a publisher that runs on another thread:

    event loop    gather the next tensor from all ranks        gather …
                  ▲ request                │ tensor            ▲
    thread        publish ──────────────── ▼ copy ─────────────┘

A publisher requests a tensor after it has copied the last one, so no more tensors are in memory
than the publisher keeps itself. The iterator stays on the thread where verl would walk it, since
its CUDA streams and its current GPU belong to that thread.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import secrets
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.fleet.updates import Offered
from rollway.fleet.workers import Worker
from rollway.weights.checkpoint import read_headers
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import Offer

NamedTensor = tuple[str, Any]
"""A name and a torch tensor."""
Result = TypeVar("Result")


class WeightStream:
    """The tensors of one version, as a context manager on the event loop.

    Every rank of the trainer must walk its iterator to the end, since each step gathers from all of
    them. So if the block fails, leaving it walks the rest."""

    def __init__(self, weights: Any) -> None:
        self._tensors = iterate(weights)
        self._loop = asyncio.get_running_loop()
        self._cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception):
            async for _ in self._tensors:
                pass
        elif error is not None:
            self._cancelled = True  # ends the thread, which a cancelled task leaves running

    async def feed(self, work: Callable[[Iterator[NamedTensor]], Result]) -> Result:
        """Run `work` on a thread, with an iterator over the tensors."""
        return await asyncio.to_thread(work, self._pull())

    def _pull(self) -> Iterator[NamedTensor]:
        while (pair := self._request_next()) is not None:
            yield pair
            pair = None  # must not stay in memory while the next one is gathered

    def _request_next(self) -> NamedTensor | None:
        if self._cancelled:
            raise WeightsError("The update of the weights was cancelled.")
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    async def _next(self) -> NamedTensor | None:
        return await anext(self._tensors, None)


async def drain(weights: Any) -> None:
    """Walk an iterator to its end and discard the tensors."""
    async for _ in iterate(weights):
        pass


async def iterate(weights: Any) -> AsyncGenerator[NamedTensor, None]:
    """Iterate over a plain or an asynchronous iterator."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


MESSAGE_SECONDS = 120.0
"""Within which an engine must have received a bucket."""


@dataclass(frozen=True)
class BucketSender:
    """Sends the weights of one rank."""

    job: str
    """Ray's job id, which tells jobs on one machine apart."""
    rank: int
    world: int
    bucket_megabytes: int
    tied: frozenset[str] = frozenset()
    """Names that are not sent: second names of other tensors."""

    def get_socket(self, rank: int) -> Path:
        """Return a rank's socket, named like verl's own, which have a replica's number instead."""
        return Path(tempfile.gettempdir(), f"rl-colocate-zmq-{self.job}-rollway-rank-{rank}.sock")

    async def send(self, weights: Any) -> None:
        """Send the iterator's tensors to this rank's engine, with verl's own sender."""
        import zmq

        sender = _import_verls_sender().BucketedWeightSender(
            f"ipc://{self.get_socket(self.rank)}",
            bucket_size_mb=self.bucket_megabytes,
            use_shm=True,
        )
        sender.zmq_context = context = zmq.Context()
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            context.setsockopt(option, int(1000 * MESSAGE_SECONDS))
        context.setsockopt(zmq.LINGER, 0)
        try:
            await sender.async_send_weights(self._skip_tied(weights))
        except zmq.Again as error:
            raise WeightsError(
                f"Rank {self.rank}'s engine did not receive its weights within "
                f"{MESSAGE_SECONDS:g} s."
            ) from error
        finally:
            context.term()

    async def send_as_first(self, weights: Any, pool: Any, step: int | None) -> dict[str, float]:
        """Send as rank 0, which also has the pool start the receivers."""
        sockets = [str(self.get_socket(rank)) for rank in range(self.world)]
        # The call is sent here, not in a task: verl's sender blocks the event loop until the
        # engines receive.
        refit = asyncio.ensure_future(pool.receive_buckets.remote(sockets, step))
        try:
            await self.send(weights)
        except Exception:
            # If the engines refused, their reason explains why nobody received.
            await asyncio.wait([refit], timeout=MESSAGE_SECONDS)
            if refit.done():
                await refit
            raise
        figures: dict[str, float] = await refit
        return figures

    async def _skip_tied(self, weights: Any) -> AsyncIterator[NamedTensor]:
        async for name, tensor in iterate(weights):
            if name not in self.tied:
                yield name, tensor.detach()


@dataclass(slots=True)
class BucketUpdate(Offered):
    """An update for which every worker gets its own senders."""

    sockets: Sequence[str] = ()
    _assigned: dict[int, list[str]] = field(default_factory=dict)

    def offer_to(self, worker: Worker) -> Offer:
        where = {**self.offer.where, "sockets": self._assign_sockets(worker)}
        return msgspec.structs.replace(self.offer, where=where)

    def _assign_sockets(self, worker: Worker) -> list[str]:
        size = worker.world_size
        start = len(self._assigned) * size
        if worker.instance_id not in self._assigned and start + size > len(self.sockets):
            raise UsageError(
                f"{len(self.sockets)} ranks of the trainer send weights, and the engines have more "
                "ranks.",
                "Use weights=auto, which does not pair ranks.",
            )
        sockets = list(self.sockets[start : start + size])
        return self._assigned.setdefault(worker.instance_id, sockets)


def make_bucket_update(
    version: int, sockets: Sequence[str], model: Path, secret: str
) -> BucketUpdate:
    headers = read_headers(model).values()
    nbytes = sum(math.prod(header.shape) * ELEMENT_BYTES[header.dtype] for header in headers)
    where = {"sockets": [], "checkpoint": str(model), "seconds": MESSAGE_SECONDS}
    # The contents are unknown in advance, so a random identity makes each version distinct.
    identity = secrets.token_hex(16)
    offer = Offer("verl_buckets", version, identity, nbytes, where, repeatable=False)
    return BucketUpdate(offer, secret, allow_cast=True, sockets=sockets)


def _import_verls_sender() -> ModuleType:
    """Import verl's module by its path: its package imports vLLM, which trainers may lack."""
    import verl.workers.rollout

    (directory,) = verl.workers.rollout.__path__
    path = Path(directory, "vllm_rollout", "bucketed_weight_transfer.py")
    spec = importlib.util.spec_from_file_location("rollway_verl_buckets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
