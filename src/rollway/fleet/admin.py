"""Admin calls to one Dynamo worker: `POST {admin_url}/engine/<route>`, typed and bounded.

Dynamo answers HTTP 200 also when a call failed, with `status: error` in the body; here that is an
`AdminError`. Calls that may be repeated without harm are retried; a weight update is sent once,
since an update whose answer was lost may have been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollway.errors import AdminError, RequestFailed, RollwayError, Unreachable
from rollway.fleet.discovery import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry

PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True, slots=True)
class AdminTimeouts:
    """Seconds one attempt of a call may take."""

    probe: float = 10.0
    pause: float = 300.0
    update: float = 720.0


class Admin:
    """The admin routes of Dynamo's vLLM workers."""

    def __init__(self, http: Http, timeouts: AdminTimeouts | None = None) -> None:
        self._http = http
        self._timeouts = timeouts or AdminTimeouts()

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. `wait` lets running requests finish, `keep` freezes them, `abort` ends
        them. The KV cache is cleared unless told otherwise: blocks of one policy must not serve
        the next."""
        body = {"mode": mode, "clear_cache": clear_cache}
        await self._post(worker, "pause_generation", body, self._timeouts.pause, IDEMPOTENT)

    async def resume(self, worker: Worker) -> None:
        await self._post(worker, "resume_generation", {}, self._timeouts.pause, IDEMPOTENT)

    async def flush_cache(self, worker: Worker) -> None:
        """Drop cached prefixes. Dynamo says ok also when vLLM refused because requests hold
        blocks, so flush only what is paused and drained."""
        await self._post(worker, "flush_cache", {}, self._timeouts.probe, IDEMPOTENT)

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a checkpoint directory the worker can read; the worker must be paused."""
        body = {"model_path": str(path), "weight_version": version}
        await self._post(worker, "update_weights_from_disk", body, self._timeouts.update, ONCE)

    async def weight_version(self, worker: Worker) -> int | None:
        """The version the worker declares; None before any was declared."""
        reply = await self._post(worker, "get_weight_version", {}, self._timeouts.probe, IDEMPOTENT)
        version = reply.get("version")
        if version is None:
            return None
        try:
            return int(version)
        except (TypeError, ValueError):
            raise AdminError(
                f"{worker} declares the weight version {version!r}, which is not a whole number.",
                "Rollway numbers versions; refit the worker with `fleet.refit(path, version)`.",
            ) from None

    async def declare_version(self, worker: Worker, version: int) -> None:
        """Set the label alone: the worker does not check it against its weights."""
        body = {"weight_version": version}
        await self._post(worker, "set_weight_version", body, self._timeouts.probe, IDEMPOTENT)

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Say which requests the router may send here: those that require one of these, and those
        that require none. The worker does not list this route, but has it."""
        await self._call(worker, "update/model_taints", {"taints": list(taints)})

    async def alive(self, worker: Worker) -> bool:
        try:
            reply = await self._post(worker, "liveness_probe", {}, self._timeouts.probe, ONCE)
        except RollwayError:
            return False
        return reply.get("alive") is True

    async def _post(
        self, worker: Worker, route: str, body: dict[str, Any], timeout: float, retry: Retry
    ) -> dict[str, Any]:
        if route not in worker.routes:
            raise AdminError(
                f"{worker} does not offer `{route}`.",
                "Start it with --enable-rl (Rollway does so for engine: vllm).",
            )
        return await self._call(worker, route, body, timeout, retry)

    async def _call(
        self,
        worker: Worker,
        route: str,
        body: dict[str, Any],
        timeout: float | None = None,
        retry: Retry = IDEMPOTENT,
    ) -> dict[str, Any]:
        if worker.error is not None:
            raise AdminError(
                f"{worker} is listed with an error: {worker.error}.",
                "It is hung or dead; a supervised worker is restarted by its stack.",
            )
        timeout = timeout or self._timeouts.probe
        try:
            reply = await self._http.post(
                f"{worker.admin_url}/engine/{route}", body, timeout=timeout, retry=retry
            )
        except (RequestFailed, Unreachable) as error:
            raise AdminError(f"{worker}: {error.message}", error.hint) from error
        if not isinstance(reply, dict) or reply.get("status") not in ("ok", "success"):
            said = reply.get("message") if isinstance(reply, dict) else reply
            raise AdminError(f"{worker} refused `{route}`: {said or 'no reason given'}.")
        return reply
