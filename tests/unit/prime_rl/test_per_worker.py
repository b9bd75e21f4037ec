"""Calls to single workers are parts of one operation of the fleet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from rollway.errors import RefitError, RollwayError
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.per_worker import WorkerParts, make_key
from rollway.integrations.prime_rl.routes import _find_origin
from rollway.integrations.prime_rl.virtual_worker import VirtualWorker
from tests.waiting import settle

WORKERS = [Worker(2**60 + n, "m", f"http://10.0.0.{n}:9090", world_size=2) for n in (1, 2)]
A, B = map(make_key, WORKERS)
PAUSE, RESUME = "pause_generation", "resume_generation"
UPDATE = "update_weights_from_disk"
STEP = {"model_path": "/runs/step_3", "weight_version": "step_3"}


class FakeFleet:
    """Lists two workers, until a test takes one away."""

    def __init__(self) -> None:
        self.listed = list(WORKERS)

    async def workers(self, *, fresh: bool = True) -> list[Worker]:
        return list(self.listed)


class FakeVirtual:
    """Counts what is carried out; `fail` decides how it ends."""

    model = "m"
    routes = dict.fromkeys((PAUSE, UPDATE, RESUME))

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail: RollwayError | None = None

    async def call_route(self, name: str, body: Any) -> dict[str, Any]:
        self.calls.append((name, body))
        if self.fail is not None:
            raise self.fail
        return {"status": "ok", "call": len(self.calls)}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Client:
    """A client that calls single workers."""

    def __init__(self, parts: WorkerParts, virtual: FakeVirtual) -> None:
        self.parts, self.virtual = parts, virtual

    async def call(self, key: str, route: str, body: Any = None) -> dict[str, Any]:
        virtual = cast(VirtualWorker, self.virtual)
        return await self.parts.call_route(virtual, key, route, body or {})

    async def call_both(self, route: str, body: Any = None) -> list[Any]:
        calls = (self.call(key, route, body) for key in (A, B))
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def virtual() -> FakeVirtual:
    return FakeVirtual()


@pytest.fixture
def client(fleet: FakeFleet, virtual: FakeVirtual) -> Client:
    return Client(WorkerParts(cast(Fleet, fleet), seconds=0.1), virtual)


async def test_every_worker_is_listed_at_an_address_of_the_server(
    client: Client, virtual: FakeVirtual, fleet: FakeFleet
) -> None:
    fleet.listed[1] = Worker(9, "m", WORKERS[1].admin_url, error="timed out")  # restarted
    listing = await client.parts.list_workers(cast(VirtualWorker, virtual), "http://gw:8100")
    assert listing["protocol_version"] == 1
    first, second = listing["workers"]
    assert first["system_url"] == f"http://gw:8100/workers/{A}"
    assert second["system_url"] == f"http://gw:8100/workers/{B}"  # by address, not by id
    assert first["instance_id"] == 2**60 + 1 and first["world_size"] == 2
    assert "error" not in first and second["error"] == "timed out"
    # A client of September wants one worker at an origin; it finds none here.
    assert "admin_base_url" not in first


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("gw:8100", "http://gw:8100"),
        ("0.0.0.0:8100", "http://10.0.0.5:8100"),
        ("[::]:8100", "http://10.0.0.5:8100"),
        ("0.0.0.0", "http://10.0.0.5:8100"),
    ],
)
def test_no_listing_names_0_0_0_0(host: str, origin: str) -> None:
    transport = SimpleNamespace(get_extra_info=lambda _: ("10.0.0.5", 8100))
    request = SimpleNamespace(scheme="http", host=host, transport=transport)
    assert _find_origin(cast(web.Request, request)) == origin


async def test_one_pause_one_update_and_one_resume(client: Client, virtual: FakeVirtual) -> None:
    paused = await client.call_both(PAUSE)
    assert virtual.names == [PAUSE] and paused[0] == paused[1]
    first = asyncio.create_task(client.call(A, UPDATE, STEP))
    await settle()
    assert virtual.names == [PAUSE]  # B's has not come
    await client.call(B, UPDATE, STEP)
    await first
    # `WeightUpdates` makes one refit of equal updates; it gets them once all are there.
    assert set(virtual.names[1:]) == {UPDATE}
    resuming = asyncio.create_task(client.call(A, RESUME))
    await settle()
    assert RESUME not in virtual.names
    await client.call(B, RESUME)
    await resuming
    assert all(isinstance(answer, dict) for answer in await client.call_both(RESUME))  # repeated


async def test_rounds_follow_each_other(client: Client, virtual: FakeVirtual) -> None:
    for step in (1, 2, 3):
        body = {**STEP, "weight_version": str(step)}
        for route, content in ((PAUSE, None), (UPDATE, body), (RESUME, None)):
            answers = await client.call_both(route, content)
            assert all(isinstance(answer, dict) for answer in answers), answers
    assert virtual.names.count(PAUSE) == 3


async def test_an_update_that_misses_a_worker_changes_nothing(
    client: Client, virtual: FakeVirtual
) -> None:
    await client.call_both(PAUSE)
    with pytest.raises(Refused, match=f"came to {A}, and not to {B}") as refusal:
        await client.call(A, UPDATE, STEP)
    assert refusal.value.status == 503 and UPDATE not in virtual.names  # it may be repeated
    await client.call_both(UPDATE, STEP)
    assert UPDATE in virtual.names


async def test_workers_are_not_moved_to_different_weights(
    client: Client, virtual: FakeVirtual
) -> None:
    await client.call_both(PAUSE)
    calls = (client.call(A, UPDATE, STEP), client.call(B, UPDATE, {**STEP, "model_path": "/x"}))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, Refused) and answer.status == 409 for answer in answers)
    assert UPDATE not in virtual.names


async def test_every_caller_gets_the_failure(client: Client, virtual: FakeVirtual) -> None:
    virtual.fail = Refused(409, "/init_broadcaster failed.")
    assert [str(answer) for answer in await client.call_both(PAUSE)] == [str(virtual.fail)] * 2
    assert virtual.names == [PAUSE]  # a second one would have closed the gate
    virtual.fail = None
    await client.call_both(PAUSE)
    virtual.fail = RefitError("worker 7 is in doubt.")
    assert {str(answer) for answer in await client.call_both(UPDATE, STEP)} == {str(virtual.fail)}


async def test_a_client_that_was_restarted_begins_anew(
    client: Client, virtual: FakeVirtual
) -> None:
    """The first knew both workers; the second discovers one."""
    await client.call_both(PAUSE)
    left = asyncio.create_task(client.call(B, UPDATE, STEP))
    await settle()
    await client.call(A, PAUSE)
    with pytest.raises(Refused, match="paused again"):
        await left
    await client.call(A, UPDATE, STEP)
    await client.call(A, RESUME)
    assert virtual.names == [PAUSE, PAUSE, UPDATE, RESUME]


async def test_a_restarted_server_takes_the_next_call(client: Client, virtual: FakeVirtual) -> None:
    """It does not know who was paused; `WeightUpdates` does."""
    await client.call_both(UPDATE, STEP)
    await client.call_both(RESUME)
    assert set(virtual.names) == {UPDATE, RESUME}


async def test_an_adapter_is_loaded_once_for_all_workers(
    client: Client, virtual: FakeVirtual
) -> None:
    body = {"lora_name": "p", "source": {"uri": "file:///runs/step_1"}}
    first, second = await client.call_both("load_lora", body)
    assert first == second and virtual.names == ["load_lora"]
    await client.call_both("load_lora", body)  # a step that comes again may have other weights
    assert virtual.names == ["load_lora"] * 2
    virtual.fail = Refused(500, "no")
    assert all(isinstance(a, Refused) for a in await client.call_both("unload_lora", {}))
    assert virtual.names[2:] == ["unload_lora"]


async def test_the_fleet_joins_a_group_as_a_whole(client: Client, virtual: FakeVirtual) -> None:
    body = {"host": "h", "port": 1, "inference_world_size": 4}
    calls = (client.call(key, "init_weights_update_group", {**body, "rank_offset": offset})
             for key, offset in ((A, 0), (B, 2)))  # fmt: skip
    await asyncio.gather(*calls)
    assert virtual.calls == [("init_weights_update_group", {**body, "rank_offset": 0})]


async def test_a_worker_that_restarts_is_still_called(client: Client, fleet: FakeFleet) -> None:
    await client.call_both(PAUSE)
    fleet.listed.pop()
    assert all(isinstance(a, dict) for a in await client.call_both(UPDATE, STEP))
    with pytest.raises(Refused) as refusal:
        await client.parts.find_worker(B)
    assert refusal.value.status == 503
    with pytest.raises(Refused, match="no worker") as refusal:
        await client.call("0" * 12, PAUSE)
    assert refusal.value.status == 404
