"""The orders that the guard adds to a worker, on a fake of Dynamo's handler.

tests/stack has them on real workers, tests/security the signatures."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.engine import guard
from rollway.engine.guard import STOP_SECONDS, EngineOrders, Guard, install
from rollway.engine.refit_orders import STAMPS, _open_notifications
from rollway.signed_calls import CANCEL, DOOR, MEMORY, REFIT, SLEEP, STAGE, WAKE, sign
from tests.waiting import stays_async, wait_until_async

ORDER = {
    "identity": "w5", "mode": "abort", "label": 4, "leaving": -10, "version": 5,
    "taints": ["rollway-v5"], "taints_before": ["rollway-v4"],
}  # fmt: skip


class Handler:
    """Dynamo's object behind the RL routes, and its engine client."""

    def __init__(self) -> None:
        self._pause_lock = asyncio.Lock()
        self._weight_version: Any = 4
        self._paused = False
        self.engine_client = self
        self.calls: list[Any] = []
        self.report: dict[str, Any] | Exception = {"state": "served", "frozen": {}}
        self.labels: list[int | None] = []
        self.hold: asyncio.Event | None = None
        self.staged: dict[str, Any] = {}
        self.notifications = 2
        self.states: list[list[str]] = []
        """What its two ranks report, call after call; ready in the end."""

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append(method)
        if method == "rollway_label":
            self.labels.append(kwargs["label"])
            return [True]
        if method == "rollway_refit":
            self.calls.append(("label during the refit", self._weight_version))
            if self.hold is not None:
                await self.hold.wait()
            if isinstance(self.report, Exception):
                raise self.report
            return [dict(self.report)]
        if method == "rollway_stage":
            self.staged = kwargs
            for _ in range(self.notifications):
                with socket.socket(socket.AF_UNIX) as client:
                    client.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(client, f"\0{kwargs['tell']}")
            if isinstance(self.report, Exception):
                raise self.report
            return [None, None]
        states = self.states.pop(0) if self.states else ["ready", "ready"]
        return [{"state": state, "error": ""} for state in states]

    async def set_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        self._weight_version = body["weight_version"]
        return {"status": "ok"}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": self._weight_version}

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        self.calls.append(request)
        yield {"token_ids": [1, 2]}
        await asyncio.sleep(0)  # it really suspends
        yield {"token_ids": [3], "finish_reason": "length"}


class Context:
    def id(self) -> str:
        return "request-1"


def make_orders(handler: Handler) -> tuple[EngineOrders, Any, Any]:
    orders = EngineOrders()

    async def set_taints(body: dict[str, Any]) -> dict[str, Any]:
        handler.calls.append(tuple(body["taints"]))
        return {"status": "ok"}

    orders.wrap("update/model_taints", set_taints)
    write = orders.wrap("set_weight_version", handler.set_weight_version)
    read = orders.wrap("get_weight_version", handler.get_weight_version)
    return orders, write, read


async def test_an_order_leaves_the_routing_refits_and_returns() -> None:
    handler = Handler()
    orders, *_ = make_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert reply["status"] == "ok" and reply["report"]["state"] == "served"
    assert set(reply["seconds"]) == {"leave", "engine", "enter"}
    during = ("label during the refit", -10)
    assert handler.calls == [(), "rollway_refit", during, ("rollway-v5",)]
    assert handler._weight_version == 5


async def test_an_order_for_another_label_is_refused() -> None:
    handler = Handler()
    orders, *_ = make_orders(handler)
    reply = await orders.refit.run({**ORDER, "label": 3})
    assert (reply["status"], reply["state"]) == ("error", "refused")
    assert handler.calls == [] and handler._weight_version == 4


async def test_a_refusal_of_the_engine_restores_label_and_routing() -> None:
    handler = Handler()
    handler.report = {"state": "refused", "error": "not staged"}
    orders, *_ = make_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert (reply["state"], reply["message"]) == ("refused", "not staged")
    assert handler.calls[-1] == ("rollway-v4",) and handler._weight_version == 4


async def test_a_failed_swap_leaves_the_worker_out_of_service() -> None:
    handler = Handler()
    handler.report = RuntimeError("2 parameters differ")
    orders, *_ = make_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert (reply["state"], reply["message"]) == ("in doubt", "2 parameters differ")
    assert handler._weight_version == -10 and handler._paused
    assert ("rollway-v5",) not in handler.calls


async def test_an_order_ends_although_its_caller_is_gone() -> None:
    handler = Handler()
    handler.hold = asyncio.Event()
    orders, *_ = make_orders(handler)
    call = asyncio.create_task(orders.refit.run(ORDER))
    await wait_until_async(lambda: "rollway_refit" in handler.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    handler.hold.set()
    async with handler._pause_lock:  # the order holds it until it ends
        assert handler._weight_version == 5


STAGING = {
    "identity": "w5", "offer": {"identity": "w5"}, "allow_cast": False, "needs_label": True,
    "seconds": 3600.0,
}  # fmt: skip


async def test_one_order_stages_and_answers_with_all_that_a_refit_needs() -> None:
    handler = Handler()
    orders, *_ = make_orders(handler)
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    ready = {"state": "ready", "error": ""}
    facts = {"label": 4, "refits": True, "asleep": 0}
    assert reply == {"status": "ok", "ranks": [ready, ready], **facts}
    assert handler.calls == ["rollway_stage", "rollway_staging", "rollway_label"]
    assert handler.staged["offer"] == {"identity": "w5"}


async def test_nothing_is_staged_while_the_weights_sleep() -> None:
    handler = Handler()
    orders, *_ = make_orders(handler)
    orders._sleep.level, orders._sleep._sleeping = 2, {"weights", "kv_cache"}
    reply = await orders.refit.stage(STAGING)
    assert reply == {"status": "ok", "are_weights_asleep": True, "asleep": 2}
    assert handler.calls == []


@pytest.mark.parametrize("notifications", [0, 1])
async def test_ranks_that_cannot_notify_are_asked_again(notifications: int) -> None:
    handler = Handler()
    handler.notifications, handler.states = notifications, [["running", "ready"]]
    orders, *_ = make_orders(handler)
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    assert [rank["state"] for rank in reply["ranks"]] == ["ready", "ready"]
    assert handler.calls.count("rollway_staging") == 2


async def test_an_order_to_stage_answers_in_time_also_if_the_ranks_are_not_done() -> None:
    """The caller then repeats it."""
    handler = Handler()
    orders, *_ = make_orders(handler)
    reply = await orders.refit.stage({**STAGING, "seconds": 0.0})
    assert [rank["state"] for rank in reply["ranks"]] == ["running"]
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    assert [rank["state"] for rank in reply["ranks"]] == ["ready", "ready"]


async def test_a_worker_without_a_label_stages_nothing_if_it_needs_one() -> None:
    handler = Handler()
    handler._weight_version = None
    orders, *_ = make_orders(handler)
    reply = await orders.refit.stage(STAGING)
    assert (reply["label"], reply["ranks"], handler.calls) == (None, [], [])
    assert (await orders.refit.stage({**STAGING, "needs_label": False}))["ranks"]


async def test_an_engine_that_cannot_stage_says_why() -> None:
    handler = Handler()
    handler.report = AttributeError("'Worker' object has no attribute 'rollway_stage'")
    orders, *_ = make_orders(handler)
    reply = await orders.refit.stage(STAGING)
    assert reply["status"] == "error" and "no attribute 'rollway_stage'" in reply["message"]


async def test_the_engine_gets_every_label_of_the_worker() -> None:
    handler = Handler()
    _, write, read = make_orders(handler)
    assert (await read({}))["enforced"] is False
    for label in (7, -3, "8", "by another tool"):
        await write({"weight_version": label})
    assert handler.labels == [7, -3, 8, None]
    reply = {"status": "ok", "version": "by another tool", "enforced": True, "asleep": 0}
    assert await read({}) == {**reply, "paused": False}


@pytest.mark.parametrize(("given", "used"), [(0, STOP_SECONDS), (None, None), (7, 7)])
async def test_the_engine_has_time_to_exit(given: float | None, used: float | None) -> None:
    """Dynamo gives it none: it passes the time for draining requests."""
    handler, timeouts = Handler(), []
    handler.shutdown = lambda timeout=None: timeouts.append(timeout)  # type: ignore[attr-defined]
    make_orders(handler)
    handler.engine_client.shutdown(timeout=given)  # type: ignore[attr-defined]
    assert timeouts == [used]


def request(*fields: str, salt: str = "v4") -> dict[str, Any]:
    return {"extra_args": {"nvext": {"extra_fields": list(fields), "cache_salt": salt}}}


async def sample(handler: Handler, orders: EngineOrders, asked: dict[str, Any]) -> list[Any]:
    return [chunk async for chunk in orders.refit.stamp(handler.generate)(asked, Context())]


async def test_the_last_chunk_names_the_versions() -> None:
    handler = Handler()
    orders, write, _ = make_orders(handler)
    await write({"weight_version": 4})
    first, last = await sample(handler, orders, request("engine_data", STAMPS, "worker_id"))
    assert "engine_data" not in first
    assert last["engine_data"] == {STAMPS: [(0, 4)]}
    # Dynamo would collect all tokens and log-probs for it once more.
    assert handler.calls[-1]["extra_args"]["nvext"]["extra_fields"] == ["worker_id"]


@pytest.mark.parametrize(
    "asked", [request("engine_data"), request(STAMPS, salt="mine"), {"token_ids": [1]}]
)
async def test_requests_that_do_not_ask_or_name_no_version_get_no_stamps(asked: Any) -> None:
    handler = Handler()
    orders, write, _ = make_orders(handler)
    await write({"weight_version": 4})
    chunks = await sample(handler, orders, asked)
    assert all("engine_data" not in chunk for chunk in chunks)


async def test_a_request_that_a_refit_froze_has_both_versions() -> None:
    handler = Handler()
    orders, write, _ = make_orders(handler)
    await write({"weight_version": 4})
    handler.report = {"state": "served", "frozen": {"request-1-ab12cd34": 2, "other-99": 7}}
    handler.hold = asyncio.Event()
    stream = orders.refit.stamp(handler.generate)(request("engine_data", STAMPS), Context())
    await anext(stream)
    refit = asyncio.create_task(orders.refit.run({**ORDER, "mode": "keep"}))
    last = asyncio.create_task(anext(stream))
    await wait_until_async(lambda: "rollway_refit" in handler.calls)
    # The refit that is running may have frozen this request.
    assert await stays_async(lambda: not last.done(), 0.01)
    handler.hold.set()
    assert (await last)["engine_data"] == {STAMPS: [(0, 4), (2, 5)]}
    await refit
    await stream.aclose()


class Numbers(list[dict[int, float]]):
    """As vLLM's flat log-probs: a list of dictionaries, and the numbers alone."""

    logprobs = (-1.5, -2.5)


@pytest.mark.parametrize(
    ("request_id", "logprobs", "is_plain"),
    [("request-1", 0, True), ("another's", 0, False), ("request-1", 1, False)],
)
async def test_own_requests_get_log_probs_as_numbers(
    request_id: str, logprobs: int, is_plain: bool
) -> None:
    """Dynamo would decode each token for alternatives that were not requested."""
    ends = []

    class Client:
        async def generate(self, *given: Any, **_: Any) -> AsyncIterator[Any]:
            try:
                assert given[1].flat_logprobs is is_plain
                values = Numbers([{5: -1.5}, {6: -2.5}])
                for _ in range(2):
                    yield SimpleNamespace(
                        outputs=[SimpleNamespace(token_ids=[5, 6], logprobs=values)]
                    )
            finally:
                ends.append("closed")

    client = Client()
    guard.send_plain_logprobs(client, "request-1".__eq__)
    params = SimpleNamespace(logprobs=logprobs, prompt_logprobs=None, flat_logprobs=False)
    stream = client.generate([1], params, request_id, priority=0)
    result = await anext(stream)
    expected: Any = (-1.5, -2.5) if is_plain else [{5: -1.5}, {6: -2.5}]
    assert result.outputs[0].logprobs == expected
    await stream.aclose()
    assert ends == ["closed"], "an aborted request must reach the engine at once"


def test_an_engine_whose_client_does_not_generate_is_left_alone() -> None:
    """As in workers of another engine, which take orders all the same."""
    client = object()
    guard.send_plain_logprobs(client, "request-1".__eq__)


def make_endpoint_class() -> type:
    methods = ("serve_endpoint", "unregister_endpoint_instance")
    return type("Endpoint", (), {name: lambda *_: None for name in methods})


async def test_orders_of_a_worker_need_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: dict[str, Any] = {}
    runtime = type("Runtime", (), {"register_engine_route": lambda _, n, f: routes.update({n: f})})
    endpoint = make_endpoint_class()
    core = SimpleNamespace(DistributedRuntime=runtime, Endpoint=endpoint)
    monkeypatch.setattr(importlib, "import_module", lambda _: core)
    guard, handler = Guard("a secret"), Handler()
    install(guard)
    runtime().register_engine_route("set_weight_version", handler.set_weight_version)
    own = {REFIT, CANCEL, STAGE, SLEEP, WAKE, MEMORY}
    assert routes.keys() == {DOOR, "set_weight_version", *own}
    for name in (REFIT, CANCEL, STAGE):
        for order in ({}, {"rollway_order": sign("another", name, guard.verifier.process, ORDER)}):
            assert (await routes[name](order))["status"] == "error"
    assert handler.calls == [] and handler._weight_version == 4
    order = {"rollway_order": sign("a secret", REFIT, guard.verifier.process, ORDER)}
    assert (await routes[REFIT](order))["status"] == "ok"
    assert handler._weight_version == 5


async def test_vllm_reads_its_environment_once_when_a_worker_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    runtime = type("Runtime", (), {"register_engine_route": lambda *_: None})
    endpoint = make_endpoint_class()
    core = SimpleNamespace(DistributedRuntime=runtime, Endpoint=endpoint)
    monkeypatch.setattr(importlib, "import_module", lambda _: core)
    envs = SimpleNamespace(enable_envs_cache=lambda: calls.append("cached"))
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)  # type: ignore[arg-type]
    install(Guard("a secret"))
    handler = Handler()
    runtime().register_engine_route("set_weight_version", handler.set_weight_version)
    assert calls == []  # its engine may still be starting
    endpoint().serve_endpoint(handler.generate)
    assert calls == ["cached"]


async def test_a_worker_that_serves_does_not_search_what_it_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of all objects that vLLM brings would stop the event loop for 0.4 s."""
    handler = Handler()
    runtime = type("Runtime", (), {"register_engine_route": lambda *_: None})
    endpoint = make_endpoint_class()
    core = SimpleNamespace(DistributedRuntime=runtime, Endpoint=endpoint)
    monkeypatch.setattr(importlib, "import_module", lambda _: core)
    install(Guard("secret"))
    runtime().register_engine_route("set_weight_version", handler.set_weight_version)
    before = gc.get_freeze_count()
    try:
        endpoint().serve_endpoint(handler.generate)
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


async def test_a_notification_is_taken_in_one_turn_of_the_event_loop() -> None:
    """A worker with many streams needs tens of milliseconds for each turn."""
    with _open_notifications() as (name, notifications):
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"\0{name}")
            for _ in range(2):
                await asyncio.sleep(0)  # the loop looks at its sockets, then runs what is due
            assert notifications.qsize() == 1
            notifications.get_nowait()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(f"\0{name}")


def test_a_worker_that_ends_does_not_search_for_garbage(tmp_path: Path) -> None:
    report = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))"
    (tmp_path / "ending.py").write_text(report)
    worker = subprocess.run(
        [sys.executable, guard.__file__, "ending"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert worker.stdout == "True\n", worker.stderr
