"""A stand-in for a Dynamo frontend that answers immediately, so that only the gateway is measured.

It accepts the gateway's requests and returns invented token ids and log-probs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from benchmarks.children import serve

MODEL = "cheap"
_CONTEXT = 4096
_WORKER = {"worker_id": {"decode_worker_id": 1}}


def _make_app() -> web.Application:
    app = web.Application(client_max_size=2**26)
    numbers = itertools.count()

    async def models(request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "owned_by": "nvidia", "context_window": _CONTEXT}
        return _json({"object": "list", "data": [entry]})

    async def workers(request: web.Request) -> web.Response:
        return _json({"workers": []})  # without workers, answers carry no versions

    async def chat(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        ids = _make_ids(next(numbers), int(body["max_tokens"]))
        prompt = len(body["nvext"]["token_data"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "total_tokens": prompt + len(ids),
        }
        if not body.get("stream"):
            return _json(_make_answer("message", ids, "length") | {"usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        # When its own client disconnects, the gateway closes this connection too.
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            for event in _make_events(ids, usage):
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/rl/workers", workers)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _make_ids(number: int, count: int) -> list[int]:
    """Repeat the digits of the answer's number, one token each: no two answers are equal."""
    digits = itertools.cycle(f"{number:012d}")
    return [ord(digit) for digit in itertools.islice(digits, count)]


def _make_answer(part: str, ids: list[int], finish: str | None) -> dict[str, Any]:
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


def _make_events(ids: list[int], usage: dict[str, int]) -> Iterator[dict[str, Any]]:
    middle = len(ids) // 2
    yield _make_answer("delta", ids[:middle], None)
    yield _make_answer("delta", ids[middle:], "length")
    yield {"id": "cheap", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


if __name__ == "__main__":
    asyncio.run(serve(_make_app()))
