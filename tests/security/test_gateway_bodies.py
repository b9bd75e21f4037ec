"""An attacker sends bad bodies: each gets an error in OpenAI's form and costs little."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.gateway import requests
from tests.awkward_tokenizer import PLAIN
from tests.security.bad_bodies import BAD_CHATS, BAD_TEXTS
from tests.security.gateway_service import read_error, serve_gateway

RESERVED_SETTINGS = [
    "chat_template", "conversation", "padding", "truncation", "max_length", "documents",
    "tokenizer_kwargs", "tools", "tokenize", "return_dict", "return_tensors",
    "return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message",
    "eos_token",
]  # fmt: skip


async def test_a_bad_chat_is_refused_and_leaves_no_session(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        for label, body in BAD_CHATS.items():
            headers = {"x-rollway-session": "bad"}
            status, answer = await gateway.post("/v1/chat/completions", body, headers=headers)
            assert status == 400, (label, status, answer)
            assert read_error(answer)["type"] == "invalid_request_error", label
            if "messages" in str(body)[:200]:
                status, answer = await gateway.post("/tokenize", body)
                assert status in (200, 400), (label, status, answer)
        assert gateway.frontend.bodies == []
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}
        assert (await gateway.chat())[0] == 200


async def test_a_bad_completion_is_refused(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        for label, body in BAD_TEXTS.items():
            status, answer = await gateway.post("/v1/completions", body)
            assert status == 400, (label, status, answer)
            read_error(answer)
        for tokens in (5, [2**70], [-1], ["a"], [True], [[1]], "12", [1] * 3000):
            status, answer = await gateway.post("/detokenize", {"tokens": tokens})
            assert status == 400, (tokens, answer)
            read_error(answer)
        for prompt in (5, ["a"], {"a": 1}, None):
            status, answer = await gateway.post("/tokenize", {"prompt": prompt})
            assert status == 400, (prompt, answer)
        assert gateway.frontend.bodies == []
        good = {"prompt": [[1, 2.0], "ab"], "n": 2, "max_tokens": 4}
        status, answer = await gateway.post("/v1/completions", good)
        assert status == 200 and len(answer["choices"]) == 4


@pytest.mark.parametrize("name", RESERVED_SETTINGS)
async def test_a_client_sets_a_parameter_of_the_tokenizer(tmp_path: Path, name: str) -> None:
    async with serve_gateway(tmp_path) as gateway:
        status, answer = await gateway.chat(chat_template_kwargs={name: "x"})
        assert status == 400 and name in read_error(answer)["message"]


async def test_a_client_sends_a_template_that_never_ends(tmp_path: Path) -> None:
    """Such a template once blocked the event loop for ever."""
    loops = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
    async with serve_gateway(tmp_path) as gateway:
        for fields in (
            {"chat_template_kwargs": {"chat_template": loops}},
            {"chat_template": loops},
        ):
            status, answer = await gateway.chat(**fields)
            assert status == 400 and "chat_template" in read_error(answer)["message"]
        assert gateway.frontend.bodies == []


async def test_settings_of_the_model_reach_the_template(tmp_path: Path) -> None:
    template = "{% if thinking %}<|im_start|>{% endif %}" + PLAIN
    async with serve_gateway(tmp_path, template=template) as gateway:
        assert (await gateway.chat(chat_template_kwargs={"thinking": True}))[0] == 200
        first, sent = gateway.frontend.bodies[0]["nvext"]["token_data"][:2]
        assert first == sent, "the setting did not reach the template"
        assert gateway.frontend.bodies[0]["chat_template_kwargs"] == {"thinking": True}


async def test_compressed_bodies_are_refused_before_decompression(tmp_path: Path) -> None:
    """200 KiB of gzip once became 200 MiB of JSON."""
    compressed = {"gzip": _compress_long_text(31), "deflate": _compress_long_text(15)}
    async with serve_gateway(tmp_path) as gateway:
        assert (await gateway.get("/health"))[0] == 200
        for coding, body in compressed.items():
            # Reset the peak of this process: an earlier test may have had a higher one.
            Path("/proc/self/clear_refs").write_text("5")
            before = _read_peak_kib()
            headers = {"content-encoding": coding}
            status, answer = await gateway.post("/tokenize", body, headers=headers)
            assert _read_peak_kib() - before < 50 * 1024, coding
            assert status == 415 and "ompressed" in read_error(answer)["message"]


def _compress_long_text(format_bits: int) -> bytes:
    """Compress a long text piece by piece: the whole must not be in memory here either."""
    packer = zlib.compressobj(1, zlib.DEFLATED, format_bits)
    pieces = [b'{"prompt": "', *[b"a" * 2**20] * 200, b'"}']
    return b"".join([*(packer.compress(piece) for piece in pieces), packer.flush()])


async def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    limit = requests.get_body_limit(2048)
    assert limit == 32 * 2**20 and requests.get_body_limit(10**9) == 128 * 2**20
    async with serve_gateway(tmp_path) as gateway:
        body = b'{"prompt": "' + b"a" * limit + b'"}'
        status, answer = await gateway.post("/tokenize", body)
        assert status == 413, answer
        read_error(answer)
        lists = b'{"a": [' + b"[]," * 1_100_000 + b"1]}"
        status, answer = await gateway.post("/tokenize", lists)
        assert status == 400 and "lists" in read_error(answer)["message"]


@pytest.mark.parametrize("item", [b'"a"', b"500"])
async def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(
    tmp_path: Path, item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MiB of short texts once used 500 MiB; 57 MiB of ids blocked all requests for 4.6 s."""
    count = 1_100_000 if item == b'"a"' else 8_100_000
    async with serve_gateway(tmp_path) as gateway:
        body = b'{"prompt": [' + (item + b",") * count + item + b"]}"
        monkeypatch.setattr(requests.msgspec.json, "decode", None)
        status, answer = await gateway.post("/v1/completions", body)
        assert status == 400 and "The body has more than" in read_error(answer)["message"]


def test_token_lists_beyond_the_context_are_refused_unread() -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the ids were read")

    ids = Unread([5] * 10)
    for read in (
        lambda: requests.read_prompts({"prompt": ids}, 9),
        lambda: requests.read_prompts({"prompt": [[1], [5] * 10]}, 9),
        lambda: requests.read_ids({"tokens": ids}, "tokens", 9),
    ):
        with pytest.raises(UsageError, match="maximum context length is 9"):
            read()


@pytest.mark.parametrize("chunked", [False, True])
async def test_many_long_bodies_do_not_fill_the_memory(tmp_path: Path, chunked: bool) -> None:
    """The sum of all bodies once had no bound. The largest allowed body always fits."""
    limit = requests.get_body_limit(2048)
    async with serve_gateway(tmp_path, body_bytes=1) as gateway:
        whole = b'{"prompt": "' + b"a" * (limit - 14) + b'"}'
        assert len(whole) == limit
        status, answer = await gateway.post("/tokenize", whole)
        assert status == 400, answer
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        size = limit * 3 // 4
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % limit
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\n" + framing + b"\r\n\r\n"
        )
        part = b" " * size
        writer.write(b"%x\r\n" % size + part + b"\r\n" if chunked else part)
        await writer.drain()
        status = 0
        async with asyncio.timeout(30):
            while status != 503:  # until the unfinished body has arrived
                status, answer = await gateway.post("/tokenize", whole)
        assert read_error(answer)["type"] == "overloaded"
        assert (await gateway.chat())[0] == 200, "a short request needs no budget"
        writer.close()
        async with asyncio.timeout(30):
            while status == 503:
                status, answer = await gateway.post("/tokenize", whole)
        assert status == 400


def _read_peak_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not report VmHWM")
