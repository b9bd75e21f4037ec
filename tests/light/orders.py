"""What Rollway's guard calls in an engine: `collective_rpc`, with the methods that orders need, and
vLLM's own sleep and wake.

They do what `rollway/engine/core.py` and the worker extension do in vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.light.engine import Engine, Pause

TAGS = ("weights", "kv_cache")


class EngineClient:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._load_seconds = float(os.environ.get("LIGHT_LOAD_SECONDS", "0"))
        self._is_cancelled = asyncio.Event()
        self._sleeping: set[str] = set()

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Return the answers of all ranks, of which there is one."""
        return [await getattr(self, f"_{method}")(**kwargs)]

    async def sleep(self, level: int, mode: Any) -> None:
        await self._engine.pause(mode, True)
        self._sleeping = set(TAGS)
        if level == 2:
            self._engine.worker.forget()

    async def wake_up(self, tags: list[str]) -> None:
        self._sleeping -= set(tags)
        if not self._sleeping:
            self._engine.resume()  # as vLLM does

    async def _rollway_memory(self, level: int) -> dict[str, Any]:
        refuses = level and os.environ.get("LIGHT_NO_SLEEP_MODE") == "1"
        return {
            "device": "light",
            "free": 10**9 * (1 + len(self._sleeping)),
            "total": 4 * 10**9,
            "resident": 0,
            "asleep_bytes": dict.fromkeys(self._sleeping, 10**9),
            "releases": True,
            "refusal": "set `enable-sleep-mode: true`" if refuses else "",
        }

    async def _rollway_before_sleep(self, level: int) -> None:
        self._engine.worker.rollway_unstage()

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

    async def _rollway_unstage(self, identity: str) -> None:
        self._engine.worker.rollway_unstage(identity)

    async def _rollway_label(self, label: int | None) -> bool:
        self._engine.label = label
        return True

    async def _rollway_cancel(self) -> bool:
        self._is_cancelled.set()
        return True

    async def _rollway_refit(
        self, identity: str, mode: str, version: int, leaving: int, release: bool = False
    ) -> dict[str, Any]:
        engine, began = self._engine, time.monotonic()
        if not engine.worker.has_staged(identity) or "weights" in self._sleeping:
            return {"state": "refused", "error": "nothing is staged, or the weights sleep"}
        was_paused, label = engine.pause_state is not Pause.NONE, engine.label
        engine.label = leaving
        if not await self._stop(mode):
            engine.label = label
            if not was_paused:
                engine.resume()
            return {"state": "refused", "error": "the refit was cancelled"}
        stopped = time.monotonic()
        engine.worker.rollway_swap(identity)
        engine.label = version
        # vLLM appends a part to Dynamo's id of a request.
        requests = engine.requests if mode == "keep" else {}
        frozen = {f"{key}-0": entry.count for key, entry in requests.items()}
        if mode != "keep":
            engine.abort_others()
        if not self._sleeping:
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
            "frozen": frozen,
        }

    async def _stop(self, mode: Any) -> bool:
        """Pause the engine; return False if the refit was cancelled before that."""
        self._is_cancelled.clear()
        pausing = asyncio.create_task(self._engine.pause(mode, clear_cache=True))
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        await asyncio.wait({pausing, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if not pausing.done():
            pausing.cancel()
            return False
        pausing.result()
        return True
