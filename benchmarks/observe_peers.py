"""The other ends of an observed stack, each in a process of its own.

    python -m benchmarks.observe_peers receive     accepts spans and logs, and drops them
    python -m benchmarks.observe_peers look URL    keeps the page of a dashboard open

Each prints a line of JSON when it is ready, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
from aiohttp import web

from rollway import processes


async def receive() -> None:
    """Accept every POST."""

    async def accept(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/{path:.*}", accept)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _tell(url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces")
    await asyncio.Event().wait()


async def look(url: str) -> None:
    """Read the stream of a page until it ends."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url.rstrip('/')}/api/stream") as answer,
    ):
        answer.raise_for_status()
        _tell()
        async for _ in answer.content.iter_any():
            pass


def _tell(**fields: str) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    processes.die_with_parent()
    what, *arguments = sys.argv[1:]
    asyncio.run(receive() if what == "receive" else look(*arguments))


if __name__ == "__main__":
    main()
