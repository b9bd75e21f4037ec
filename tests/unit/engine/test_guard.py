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
from rollway.signed_calls import CANCEL, DISCARD, DOOR, MEMORY, REFIT, SLEEP, STAGE, WAKE, sign
from tests.unit.engine.dynamo_handler import BOTH, LEAVING, Handler, add_orders
from tests.waiting import stays_async, wait_until_async

ORDER = {
    "identity": "w5", "mode": "abort", "label": 4, "leaving": LEAVING, "version": 5,
    "taints": ["rollway-v5"], "taints_before": ["rollway-v4"],
}  # fmt: skip


class Context:
    def id(self) -> str:
        return "request-1"


async def test_an_order_leaves_the_routing_refits_and_returns() -> None:
    handler = Handler()
    orders, _ = add_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert reply["status"] == "ok" and reply["report"]["state"] == "served"
    assert set(reply["seconds"]) == {"leave", "engine", "enter"}
    assert handler.calls == [(), "rollway_refit", ("rollway-v5",)]
    assert handler.label_at[()] == handler.label_at["rollway_refit"] == LEAVING
    # Last: a worker that is labelled with a version serves it.
    assert handler.label_at["rollway-v5",] == LEAVING and handler._weight_version == 5


async def test_an_order_for_another_label_is_refused() -> None:
    handler = Handler()
    orders, _ = add_orders(handler)
    reply = await orders.refit.run({**ORDER, "label": 3})
    assert (reply["status"], reply["state"]) == ("error", "refused")
    assert handler.calls == [] and handler._weight_version == 4


async def test_a_refusal_of_the_engine_restores_label_and_routing() -> None:
    handler = Handler()
    handler.report = {"state": "refused", "error": "not staged"}
    orders, _ = add_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert (reply["state"], reply["message"]) == ("refused", "not staged")
    assert handler.calls[-1] == ("rollway-v4",) and handler._weight_version == 4


async def test_no_request_is_routed_to_a_worker_that_a_refused_refit_leaves_paused() -> None:
    """A user has paused it: requests would wait in it until it is resumed."""
    handler = Handler()
    handler._paused, handler.report = True, {"state": "refused", "error": "not staged"}
    orders, _ = add_orders(handler)
    assert (await orders.refit.run(ORDER))["state"] == "refused"
    assert handler.calls[-1] == () and handler._weight_version == 4 and handler._paused


async def test_a_failed_swap_leaves_the_worker_out_of_service() -> None:
    handler = Handler()
    handler.report = RuntimeError("2 parameters differ")
    orders, _ = add_orders(handler)
    reply = await orders.refit.run(ORDER)
    assert (reply["state"], reply["message"]) == ("in doubt", "2 parameters differ")
    assert handler._weight_version == LEAVING and handler._paused
    assert ("rollway-v5",) not in handler.calls


async def test_an_order_ends_although_its_caller_is_gone() -> None:
    handler = Handler()
    handler.holds[REFIT] = hold = asyncio.Event()
    orders, _ = add_orders(handler)
    call = asyncio.create_task(orders.refit.run(ORDER))
    await wait_until_async(lambda: "rollway_refit" in handler.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    hold.set()
    async with handler._pause_lock:  # the order holds it until it ends
        assert handler._weight_version == 5


STAGING = {
    "identity": "w5", "offer": {"identity": "w5"}, "allow_cast": False, "needs_label": True,
    "seconds": 3600.0,
}  # fmt: skip


async def test_one_order_stages_and_answers_with_all_that_a_refit_needs() -> None:
    handler = Handler()
    orders, _ = add_orders(handler)
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    ready = {"state": "ready", "error": ""}
    facts = {"label": 4, "refits": True, "asleep": 0}
    assert reply == {"status": "ok", "ranks": [ready, ready], **facts}
    assert handler.calls == ["rollway_label", "rollway_stage", "rollway_staging"]
    assert handler.staged["offer"] == {"identity": "w5"}


@pytest.mark.parametrize("notifications", [0, 1])
async def test_ranks_that_cannot_notify_are_asked_again(notifications: int) -> None:
    handler = Handler()
    handler.notifications, handler.states = notifications, [["running", "ready"]]
    orders, _ = add_orders(handler)
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    assert [rank["state"] for rank in reply["ranks"]] == ["ready", "ready"]
    assert handler.calls.count("rollway_staging") == 2


async def test_an_order_to_stage_answers_in_time_also_if_the_ranks_are_not_done() -> None:
    """The caller then repeats it."""
    handler = Handler()
    orders, _ = add_orders(handler)
    reply = await orders.refit.stage({**STAGING, "seconds": 0.0})
    assert [rank["state"] for rank in reply["ranks"]] == ["running"]
    reply = await asyncio.wait_for(orders.refit.stage(STAGING), 30)
    assert [rank["state"] for rank in reply["ranks"]] == ["ready", "ready"]


async def test_a_worker_without_a_label_stages_nothing_if_it_needs_one() -> None:
    handler = Handler()
    handler._weight_version = None
    orders, _ = add_orders(handler)
    reply = await orders.refit.stage(STAGING)
    assert (reply["label"], reply["ranks"], reply["refits"]) == (None, [], True)
    assert "rollway_stage" not in handler.calls
    assert (await orders.refit.stage({**STAGING, "needs_label": False}))["ranks"]


async def test_an_engine_that_cannot_stage_says_why() -> None:
    handler = Handler()
    handler.fails[STAGE] = AttributeError("'Worker' object has no attribute 'rollway_stage'")
    orders, _ = add_orders(handler)
    reply = await orders.refit.stage(STAGING)
    assert reply["status"] == "error" and "no attribute 'rollway_stage'" in reply["message"]


@pytest.mark.parametrize("has_extension", [True, False])
async def test_an_engine_without_the_plugin_stages_nothing(has_extension: bool) -> None:
    """The fleet takes its worker for a foreign one."""
    handler = Handler()
    handler.is_hooked = False
    if not has_extension:
        handler.fails["rollway_label"] = AttributeError("no attribute 'rollway_label'")
    orders, routes = add_orders(handler)
    reply = await orders.refit.stage(STAGING)
    assert (reply["refits"], reply["ranks"]) == (False, [])
    assert handler.calls == ["rollway_label"]
    assert (await routes["get_weight_version"]({}))["enforced"] is False


async def test_staged_weights_that_will_not_be_served_are_freed() -> None:
    handler = Handler()
    orders, _ = add_orders(handler)
    assert await orders.refit.discard({"identity": "w5"}) == {"status": "ok"}
    assert handler.calls == ["rollway_unstage"]


async def test_the_engine_gets_every_label_of_the_worker() -> None:
    handler = Handler()
    _, routes = add_orders(handler)
    read, write = routes["get_weight_version"], routes["set_weight_version"]
    assert (await read({}))["enforced"] is False
    for label in (7, -3, "8", "by another tool"):
        await write({"weight_version": label})
    assert handler.labels == [7, -3, 8, -1]
    reply = {"status": "ok", "version": "by another tool", "enforced": True, "asleep": 0}
    assert await read({}) == {**reply, "paused": False}


async def test_a_worker_that_another_tool_has_labelled_is_in_doubt_until_it_is_refitted() -> None:
    """The fleet reads its label as -1, and orders name that one."""
    handler, orders, _ = await make_labelled("step-3")
    assert handler.labels == [-1]  # it refuses requests of every version
    assert (await orders.refit.stage(STAGING))["label"] == "step-3"
    reply = await orders.refit.run({**ORDER, "label": -1, "leaving": -1, "taints_before": []})
    assert reply["status"] == "ok" and handler._weight_version == 5


# --- a worker that sleeps ------------------------------------------------------------------------


async def make_sleeper(level: int) -> tuple[Handler, EngineOrders, dict[str, Any]]:
    """Return a worker that sleeps."""
    handler = Handler()
    orders, routes = add_orders(handler)
    await routes["set_weight_version"]({"weight_version": 4})
    reply = await routes[SLEEP](
        {"level": level, "mode": "wait", "label": 4, "leaving": LEAVING, "taints": ["rollway-v4"]}
    )
    assert reply["status"] == "ok" and handler.asleep == BOTH
    handler.calls.clear()
    return handler, orders, routes


SLEEPERS_ORDER = {**ORDER, "label": LEAVING, "leaving": -1, "taints_before": []}
for_each_level = pytest.mark.parametrize("level", [1, 2])


@for_each_level
async def test_to_stage_wakes_the_weights_of_a_worker_that_sleeps_and_nothing_else(
    level: int,
) -> None:
    handler, orders, _ = await make_sleeper(level)
    for _ in range(2):  # an order may be repeated
        reply = await orders.refit.stage(STAGING)
        assert (reply["label"], reply["asleep"]) == (LEAVING, level)
        assert [rank["state"] for rank in reply["ranks"]] == ["ready", "ready"]
    assert handler.calls.count(("wake_up", "weights")) == 1
    assert handler.calls.index(("wake_up", "weights")) < handler.calls.index("rollway_stage")
    assert handler.asleep == {"kv_cache"} and handler._paused


@for_each_level
async def test_a_refit_wakes_the_cache_last_and_then_serves(level: int) -> None:
    """Until the swap, the memory may hold the staged weights."""
    handler, orders, routes = await make_sleeper(level)
    await orders.refit.stage(STAGING)
    handler.calls.clear()
    reply = await orders.refit.run(SLEEPERS_ORDER)
    assert handler.calls == [(), "rollway_refit", ("wake_up", "kv_cache"), ("rollway-v5",)]
    assert {handler.label_at[call] for call in handler.calls} == {-1}
    assert handler._weight_version == 5 and handler.asleep == set() and not handler._paused
    assert reply["memory"].keys() == {"asleep", "after", "seconds"}
    assert reply["memory"]["seconds"].keys() == {"wake.weights", "wake.kv_cache"}
    assert (await routes["get_weight_version"]({}))["asleep"] == 0
    assert (await routes[WAKE]({}))["is_awake"] is True


@for_each_level
async def test_a_worker_whose_cache_does_not_fit_stays_out_of_service(level: int) -> None:
    handler, orders, routes = await make_sleeper(level)
    await orders.refit.stage(STAGING)
    handler.fails["wake_up"] = RuntimeError("out of memory")
    reply = await orders.refit.run(SLEEPERS_ORDER)
    assert (reply["status"], reply["state"]) == ("error", "asleep")
    assert "out of memory (cuda:0 has 1.00 GB free" in reply["message"]
    assert handler._weight_version == -1 and handler._paused
    assert ("rollway-v5",) not in handler.calls
    del handler.fails["wake_up"]
    # Its weights are the new ones, so a wake must not say that it serves the old version.
    assert await routes[WAKE]({}) == {"status": "ok", "is_awake": False, "level": level}
    assert handler._weight_version == -1
    # The next refit brings it back.
    await orders.refit.discard({"identity": "w5"})
    await orders.refit.stage(STAGING)
    reply = await orders.refit.run({**SLEEPERS_ORDER, "label": -1})
    assert reply["status"] == "ok" and handler._weight_version == 5


@for_each_level
async def test_a_worker_that_slept_sleeps_again_if_the_update_is_discarded(level: int) -> None:
    handler, orders, routes = await make_sleeper(level)
    await orders.refit.stage(STAGING)
    handler.calls.clear()
    await orders.refit.discard({"identity": "w5"})
    assert handler.calls == ["rollway_unstage", "rollway_before_sleep", ("sleep", level, "abort")]
    assert handler.asleep == BOTH and handler._weight_version == LEAVING
    await orders.refit.discard({"identity": "w5"})  # again: nothing is left to do
    assert handler.calls[3:] == ["rollway_unstage"]
    reply = await routes[WAKE]({})
    assert reply.get("version") == (4 if level == 1 else None)


@for_each_level
async def test_a_refused_refit_leaves_a_worker_asleep_with_what_it_has(level: int) -> None:
    handler, orders, routes = await make_sleeper(level)
    await orders.refit.stage(STAGING)
    handler.report = {"state": "refused", "error": "not staged"}
    assert (await orders.refit.run(SLEEPERS_ORDER))["state"] == "refused"
    assert handler._weight_version == LEAVING and handler.asleep == {"kv_cache"}
    assert handler.calls[-1] == () and handler._paused
    await orders.refit.discard({"identity": "w5"})
    reply = await routes[WAKE]({})
    assert reply.get("version") == (4 if level == 1 else None)
    assert handler._weight_version == (4 if level == 1 else LEAVING)


async def test_a_wake_does_not_restore_what_a_failed_swap_has_left() -> None:
    handler, orders, routes = await make_sleeper(1)
    await orders.refit.stage(STAGING)
    handler.report = RuntimeError("2 parameters differ")
    assert (await orders.refit.run(SLEEPERS_ORDER))["state"] == "in doubt"
    await orders.refit.discard({"identity": "w5"})
    handler.calls.clear()
    assert await routes[WAKE]({}) == {"status": "ok", "is_awake": False, "level": 1}
    assert handler.calls == [] and handler._weight_version == -1 and handler.asleep == BOTH


async def test_an_engine_that_cannot_give_the_weights_their_memory_stages_nothing() -> None:
    handler, orders, _ = await make_sleeper(1)
    handler.fails["wake_up"] = RuntimeError("out of memory")
    reply = await orders.refit.stage(STAGING)
    assert reply["status"] == "error" and "2.00 GB free" in reply["message"]
    assert "rollway_stage" not in handler.calls


# --- the engine's process and its event loop -----------------------------------------------------


@pytest.mark.parametrize(("given", "used"), [(0, STOP_SECONDS), (None, None), (7, 7)])
async def test_the_engine_has_time_to_exit(given: float | None, used: float | None) -> None:
    """Dynamo gives it none: it passes the time for draining requests."""
    handler, timeouts = Handler(), []
    handler.shutdown = lambda timeout=None: timeouts.append(timeout)  # type: ignore[attr-defined]
    add_orders(handler)
    handler.engine_client.shutdown(timeout=given)  # type: ignore[attr-defined]
    assert timeouts == [used]


def request(*fields: str, salt: str = "v4") -> dict[str, Any]:
    return {"extra_args": {"nvext": {"extra_fields": list(fields), "cache_salt": salt}}}


async def sample(handler: Handler, orders: EngineOrders, asked: dict[str, Any]) -> list[Any]:
    return [chunk async for chunk in orders.refit.stamp(handler.generate)(asked, Context())]


async def make_labelled(label: Any = 4) -> tuple[Handler, EngineOrders, dict[str, Any]]:
    handler = Handler()
    orders, routes = add_orders(handler)
    await routes["set_weight_version"]({"weight_version": label})
    return handler, orders, routes


async def test_the_last_chunk_names_the_versions() -> None:
    handler, orders, _ = await make_labelled()
    first, last = await sample(handler, orders, request("engine_data", STAMPS, "worker_id"))
    assert "engine_data" not in first
    assert last["engine_data"] == {STAMPS: [(0, 4)]}
    # Dynamo would collect all tokens and log-probs for it once more.
    assert handler.calls[-1]["extra_args"]["nvext"]["extra_fields"] == ["worker_id"]


@pytest.mark.parametrize(
    "asked", [request("engine_data"), request(STAMPS, salt="mine"), {"token_ids": [1]}]
)
async def test_requests_that_do_not_ask_or_name_no_version_get_no_stamps(asked: Any) -> None:
    handler, orders, _ = await make_labelled()
    chunks = await sample(handler, orders, asked)
    assert all("engine_data" not in chunk for chunk in chunks)


async def is_stamped(handler: Handler, orders: EngineOrders) -> bool:
    """Sample a request that names version 4 and asks for stamps."""
    *_, last = await sample(handler, orders, request("engine_data", STAMPS))
    return "engine_data" in last


async def test_an_engine_without_a_label_stamps_nothing() -> None:
    """It admits every request, so nobody knows which version samples it."""
    handler = Handler()
    orders, routes = add_orders(handler)
    assert not await is_stamped(handler, orders)
    handler._weight_version = None
    await orders.refit.stage(STAGING)  # the engine is known to have the plugin, and has no label
    assert (await routes["get_weight_version"]({}))["enforced"] is True
    assert not await is_stamped(handler, orders)
    await routes["set_weight_version"]({"weight_version": 4})
    assert await is_stamped(handler, orders)
    await routes["set_weight_version"]({"weight_version": None})
    assert not await is_stamped(handler, orders)


@pytest.mark.parametrize("raises", [True, False])
async def test_an_engine_without_the_plugin_stamps_nothing(raises: bool) -> None:
    handler = Handler()
    handler.is_hooked = False
    if raises:
        handler.fails["rollway_label"] = RuntimeError("no such method")
    orders, routes = add_orders(handler)
    await routes["set_weight_version"]({"weight_version": 4})
    assert not await is_stamped(handler, orders)


@pytest.mark.parametrize(("before", "after"), [(None, 4), (4, None)])
async def test_nothing_is_stamped_between_the_workers_label_and_the_engines(
    before: int | None, after: int | None
) -> None:
    """The worker has the new label, and the engine may still have none, or none any more."""
    handler, orders, routes = await make_labelled(before)
    handler.holds["rollway_label"] = hold = asyncio.Event()
    labelling = asyncio.create_task(routes["set_weight_version"]({"weight_version": after}))
    await wait_until_async(lambda: handler.calls.count("rollway_label") == 2)
    assert handler._weight_version == after
    assert not await is_stamped(handler, orders)
    hold.set()
    await labelling
    assert await is_stamped(handler, orders) is (after == 4)


async def test_a_refit_labels_the_engine_so_that_its_worker_stamps() -> None:
    """Nobody has labelled it before, as in a stack that others have started."""
    handler = Handler()
    handler._weight_version = None
    orders, _ = add_orders(handler)
    await orders.refit.stage({**STAGING, "needs_label": False})
    assert not await is_stamped(handler, orders)
    order = {**ORDER, "label": None, "leaving": -1, "version": 4, "taints_before": []}
    assert (await orders.refit.run(order))["status"] == "ok"
    assert await is_stamped(handler, orders)


async def test_a_request_that_a_refit_froze_has_both_versions() -> None:
    handler, orders, _ = await make_labelled()
    handler.report = {"state": "served", "frozen": {"request-1-ab12cd34": 2, "other-99": 7}}
    handler.holds[REFIT] = hold = asyncio.Event()
    stream = orders.refit.stamp(handler.generate)(request("engine_data", STAMPS), Context())
    await anext(stream)
    refit = asyncio.create_task(orders.refit.run({**ORDER, "mode": "keep"}))
    last = asyncio.create_task(anext(stream))
    await wait_until_async(lambda: "rollway_refit" in handler.calls)
    # The refit that is running may have frozen this request.
    assert await stays_async(lambda: not last.done(), 0.01)
    hold.set()
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
    own = {REFIT, CANCEL, STAGE, DISCARD, SLEEP, WAKE, MEMORY}
    assert routes.keys() == {DOOR, "set_weight_version", *own}
    for name in own:
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
