"""What Rollway's guard calls in an engine: `collective_rpc`, with the methods that orders need.

They do what `rollway/engine/core.py` and the worker extension do in vLLM, except for `keep`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.light.engine import Engine


class EngineClient:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._load_seconds = float(os.environ.get("LIGHT_LOAD_SECONDS", "0"))

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Return the answers of all ranks, of which there is one."""
        return [await getattr(self, f"_{method}")(**kwargs)]

    async def _rollway_stage(self, offer: dict[str, Any], allow_cast: bool, tell: str) -> None:
        from rollway.weights.offer import read_offer

        weights = read_offer(offer, self._engine.worker.secret)
        if weights.transport not in ("checkpoint", "files"):
            worker = self._engine.worker

            def stage(path: Path) -> None:
                worker.stage(weights.identity, path, allow_cast=True)

            worker.broadcasts.receive(weights, stage, tell)
            return
        path = Path(weights.where["path"])
        await asyncio.sleep(self._load_seconds)  # requests go on, as while a real worker stages
        self._engine.worker.stage(weights.identity, path, allow_cast)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{tell}")

    async def _rollway_staging(self, identity: str) -> dict[str, Any]:
        is_ready = self._engine.worker.has_staged(identity)
        if (state := self._engine.worker.get_broadcast_state(identity)) is not None:
            return state
        return {"state": "ready" if is_ready else "failed", "error": "" if is_ready else "not here"}

    async def _rollway_label(self, label: int | None) -> bool:
        self._engine.label = label
        return True

    async def _rollway_cancel(self) -> bool:
        return True

    async def _rollway_refit(
        self, identity: str, mode: str, version: int, leaving: int, release: bool = False
    ) -> dict[str, Any]:
        engine, began = self._engine, time.monotonic()
        if mode == "keep" or not engine.worker.has_staged(identity):
            return {"state": "refused", "error": "it cannot keep requests, or nothing is staged"}
        engine.label = leaving
        await engine.pause("abort" if mode == "abort" else "wait", clear_cache=True)
        stopped = time.monotonic()
        engine.worker.rollway_swap(identity)
        engine.label = version
        engine.resume()
        now = time.monotonic()
        is_waiting = mode == "wait"
        return {
            "state": "served",
            "paused_seconds": now - (stopped if is_waiting else began),
            "waited_seconds": stopped - began if is_waiting else 0.0,
            "stop_seconds": stopped - began,
            "swap_seconds": now - stopped,
            "swap": {"strategy": "reload"},
            "frozen": {},
        }
