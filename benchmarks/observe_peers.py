"""The other ends of an observed stack, each in a process of its own.

    python -m benchmarks.observe_peers receive     accepts spans and logs, and drops them
    python -m benchmarks.observe_peers look URL    keeps the page of a dashboard open

Each prints a line of JSON when it is ready.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web

from benchmarks.children import serve


async def receive() -> None:
    """Accept every POST."""

    async def accept(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/{path:.*}", accept)
    await serve(app)


async def look(url: str) -> None:
    """Read the stream of a page until it ends."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url.rstrip('/')}/api/stream") as answer,
    ):
        answer.raise_for_status()
        print("{}", flush=True)
        async for _ in answer.content.iter_any():
            pass


def main() -> None:
    what, *arguments = sys.argv[1:]
    asyncio.run(receive() if what == "receive" else look(*arguments))


if __name__ == "__main__":
    main()
