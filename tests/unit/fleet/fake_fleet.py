"""Fake Dynamo workers: the admin routes with scripted failures, over real HTTP.

For faults that a real worker does not show on demand. tests/stack has the tests on real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

ROUTES = [
    "pause_generation", "resume_generation", "flush_cache", "update_weights_from_disk",
    "get_weight_version", "set_weight_version", "liveness_probe",
]  # fmt: skip


@dataclass
class FakeWorker:
    instance_id: int
    version: int | None = 0
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    fail: dict[str, Any] = field(default_factory=dict)
    """The failure of each route: an HTTP status, a message, seconds to hang, or a list of these."""
    routes: list[str] = field(default_factory=lambda: list(ROUTES))
    error: str | None = None
    taints: list[str] = field(default_factory=list)
    ignores_updates: bool = False
    """Whether it reports success for an update and keeps its version."""

    async def handle(self, request: web.Request) -> web.Response:
        route = request.match_info["route"]
        if route.startswith("rollway_") and route not in self.routes:
            return web.Response(status=404)  # it has no guard
        self.calls.append(route)
        failure = self.fail.get(route)
        if isinstance(failure, list):
            failure = failure.pop(0) if failure else None
        if isinstance(failure, float):
            await asyncio.sleep(failure)  # a worker that hangs for so long
        elif isinstance(failure, int):
            return web.Response(status=failure, text="failure")
        elif isinstance(failure, str):
            return _reply({"status": "error", "message": failure})
        body = await request.json()
        if route == "update_weights_from_disk":
            if not self.paused:
                return _reply({"status": "error", "message": "must be paused"})
            if not self.ignores_updates:
                self.version = body["weight_version"]
        elif route == "set_weight_version":
            self.version = body["weight_version"]
        elif route == "update/model_taints":
            self.taints = body["taints"]
        elif route in ("pause_generation", "resume_generation"):
            self.paused = route == "pause_generation"
        return _reply({"status": "ok", "version": self.version, "alive": True})


def _reply(body: dict[str, Any]) -> web.Response:
    # Dynamo sends JSON as text/plain.
    return web.Response(text=json.dumps(body), content_type="text/plain")


@asynccontextmanager
async def fake_fleet(*workers: FakeWorker) -> AsyncIterator[str]:
    """Serve the workers and their listing; yields the listing's base URL."""
    runners = []

    async def serve(app: web.Application) -> str:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    urls = []
    for worker in workers:
        app = web.Application()
        app.router.add_post("/engine/{route:.+}", worker.handle)
        urls.append(await serve(app))

    async def listing(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "workers": [
                    {
                        "instance_id": worker.instance_id,
                        "system_url": url,
                        "model": "tiny",
                        "routes": worker.routes,
                        "error": worker.error,
                    }
                    for worker, url in zip(workers, urls, strict=True)
                ]
            }
        )

    app = web.Application()
    app.router.add_get("/v1/rl/workers", listing)
    try:
        yield await serve(app)
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def serving(path: str, answer: Any) -> AsyncIterator[str]:
    """Serve one GET route; `answer` is JSON, or a function that returns it."""

    async def handle(_: web.Request) -> web.Response:
        return web.json_response(answer() if callable(answer) else answer)

    app = web.Application()
    app.router.add_get(path, handle)
    async with TestServer(app, host="127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.port}"
