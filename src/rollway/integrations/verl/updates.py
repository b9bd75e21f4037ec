"""New weights from a rank of the trainer: published by one transport, taken by a pool's stack.

Every rank must go through verl's iterator, which gathers a tensor from all of them at each step;
the first one publishes what it sees.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from rollway.integrations.verl.options import Options
from rollway.weights.offer import Offer


class Publisher(Protocol):
    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Offer: ...


class Publishing:
    """Of one rank; the publisher is kept, and with it memory and connections."""

    def __init__(self, options: Options, model_path: str) -> None:
        self._options, self._model_path = options, model_path
        self._publisher: Publisher | None = None

    async def send(self, weights: Any, pool: Any, step: int | None) -> dict[str, float]:
        """Publish what the iterator has, and have every worker of the pool serve it."""
        tensors = await collected(weights, self._kept)
        about = await pool.about.remote()
        version = await pool.next_version.remote()
        if self._publisher is None:
            self._publisher = self._made(self._transport(tensors), about["secret"])
        publish = self._publisher.publish
        offer = await asyncio.to_thread(publish, version, tensors.items())
        figures: dict[str, float] = await pool.refit.remote(offer.as_json(), step)
        return figures

    def _kept(self, tensor: Any) -> Any:
        """On the GPU only for those that read it there: verl gathers one tensor at a time, and all
        of them might not fit."""
        return tensor if self._options.weights in ("auto", "cuda_ipc", "nixl") else tensor.cpu()

    def _transport(self, tensors: dict[str, Any]) -> str:
        if self._options.weights != "auto":
            return self._options.weights
        return "cuda_ipc" if any(tensor.is_cuda for tensor in tensors.values()) else "shm"

    def _made(self, name: str, secret: str) -> Publisher:
        if name == "shm":
            from rollway.weights.transports.shm import ShmPublisher

            return ShmPublisher()
        if name == "cuda_ipc":
            from rollway.weights.transports.cuda_ipc import CudaIpcPublisher

            return CudaIpcPublisher()
        if name == "nixl":
            from rollway.weights.transports.nixl import NixlPublisher

            return NixlPublisher(secret=secret)
        return self._in_directory(name)

    def _in_directory(self, name: str) -> Publisher:
        from pathlib import Path

        directory = self._options.weights_dir
        assert directory is not None  # the options were checked
        if name == "files":
            from rollway.weights.transports.files import FilesPublisher

            return FilesPublisher(directory, Path(self._model_path))
        from rollway.weights.store import Store
        from rollway.weights.transports.delta import DeltaPublisher

        return DeltaPublisher(Store(directory))


async def collected(weights: Any, kept: Callable[[Any], Any]) -> dict[str, Any]:
    """All tensors of a plain or an asynchronous iterator, each as it is to be kept."""
    return {name: kept(tensor) async for name, tensor in each(weights)}


async def drained(weights: Any) -> None:
    async for _ in each(weights):
        pass


async def each(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    if hasattr(weights, "__aiter__"):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
