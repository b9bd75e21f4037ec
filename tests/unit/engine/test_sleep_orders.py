"""The guard's orders to sleep and wake, on a fake of Dynamo's handler and vLLM's engine client.

tests/stack has them on a real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollway.engine.guard import EngineOrders
from rollway.signed_calls import MEMORY, SLEEP, WAKE
from tests.waiting import wait_until_async

BOTH = ["weights", "kv_cache"]


class Engine:
    """Dynamo's handler, and the engine client with vLLM's executor behind it."""

    def __init__(self) -> None:
        self._pause_lock = asyncio.Lock()
        self._weight_version: Any = 4
        self._paused = False
        self.engine_client = self
        self.calls: list[Any] = []
        self.asleep: set[str] = set()
        self.refusal = ""
        self.fails: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        if method == "rollway_memory":
            free = 100 * len(self.asleep) * 10**7
            refusal = self.refusal if kwargs["level"] else ""
            return [{"device": "cuda:0", "free": free, "releases": True, "refusal": refusal}]
        self.calls.append((method, *kwargs.values()))
        return [True]

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        if self.hold is not None:
            await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        self.asleep = set(BOTH)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))
        if self.fails is not None:
            raise self.fails
        self.asleep -= set(tags)

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("route")
        return {"status": "ok", "version": self._weight_version}

    resume_generation = update_weights_from_distributed = get_weight_version = reply
    own_sleep = own_wake = set_weight_version = reply


@pytest.fixture
def engine() -> Engine:
    return Engine()


def add_orders(engine: Engine) -> tuple[EngineOrders, dict[str, Any]]:
    orders = EngineOrders()
    handlers = {
        "get_weight_version": engine.get_weight_version,
        "resume_generation": engine.resume_generation,
        "update_weights_from_distributed": engine.update_weights_from_distributed,
        "control/sleep": engine.own_sleep,
        "control/wake_up": engine.own_wake,
    }
    routes = {name: orders.wrap(name, handler) for name, handler in handlers.items()}
    return orders, routes | orders.list_own()


async def sleep(routes: dict[str, Any], level: int = 1, **more: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await routes[SLEEP]({"level": level, "mode": "wait"} | more)
    return reply


async def test_a_sleep_reports_memory_and_a_wake_brings_it_back(engine: Engine) -> None:
    _, routes = add_orders(engine)
    reply = await sleep(routes)
    assert reply["status"] == "ok" and engine._paused
    assert (reply["before"][0]["free"], reply["ranks"][0]["free"]) == (0, 2 * 10**9)
    assert engine.calls == [("rollway_before_sleep", 1), ("sleep", 1, "wait")]
    assert (await routes["get_weight_version"]({}))["asleep"] == 1
    assert (await routes[MEMORY]({}))["asleep"] == 1
    reply = await routes[WAKE]({})
    assert reply["status"] == "ok" and not engine._paused and engine.asleep == set()
    assert engine.calls[-1] == ("wake_up", *BOTH)
    assert (await routes["get_weight_version"]({}))["asleep"] == 0


async def test_orders_that_find_their_work_done_do_nothing(engine: Engine) -> None:
    _, routes = add_orders(engine)
    assert (await routes[WAKE]({}))["status"] == "ok" and engine.calls == []
    await sleep(routes)
    engine.calls.clear()
    assert (await sleep(routes))["status"] == "ok" and engine.calls == []
    assert "sleeps at level 1" in (await sleep(routes, 2))["message"]
    await routes[WAKE]({"tags": ["weights"]})
    await routes[WAKE]({"tags": ["weights"]})
    assert engine.calls == [("wake_up", "weights")]
    await sleep(routes)  # again, after a refit that was refused
    assert engine.calls[-1] == ("sleep", 1, "wait")


async def test_level_2_wakes_completely_only_after_new_weights(engine: Engine) -> None:
    _, routes = add_orders(engine)
    update = routes["update_weights_from_distributed"]
    await sleep(routes, 2)
    assert "its weights are gone" in (await routes[WAKE]({}))["message"]
    assert "its weights sleep" in (await update({"engine_rpc": "rollway_swap"}))["message"]
    await routes[WAKE]({"tags": ["weights"]})
    assert "its weights are gone" in (await routes[WAKE]({"tags": ["kv_cache"]}))["message"]
    assert (await update({"engine_rpc": "rollway_stage", "allow_unpaused": True}))["status"] == "ok"
    assert "its weights are gone" in (await routes[WAKE]({}))["message"]  # they are only staged
    assert (await update({"engine_rpc": "rollway_swap"}))["status"] == "ok"
    assert (await routes[WAKE]({}))["status"] == "ok" and engine.asleep == set()


async def test_nothing_generates_in_an_engine_that_sleeps(engine: Engine) -> None:
    orders, routes = add_orders(engine)
    await sleep(routes)
    for tags in (None, ["weights"]):
        if tags:
            await routes[WAKE]({"tags": tags})
        assert "it sleeps" in (await routes["resume_generation"]({}))["message"]
        reply = await orders.refit.run({"label": 4})
        assert (reply["state"], reply["message"]) == ("refused", "it sleeps")
    for own in ("control/sleep", "control/wake_up"):  # Dynamo's would resume a part
        assert "take the place" in (await routes[own]({}))["message"]
    assert "route" not in engine.calls
    await routes[WAKE]({})
    assert (await routes["resume_generation"]({}))["status"] == "ok"


async def test_an_engine_without_sleep_mode_is_refused_before_anything_stops(
    engine: Engine,
) -> None:
    _, routes = add_orders(engine)
    engine.refusal = "it was started without sleep mode"
    reply = await sleep(routes)
    assert (reply["state"], reply["message"]) == ("refused", engine.refusal)
    assert engine.calls == [] and not engine._paused


async def test_an_order_for_another_label_is_refused(engine: Engine) -> None:
    _, routes = add_orders(engine)
    assert (await sleep(routes, label=-11))["state"] == "refused" and engine.calls == []
    assert (await sleep(routes, label=4))["status"] == "ok"


async def test_a_sleep_ends_although_its_caller_is_gone(engine: Engine) -> None:
    _, routes = add_orders(engine)
    engine.hold = asyncio.Event()
    call = asyncio.create_task(sleep(routes))
    await wait_until_async(lambda: ("sleep", 1, "wait") in engine.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.hold.set()
    async with engine._pause_lock:  # the order holds it until it ends
        assert engine.asleep == set(BOTH)


async def test_a_wake_without_memory_names_the_figures_and_may_be_repeated(engine: Engine) -> None:
    _, routes = add_orders(engine)
    await sleep(routes)
    engine.fails = RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
    message = (await routes[WAKE]({}))["message"]
    assert "out of memory" in message and "cuda:0 has 2.00 GB free" in message
    assert "it sleeps" in (await routes["resume_generation"]({}))["message"]
    engine.fails = None
    assert (await routes[WAKE]({}))["status"] == "ok" and engine.asleep == set()


async def test_an_engine_whose_sleep_failed_stays_out(engine: Engine) -> None:
    _, routes = add_orders(engine)
    engine.fails = RuntimeError("Memory usage increased after sleeping.")
    assert (await sleep(routes))["message"] == "Memory usage increased after sleeping."
    assert engine._paused and "it sleeps" in (await routes["resume_generation"]({}))["message"]
