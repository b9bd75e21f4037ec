"""The order of calls to foreign workers. Workers and policy are mocks that note
the calls. tests/stack/test_nemo_rl_stock.py has real ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import AdminError, UsageError
from rollway.fleet.admin import NoSuchMethod
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.integrations.nemo_rl.stock import StockUpdate, StockWire
from tests.unit.fleet.fake_fleet import ROUTES, FakeWorker, fake_fleet


def make_worker(number: int, ranks: int = 1) -> Any:
    return SimpleNamespace(instance_id=number, world_size=ranks, error=None)


class FakeAdmin:
    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        self.groups: dict[int, Any] = {}
        self.fails_at: tuple[int, str] | None = None

    async def _note(self, worker: Any, method: str) -> None:
        await asyncio.sleep(0)  # as a request does, it lets others run
        if (worker.instance_id, method) == self.fails_at:
            raise AdminError(f"{method} failed.")
        self.calls.append((worker.instance_id, method))

    async def call(self, worker: Any, method: str, arguments: Any) -> None:
        await self._note(worker, method)

    async def update_distributed(
        self, worker: Any, version: int, method: str, arguments: Any
    ) -> None:
        await self._note(worker, method)

    async def init_group(self, worker: Any, arguments: Any, *, method: str) -> None:
        await self._note(worker, method)
        self.groups[worker.instance_id] = arguments["init_info"]


class FakeCalls:
    """The policy's ranks."""

    def __init__(self, *names: str) -> None:
        self.calls: list[str] = []
        self.names = names or ("w",)

    def __call__(self, method: str, **kwargs: Any) -> list[Any]:
        self.calls.append(method)
        if method == "list_tensors":
            return [[(name, "bfloat16", [2, 3], 12) for name in self.names], []]
        if method == "make_id":
            return [{"nccl_unique_id_b64": "aWQ=", "packed": True}, None]
        return [None, None]


def make_fleet() -> Any:
    return SimpleNamespace(admin=FakeAdmin())


async def receive(update: StockUpdate, admin: Any, *workers: Any) -> list[Any]:
    """Take the workers through a refit."""
    for worker in workers:
        await pass_preflight(update, admin, worker)
    loads = (update.load(admin, worker, -5) for worker in workers)
    return await asyncio.gather(*loads, return_exceptions=True)


async def pass_preflight(update: StockUpdate, admin: Any, worker: Any) -> None:
    """Nobody can stage a collective, so every worker is moved as a foreign one."""
    with pytest.raises(NoSuchMethod) as why:
        await update.stage(admin, worker, needs_label=False)
    await update.check_foreign(worker, why.value)


async def test_ranks_of_all_workers_follow_the_sender() -> None:
    calls, fleet = FakeCalls(), make_fleet()
    wire = StockWire(calls)
    update = await wire.prepare(fleet)
    assert wire.nbytes == 12
    assert update.info == {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    first, second, third = make_worker(7, ranks=2), make_worker(9), make_worker(11)
    assert await receive(update, fleet.admin, first, second) == [None, None]
    assert fleet.admin.groups[7] == {
        "nccl_unique_id_b64": "aWQ=", "packed": True, "rank_offset": 1, "world_size": 4,
    }  # fmt: skip
    assert fleet.admin.groups[9]["rank_offset"] == 3
    await receive(await wire.prepare(fleet), fleet.admin, first, second)  # the group stays
    assert calls.calls.count("join_group") == 1 and calls.calls.count("list_tensors") == 1
    await receive(await wire.prepare(fleet), fleet.admin, second, third)
    assert calls.calls.count("join_group") == 2
    wire.forget()
    await receive(await wire.prepare(fleet), fleet.admin, second, third)
    assert calls.calls.count("join_group") == 3


async def test_a_worker_that_is_ready_later_gets_a_broadcast_of_its_own() -> None:
    calls, fleet = FakeCalls(), make_fleet()
    update = await StockWire(calls).prepare(fleet)
    assert await receive(update, fleet.admin, make_worker(7)) == [None]
    assert await receive(update, fleet.admin, make_worker(9)) == [None]
    assert fleet.admin.groups[9] == {
        "nccl_unique_id_b64": "aWQ=", "packed": True, "rank_offset": 1, "world_size": 2,
    }  # fmt: skip
    assert calls.calls.count("send_weights_via_checkpoint_engine") == 3  # once to list
    assert update.repeatable  # or a refit would refuse a worker that joins in it
    update.close()
    assert not update.repeatable


class FakeStockWorker(FakeWorker):
    """Declares what its last call of an update says, as Dynamo's workers do."""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.match_info["route"] == "update_weights_from_distributed":
            self.version = body.get("weight_version", self.version)
        return await super().handle(request)


async def test_a_successor_that_is_ready_in_the_middle_of_a_refit_is_part_of_it() -> None:
    """Its supervisor labels it when it is ready; before, it is left alone."""
    routes = [*ROUTES, "update_weights_from_distributed", "init_weights_update_group"]
    first, successor = (FakeStockWorker(number, routes=routes) for number in (1, 2))
    successor.version = None

    async def become_ready(step: str, worker: Any) -> None:
        if step == "update" and successor.version is None:
            successor.version = 0

    async with fake_fleet(first, successor) as url, Http() as http:
        fleet = Fleet(http, url, supervised=lambda _: True)
        fleet.observer = become_ready
        calls = FakeCalls()
        wire = StockWire(calls)
        update = await wire.prepare(fleet)
        report = await fleet.refit(7, update)
        assert [(w.state, w.version) for w in report.workers] == [("serving", 7)] * 2
        assert report.passes == 2 and calls.calls.count("join_group") == 2
        update.close()
        report = await fleet.refit(8, await wire.prepare(fleet))
        assert fleet.versions.by_worker == {1: 8, 2: 8} and report.passes == 1
        assert calls.calls.count("join_group") == 3  # all of them together


async def test_a_version_that_has_ended_is_sent_to_nobody_who_joins() -> None:
    routes = [*ROUTES, "update_weights_from_distributed", "init_weights_update_group"]
    first, late = (FakeStockWorker(number, routes=routes) for number in (1, 2))
    late.version = None
    async with fake_fleet(first, late) as url, Http() as http:
        fleet = Fleet(http, url, supervised=lambda _: True)
        update = await StockWire(FakeCalls()).prepare(fleet)
        await fleet.refit(7, update)
        update.close()
        late.version = 0
        assert await fleet.admit() is None
        assert late.version == 0 and "update_weights_from_distributed" not in late.calls


async def test_a_draft_model_is_refused_before_a_worker_is_asked() -> None:
    fleet = make_fleet()
    wire = StockWire(FakeCalls("w", "draft.fc.weight"))
    with pytest.raises(UsageError, match="exports a draft model"):
        await wire.prepare(fleet)
    assert fleet.admin.calls == []


async def test_nobody_receives_before_all_have_started() -> None:
    fleet = make_fleet()
    update = await StockWire(FakeCalls()).prepare(fleet)
    await update.prepare()
    await receive(update, fleet.admin, *(make_worker(number) for number in (1, 2, 3)))
    methods = [method for _, method in fleet.admin.calls]
    steps = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
    assert methods[:6] == [steps[0]] * 3 + [steps[1]] * 3
    assert methods.count(steps[2]) == methods.count("finish_weight_update") == 3


@pytest.mark.parametrize("method", ["init_weight_transfer_engine", "start_weight_update"])
async def test_a_worker_that_cannot_begin_stops_all_before_the_broadcast(method: str) -> None:
    calls, fleet = FakeCalls(), make_fleet()
    fleet.admin.fails_at = (2, method)
    update = await StockWire(calls).prepare(fleet)
    calls.calls.clear()
    results = await receive(update, fleet.admin, make_worker(1), make_worker(2))
    assert all(isinstance(result, AdminError) for result in results)
    assert "send_weights_via_checkpoint_engine" not in calls.calls
    assert "update_weights" not in [each for _, each in fleet.admin.calls]


async def test_a_worker_that_never_comes_is_named() -> None:
    fleet = make_fleet()
    update = await StockWire(FakeCalls()).prepare(fleet)
    update.gather_seconds = 0.05
    for worker in (make_worker(1), make_worker(2)):
        await pass_preflight(update, fleet.admin, worker)
    with pytest.raises(AdminError, match="workers 2 are not paused"):
        await update.load(fleet.admin, make_worker(1), -5)
    assert fleet.admin.calls == []
