"""`VllmAdmin` when a server misbehaves (scripted; tests/stack has the tests on real servers)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import AdminError, RequestFailed, Unreachable
from rollway.fleet.admin import IN_DOUBT, Facts, NoSuchMethod
from rollway.fleet.vllm_admin import VllmAdmin
from rollway.fleet.workers import Worker
from rollway.http import IDEMPOTENT, Http

DROP = "drop the connection"
ANSWERS: dict[str, Any] = {
    "is_paused": {"is_paused": True},
    "reset_prefix_cache": {"success": True},
    "collective_rpc": {"results": [None]},
    "update_weight_version": {"success": True, "new_version": "7"},
    "pause": {"status": "paused"},
}


class Server:
    """A server that answers like vLLM, or with the answer that a test scripts for a route."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.trouble: dict[str, Any] = {}
        self.worker = Worker(-1, "tiny", "")

    async def handle(self, request: web.Request) -> web.Response:
        route = request.path[1:]
        self.calls.append(route)
        answer = self.trouble.get(route, ANSWERS.get(route))
        if isinstance(answer, list):
            answer = answer.pop(0) if answer else ANSWERS[route]
        if answer == DROP:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))


def failed(message: str) -> tuple[int, Any]:
    """Return vLLM's answer for an exception of the engine."""
    return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{route:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.worker = replace(server.worker, admin_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield server
    await runner.cleanup()


@pytest.fixture
async def admin() -> AsyncIterator[VllmAdmin]:
    async with Http() as http:
        yield VllmAdmin(http)


@pytest.mark.parametrize("trouble", [DROP, failed("out of memory"), (503, "busy")])
async def test_an_update_is_sent_once_and_declares_nothing_when_it_fails(
    server: Server, admin: VllmAdmin, trouble: Any
) -> None:
    server.trouble["collective_rpc"] = trouble
    with pytest.raises(AdminError) as failure:
        await admin.update_from_disk(server.worker, Path("/new"), 7)
    assert server.calls == ["is_paused", "reset_prefix_cache", "collective_rpc"]
    assert str(server.worker) in failure.value.message
    # The cause shows callers whether the server answered.
    kind = Unreachable if trouble == DROP else RequestFailed
    assert isinstance(failure.value.__cause__, kind)


@pytest.mark.parametrize("trouble", [DROP, (500, {"error": "Failed to pause generation: x"})])
async def test_calls_that_are_safe_to_repeat_are_retried(
    server: Server, admin: VllmAdmin, trouble: Any
) -> None:
    server.trouble["pause"] = [trouble, trouble]
    await admin.pause(server.worker)
    assert server.calls == ["pause"] * 3
    server.trouble["pause"] = trouble
    with pytest.raises(AdminError):
        await admin.pause(server.worker)
    assert server.calls == ["pause"] * (3 + IDEMPOTENT.attempts)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (failed("Call to collective_rpc method failed: it broke."), "it broke."),
        (
            failed(
                "Call to collective_rpc method failed: Worker failed with error 'it's\nbroken', "
                "please check the stack trace above for the root cause"
            ),
            "it's\nbroken.",
        ),
        (failed("Worker failed with error '" + "x" * 900 + "', please"), "x" * 400),
        ((500, "Internal Server Error"), "Internal Server Error."),
        ((400, {"detail": "Missing 'method' in request body"}), "Missing 'method' in request"),
        ((500, ""), "(empty body)."),
    ],
)
async def test_the_error_shows_the_reason_without_the_text_around_it(
    server: Server, admin: VllmAdmin, trouble: Any, reason: str
) -> None:
    server.trouble["collective_rpc"] = trouble
    with pytest.raises(AdminError) as failure:
        await admin.call(server.worker, "look", {})
    assert f"refused `look`: {reason}" in failure.value.message


async def test_a_missing_method_and_a_failed_method_are_different_errors(
    server: Server, admin: VllmAdmin
) -> None:
    # The message of a server whose only worker is in the engine's process (a single GPU).
    server.trouble["collective_rpc"] = failed("Method 'look' is not implemented.")
    with pytest.raises(NoSuchMethod):
        await admin.call(server.worker, "look", {})
    server.trouble["collective_rpc"] = failed("NVFP4 is not implemented here")
    with pytest.raises(AdminError, match="NVFP4") as failure:
        await admin.call(server.worker, "look", {})
    assert not isinstance(failure.value, NoSuchMethod)


async def test_the_error_for_a_missing_route_has_a_hint(server: Server, admin: VllmAdmin) -> None:
    server.trouble = dict.fromkeys(ANSWERS)
    with pytest.raises(AdminError, match=r"no route /pause\. .*VLLM_SERVER_DEV_MODE=1"):
        await admin.pause(server.worker)
    with pytest.raises(AdminError, match=r"no route /weight_info\. .*VLLM_SERVER_DEV_MODE=1"):
        await admin.read(server.worker)


@pytest.mark.parametrize(
    ("label", "version"), [("default", None), ("7", 7), ("-5", -5), ("step-3", IN_DOUBT)]
)
async def test_a_server_has_a_label_and_stamps_nothing(
    server: Server, admin: VllmAdmin, label: str, version: int | None
) -> None:
    server.trouble["weight_info"] = {"weight_version": label}
    assert await admin.read(server.worker) == Facts(version)


async def test_a_server_takes_no_orders(server: Server, admin: VllmAdmin) -> None:
    order = {"seconds": 1.0}
    for call in (
        admin.stage(server.worker, order),
        admin.refit(server.worker, order),
        admin.discard(server.worker, "w1"),
        admin.memory(server.worker),
        admin.sleep(server.worker, order),
        admin.wake(server.worker),
    ):
        with pytest.raises(NoSuchMethod, match="takes no orders"):
            await call
    assert server.calls == []


@pytest.mark.parametrize("page", ["<html>", "", [1]])
async def test_an_answer_from_another_server_is_an_error(
    server: Server, admin: VllmAdmin, page: Any
) -> None:
    server.trouble = dict.fromkeys(ANSWERS, (200, page))
    for call in (admin.pause(server.worker), admin.call(server.worker, "look", {})):
        with pytest.raises(AdminError):
            await call
    server.trouble = {"reset_prefix_cache": {}}
    with pytest.raises(AdminError, match="did not flush"):
        await admin.flush_cache(server.worker)


async def test_a_server_that_is_listed_with_an_error_is_not_called(
    server: Server, admin: VllmAdmin
) -> None:
    with pytest.raises(AdminError, match="listed with an error: no answer"):
        await admin.pause(replace(server.worker, error="no answer"))
    assert server.calls == []
