"""A stand-in for an admin server: it records every request as its bytes, and answers what a test
sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ROUTES = ["pause_generation", "resume_generation"]


@dataclass
class Recorded:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class RecordingServer:
    """Answers `{}` to everything, unless a test sets another answer for a path."""

    url: str = ""
    requests: list[Recorded] = field(default_factory=list)
    answers: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    """For each path: statuses and bodies. The last answer stays."""
    silent: set[str] = field(default_factory=set)
    """Paths whose requests are never answered."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, path: str, *answers: tuple[int, Any]) -> None:
        self.answers[path] = list(answers)

    def serve_models(self, *entries: dict[str, Any]) -> None:
        self.answer("/v1/models", (200, {"data": list(entries)}))

    @property
    def lines(self) -> list[str]:
        return [request.line for request in self.requests]

    def sent_to(self, path: str) -> list[bytes]:
        return [request.body for request in self.requests if request.path == path]

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(Recorded(request.method, request.path_qs, body, headers))
        if request.path in self.silent:
            await self.ended.wait()
        answers = self.answers.get(request.path, [(200, {})])
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=status, text=text)


@asynccontextmanager
async def serve(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[RecordingServer]:
    """Serve on a free port until the block ends."""
    server = RecordingServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server._handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    server.url = f"http://{host}:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.ended.set()
        await runner.cleanup()


def list_workers(*urls: str, **more: Any) -> dict[str, Any]:
    entries = [
        {"instance_id": number, "model": "m", "system_url": url, "routes": ROUTES, **more}
        for number, url in enumerate(urls, 1)
    ]
    return {"protocol_version": 1, "workers": entries}
