"""Failures behind the gateway: the client gets a clean error, and no session remains."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rollway.gateway.server import Gateway
from tests.security.gateway_service import Service, read_error, serve_gateway
from tests.waiting import wait_until_async

REFUSAL = {"message": "Invalid request", "details": {"field": "temperature"}, "type": "x"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_refusals_of_the_frontend_keep_their_status(
    tmp_path: Path, stream: bool, route: str
) -> None:
    async with serve_gateway(tmp_path) as gateway:
        for status in (400, 403, 409, 413, 422):
            gateway.frontend.error_answer = (status, REFUSAL)
            body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": stream}
            answered, answer = await gateway.post(route, body, headers={"x-rollway-session": "s"})
            assert answered == status, answer
            error = read_error(answer)
            assert "Invalid request" in error["message"]
            assert error["type"] == "invalid_request_error"
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_do_not_reveal_internal_addresses(tmp_path: Path, stream: bool) -> None:
    async with serve_gateway(tmp_path) as gateway:
        url = f"{gateway.frontend.url}/v1/chat/completions"
        port = gateway.frontend.url.rpartition(":")[2]
        text = f"no worker at {url}, tcp://10.1.2.3:{port} or [::1]:{port} or localhost:{port}"
        for status in (400, 500, 503):
            gateway.frontend.error_answer = (status, {"message": text})
            answered, answer = await gateway.chat(stream=stream)
            assert answered == (400 if status == 400 else 502)
            assert port not in read_error(answer)["message"]


async def test_a_missing_frontend_is_answered_with_503(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, frontend_url="http://127.0.0.1:9") as gateway:
        for stream in (False, True):
            status, answer = await gateway.chat({"x-rollway-session": "s"}, stream=stream)
            assert status == 503 and ":9" not in read_error(answer)["message"]
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


async def test_a_disconnected_client_leaves_no_session(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        gateway.frontend.may_answer.clear()
        for stream in (False, True):
            before = len(gateway.frontend.bodies)
            request = asyncio.create_task(
                gateway.chat({"x-rollway-session": "gone"}, stream=stream)
            )
            await wait_until_async(lambda: len(gateway.frontend.bodies) > before)  # noqa: B023
            request.cancel()
            await asyncio.wait([request])
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


async def test_a_fault_of_the_gateway_is_logged_and_answered_with_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Gateway, request: Any) -> Any:
        raise KeyError("an internal secret")

    monkeypatch.setattr(Gateway, "models", fail)
    async with serve_gateway(tmp_path) as gateway:
        with caplog.at_level(logging.ERROR):
            status, answer = await gateway.get("/v1/models")
        error = read_error(answer)
        assert status == 500 and error["type"] == "internal_error"
        assert "secret" not in error["message"]
        assert "an internal secret" in caplog.text, "the log has the cause"
        number = error["message"].rstrip(".").rpartition(" ")[2]
        assert number in caplog.text


async def test_unknown_routes_are_answered_with_errors_of_the_same_form(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/v1/models", 405),
            ("DELETE", "/v1/rollway/sessions", 405),
            ("OPTIONS", "/v1/chat/completions", 405),
            ("GET", "/v1/rollway/trajectories/nobody", 404),
            ("DELETE", "/v1/rollway/trajectories/nobody", 404),
        ):
            answered, answer = await gateway.call(method, path)
            assert answered == status, (method, path)
            read_error(answer)


async def test_an_error_in_a_stream_is_an_event(tmp_path: Path) -> None:
    """After the first token, an error can no longer have a status."""
    async with serve_gateway(tmp_path) as gateway:

        async def judge(*_: Any) -> Any:
            raise ValueError("http://10.0.0.1:5 said no")

        gateway.gateway.chat._judge = judge  # type: ignore[method-assign]
        status, raw = await _stream_chat(gateway)
        assert status == 200 and b"internal_error" in raw and b"10.0.0.1" not in raw
        assert b"[DONE]" not in raw
        assert (await gateway.get("/v1/rollway/sessions"))[1]["sessions"] == {}


async def _stream_chat(gateway: Service) -> tuple[int, bytes]:
    status, raw = await gateway.chat({"x-rollway-session": "s"}, stream=True)
    assert isinstance(raw, bytes)
    return status, raw
