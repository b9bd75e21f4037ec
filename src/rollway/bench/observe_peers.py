"""The other ends of an observed stack, each in a process of its own.

    python -m rollway.bench.observe_peers receive     accepts spans and logs, and drops them
    python -m rollway.bench.observe_peers answer      answers every rollout at once
    python -m rollway.bench.observe_peers look URL    keeps the page of a dashboard open
    python -m rollway.bench.observe_peers sample FILE INTERVAL   samples the targets of a file
    python -m rollway.bench.observe_peers day DIR     lives through a day of samples, and ends

Each prints a line of JSON when it is ready, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from rollway import processes
from rollway.bench.observe_day import live_through_day
from rollway.observe.record import Recorder
from rollway.observe.sample import Sampler, Target

ANSWER = {
    "choices": [{"index": 0, "finish_reason": "length", "text": ""}],
    "usage": {"prompt_tokens": 128, "completion_tokens": 16},
    "nvext": {"completion_token_ids": list(range(16)), "worker_id": {"decode_worker_id": 7}},
}
"""A rollout of a mocker."""


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


class _Answering(asyncio.Protocol):
    """Answers every request of a connection with the same rollout, as cheaply as it can."""

    _transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport, self._pending = transport, b""
        body = msgspec.json.encode(ANSWER)
        self._answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, end, rest = self._pending.partition(b"\r\n\r\n")
        _, _, size = head.lower().partition(b"content-length: ")
        if end and len(rest) >= int(size.split(b"\r\n")[0]):
            self._pending = b""  # a client sends one request at a time
            self._transport.write(self._answer)


async def answer() -> None:
    """Stand in for a frontend."""
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0)
    _tell(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
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


async def sample(file: Path, interval: float) -> None:
    """Sample and record the targets that a file lists, beside that file."""
    targets = [Target(**fields) for fields in json.loads(file.read_text())]
    sampler = Sampler(Recorder(file.parent, "supervisor"), lambda: targets, interval=interval)
    sampler.start()
    _tell()
    await asyncio.Event().wait()


def _tell(**fields: str) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    processes.die_with_parent()
    what, *arguments = sys.argv[1:]
    if what == "receive":
        asyncio.run(receive())
    elif what == "answer":
        asyncio.run(answer())
    elif what == "look":
        asyncio.run(look(*arguments))
    elif what == "day":
        asyncio.run(live_through_day(Path(arguments[0])))
    else:
        asyncio.run(sample(Path(arguments[0]), float(arguments[1])))


if __name__ == "__main__":
    main()
