"""Requests that take long to prepare: they hold up nobody else, and they end."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.gateway import pages
from rollway.gateway.recorder import Session, Turn
from rollway.gateway.replies import Refused
from rollway.gateway.threads import Threads
from tests.awkward_tokenizer import PLAIN
from tests.security.gateway_service import USER, Service, error_of, service

# A loop as long as the number in the settings says, and squared.
_LOOPS = "{% for a in range(n or 0) %}{% for b in range(n or 0) %}{% endfor %}{% endfor %}" + PLAIN
_NESTED = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}" + PLAIN
)


async def _answers_meanwhile(gateway: Service, slow: asyncio.Task[Any]) -> int:
    """How many other requests are answered before a slow one is."""
    count = 0
    while not slow.done():
        assert (await gateway.get("/health"))[0] == 200
        count += 1
        await asyncio.sleep(0.01)
    return count


@pytest.mark.parametrize("how", ["settings", "messages"])
async def test_a_template_that_loops_is_ended(tmp_path: Path, how: str) -> None:
    template = _LOOPS if how == "settings" else _NESTED
    fields: dict[str, Any] = {"chat_template_kwargs": {"n": 90_000}}
    if how == "messages":
        fields = {"messages": [{"role": "user", "content": "a"}] * 2_000}
    async with service(tmp_path, template=template) as gateway:
        gateway.gateway.template.threads.seconds = 1.0
        slow = asyncio.create_task(gateway.chat(**fields))
        assert await _answers_meanwhile(gateway, slow) > 3
        status, answer = await slow
        assert status == 400 and "took longer" in error_of(answer)["message"]
        assert (await gateway.chat())[0] == 200
        while _workers():  # the loop itself was ended, not only its request
            await asyncio.sleep(0.05)


async def test_work_that_cannot_be_ended_takes_its_slot_and_no_more() -> None:
    """A call into C is not interrupted: with all slots lost there is an error and no hang."""
    threads = Threads(2, seconds=0.05, wait_seconds=0.05)
    locks = [threading.Lock(), threading.Lock()]
    for lock in locks:
        lock.acquire()
        with pytest.raises(UsageError, match="took longer"):
            await threads.run(lambda lock=lock: lock.acquire(timeout=60), "It")  # type: ignore[misc]
    with pytest.raises(Refused, match="busy") as refused:
        await threads.run(int, "It")
    assert refused.value.status == 503
    for lock in locks:
        lock.release()
    while _workers():
        await asyncio.sleep(0.01)
    threads.wait_seconds = 60.0
    assert await threads.run(lambda: 5, "It") == 5


async def test_a_client_that_leaves_ends_its_work(tmp_path: Path) -> None:
    async with service(tmp_path, template=_LOOPS) as gateway:
        slow = asyncio.create_task(gateway.chat(chat_template_kwargs={"n": 90_000}))
        while not _workers():
            await asyncio.sleep(0.01)
        slow.cancel()
        while _workers():
            await asyncio.sleep(0.05)
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


@pytest.mark.parametrize("route", ["/tokenize", "/v1/completions"])
async def test_text_that_cannot_fit_is_not_tokenized(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB blocked everybody for 12 s."""
    async with service(tmp_path) as gateway:
        tokenized: list[int] = []
        tokenizer = gateway.gateway.template.tokenizer
        encode = type(tokenizer)._encode_plus

        def count(self: Any, text: Any, *args: Any, **options: Any) -> Any:
            tokenized.append(len(text))
            return encode(self, text, *args, **options)

        monkeypatch.setattr(type(tokenizer), "_encode_plus", count)
        status, answer = await gateway.post(route, {"prompt": "1 2 3 " * 1_400_000})
        assert status == 400 and error_of(answer)["code"] == "context_length_exceeded"
        assert sum(tokenized) < 1_000_000
        long = [{"role": "user", "content": "1 2 3 " * 1_400_000}]
        status, answer = await gateway.chat(messages=long)
        assert status == 400 and error_of(answer)["code"] == "context_length_exceeded"
        assert sum(tokenized) < 1_000_000
        assert gateway.frontend.bodies == []


async def test_long_text_is_tokenized_beside_other_requests(tmp_path: Path) -> None:
    async with service(tmp_path, context=4_000_000) as gateway:
        for route, body in (
            ("/tokenize", {"prompt": "there is no end to it, " * 20_000}),
            ("/tokenize", {"messages": [USER, {"role": "user", "content": "ab " * 150_000}]}),
            ("/detokenize", {"tokens": [5] * 1_000_000}),
        ):
            slow = asyncio.create_task(gateway.post(route, body))
            assert await _answers_meanwhile(gateway, slow) > 3, route
            assert (await slow)[0] == 200


def _forked_session(turns: int, forks: int, tokens: int) -> Session:
    session = Session()

    def add(parent: str | None, new: int) -> str:
        session.add(
            Turn("s", "m", str(len(session.turns)), [1] * new, [2] * tokens, [-0.5] * tokens,
                 "stop", 0, 7, parent)
        )  # fmt: skip
        return session.turns[-1].id

    for _ in range(forks):
        last: str | None = None
        for _ in range(turns):
            last = add(last, tokens)
    return session


async def test_trajectories_of_a_long_session_are_put_together_beside_other_requests(
    tmp_path: Path,
) -> None:
    """80 turns x 8 took 3 s in the event loop."""
    async with service(tmp_path) as gateway:
        gateway.gateway.recorder.sessions["s"] = _forked_session(80, 8, 200)
        slow = asyncio.create_task(gateway.get("/v1/rollway/trajectories/s"))
        assert await _answers_meanwhile(gateway, slow) > 3
        status, answer = await slow
        assert status == 200 and len(answer["trajectories"]) == 8 and answer["next"] is None


async def test_trajectories_come_in_pages(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        gateway.gateway.recorder.sessions["s"] = _forked_session(2, 600, 2)
        base = "/v1/rollway/trajectories/s"
        status, first = await gateway.get(base)
        assert status == 200 and len(first["trajectories"]) == 256
        assert (first["next"], first["total"]) == (256, 600)
        collected, offset = [], 0
        while offset is not None:
            _, answer = await gateway.get(f"{base}?offset={offset}&limit=250")
            collected += answer["trajectories"]
            offset = answer["next"]
        assert len(collected) == 600 and collected[:256] == first["trajectories"]
        assert (await gateway.get(f"{base}?offset=600"))[1]["trajectories"] == []
        for query in (
            "offset=-1",
            "limit=0",
            "limit=x",
            "offset=1e3",
            "limit=99999999999",
            "limit=²",
        ):
            status, answer = await gateway.get(f"{base}?{query}")
            assert status == 400, query
            error_of(answer)


def test_a_page_has_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGE_TOKENS", 20_000)
    session = _forked_session(10, 5, 500)
    answer = json.loads(pages.page(session, "s", 0, 256))
    assert len(answer["trajectories"]) == 2 and answer["next"] == 2


def test_short_prompts_need_no_thread() -> None:
    """The usual request is rendered at once: a thread would cost more than the rendering."""
    from rollway.gateway.requests import measure

    usual = [[USER] * 20, [{"type": "function", "function": {"name": "f"}}], {"thinking": True}]
    assert measure(usual).short
    for unusual in ([["a" * 30_000]], [[USER] * 3_000], [[], None, {"n": 5_000}]):
        assert not measure(unusual).short


def _workers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "gateway-work"]
