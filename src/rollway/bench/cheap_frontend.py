"""A stand-in for a Dynamo frontend that answers at once: what is left to measure is the gateway.

    python -m rollway.bench.cheap_frontend        # prints its address, ends when its stdin ends

It takes the requests that the gateway sends and answers with token ids and log-probs of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

MODEL = "cheap"
_CONTEXT = 4096
_WORKER = {"worker_id": {"decode_worker_id": 1}}


def _app() -> web.Application:
    app = web.Application(client_max_size=2**26)
    numbers = itertools.count()

    async def models(request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "owned_by": "nvidia", "context_window": _CONTEXT}
        return _json({"object": "list", "data": [entry]})

    async def workers(request: web.Request) -> web.Response:
        return _json({"workers": []})  # no versions: answers carry none

    async def chat(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        ids = _sample(next(numbers), int(body["max_tokens"]))
        usage = {
            "prompt_tokens": len(body["nvext"]["token_data"]),
            "completion_tokens": len(ids),
            "total_tokens": len(body["nvext"]["token_data"]) + len(ids),
        }
        if not body.get("stream"):
            return _json(_answer("message", ids, "length") | {"usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # the gateway's own client has vanished
            await response.prepare(request)
            for event in _events(ids, usage):
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/rl/workers", workers)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _sample(number: int, count: int) -> list[int]:
    """Digits that no other answer has, as one token each."""
    digits = [ord(digit) for digit in f"{number:012d}"]
    return (digits * (count // len(digits) + 1))[:count]


def _answer(part: str, ids: list[int], finish: str | None) -> dict[str, Any]:
    logprobs = [{"token": chr(token), "logprob": -token / 100, "token_id": token} for token in ids]
    choice = {
        "index": 0,
        part: {"role": "assistant", "content": "".join(map(chr, ids))},
        "finish_reason": finish,
        "logprobs": {"content": logprobs},
    }
    kind = "chat.completion" if part == "message" else "chat.completion.chunk"
    extra = {"completion_token_ids": ids, **_WORKER}
    return {"id": "cheap", "object": kind, "created": 0, "choices": [choice], "nvext": extra}


def _events(ids: list[int], usage: dict[str, int]) -> Iterator[dict[str, Any]]:
    middle = len(ids) // 2
    yield _answer("delta", ids[:middle], None)
    yield _answer("delta", ids[middle:], "length")
    yield {"id": "cheap", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _serve() -> None:
    runner = web.AppRunner(_app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    try:
        # The owner holds the other end: it is gone when nothing is to be read.
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve())
