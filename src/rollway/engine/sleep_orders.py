"""Orders that put a worker's engine to sleep and wake it. The guard adds them to the worker.

    serving ── sleep ──► no version, no taints; requests end or are cut; memory is released
                             │
             ┌─ level 1 ─────┴───── level 2 ─┐
             ▼                               ▼
      asleep, with weights            asleep, without weights
             │ wake                          │ a refit alone (rollway/engine/refit_orders.py):
             │   all memory back             │   stage: memory of the weights
             │   taint, label                │   refit: swap, memory of the KV cache, taint, label
             ▼                               ▼
      serving the same version        serving the new version

A refit of a worker at level 1 takes the right-hand way too. vLLM has two pools of memory that
sleep: `weights` and `kv_cache`. Level 1 moves the weights to the host, level 2 forgets them; both
forget the KV cache. Addresses stay, only the memory behind them is gone: whatever touches it ends
the process. So Dynamo's own routes that would do so are refused. Dynamo's `wake_up` is refused too:
it resumes the engine after a wake of the weights alone.

An order that has begun ends, also if its caller is gone. This file uses the standard library only:
the guard loads it by its path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
WEIGHTS, TAGS = "weights", ("weights", "kv_cache")
ROUTING_SECONDS = 0.05
"""A router may still send requests that it placed before it received new taints (10 to 30 ms
measured): they end like the others, and do not wait in a worker that sleeps."""
_UPDATES = ("update_weights_from_disk", "update_weights_from_distributed")
_OWN_ROUTES = ("sleep", "wake_up")
"""Dynamo's own routes."""


class SleepOrders:
    """What sleeps in one engine."""

    def __init__(self, handler: Any, route_to: Callable[[list[str]], Awaitable[None]]) -> None:
        """`route_to` sets the worker's taints."""
        self._handler = handler
        """Dynamo's object behind the RL routes."""
        self._route_to = route_to
        self.level = 0
        """The level at which the engine was put to sleep; 0 while all of its memory is there."""
        self.kept: tuple[int, list[str]] | None = None
        """The version that a wake restores, and its taints; None if its weights are gone."""
        self._sleeping: set[str] = set()
        self._weights_reply: dict[str, Any] = {}
        """What the last wake of the weights alone has reported."""
        self._running: set[asyncio.Task[Any]] = set()

    def protect(self, route: str, handler: Handler) -> Handler:
        """Return a handler that refuses what must not happen while the engine sleeps."""
        name = route.rpartition("/")[2]

        async def run(body: dict[str, Any]) -> dict[str, Any]:
            if name in _OWN_ROUTES:
                return _make_refusal("rollway_sleep and rollway_wake take the place of this route")
            # `update_weights_from_distributed` also runs methods that change no weights.
            changes = name in _UPDATES and not (body or {}).get("allow_unpaused")
            if self._sleeping and (changes or name == "resume_generation"):
                return _make_refusal("it sleeps: wake it")
            return await handler(body)

        guarded = (*_OWN_ROUTES, *_UPDATES, "resume_generation")
        return run if name in guarded else handler

    async def sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Leave the routing, stop generating, `wait`ing for running requests or `abort`ing them,
        and release memory."""
        return await self._answer(self._fall_asleep(body))

    async def wake(self, _: dict[str, Any]) -> dict[str, Any]:
        """Restore memory, and serve the version from before the sleep."""
        return await self._answer(self._wake())

    async def read_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the memory of every rank, and why one of them may not sleep at a level."""
        ranks = await self._read_ranks(int(body.get("level", 0)))
        return {"status": "ok", "ranks": ranks, "asleep": self.level}

    async def wake_weights(self) -> None:
        """Restore the memory of the weights, if they sleep, for a refit."""

        async def wake() -> None:
            async with self._handler._pause_lock:
                if WEIGHTS in self._sleeping:
                    self._weights_reply = await self._restore([WEIGHTS])

        await self._run(wake())

    async def wake_cache(self) -> dict[str, Any]:
        """Restore the rest of the memory, in a refit that holds the lock: the engine generates with
        the new weights. Return the memory asleep and after, and the seconds of both wakes."""
        first, self.kept = self._weights_reply, None
        last = await self._restore(list(self._sleeping))
        self.level, self._handler._paused = 0, False
        seconds = {"wake.weights": first["seconds"], "wake.kv_cache": last["seconds"]}
        return {"asleep": first["before"], "after": last["ranks"], "seconds": seconds}

    async def sleep_again(self) -> None:
        """Release the memory of the weights again, if a refit that was given up has woken them."""

        async def release() -> None:
            async with self._handler._pause_lock:
                if self.level and self._sleeping != set(TAGS):
                    await self._release(self.level, "abort")

        await self._run(release())

    async def _fall_asleep(self, body: dict[str, Any]) -> dict[str, Any]:
        handler, level = self._handler, int(body["level"])
        async with handler._pause_lock:
            label = getattr(handler, "_weight_version", None)
            if str(label) != str(body["label"]):
                return _make_refusal(f"its label is {label}, and not {body['label']}")
            if self.level not in (0, level):
                return _make_refusal(f"it sleeps at level {self.level}: wake it first")
            before = await self._read_ranks(level)
            refusals = [rank["refusal"] for rank in before if rank["refusal"]]
            if refusals:
                return _make_refusal(refusals[0])
            began = time.monotonic()
            if self.level == 0:
                taints = list(body["taints"])
                is_kept = level == 1 and int(body["label"]) >= 0
                self.kept = (int(body["label"]), taints) if is_kept else None
                # First: if the engine fails now, nobody takes the worker for what it was.
                handler._weight_version = body["leaving"]
                await self._route_to([])
                await asyncio.sleep(ROUTING_SECONDS)
                await self._release(level, str(body["mode"]))
            seconds = time.monotonic() - began
            ranks = await self._read_ranks(0)
            return {"status": "ok", "seconds": seconds, "before": before, "ranks": ranks}

    async def _wake(self) -> dict[str, Any]:
        async with self._handler._pause_lock:
            if not self.level:
                return {"status": "ok", "is_awake": True}
            if self.kept is None:
                # Only a refit brings it back.
                return {"status": "ok", "is_awake": False, "level": self.level}
            reply, level = await self._restore(list(self._sleeping)), self.level
            version, taints = self.kept
            self.level, self.kept, self._handler._paused = 0, None, False
            await self._route_to(taints)
            # Last: a worker that is labelled with a version serves it.
            self._handler._weight_version = version
            return {"status": "ok", "version": version, "level": level, **reply}

    async def _release(self, level: int, mode: str) -> None:
        client = self._handler.engine_client
        # From here on it counts as asleep: a failure leaves memory in an unknown state.
        self.level, self._sleeping, self._handler._paused = level, set(TAGS), True
        await client.collective_rpc("rollway_before_sleep", kwargs={"level": level})
        await client.sleep(level, mode)

    async def _restore(self, tags: list[str]) -> dict[str, Any]:
        """Restore the memory of pools. vLLM resumes by itself once all memory is back."""
        before, began = await self._read_ranks(0), time.monotonic()
        try:
            await self._handler.engine_client.wake_up(tags)
        except Exception as error:  # it still sleeps, and may be woken again
            raise RuntimeError(f"{error} ({_describe(before)})") from error
        self._sleeping -= set(tags)
        seconds = time.monotonic() - began
        return {"seconds": seconds, "before": before, "ranks": await self._read_ranks(0)}

    async def _read_ranks(self, level: int) -> list[dict[str, Any]]:
        client = self._handler.engine_client
        ranks: list[dict[str, Any]] = await client.collective_rpc(
            "rollway_memory", kwargs={"level": level}
        )
        return ranks

    async def _answer(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = await self._run(work)
        except Exception as error:  # noqa: BLE001 (it goes into the answer)
            return {"status": "error", "message": str(error) or type(error).__name__}
        return reply

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, also if the caller is gone."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)


def _describe(ranks: list[dict[str, Any]]) -> str:
    return ", ".join(f"{r['device']} has {r['free'] / 1e9:.2f} GB free" for r in ranks)


def _make_refusal(reason: str) -> dict[str, Any]:
    return {"status": "error", "state": "refused", "message": reason}
