"""`DynamoAdmin` against a scripted worker: route styles, named engine methods, groups, adapters."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from rollway.errors import AdminError, Unreachable, UsageError
from rollway.fleet import admin as admin_module
from rollway.fleet.admin import (
    IN_DOUBT,
    UNVERIFIED,
    AnotherProcess,
    Facts,
    NoSuchMethod,
    RefitRefused,
    StillAsleep,
    leaving_label,
    parse_label,
    start_and_wait,
    version_left,
)
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.signed_calls import DISCARD, DOOR, MEMORY, OTHER_PROCESS, REFIT, SLEEP, STAGE, WAKE
from rollway.weights.offer import STILL

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
            await admin.sleep(nested, {"level": 2})
            with pytest.raises(NoSuchMethod, match="does not offer `flush_cache`"):
                await admin.flush_cache(nested)
        assert [route for route, _ in calls] == [
            "control/pause_generation", "update/model_taints", "rollway_sleep",
        ]  # fmt: skip
        async with worker() as (unknown, calls):  # found by /health or in a static list: no routes
            await admin.pause(unknown)
            await admin.wake(unknown)
        assert calls[1:] == [("rollway_wake", {})] and calls[0][0] == "pause_generation"


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
            assert (await connection.read(target)).label == 3
            assert (await connection.read(target)).label == 3
            drop[0] = True
            with pytest.raises(AdminError):
                await connection.flush_cache(target)
            drop[0] = False
            before = len(calls)
            with pytest.raises(AdminError, match="may reach another process"):
                await connection.set_taints(target, ["rollway-v3"])
            assert len(calls) == before
        assert (await DynamoAdmin(http).read(target)).label == 3


@pytest.mark.parametrize("order", [STAGE, REFIT, DISCARD, MEMORY, SLEEP, WAKE])
async def test_a_worker_without_a_guard_takes_no_orders(order: str) -> None:
    async with worker(lambda *_: 404) as (target, calls), Http() as http:
        admin = DynamoAdmin(http)
        orders: dict[str, Callable[[], Awaitable[object]]] = {
            STAGE: lambda: admin.stage(target, {"seconds": 1.0}),
            REFIT: lambda: admin.refit(target, {}),
            DISCARD: lambda: admin.discard(target, "w1"),
            MEMORY: lambda: admin.memory(target),
            SLEEP: lambda: admin.sleep(target, {}),
            WAKE: lambda: admin.wake(target),
        }
        with pytest.raises(NoSuchMethod, match="takes no orders of Rollway") as failure:
            await orders[order]()
    assert "Start the workers by Rollway" in failure.value.hint
    assert [route for route, _ in calls] == [order]


async def test_an_order_to_stage_answers_with_the_label() -> None:
    reply = {"status": "ok", "ranks": [{"state": "ready"}], "label": "7", "refits": True}
    async with worker(lambda *_: {**reply, "asleep": 1}) as (target, _), Http() as http:
        answer = await DynamoAdmin(http).stage(target, {"seconds": 1.0})
    assert (answer.label, answer.sleep_level, len(answer.ranks)) == (7, 1, 1)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            {"status": "error", "message": "'W' object has no attribute 'rollway_stage'"},
            "has no attribute 'rollway_stage'",
        ),
        (
            {"status": "ok", "ranks": [], "label": 7, "refits": False, "asleep": 0},
            "has not loaded Rollway's plugin",
        ),
    ],
)
async def test_an_engine_that_cannot_stage_is_a_foreign_one(
    reply: dict[str, Any], reason: str
) -> None:
    async with worker(lambda *_: reply) as (target, _), Http() as http:
        with pytest.raises(NoSuchMethod, match=reason):
            await DynamoAdmin(http).stage(target, {"seconds": 1.0})


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ({"version": 3}, Facts(3)),  # Dynamo's own route, without a guard
        (
            {"version": "3", "enforced": True, "asleep": 0, "paused": True},
            Facts(3, enforces=True, is_paused=True),
        ),
        ({"version": -5, "enforced": True, "asleep": 2}, Facts(-5, enforces=True, sleep_level=2)),
        ({"version": None, "enforced": False, "asleep": 0, "paused": False}, Facts(None)),
    ],
)
async def test_one_call_reads_all_that_a_worker_says_of_itself(
    said: dict[str, Any], facts: Facts
) -> None:
    async with worker(lambda *_: {"status": "ok", **said}) as (target, calls), Http() as http:
        assert await DynamoAdmin(http).read(target) == facts
    assert [route for route, _ in calls] == ["get_weight_version"]


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


@pytest.mark.parametrize(
    ("state", "error"),
    [("refused", RefitRefused), ("asleep", StillAsleep), ("in doubt", AdminError)],
)
async def test_the_answer_to_a_refit_says_what_became_of_the_worker(
    state: str, error: type[AdminError]
) -> None:
    reply = {"status": "error", "state": state, "message": "no room"}
    async with worker(lambda *_: reply) as (target, _), Http() as http:
        with pytest.raises(AdminError, match="no room") as failure:
            await DynamoAdmin(http).refit(target, {})
    assert type(failure.value) is error and failure.value.__cause__ is None


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
        (leaving_label(3), leaving_label(3)),
        ("step-3", IN_DOUBT),
    ],
)
def test_a_label_is_parsed_as_a_version(label: Any, version: int | None) -> None:
    assert parse_label(label) == version


@pytest.mark.parametrize("version", [0, 1, 7, 10**9])
def test_the_label_of_a_worker_that_leaves_service_names_its_version(version: int) -> None:
    assert version_left(leaving_label(version)) == version
    for label in (None, IN_DOUBT, UNVERIFIED, version):
        assert version_left(label) is None


# --- a task in the background of a worker: adapters, prime-rl's groups -------------------------


class Background:
    """The engine methods of a worker with two ranks: `start` begins, and `check` raises these
    answers until it is done."""

    def __init__(self, *answers: str, notifications: int = 2) -> None:
        self.answers, self.notifications = list(answers), notifications
        self.checks = 0

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        assert method == "start"
        for _ in range(self.notifications):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, f"\0{arguments['tell']}")

    async def check(self) -> None:
        self.checks += 1
        if self.answers:
            raise AdminError(self.answers.pop(0))

    async def wait(self, seconds: float = 30.0) -> None:
        place, own = Worker(7, "m", "http://w", world_size=2), cast(DynamoAdmin, self)
        await start_and_wait(own, place, ("start", {}), self.check, seconds)


async def test_a_worker_that_notifies_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only a notification ends the wait before an hour.
    monkeypatch.setattr(admin_module, "ASK_SECONDS", 3600.0)
    background = Background()
    await asyncio.wait_for(background.wait(), 30)
    assert background.checks == 1


@pytest.mark.parametrize("notifications", [0, 1])
async def test_a_worker_that_cannot_notify_is_asked_repeatedly(notifications: int) -> None:
    background = Background(f"refused: {STILL} version 3.", notifications=notifications)
    await background.wait()
    assert background.checks == 2


async def test_what_a_background_task_raises_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="changed while it was read"):
        await Background("w of version 3 changed while it was read.").wait()


async def test_a_background_task_has_a_time_limit() -> None:
    with pytest.raises(UsageError, match="has not got the weights within 0 s"):
        await Background(*[STILL] * 9).wait(0.0)
