"""A gateway in front of a frontend that answers as Dynamo does, both over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rollway.gateway.command import listen
from rollway.gateway.server import Gateway
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.gateway.upstream import CHAT, Upstream
from rollway.http import Http
from rollway.rollout.wire import COMPLETIONS
from rollway.versions import FleetVersions
from tests.awkward_tokenizer import PLAIN, build, make

CONTEXT = 2048
USER = {"role": "user", "content": "hello"}
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 8}
_SAMPLED = [*make().encode("ok"), make().eos_token_id]


class Frontend:
    """A frontend that answers every request with `ok`, unless a test sets another answer."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.error_answer: tuple[int, Any] | None = None
        """Status and body of every answer, unless it is `ok`."""
        self.may_answer = asyncio.Event()
        """Every answer waits for this event."""
        self.may_answer.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        await self.may_answer.wait()
        if self.error_answer is not None:
            status, content = self.error_answer
            return web.json_response(content, status=status)
        whole = _build_answer(body, chat=request.path.endswith("chat/completions"))
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        message = whole["choices"][0].pop("message", None)
        if message is not None:
            whole["choices"][0]["delta"] = message
        await response.write(b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n")
        return response


def _build_answer(body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    ids = _SAMPLED[: body["max_tokens"]]
    reason = "stop" if len(ids) == len(_SAMPLED) else "length"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": "ok"}
        choice["logprobs"] = {"content": [{"logprob": -0.5, "token_id": token} for token in ids]}
    else:
        choice |= {"text": "ok", "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
    prompt = body["nvext"]["token_data"]
    return {
        "id": "1",
        "object": "chat.completion" if chat else "text_completion",
        "choices": [choice],
        "nvext": {
            "completion_token_ids": ids,
            "worker_id": {"decode_worker_id": 7},
            "detailed_finish_reason": reason,
        },
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


class Service:
    """A running gateway and a client of it."""

    def __init__(self, gateway: Gateway, frontend: Frontend, port: int) -> None:
        self.gateway, self.frontend, self.port = gateway, frontend, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def post(
        self, path: str, body: Any, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """POST JSON or raw bytes; return the status and the decoded answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **(headers or {})}
        return await self.call("POST", path, data=data, headers=all_headers)

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", {**CHAT_BODY, **fields}, headers=headers)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return await self.call("GET", path, headers=headers)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as answer:
            raw = await answer.read()
            if answer.content_type == "application/json":
                return answer.status, json.loads(raw)
            return answer.status, raw


@asynccontextmanager
async def serve_gateway(
    directory: Path,
    *,
    template: str = PLAIN,
    context: int = CONTEXT,
    frontend_url: str = "",
    kind: type[Gateway] = Gateway,
    upstream: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Service]:
    """Serve on a free port until the block ends; `frontend_url` replaces the frontend's own, and
    `upstream` has options of the client that asks it."""
    frontend = Frontend()
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/v1/chat/completions", frontend.answer)
    app.router.add_post("/v1/completions", frontend.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    frontend.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    store = SessionStore(directory / "gateway.sqlite")
    async with Http() as http:
        chat, text = (
            Upstream(
                http,
                frontend_url or frontend.url,
                "m",
                FleetVersions(),
                wire=wire,
                **{"patience": 0.5, **(upstream or {})},
            )
            for wire in (CHAT, COMPLETIONS)
        )
        tokenizer = Template(build(directory / "tokenizer", template=template))
        gateway = kind("m", tokenizer, store, chat, text, context, **options)
        listener = await listen(gateway, "127.0.0.1", 0)
        running = Service(gateway, frontend, listener.port)
        try:
            yield running
        finally:
            frontend.may_answer.set()
            await running.http.close()
            await listener.close()
            store.close()
            await runner.cleanup()


def read_error(answer: Any) -> dict[str, Any]:
    """Return the error of an answer, which must have OpenAI's form and nothing else."""
    assert isinstance(answer, dict) and set(answer) == {"error"}, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "code", "param"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert "://" not in error["message"] and "127.0.0.1:" not in error["message"]
    assert "Traceback" not in error["message"]
    return dict(error)
