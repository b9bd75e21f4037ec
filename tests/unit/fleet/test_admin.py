"""`DynamoAdmin` against a scripted worker: route styles, named engine methods, groups, adapters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import AdminError, Unreachable
from rollway.fleet.admin import (
    IN_DOUBT,
    AnotherProcess,
    NoSuchMethod,
    NoSuchOrder,
    RefitRefused,
    parse_label,
    unverified_label,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.signed_calls import DOOR, OTHER_PROCESS, REFIT, STAGE

Calls = list[tuple[str, dict[str, Any]]]
Script = Callable[[str, dict[str, Any]], Any]


def fine(route: str, body: dict[str, Any]) -> Any:
    return {"status": "ok"}


@asynccontextmanager
async def worker(script: Script = fine, **fields: Any) -> AsyncIterator[tuple[Worker, Calls]]:
    """Serve a worker that answers by a script; the answer None drops the connection, a number is
    an HTTP status."""
    calls: Calls = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        calls.append((request.match_info["route"], body))
        answer = script(request.match_info["route"], body)
        if isinstance(answer, int):
            return web.Response(status=answer)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(text=json.dumps(answer))

    app = web.Application()
    app.router.add_post("/engine/{route:.+}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Worker(1, "m", f"http://127.0.0.1:{runner.addresses[0][1]}", **fields), calls
    finally:
        await runner.cleanup()


async def test_routes_are_called_in_the_style_the_worker_advertises() -> None:
    async with Http() as http:
        admin = DynamoAdmin(http)
        async with worker(routes=frozenset({"control/pause_generation"})) as (nested, calls):
            await admin.pause(nested)
            await admin.set_taints(nested, ["a"])
            await admin.sleep(nested, 2, "abort")
            with pytest.raises(NoSuchMethod, match="does not offer `flush_cache`"):
                await admin.flush_cache(nested)
        assert [route for route, _ in calls] == [
            "control/pause_generation", "update/model_taints", "rollway_sleep",
        ]  # fmt: skip
        async with worker() as (unknown, calls):  # found by /health or in a static list: no routes
            await admin.pause(unknown)
            await admin.wake(unknown, ["weights"])
        assert [route for route, _ in calls] == ["pause_generation", "rollway_wake"]
        assert calls[1][1] == {"tags": ["weights"]}


async def test_an_engine_method_is_called_without_touching_version_or_cache() -> None:
    async with worker() as (target, calls), Http() as http:
        await DynamoAdmin(http).call(target, "look", {"path": "/x"})
        await DynamoAdmin(http).update_distributed(target, 7, "receive", {"names": ["a"]})
    assert calls[0][1] == {
        "path": "/x",
        "engine_rpc": "look",
        "allow_unpaused": True,
        "reset_prefix_cache": False,
    }
    assert calls[1][1] == {"names": ["a"], "engine_rpc": "receive", "weight_version": 7}


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("'CPUWorker' object has no attribute 'look'", True),
        ("Call to collective_rpc method failed: Method 'look' is not implemented.", True),
        ("Worker failed with error ''X' object has no attribute 'look'', please check the", True),
        ("'NoneType' object has no attribute 'shape'", False),
        ("the checkpoint has nothing for 2 parameters", False),
    ],
)
async def test_a_missing_method_and_a_failed_method_are_different_errors(
    message: str, missing: bool
) -> None:
    def refuse(route: str, body: dict[str, Any]) -> Any:
        return {"status": "error", "message": message}

    async with worker(refuse) as (target, _), Http() as http:
        with pytest.raises(AdminError) as error:
            await DynamoAdmin(http).call(target, "look", {})
    assert isinstance(error.value, NoSuchMethod) is missing


async def test_the_error_shows_what_the_engine_raised_without_the_text_around_it() -> None:
    prefix = (
        "Call to collective_rpc method failed: Worker failed with error 'a is missing', please "
    )

    def refuse(route: str, body: dict[str, Any]) -> Any:
        return {"status": "error", "message": prefix + "check the stack trace above"}

    async with worker(refuse) as (target, _), Http() as http:
        with pytest.raises(
            AdminError, match=r"refused `update_weights_from_disk`: a is missing\.$"
        ):
            await DynamoAdmin(http).update_from_disk(target, Path("/x"), 1)


async def test_a_failed_rendezvous_has_a_hint() -> None:
    async with worker(lambda route, body: None) as (target, calls), Http() as http:
        with pytest.raises(AdminError, match=r"did not join the weight group.*") as error:
            await DynamoAdmin(http).init_group(target, {"port": 1})
        assert "DYN_RL_INIT_WEIGHTS_TIMEOUT_S" in error.value.hint
    assert len(calls) == 1  # a worker that may be joining is not called twice


async def test_an_adapter_whose_name_is_in_use_is_reloaded() -> None:
    loaded: set[str] = set()

    def adapters(route: str, body: dict[str, Any]) -> Any:
        if route == "flush_cache":
            return {"status": "ok"}
        name = body["lora_name"]
        if route == "unload_lora":
            loaded.discard(name)
            return {"status": "success", "message": "unloaded"}
        if name in loaded:
            return {"status": "success", "message": f"LoRA adapter '{name}' already loaded"}
        loaded.add(name)
        return {"status": "success", "message": f"LoRA adapter '{name}' loaded"}

    async with worker(adapters) as (target, calls), Http() as http:
        admin = DynamoAdmin(http)
        await admin.load_lora(target, "style", Path("/adapters/a"))
        await admin.load_lora(target, "style", Path("/adapters/b"))
        await admin.unload_lora(target, "style")
    assert [route for route, _ in calls] == [
        "load_lora", "flush_cache",
        "load_lora", "unload_lora", "load_lora", "flush_cache", "unload_lora",
    ]  # fmt: skip
    assert calls[4][1]["source"] == {"uri": "file:///adapters/b"}


async def test_a_pinned_connection_never_reaches_a_second_process() -> None:
    drop = [False]

    def script(route: str, body: dict[str, Any]) -> Any:
        return None if drop[0] else {"status": "ok", "version": 3}

    async with worker(script) as (target, calls), Http() as http:
        async with DynamoAdmin(http).pin() as connection:
            assert await connection.weight_version(target) == 3
            assert await connection.weight_version(target) == 3
            drop[0] = True
            with pytest.raises(AdminError):
                await connection.flush_cache(target)
            drop[0] = False
            before = len(calls)
            with pytest.raises(AdminError, match="may reach another process"):
                await connection.set_taints(target, ["rollway-v3"])
            assert len(calls) == before
        assert await DynamoAdmin(http).weight_version(target) == 3


async def test_a_worker_without_orders_is_asked_once() -> None:
    async with worker(lambda *_: 404) as (target, calls), Http() as http:
        admin = DynamoAdmin(http)
        for _ in range(2):
            with pytest.raises(NoSuchOrder):
                await admin.stage(target, {"seconds": 1.0})
        assert [route for route, _ in calls] == [STAGE]


async def test_an_order_to_stage_answers_with_the_label() -> None:
    reply = {"status": "ok", "ranks": [{"state": "ready"}], "label": "7", "refits": True}
    async with worker(lambda *_: reply) as (target, _), Http() as http:
        admin = DynamoAdmin(http)
        assert (await admin.stage(target, {"seconds": 1.0})).label == 7
        assert admin.takes_refits(target) and admin.enforces_versions(target)


async def test_an_engine_that_cannot_stage_has_no_such_method() -> None:
    message = "Call to collective_rpc method failed: 'W' object has no attribute 'rollway_stage'"
    reply = {"status": "error", "message": message}
    async with worker(lambda *_: reply) as (target, _), Http() as http:
        with pytest.raises(NoSuchMethod) as failure:
            await DynamoAdmin(http).stage(target, {"seconds": 1.0})
        assert not isinstance(failure.value, NoSuchOrder)


async def test_a_refit_is_never_sent_to_a_successor() -> None:
    """Other orders may be, because a worker refuses them before it does anything."""
    names = ["first", "second"]

    def script(route: str, body: dict[str, Any]) -> Any:
        if route == DOOR:
            return {"status": "ok", "process": names.pop(0)}
        if body["rollway_order"]["process"] == "first":
            return {"status": "error", "message": OTHER_PROCESS}
        return {"status": "ok"}

    async with worker(script) as (target, calls), Http() as http:
        admin = DynamoAdmin(http, secret="s")
        with pytest.raises(AnotherProcess):
            await admin.refit(target, {})
        assert [route for route, _ in calls] == [DOOR, REFIT]
        names.insert(0, "first")
        admin = DynamoAdmin(http, secret="s")
        await admin.resume(target)
        assert [route for route, _ in calls][2:].count("resume_generation") == 2


async def test_a_refused_refit_changed_nothing() -> None:
    reply = {"status": "error", "state": "refused", "message": "not staged"}
    async with worker(lambda *_: reply) as (target, _), Http() as http:
        with pytest.raises(RefitRefused, match="not staged"):
            await DynamoAdmin(http).refit(target, {})


async def test_a_closed_client_raises() -> None:
    http = Http()
    await http.close()
    with pytest.raises(Unreachable, match="closed"):
        await http.get("http://127.0.0.1:9", timeout=1.0)


@pytest.mark.parametrize(
    ("label", "version"),
    [
        (None, None),
        (7, 7),
        ("7", 7),
        (-1, IN_DOUBT),
        (unverified_label(3), unverified_label(3)),
        ("step-3", IN_DOUBT),
    ],
)
def test_a_label_is_parsed_as_a_version(label: Any, version: int | None) -> None:
    assert parse_label(label) == version
