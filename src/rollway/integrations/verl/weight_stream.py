"""verl's iterator of weights, pulled by a publisher that runs on another thread.

    event loop    gather the next tensor from all ranks        gather …
                  ▲ request                │ tensor            ▲
    thread        publish ──────────────── ▼ copy ─────────────┘

A publisher requests a tensor after it has copied the last one, so no more tensors are in memory
than the publisher keeps itself. The iterator stays on the thread where verl would walk it, since
its CUDA streams and its current GPU belong to that thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Self, TypeVar

from rollway.errors import WeightsError

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
