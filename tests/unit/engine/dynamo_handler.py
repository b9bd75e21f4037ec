"""A fake of Dynamo's handler with vLLM's engine client behind it, and the guard's orders for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from rollway.engine.guard import EngineOrders

BOTH = {"weights", "kv_cache"}
LEAVING = -7
"""The label of a worker that has served nothing since version 4."""


class Handler:
    """Dynamo's object behind the RL routes, and its engine client."""

    def __init__(self) -> None:
        self._pause_lock = asyncio.Lock()
        self._weight_version: Any = 4
        self._paused = False
        self.engine_client = self
        self.calls: list[Any] = []
        """Methods of the engine, and taints as tuples."""
        self.label_at: dict[Any, Any] = {}
        """The worker's label at the last of each of them."""
        self.report: dict[str, Any] | Exception = {"state": "served", "frozen": {}}
        self.labels: list[int | None] = []
        """The labels that the engine was given."""
        self.is_hooked = True
        """Whether the engine has `rollway/engine/core.py`."""
        self.holds: dict[str, asyncio.Event] = {}
        """Methods of the engine that wait."""
        self.fails: dict[str, Exception] = {}
        """Methods of the engine's client that fail."""
        self.staged: dict[str, Any] = {}
        self.notifications = 2
        self.states: list[list[str]] = []
        """What its two ranks report, call after call; ready in the end."""
        self.asleep: set[str] = set()
        self.refusal = ""
        """Why the engine may not sleep."""

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        self.label_at[call] = self._weight_version

    async def _run(self, call: Any, method: str) -> None:
        self._note(call)
        if method in self.holds:
            await self.holds[method].wait()
        if method in self.fails:
            raise self.fails[method]

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        if method == "rollway_memory":
            free = 100 * len(self.asleep) * 10**7
            refusal = self.refusal if kwargs["level"] else ""
            return [{"device": "cuda:0", "free": free, "releases": True, "refusal": refusal}]
        await self._run(method, method)
        if method == "rollway_label":
            self.labels.append(kwargs["label"])
            return [self.is_hooked]
        if method == "rollway_refit":
            if isinstance(self.report, Exception):
                raise self.report
            return [dict(self.report)]
        if method == "rollway_stage":
            return await self._stage(kwargs)
        if method in ("rollway_unstage", "rollway_before_sleep", "rollway_cancel"):
            return [True]
        states = self.states.pop(0) if self.states else ["ready", "ready"]
        return [{"state": state, "error": ""} for state in states]

    async def _stage(self, kwargs: dict[str, Any]) -> list[Any]:
        assert "weights" not in self.asleep, "the memory of the weights is gone"
        self.staged = kwargs
        for _ in range(self.notifications):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, f"\0{kwargs['tell']}")
        return [None, None]

    async def sleep(self, level: int, mode: str) -> None:
        await self._run(("sleep", level, mode), "sleep")
        self.asleep = set(BOTH)

    async def wake_up(self, tags: list[str]) -> None:
        await self._run(("wake_up", *sorted(tags)), "wake_up")
        self.asleep -= set(tags)

    async def set_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        self._weight_version = body["weight_version"]
        return {"status": "ok"}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": self._weight_version}

    async def run_route(self, body: dict[str, Any]) -> dict[str, Any]:
        self._note("route")
        return {"status": "ok"}

    resume_generation = update_weights_from_distributed = own_sleep = own_wake = run_route

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        self.calls.append(request)
        yield {"token_ids": [1, 2]}
        await asyncio.sleep(0)  # it really suspends
        yield {"token_ids": [3], "finish_reason": "length"}


def add_orders(handler: Handler) -> tuple[EngineOrders, dict[str, Any]]:
    """Return the guard's orders of a worker, and all its routes."""
    orders = EngineOrders()

    async def set_taints(body: dict[str, Any]) -> dict[str, Any]:
        handler._note(tuple(body["taints"]))
        return {"status": "ok"}

    handlers = {
        "update/model_taints": set_taints,
        "set_weight_version": handler.set_weight_version,
        "get_weight_version": handler.get_weight_version,
        "resume_generation": handler.resume_generation,
        "update_weights_from_distributed": handler.update_weights_from_distributed,
        "control/sleep": handler.own_sleep,
        "control/wake_up": handler.own_wake,
    }
    routes = {name: orders.wrap(name, route) for name, route in handlers.items()}
    return orders, routes | orders.list_own()
