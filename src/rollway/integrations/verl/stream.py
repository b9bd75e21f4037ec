"""verl's iterator of weights, for a publisher that runs on a thread of its own.

    event loop    next tensor: gathered from all ranks        next …
                  ▲ asked for              │ handed over      ▲
    thread        publish ──────────────── ▼ copy ────────────┘

A publisher asks for a tensor when it has copied the last one, so no more are in memory than it
keeps itself. The iterator stays on the thread where verl would go through it: its streams and its
current GPU are those of that thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

from rollway.errors import WeightsError

Named = tuple[str, Any]
"""A name and a torch tensor."""
Result = TypeVar("Result")


class Stream:
    """One version's tensors. Made on the event loop; iterated over on another thread."""

    def __init__(self, weights: Any) -> None:
        self._each = each(weights)
        self._loop = asyncio.get_running_loop()
        self._first: Named | None = None
        self._stopped = False

    async def first(self) -> Named | None:
        """The first tensor, which is still to come when the stream is iterated over."""
        if self._first is None:
            self._first = await self._next()
        return self._first

    async def through(self, work: Callable[[Iterator[Named]], Result]) -> Result:
        """Do the work on a thread. Whichever side fails ends the other; the iterator is gone
        through to its end all the same, where it can be, since other ranks wait at each step."""
        try:
            return await asyncio.to_thread(work, self._tensors())
        except asyncio.CancelledError:
            self._stopped = True
            raise
        except Exception:
            await self.rest()
            raise

    async def rest(self) -> None:
        """Go through what is left."""
        async for _ in self._each:
            pass

    def _tensors(self) -> Iterator[Named]:
        one, self._first = self._first, None
        while one is not None or (one := self._asked()) is not None:
            yield one
            one = None  # not kept while the next is gathered

    def _asked(self) -> Named | None:
        if self._stopped:
            raise WeightsError("The update of the weights was cancelled.")
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    async def _next(self) -> Named | None:
        return await anext(self._each, None)


async def drained(weights: Any) -> None:
    async for _ in each(weights):
        pass


async def each(weights: Any) -> AsyncGenerator[Named, None]:
    """Of a plain or an asynchronous iterator."""
    if hasattr(weights, "__aiter__"):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one
