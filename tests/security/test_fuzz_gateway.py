"""Every route of the gateway against thousands of bad requests, over real HTTP.

Every request is answered in bounded time. Errors have OpenAI's form, and none is a 500.
"""

from __future__ import annotations

import asyncio
import json
import string
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.bad_bodies import BAD_CHATS, BAD_TEXTS
from tests.security.gateway_service import CHAT_BODY, USER, Service, read_error, serve_gateway
from tests.soak import examples

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/tokenize", "/detokenize")
SECONDS = 30.0
"""Limit for one answer, far above the usual time."""
MEMORY_KIB = 400 * 1024
TYPED = (502, 503)

_requests_sent = 0


class BackgroundGateway:
    """A gateway in its own thread, for tests that are not coroutines."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = serve_gateway(directory)
        self.gateway: Service = self.run(self._context.__aenter__())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(4 * SECONDS)

    def close(self) -> None:
        self.run(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def send(
        self, method: str, path: str, data: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Send one request and check the rules that hold for every answer."""
        global _requests_sent
        _requests_sent += 1
        if method == "POST":
            headers = {"content-type": "application/json", **headers}

        async def call() -> tuple[int, Any]:
            async with asyncio.timeout(SECONDS):
                return await self.gateway.call(method, path, data=data, headers=headers)

        status, answer = self.run(call())
        assert status < 500 or status in TYPED, (method, path, data, status, answer)
        if status >= 400:
            read_error(answer)
        elif isinstance(answer, bytes):  # a stream
            assert answer.startswith(b"data: ")
        return status, answer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundGateway]:
    background = BackgroundGateway(tmp_path_factory.mktemp("fuzz"))
    before = _read_rss_kib()
    yield background
    grown = _read_rss_kib() - before
    background.close()
    assert grown < MEMORY_KIB, f"{grown} KiB more after {_requests_sent} requests"


quick = settings(
    max_examples=1,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)

_texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", "user", "assistant", "tool", "system", "text", "{}", "[" * 3000,
                     "a" * 9000, "<|im_end|>", "<|im_start|>", "{{ 1 }}", "{% for a in b %}",
                     "\x00", "null"]),
)  # fmt: skip
_numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**32, 2**63, 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
)
_scalars = st.one_of(st.none(), st.booleans(), _numbers, _texts)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(_texts, inner, max_size=4)
    ),
    max_leaves=12,
)
_ids = st.one_of(st.lists(st.integers(0, 300), max_size=8), st.lists(_scalars, max_size=4), _values)
_calls = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"function": st.one_of(
                st.fixed_dictionaries({}, optional={"name": _values, "arguments": _values}), _values
            )}
        ),
        _values,
    ),
    max_size=3,
)  # fmt: skip
_messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "assistant", "tool", "system"]), _values)},
            optional={
                "content": st.one_of(_texts, st.lists(st.one_of(
                    st.fixed_dictionaries({"type": st.just("text"), "text": _scalars}), _values
                ), max_size=3), _values),
                "tool_calls": st.one_of(_calls, _values),
                "tool_call_id": _scalars,
                "prompt_token_ids": _ids,
                "generation_token_ids": _ids,
                "reasoning_content": _scalars,
                "name": _scalars,
            },
        ),
        _values,
    ),
    max_size=5,
)  # fmt: skip
_FIELDS = {
    "messages": st.one_of(_messages, _values),
    "prompt": st.one_of(_texts, _ids, st.lists(_ids, max_size=3), _values),
    "tokens": _ids,
    "model": _values,
    "stream": st.one_of(st.booleans(), _values),
    "stream_options": st.one_of(st.just({"include_usage": True}), _values),
    "n": st.one_of(st.integers(-1, 4), _values),
    "max_tokens": st.one_of(st.integers(-1, 20), _values),
    "max_completion_tokens": _values,
    "tools": st.one_of(st.just([{"type": "function", "function": {"name": "f"}}]), _values),
    "tool_choice": st.one_of(st.sampled_from(["none", "auto"]), _values),
    "chat_template_kwargs": st.one_of(
        st.dictionaries(
            st.sampled_from(["chat_template", "padding", "thinking", "n", "tools", "messages"]),
            _values, max_size=3,
        ), _values,
    ),
    "chat_template": _values,
    "reasoning_effort": _values,
    "logprobs": _values,
    "top_logprobs": _values,
    "temperature": _values,
    "stop": _values,
    "logit_bias": _values,
    "response_format": _values,
    "metadata": _values,
    "required_prefix_token_ids": _ids,
    "return_token_ids": _values,
    "continue_final_message": _values,
    "add_generation_prompt": _values,
    "user": _values,
    "seed": _values,
}  # fmt: skip
_bodies = st.one_of(
    st.fixed_dictionaries({}, optional=_FIELDS),
    # A body with only one or two wrong fields gets past more checks.
    st.builds(
        lambda wrong: {**CHAT_BODY, "prompt": [1, 2], "tokens": [1], **wrong},
        st.lists(st.sampled_from(sorted(_FIELDS)), min_size=1, max_size=2).flatmap(
            lambda names: st.fixed_dictionaries({name: _FIELDS[name] for name in names})
        ),
    ),
    st.builds(
        lambda messages: {"messages": messages, "max_tokens": 4},
        st.lists(_messages, max_size=1).map(lambda m: [USER, *(m[0] if m else [])]),
    ),
)


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


CORPUS = [
    *(body if isinstance(body, bytes) else _encode(body) for body in BAD_CHATS.values()),
    *(_encode({**body, "max_tokens": 2}) for body in BAD_TEXTS.values()),
    *(_encode(body) for body in (
        CHAT_BODY, {**CHAT_BODY, "stream": True}, {"prompt": "a"}, {"tokens": [1, 2]},
        {"prompt": [1, 2], "stream": True, "n": 1}, {"prompt": "a", "stream": True, "n": 2},
        {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
        {"messages": [USER], "chat_template_kwargs": {"n": 10**6}},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[" * 50_000}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[" * 900 + "]" * 900}}]}, USER]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "9" * 9000}}]}, USER]},
    )),
    b"", b"null", b"0", b'"', b"\x00", b"\xef\xbb\xbf{}", b"{}" * 3, b'{"a":' * 5000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\udc00\\ud800 and more"}]}',
    b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": 1e999}', b'{"prompt": -0.0}',
    b'{"prompt": "a", "prompt": 5}',
]  # fmt: skip


@pytest.mark.parametrize("route", POSTS)
def test_every_bad_body_is_answered(running: BackgroundGateway, route: str) -> None:
    for body in CORPUS:
        running.send("POST", route, body)


@settings(quick, max_examples=examples(1_100))
@given(body=_bodies, session=st.sampled_from(["", "s", "t"]))
def test_arbitrary_fields_are_answered_on_every_route(
    running: BackgroundGateway, body: Any, session: str
) -> None:
    headers = {"x-rollway-session": session} if session else {}
    for route in POSTS:
        running.send("POST", route, _encode(body), **headers)


@settings(quick, max_examples=examples(900))
@given(
    body=st.sampled_from([case for case in CORPUS if len(case) < 2_000]),
    place=st.floats(0, 1),
    cut=st.integers(0, 8),
    piece=st.binary(max_size=8),
    route=st.sampled_from(POSTS),
)
def test_corrupted_bodies_are_answered(
    running: BackgroundGateway, body: bytes, place: float, cut: int, piece: bytes, route: str
) -> None:
    start = int(place * len(body))
    running.send("POST", route, body[:start] + piece + body[start + cut :])


_SEGMENTS = ["v1", "rollway", "trajectories", "sessions", "health", "models", "chat", "completions",
          "tokenize", "..", ".", "", "a b", "%00", "é", "\ud7ff", "key-1", "'\"<>"]  # fmt: skip


@settings(quick, max_examples=examples(700))
@given(
    method=st.sampled_from(["GET", "DELETE", "PUT", "POST", "PATCH", "HEAD", "OPTIONS"]),
    segments=st.lists(st.one_of(st.sampled_from(_SEGMENTS), st.text(max_size=8)), max_size=5),
    session=st.booleans(),
    query=st.dictionaries(
        st.sampled_from(["offset", "limit", "x"]), st.text(string.printable, max_size=6), max_size=2
    ),
)
def test_arbitrary_paths_are_answered(
    running: BackgroundGateway,
    method: str,
    segments: list[str],
    session: bool,
    query: dict[str, str],
) -> None:
    parts = ["v1", "rollway", "trajectories", *segments] if session else segments
    path = "/" + "/".join(quote(part.encode(errors="replace"), safe="") for part in parts)
    query_string = "&".join(f"{name}={quote(value)}" for name, value in query.items())
    if method == "HEAD":  # its answer has no body to check
        return
    running.send(method, f"{path}?{query_string}" if query_string else path)


_header = st.text(
    st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]),
    max_size=40,
).map(str.strip)


@settings(quick, max_examples=examples(500))
@given(session=_header, key=_header, host=st.one_of(st.just(""), _header))
def test_arbitrary_headers_are_answered(
    running: BackgroundGateway, session: str, key: str, host: str
) -> None:
    headers = {"x-rollway-session": session, "authorization": f"Bearer {key}"}
    if host:
        headers["host"] = host
    running.send("POST", "/v1/chat/completions", _encode(CHAT_BODY), **headers)
    running.send("GET", "/v1/rollway/sessions")


def test_the_gateway_still_answers_after_thousands_of_requests(running: BackgroundGateway) -> None:
    status, answer = running.send("POST", "/v1/chat/completions", _encode(CHAT_BODY))
    assert status == 200 and answer["choices"][0]["message"]["content"] == "ok"
    for name in running.send("GET", "/v1/rollway/sessions")[1]["sessions"]:
        status, _ = running.send("GET", f"/v1/rollway/trajectories/{quote(name, safe='')}")
        assert status == 200, name


def _read_rss_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not report VmRSS")
