"""Orders that put a worker's engine to sleep and wake it. The guard adds them to the worker.

    awake ── sleep ──────────► asleep                     nothing runs, no KV cache, memory released
    asleep ── wake weights ──► weights in memory          nothing runs; level 1: the old ones
              (a refit copies new ones into place, see rollway/fleet/worker_refit.py)
           ── wake all ──────► awake                      refused at level 2 until a refit

vLLM has two pools of memory that sleep: `weights` and `kv_cache`. Level 1 moves the weights to the
host, level 2 forgets them; both forget the KV cache. Addresses stay, only the memory behind them is
gone: whatever touches it ends the process. So Dynamo's own routes that would do so are refused.
Dynamo's `wake_up` is refused too: it resumes the engine after a wake of the weights alone.

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
_UPDATES = ("update_weights_from_disk", "update_weights_from_distributed")
_OWN_ROUTES = ("sleep", "wake_up")
"""Dynamo's own routes."""


class SleepOrders:
    """What sleeps in one engine."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        """Dynamo's object behind the RL routes."""
        self.level = 0
        """The level at which the engine was put to sleep; 0 while all of its memory is there."""
        self._sleeping: set[str] = set()
        self._has_weights = True
        """Whether the weights survive a wake, or were replaced since."""
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def are_weights_asleep(self) -> bool:
        """Whether nothing may be read from or written to the weights."""
        return WEIGHTS in self._sleeping

    def protect(self, route: str, handler: Handler) -> Handler:
        """Return a handler that refuses what must not happen while the engine sleeps."""
        name = route.rpartition("/")[2]

        async def run(body: dict[str, Any]) -> dict[str, Any]:
            if name in _OWN_ROUTES:
                return _make_refusal("rollway_sleep and rollway_wake take the place of this route")
            # `update_weights_from_distributed` also runs methods that change no weights.
            changes = name in _UPDATES and not (body or {}).get("allow_unpaused")
            if changes and self.are_weights_asleep:
                return _make_refusal("its weights sleep: wake them before they are updated")
            if name == "resume_generation" and self._sleeping:
                return _make_refusal("it sleeps: wake it")
            reply = await handler(body)
            if changes and reply.get("status") == "ok":
                self._has_weights = True
            return reply

        guarded = (*_OWN_ROUTES, *_UPDATES, "resume_generation")
        return run if name in guarded else handler

    async def sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Stop generating, `wait`ing for running requests or `abort`ing them; release memory."""
        return await self._run(self._fall_asleep(body))

    async def wake(self, body: dict[str, Any]) -> dict[str, Any]:
        """Restore memory; with all of it the engine generates again."""
        return await self._run(self._wake(body.get("tags")))

    async def read_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the memory of every rank, and why one of them may not sleep at a level."""
        ranks = await self._read_ranks(int(body.get("level", 0)))
        return {"status": "ok", "ranks": ranks, "asleep": self.level}

    async def _fall_asleep(self, body: dict[str, Any]) -> dict[str, Any]:
        handler, level = self._handler, int(body["level"])
        async with handler._pause_lock:
            label = getattr(handler, "_weight_version", None)
            if "label" in body and str(label) != str(body["label"]):
                # The caller gave up before the order came, and the worker serves again.
                return _make_refusal(f"its label is {label}, and not {body['label']}")
            if self.level not in (0, level):
                return _make_refusal(f"it sleeps at level {self.level}: wake it first")
            before = await self._read_ranks(level)
            refusals = [rank["refusal"] for rank in before if rank["refusal"]]
            if refusals:
                return _make_refusal(refusals[0])
            began = time.monotonic()
            if self._sleeping != set(TAGS):
                # From here on it counts as asleep: a failure leaves memory in an unknown state.
                is_first = self.level == 0
                self.level, self._sleeping, handler._paused = level, set(TAGS), True
                self._has_weights = level == 1 and (is_first or self._has_weights)
                await handler.engine_client.collective_rpc(
                    "rollway_before_sleep", kwargs={"level": level}
                )
                await handler.engine_client.sleep(level, str(body["mode"]))
            seconds = time.monotonic() - began
            ranks = await self._read_ranks(0)
            return {"status": "ok", "seconds": seconds, "before": before, "ranks": ranks}

    async def _wake(self, tags: list[str] | None) -> dict[str, Any]:
        async with self._handler._pause_lock:
            wanted = [tag for tag in tags or TAGS if tag in self._sleeping]
            if not self._has_weights and wanted and wanted != [WEIGHTS]:
                return _make_refusal("its weights are gone: refit it")
            before = await self._read_ranks(0)
            began = time.monotonic()
            if wanted:
                try:
                    await self._handler.engine_client.wake_up(wanted)
                except Exception as error:  # noqa: BLE001 (it still sleeps, and may be woken again)
                    return _make_refusal(f"{error} ({_describe(before)})")
                self._sleeping -= set(wanted)
            if not self._sleeping:
                # vLLM resumes by itself once all memory is back.
                self.level, self._has_weights, self._handler._paused = 0, True, False
            seconds = time.monotonic() - began
            ranks = await self._read_ranks(0)
            return {"status": "ok", "seconds": seconds, "before": before, "ranks": ranks}

    async def _read_ranks(self, level: int) -> list[dict[str, Any]]:
        client = self._handler.engine_client
        ranks: list[dict[str, Any]] = await client.collective_rpc(
            "rollway_memory", kwargs={"level": level}
        )
        return ranks

    async def _run(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except Exception as error:  # noqa: BLE001 (it goes into the answer)
            return {"status": "error", "message": str(error) or type(error).__name__}


def _describe(ranks: list[dict[str, Any]]) -> str:
    return ", ".join(f"{r['device']} has {r['free'] / 1e9:.2f} GB free" for r in ranks)


def _make_refusal(reason: str) -> dict[str, Any]:
    return {"status": "error", "state": "refused", "message": reason}
