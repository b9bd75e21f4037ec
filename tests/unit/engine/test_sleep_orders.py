"""The guard's orders to sleep and wake, on a fake of Dynamo's handler and vLLM's engine client.

test_guard.py has refits of workers that sleep, tests/stack all of them on a real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollway.fleet.admin import leaving_label
from rollway.signed_calls import MEMORY, SLEEP, WAKE
from tests.unit.engine.dynamo_handler import BOTH, LEAVING, Handler, add_orders
from tests.waiting import wait_until_async

ORDER = {"level": 1, "mode": "wait", "label": 4, "leaving": LEAVING, "taints": ["rollway-v4"]}
RELEASE = ["rollway_before_sleep", ("sleep", 1, "wait")]


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def routes(handler: Handler) -> dict[str, Any]:
    _, routes = add_orders(handler)
    return routes


async def sleep(routes: dict[str, Any], level: int = 1, **more: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await routes[SLEEP]({**ORDER, "level": level, **more})
    return reply


async def wake(routes: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = await routes[WAKE]({})
    return reply


def test_the_label_in_these_tests_is_that_of_the_fleet() -> None:
    assert leaving_label(4) == LEAVING


async def test_a_sleep_takes_label_and_routing_away_before_memory(
    handler: Handler, routes: dict[str, Any]
) -> None:
    """If the engine fails in the middle, nobody takes the worker for what it was."""
    assert (await sleep(routes))["status"] == "ok"
    assert handler.calls == [(), *RELEASE]
    assert {handler.label_at[call] for call in handler.calls} == {LEAVING}
    assert handler._weight_version == LEAVING and handler._paused and handler.asleep == BOTH


async def test_a_wake_brings_memory_routing_and_label_back(
    handler: Handler, routes: dict[str, Any]
) -> None:
    await sleep(routes)
    handler.calls.clear()
    reply = await wake(routes)
    assert (reply["status"], reply["version"], reply["level"]) == ("ok", 4, 1)
    assert handler.calls == [("wake_up", "kv_cache", "weights"), ("rollway-v4",)]
    # Last: a worker that is labelled with a version serves it.
    assert {handler.label_at[call] for call in handler.calls} == {LEAVING}
    assert handler._weight_version == 4 and not handler._paused and handler.asleep == set()


async def test_both_report_the_memory_before_and_after(
    handler: Handler, routes: dict[str, Any]
) -> None:
    reply = await sleep(routes)
    assert (reply["before"][0]["free"], reply["ranks"][0]["free"]) == (0, 2 * 10**9)
    assert (await routes["get_weight_version"]({}))["asleep"] == 1
    assert (await routes[MEMORY]({}))["asleep"] == 1
    reply = await wake(routes)
    assert (reply["before"][0]["free"], reply["ranks"][0]["free"]) == (2 * 10**9, 0)
    assert (await routes["get_weight_version"]({}))["asleep"] == 0


async def test_a_worker_that_sleeps_is_not_called_paused(
    handler: Handler, routes: dict[str, Any]
) -> None:
    await sleep(routes)
    assert (await routes["get_weight_version"]({}))["paused"] is False


async def test_orders_that_find_their_work_done_do_nothing(
    handler: Handler, routes: dict[str, Any]
) -> None:
    assert await wake(routes) == {"status": "ok", "is_awake": True}
    assert handler.calls == [] and handler._weight_version == 4
    await sleep(routes)
    handler.calls.clear()
    assert (await sleep(routes, label=LEAVING))["status"] == "ok" and handler.calls == []
    assert "sleeps at level 1" in (await sleep(routes, 2, label=LEAVING))["message"]
    assert (await wake(routes))["version"] == 4


@pytest.mark.parametrize(
    ("level", "label"),
    [(2, 4), (1, -1), (2, -1)],
    ids=["forgotten", "in doubt", "forgotten in doubt"],
)
async def test_a_wake_says_so_where_only_a_refit_helps(
    handler: Handler, routes: dict[str, Any], level: int, label: int
) -> None:
    handler._weight_version = label
    await sleep(routes, level, label=label, leaving=-1)
    handler.calls.clear()
    assert await wake(routes) == {"status": "ok", "is_awake": False, "level": level}
    assert handler.calls == [] and handler._weight_version == -1 and handler.asleep == BOTH


async def test_nothing_generates_or_updates_in_an_engine_that_sleeps(
    handler: Handler, routes: dict[str, Any]
) -> None:
    await sleep(routes)
    handler.calls.clear()
    update = routes["update_weights_from_distributed"]
    for reply in (await routes["resume_generation"]({}), await update({"engine_rpc": "load"})):
        assert (reply["state"], reply["message"]) == ("refused", "it sleeps: wake it")
    for own in ("control/sleep", "control/wake_up"):  # Dynamo's would resume a part
        assert "take the place" in (await routes[own]({}))["message"]
    assert handler.calls == []
    # The same route runs methods that change no weights.
    assert (await update({"engine_rpc": "look", "allow_unpaused": True}))["status"] == "ok"
    await wake(routes)
    assert (await routes["resume_generation"]({}))["status"] == "ok"


async def test_an_engine_without_sleep_mode_is_refused_before_anything_stops(
    handler: Handler, routes: dict[str, Any]
) -> None:
    handler.refusal = "it was started without sleep mode"
    reply = await sleep(routes)
    assert (reply["state"], reply["message"]) == ("refused", handler.refusal)
    assert handler.calls == [] and handler._weight_version == 4 and not handler._paused


@pytest.mark.parametrize("label", [3, LEAVING, None])
async def test_an_order_for_another_label_is_refused(
    handler: Handler, routes: dict[str, Any], label: int | None
) -> None:
    """A refit, or another process, came between."""
    handler._weight_version = label
    reply = await sleep(routes)
    assert (reply["state"], reply["message"]) == ("refused", f"its label is {label}, and not 4")
    assert handler.calls == [] and handler._weight_version == label


async def test_a_sleep_ends_although_its_caller_is_gone(
    handler: Handler, routes: dict[str, Any]
) -> None:
    handler.holds["sleep"] = hold = asyncio.Event()
    call = asyncio.create_task(sleep(routes))
    await wait_until_async(lambda: ("sleep", 1, "wait") in handler.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    hold.set()
    async with handler._pause_lock:  # the order holds it until it ends
        assert handler.asleep == BOTH


async def test_a_wake_waits_for_a_sleep_that_is_still_running(
    handler: Handler, routes: dict[str, Any]
) -> None:
    """Its caller gave up, and wants the worker back."""
    handler.holds["sleep"] = hold = asyncio.Event()
    falling = asyncio.create_task(sleep(routes))
    await wait_until_async(lambda: ("sleep", 1, "wait") in handler.calls)
    waking = asyncio.create_task(wake(routes))
    hold.set()
    assert (await waking)["version"] == 4 and (await falling)["status"] == "ok"
    assert handler._weight_version == 4 and handler.asleep == set()


async def test_a_wake_without_memory_names_the_figures_and_may_be_repeated(
    handler: Handler, routes: dict[str, Any]
) -> None:
    await sleep(routes)
    handler.fails["wake_up"] = RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
    message = (await wake(routes))["message"]
    assert "out of memory" in message and "cuda:0 has 2.00 GB free" in message
    assert handler._weight_version == LEAVING and ("rollway-v4",) not in handler.calls
    assert "it sleeps" in (await routes["resume_generation"]({}))["message"]
    handler.fails.clear()
    assert (await wake(routes))["version"] == 4 and handler.asleep == set()


async def test_an_engine_whose_sleep_failed_stays_out(
    handler: Handler, routes: dict[str, Any]
) -> None:
    handler.fails["sleep"] = RuntimeError("Memory usage increased after sleeping.")
    assert (await sleep(routes))["message"] == "Memory usage increased after sleeping."
    assert handler._paused and handler._weight_version == LEAVING
    assert "it sleeps" in (await routes["resume_generation"]({}))["message"]
    assert handler.calls == [(), *RELEASE]  # no routing
