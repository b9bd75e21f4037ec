"""Answers of the gateway when a turn cannot be recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rollway.gateway.server import Gateway
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.gateway.upstream import ChatReply, ChatRequest
from rollway.rollout.completion import Completion
from rollway.versions import Ticket
from tests.awkward_tokenizer import make
from tests.security.small_disk import fill
from tests.waiting import wait_until_async

pytestmark = pytest.mark.timeout(60)
TICKET = Ticket(0, None, None, 0)
HEADERS = {"x-rollway-session": "s"}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@dataclass
class Engine:
    """An engine that always samples the same answer, once `may_answer` is set."""

    template: Template
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0

    def make_completion(self) -> Completion:
        ids = [*self.template.tokenizer.encode("yes"), self.template.end_of_turn]
        return Completion(ids, [-0.5] * len(ids), "stop", 7, 0)

    async def ask(self, request: ChatRequest) -> ChatReply:
        self.requests += 1
        await self.may_answer.wait()
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "text": "yes", "finish_reason": "stop"}
        return ChatReply(request, {"choices": [choice]}, self.make_completion(), TICKET)

    async def stream(self, request: ChatRequest) -> AsyncIterator[Any]:
        self.requests += 1
        yield SimpleNamespace(raw={"choices": [{"index": 0, "delta": {"content": "yes"}}]})
        await self.may_answer.wait()
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield SimpleNamespace(raw=end)
        yield ChatReply(request, end, self.make_completion(), TICKET)


@dataclass
class RunningGateway:
    client: TestClient[Any, Any]
    engine: Engine

    async def chat(self, messages: list[dict[str, Any]], **body: Any) -> Any:
        body = {"model": "m", "messages": messages, **body}
        return await self.client.post("/v1/chat/completions", json=body, headers=HEADERS)

    async def get(self, path: str) -> Any:
        async with self.client.get(f"/v1/rollway/{path}") as answer:
            return await answer.json()

    async def wait_for_requests(self, count: int) -> None:
        await wait_until_async(lambda: self.engine.requests >= count)


@asynccontextmanager
async def serve(path: Path, tokenizer: Path) -> AsyncIterator[RunningGateway]:
    template = Template(tokenizer)
    engine: Any = Engine(template)
    store = SessionStore(path)
    gateway = Gateway("m", template, store, engine, engine, 4096)
    try:
        async with TestClient(TestServer(gateway.app())) as client:
            yield RunningGateway(client, engine)
    finally:
        store.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make().save_pretrained(str(path))
    return path


async def test_deleting_a_session_during_a_turn_hangs_no_request(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "gateway.sqlite"
    async with serve(path, tokenizer) as gateway:
        gateway.engine.may_answer.set()
        first = await (await gateway.chat(QUESTION)).json()
        assert "recorded" not in first
        history = [*QUESTION, first["choices"][0]["message"], *QUESTION]
        gateway.engine.may_answer.clear()
        in_flight = asyncio.create_task(gateway.chat(history))
        await gateway.wait_for_requests(2)
        async with gateway.client.delete("/v1/rollway/trajectories/s") as deleted:
            assert deleted.status == 200
        gateway.engine.may_answer.set()
        answer = await in_flight
        body = await answer.json()
        assert answer.status == 200 and body["recorded"] is False
        assert answer.headers["x-rollway-recorded"] == "false"
        assert (await gateway.get("sessions"))["sessions"] == {}
        # This request once looped for ever: it continued a turn that was its own parent.
        later = [*history, body["choices"][0]["message"], *QUESTION]
        assert "recorded" not in await (await gateway.chat(later)).json()
        assert len((await gateway.get("trajectories/s"))["trajectories"]) == 1
    async with serve(path, tokenizer) as again:
        assert (await again.get("sessions"))["sessions"] == {"s": 1}


async def test_deleting_a_session_during_a_stream_is_reported_at_its_end(
    tmp_path: Path, tokenizer: Path
) -> None:
    async with serve(tmp_path / "gateway.sqlite", tokenizer) as gateway:
        answer = await gateway.chat(QUESTION, stream=True)
        await gateway.wait_for_requests(1)
        async with gateway.client.delete("/v1/rollway/trajectories/s") as deleted:
            assert deleted.status == 200
        gateway.engine.may_answer.set()
        events = [line for line in (await answer.text()).split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["recorded"] is False
        assert (await gateway.get("sessions"))["sessions"] == {}


async def test_a_failed_request_leaves_no_session(tmp_path: Path, tokenizer: Path) -> None:
    async with serve(tmp_path / "gateway.sqlite", tokenizer) as gateway:
        for wrong in ({"max_tokens": -1}, {"n": 99}):
            assert (await gateway.chat(QUESTION, **wrong)).status == 400
        pending = asyncio.create_task(gateway.chat(QUESTION))
        await gateway.wait_for_requests(1)
        assert (await gateway.get("sessions"))["sessions"] == {}
        pending.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_disk_is_answered_with_507(
    small_disk: Path, tokenizer: Path, stream: bool
) -> None:
    async with serve(small_disk / "gateway.sqlite", tokenizer) as gateway:
        gateway.engine.may_answer.set()
        assert (await gateway.chat(QUESTION)).status == 200
        filler = fill(small_disk)
        acknowledged = 1
        for _ in range(64):
            answer = await gateway.chat(QUESTION, n=1 if stream else 8, stream=stream)
            text = await answer.text()
            if "disk is full" in text:
                break
            acknowledged += 1 if stream else 8
        else:
            pytest.fail("the full disk was never reported")
        assert "507" in text and answer.status == (200 if stream else 507)
        assert (await gateway.get("sessions"))["sessions"] == {"s": acknowledged}
        filler.unlink()
        assert (await gateway.chat(QUESTION)).status == 200
        assert (await gateway.get("sessions"))["sessions"] == {"s": acknowledged + 1}
        before = (await gateway.get("trajectories/s"))["trajectories"]
    async with serve(small_disk / "gateway.sqlite", tokenizer) as again:
        after = await again.get("trajectories/s")
        assert after["trajectories"] == before
        assert after["turns"] == acknowledged + 1
