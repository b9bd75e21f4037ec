"""Requests that take long to prepare do not block others, and they are stopped in time."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.gateway import requests, threads
from rollway.gateway.replies import Refused
from rollway.gateway.store import SessionStore
from rollway.gateway.template import BoundedTokenizer, Template
from rollway.gateway.threads import Threads
from rollway.gateway.tokens import Access, scope_of
from rollway.gateway.turns import Session, Turn
from tests.awkward_tokenizer import PLAIN
from tests.security.gateway_service import USER, Service, read_error, serve_gateway
from tests.waiting import settle, wait_until_async

# Two nested loops, each as long as `n` in the settings.
_LOOPS = "{% for a in range(n or 0) %}{% for b in range(n or 0) %}{% endfor %}{% endfor %}" + PLAIN
_NESTED = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}" + PLAIN
)


async def _count_other_answers(gateway: Service, slow: asyncio.Task[Any]) -> int:
    """Count the requests that are answered before a slow one."""
    count = 0
    while not slow.done():
        assert (await gateway.get("/health"))[0] == 200
        count += 1
    return count


@pytest.mark.parametrize("source", ["settings", "messages"])
async def test_a_template_that_loops_is_stopped(tmp_path: Path, source: str) -> None:
    template = _LOOPS if source == "settings" else _NESTED
    fields: dict[str, Any] = {"chat_template_kwargs": {"n": 90_000}}
    if source == "messages":
        fields = {"messages": [{"role": "user", "content": "a"}] * 2_000}
    async with serve_gateway(tmp_path, template=template) as gateway:
        gateway.gateway.template.threads.seconds = 1.0
        slow = asyncio.create_task(gateway.chat(**fields))
        assert await _count_other_answers(gateway, slow) > 3
        status, answer = await slow
        assert status == 400 and "took longer" in read_error(answer)["message"]
        assert (await gateway.chat())[0] == 200
        # The loop itself was stopped, not only its request.
        await wait_until_async(lambda: not _list_workers())


async def test_work_that_cannot_be_stopped_costs_only_its_slot() -> None:
    """C code cannot be interrupted. With all slots lost, requests get an error and do not hang."""
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
    await wait_until_async(lambda: not _list_workers())
    threads.wait_seconds = 60.0
    assert await threads.run(lambda: 5, "It") == 5


async def test_the_work_of_a_disconnected_client_is_stopped(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, template=_LOOPS) as gateway:
        slow = asyncio.create_task(gateway.chat(chat_template_kwargs={"n": 90_000}))
        await wait_until_async(_list_workers)
        slow.cancel()
        await wait_until_async(lambda: not _list_workers())
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


@pytest.mark.parametrize("route", ["/tokenize", "/v1/completions"])
async def test_text_beyond_the_context_is_not_tokenized(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB of text once blocked all requests for 12 s."""
    async with serve_gateway(tmp_path) as gateway:
        tokenized: list[int] = []
        tokenizer = gateway.gateway.template.tokenizer
        encode = type(tokenizer)._encode_plus

        def count(self: Any, text: Any, *args: Any, **options: Any) -> Any:
            tokenized.append(len(text))
            return encode(self, text, *args, **options)

        monkeypatch.setattr(type(tokenizer), "_encode_plus", count)
        status, answer = await gateway.post(route, {"prompt": "1 2 3 " * 1_400_000})
        assert status == 400 and read_error(answer)["code"] == "context_length_exceeded"
        assert sum(tokenized) < 1_000_000
        long = [{"role": "user", "content": "1 2 3 " * 1_400_000}]
        status, answer = await gateway.chat(messages=long)
        assert status == 400 and read_error(answer)["code"] == "context_length_exceeded"
        assert sum(tokenized) < 1_000_000
        assert gateway.frontend.bodies == []


async def test_long_text_is_tokenized_without_blocking_other_requests(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, context=4_000_000) as gateway:
        for route, body in (
            ("/tokenize", {"prompt": "there is no end to it, " * 20_000}),
            ("/tokenize", {"messages": [USER, {"role": "user", "content": "ab " * 150_000}]}),
            ("/detokenize", {"tokens": [5] * 1_000_000}),
        ):
            slow = asyncio.create_task(gateway.post(route, body))
            assert await _count_other_answers(gateway, slow) > 3, route
            assert (await slow)[0] == 200


async def _record_forks(
    store: SessionStore, name: str, turns: int, forks: int, tokens: int
) -> None:
    session = await store.open(name)
    for _ in range(forks):
        last: str | None = None
        for _ in range(turns):
            new = Turn(name, "m", str(len(session.turns)), [1] * tokens, [2] * tokens,
                       [-0.5] * tokens, "stop", 0, 7, last)  # fmt: skip
            assert await store.record(session, [new])
            last = new.id


async def test_long_sessions_are_assembled_without_blocking_other_requests(
    tmp_path: Path,
) -> None:
    """80 turns with 8 forks once blocked the event loop for 3 s."""
    async with serve_gateway(tmp_path) as gateway:
        await _record_forks(gateway.gateway.store, "s", 80, 8, 200)
        slow = asyncio.create_task(gateway.get("/v1/rollway/trajectories/s"))
        assert await _count_other_answers(gateway, slow) > 3
        status, answer = await slow
        assert status == 200 and len(answer["trajectories"]) == 8 and answer["next"] is None


async def test_trajectories_are_paged(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        await _record_forks(gateway.gateway.store, "s", 2, 600, 2)
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
            read_error(answer)


async def test_a_page_has_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PAGE_TOKENS", 20_000)
    store = SessionStore(None)
    await _record_forks(store, "s", 10, 5, 500)
    session = await store.open("s")
    store.close()
    answer = json.loads(threads.make_page(session, "s", 0, 256))
    assert len(answer["trajectories"]) == 2 and answer["next"] == 2


def test_short_prompts_need_no_thread() -> None:
    """A thread would cost more than the rendering of a usual request."""
    from rollway.gateway.requests import measure

    usual = [[USER] * 20, [{"type": "function", "function": {"name": "f"}}], {"thinking": True}]
    assert measure(usual)
    for unusual in ([["a" * 30_000]], [[USER] * 3_000], [[], None, {"n": 5_000}]):
        assert not measure(unusual)


async def test_many_prompts_are_tokenized_without_blocking_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 short prompts once blocked the event loop for 2 s."""
    threads = _watch(monkeypatch, BoundedTokenizer, "encode")
    async with serve_gateway(tmp_path, context=131_072) as gateway:
        body = {"prompt": ["lorem ipsum " * 100] * 64, "max_tokens": 1}
        status, answer = await gateway.post("/v1/completions", body)
        assert status == 200 and len(answer["choices"]) == 64
        assert len(threads) == 64 and threading.main_thread() not in threads
        assert len(set(threads)) == 1
        assert (await gateway.post("/v1/completions", {"prompt": "a"}))[0] == 200
        assert threads[-1] is threading.main_thread()


async def test_a_long_body_is_decoded_without_blocking_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("parse", "read_messages", "read_prompts")
    calls = {name: _watch(monkeypatch, requests, name) for name in names}
    async with serve_gateway(tmp_path) as gateway:
        body = {"prompt": [5] * 100_000}
        status, answer = await gateway.post("/v1/completions", body)
        assert status == 400 and read_error(answer)["code"] == "context_length_exceeded"
        assert (await gateway.chat(metadata={"a": "a" * 300_000}))[0] == 200
        for name, threads in calls.items():
            assert threads and threading.main_thread() not in threads, name
        assert (await gateway.chat())[0] == 200
        assert calls["parse"][-1] is calls["read_messages"][-1] is threading.main_thread()


_HISTORY = [USER, {"role": "assistant", "content": "ok"}, USER]


async def test_a_prefix_beyond_the_context_is_refused(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [5] * 1_500, "generation_token_ids": [5] * 1_500}
    async with serve_gateway(tmp_path) as gateway:
        for body in (
            {"messages": _HISTORY, "required_prefix_token_ids": [5] * 3_000},
            {"messages": [USER, {**_HISTORY[1], **ids}, USER]},
        ):
            for route in ("/tokenize", "/v1/chat/completions"):
                status, answer = await gateway.post(route, body)
                assert status == 400, (route, answer)
                assert read_error(answer)["code"] == "context_length_exceeded"


async def test_a_long_prefix_is_joined_without_blocking_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _watch(monkeypatch, Template, "_render")
    async with serve_gateway(tmp_path, context=131_072) as gateway:
        ids = [*[5] * 30_000, gateway.gateway.template.end_of_turn]
        await gateway.chat(messages=_HISTORY, required_prefix_token_ids=ids)
        assert threads[0] is not threading.main_thread()


async def test_long_turns_are_recorded_without_blocking_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 answers to a prompt of 130,000 tokens once blocked the event loop for 2.5 s. Turns that
    arrive while a long one waits for the thread are recorded after it. So is the first turn in an
    empty log, which waits for the disk."""
    store = SessionStore(tmp_path / "gateway.sqlite")
    checks, may_begin = _watch(monkeypatch, Turn, "check"), threading.Event()

    def make_turn(history: str, count: int) -> Turn:
        return Turn("s", "m", history, [1] * count, [2], [-0.5], "stop", None, None)

    try:
        session = await store.open("s")
        assert await store.record(session, [make_turn("0", 10)])
        await wait_until_async(lambda: not store._jobs)
        assert await store.record(session, [make_turn("1", 10)])
        assert [each is threading.main_thread() for each in checks] == [False, True]
        store._thread.submit(may_begin.wait)
        sizes = (30_000, 10, 60_000, 10)
        turns = [make_turn(str(number), size) for number, size in enumerate(sizes, 2)]
        recording = asyncio.gather(*(store.record(session, [turn]) for turn in turns))
        await settle()
        may_begin.set()
        assert all(await recording)
        assert [turn.history for turn in session.turns] == list("012345")
        assert threading.main_thread() not in checks[2:]
    finally:
        may_begin.set()
        store.close()


async def test_only_long_sessions_are_assembled_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start a thread takes longer than to build a usual page."""
    calls = _watch(monkeypatch, threads, "make_page")
    async with serve_gateway(tmp_path) as gateway:
        await _record_forks(gateway.gateway.store, "usual", 4, 2, 100)
        await _record_forks(gateway.gateway.store, "long", 1, 1, 30_000)
        await _record_forks(gateway.gateway.store, "branched", 1, 50, 10)
        for name in ("usual", "long", "branched"):
            assert (await gateway.get(f"/v1/rollway/trajectories/{name}"))[0] == 200
    assert [each is threading.main_thread() for each in calls] == [True, False, False]


async def test_an_agent_tries_to_occupy_all_page_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent once kept the trainer from fetching its trajectories."""
    may_finish, started = threading.Event(), threading.Semaphore(0)
    page = threads.make_page

    def wait(session: Session, name: str, offset: int, limit: int) -> bytes:
        if name == "v":  # the name that an agent uses
            started.release()
            may_finish.wait(60)
        return page(session, name, offset, limit)

    monkeypatch.setattr(threads, "make_page", wait)
    agents = [b"agent-a", b"agent-b", b"agent-c"]
    async with serve_gateway(tmp_path, access=Access(tuple(agents), (b"operator",))) as gateway:
        for token in agents:
            await _record_forks(gateway.gateway.store, f"{scope_of(token)}/v", 1, 1, 30_000)
        base = "/v1/rollway/trajectories"

        def fetch(token: str, name: str) -> asyncio.Task[tuple[int, Any]]:
            return asyncio.create_task(
                gateway.get(f"{base}/{name}", authorization=f"Bearer {token}")
            )

        flood = [fetch("agent-a", "v") for _ in range(5)]
        try:
            await wait_until_async(lambda: started.acquire(blocking=False))
            # Other agents get a thread, too; the first one has only one.
            flood += [fetch("agent-b", "v"), fetch("agent-c", "v")]
            async with asyncio.timeout(20):
                for _ in range(2):
                    await wait_until_async(lambda: started.acquire(blocking=False))
                name = f"{scope_of(agents[0])}/v"
                assert (await fetch("operator", name))[0] == 200
            assert not started.acquire(blocking=False)
        finally:
            may_finish.set()
            answers = await asyncio.gather(*flood)
        assert [status for status, _ in answers] == [200] * 7


def _watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[threading.Thread]:
    """Record the thread of every call of a function."""
    threads: list[threading.Thread] = []
    function = getattr(owner, name)

    def record_thread(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args, **options)

    monkeypatch.setattr(owner, name, record_thread)
    return threads


def _list_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gateway-work"]
