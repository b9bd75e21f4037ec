"""`weights: verl_buckets`: verl's own hand-over, where each rank sends to the engine beside it.

    every rank    BucketedWeightSender ── shared memory, a local socket ──► its engine's rank
    rank 0        pool.hand_over ── which socket is whose, in JSON ───────► engines stage, then swap

verl's sender waits for its receiver without an end; here each wait has one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from rollway.errors import UsageError, WeightsError
from rollway.fleet.admin import AdminAPI
from rollway.fleet.discovery import Worker
from rollway.fleet.updates import Offered, stage
from rollway.integrations.verl.stream import Named, each
from rollway.weights.checkpoint import read_headers
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.offer import Offer

MESSAGE_SECONDS = 120.0
"""Within which an engine has taken a bucket."""


@dataclass(frozen=True)
class HandOver:
    """Of one rank."""

    job: str
    """Ray's: no two that run on a machine are of one name."""
    rank: int
    world: int
    bucket_megabytes: int
    tied: frozenset[str] = frozenset()
    """Names that are not sent: another tensor's second name."""

    def socket(self, rank: int) -> Path:
        """Like verl's own, which are of a replica that has a number."""
        return Path(tempfile.gettempdir(), f"rl-colocate-zmq-{self.job}-rollway-rank-{rank}.sock")

    async def send(self, weights: Any) -> None:
        """Give this rank's engine what the iterator has, by verl's own sender."""
        import zmq

        sender = _verls().BucketedWeightSender(
            f"ipc://{self.socket(self.rank)}", bucket_size_mb=self.bucket_megabytes, use_shm=True
        )
        sender.zmq_context = context = zmq.Context()
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            context.setsockopt(option, int(1000 * MESSAGE_SECONDS))
        context.setsockopt(zmq.LINGER, 0)
        try:
            await sender.async_send_weights(self._once(weights))
        except zmq.Again as error:
            raise WeightsError(
                f"Rank {self.rank}'s engine did not take its weights within {MESSAGE_SECONDS:g} s."
            ) from error
        finally:
            context.term()

    async def send_first(self, weights: Any, pool: Any, step: int | None) -> dict[str, float]:
        """The same for rank 0, which has the engines receive."""
        sockets = [str(self.socket(rank)) for rank in range(self.world)]
        refit = asyncio.ensure_future(_awaited(pool.hand_over.remote(sockets, step)))
        try:
            await self.send(weights)
        except Exception:
            await asyncio.wait([refit], timeout=MESSAGE_SECONDS)
            if refit.done():
                await refit  # why the engines took nothing, where that is the reason
            raise
        return await refit

    async def _once(self, weights: Any) -> AsyncIterator[Named]:
        async for name, tensor in each(weights):
            if name not in self.tied:
                yield name, tensor.detach()


async def _awaited(reference: Any) -> dict[str, float]:
    figures: dict[str, float] = await reference
    return figures


@dataclass(slots=True)
class HandedOver(Offered):
    """An update for which every worker has senders of its own."""

    sockets: Sequence[str] = ()
    _given: dict[int, list[str]] = field(default_factory=dict)

    async def preflight(self, admin: AdminAPI, worker: Worker) -> bool:
        mine = self._sockets_of(worker)
        offer = msgspec.structs.replace(self.offer, where={**self.offer.where, "sockets": mine})
        await stage(admin, worker, offer, self.secret, self.allow_cast, self.stage_seconds)
        return True

    def _sockets_of(self, worker: Worker) -> list[str]:
        size = worker.world_size
        at = len(self._given) * size
        if worker.instance_id not in self._given and at + size > len(self.sockets):
            raise UsageError(
                f"{len(self.sockets)} ranks of the trainer send weights, and there are more "
                "ranks of engines.",
                "Use weights=auto, which knows no such bond.",
            )
        return self._given.setdefault(worker.instance_id, list(self.sockets[at : at + size]))


def handed_over(version: int, sockets: Sequence[str], model: Path, secret: str) -> HandedOver:
    headers = read_headers(model).values()
    nbytes = sum(math.prod(one.shape) * ELEMENT_BYTES[one.dtype] for one in headers)
    where = {"sockets": [], "like": str(model), "seconds": MESSAGE_SECONDS}
    # What comes is not known before, so nothing could tell it from another version.
    identity = secrets.token_hex(16)
    offer = Offer("verl_buckets", version, identity, nbytes, where, repeatable=False)
    return HandedOver(offer, secret, allow_cast=True, sockets=sockets)


def _verls() -> ModuleType:
    """By its path: the package around it asks for a vLLM, which the trainer need not have."""
    import verl.workers.rollout

    (where,) = verl.workers.rollout.__path__
    path = Path(where, "vllm_rollout", "bucketed_weight_transfer.py")
    spec = importlib.util.spec_from_file_location("rollway_verl_buckets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
