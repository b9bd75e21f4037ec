"""The order of calls to workers without Rollway's extension. Workers and policy are mocks that note
the calls. tests/stack/test_nemo_rl_stock.py has real ones."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import AdminError, UsageError
from rollway.integrations.nemo_rl.stock import StockUpdate, StockWire


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


def make_fleet(*workers: Any) -> Any:
    async def list_workers() -> list[Any]:
        return list(workers)

    return SimpleNamespace(workers=list_workers, admin=FakeAdmin())


def make_update(
    members: set[int], sent: list[str], **options: Any
) -> tuple[StockUpdate, list[Any]]:
    def send() -> Future[list[Any]]:
        sent.append("send")
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    workers = [make_worker(number) for number in sorted(members)]
    return StockUpdate(info, frozenset(members), send, **options), workers


async def test_ranks_of_all_workers_follow_the_sender() -> None:
    calls, fleet = FakeCalls(), make_fleet(make_worker(7, ranks=2), make_worker(9))
    wire = StockWire(calls)
    update = await wire.prepare(fleet)
    assert update.members == {7, 9} and wire.nbytes == 12
    assert fleet.admin.groups[7] == {
        "nccl_unique_id_b64": "aWQ=", "packed": True, "rank_offset": 1, "world_size": 4,
    }  # fmt: skip
    assert fleet.admin.groups[9]["rank_offset"] == 3
    assert update.info == {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    before = list(calls.calls)
    await wire.prepare(fleet)  # the same workers: the group stays
    assert calls.calls == before
    later = make_fleet(make_worker(9), make_worker(11))
    assert (await wire.prepare(later)).members == {9, 11}
    assert calls.calls.count("join_group") == 2 and calls.calls.count("list_tensors") == 1
    wire.forget()
    await wire.prepare(later)
    assert calls.calls.count("join_group") == 3
    wire.close()


async def test_a_draft_model_is_refused_before_a_worker_is_asked() -> None:
    fleet = make_fleet(make_worker(7))
    wire = StockWire(FakeCalls("w", "draft.fc.weight"))
    with pytest.raises(UsageError, match="exports a draft model"):
        await wire.prepare(fleet)
    assert fleet.admin.calls == []
    silent = SimpleNamespace(instance_id=7, world_size=1, error="no answer")
    with pytest.raises(UsageError, match="no group can form"):
        await StockWire(FakeCalls()).prepare(make_fleet(silent))


async def test_nobody_receives_before_all_have_started() -> None:
    sent: list[str] = []
    update, workers = make_update({1, 2, 3}, sent)
    admin: Any = FakeAdmin()
    await update.prepare()
    for worker in workers:
        assert not (await update.preflight(admin, worker)).verifies_itself
    assert (await update.preflight(admin, make_worker(4))).is_starting  # left alone
    await asyncio.gather(*(update.apply(admin, worker, -5) for worker in workers))
    methods = [method for _, method in admin.calls]
    assert methods[:3] == ["start_weight_update"] * 3
    assert methods.count("update_weights") == methods.count("finish_weight_update") == 3
    assert sent == ["send"]


async def test_a_worker_that_cannot_start_stops_all_before_the_broadcast() -> None:
    sent: list[str] = []
    update, workers = make_update({1, 2}, sent)
    admin: Any = FakeAdmin()
    admin.fails_at = (2, "start_weight_update")
    results = await asyncio.gather(
        *(update.apply(admin, worker, -5) for worker in workers), return_exceptions=True
    )
    assert all(isinstance(result, AdminError) for result in results)
    assert sent == [] and ("update_weights" not in [method for _, method in admin.calls])


async def test_a_worker_that_never_comes_is_named() -> None:
    sent: list[str] = []
    update, workers = make_update({1, 2}, sent, gather_seconds=0.05)
    admin: Any = FakeAdmin()
    with pytest.raises(AdminError, match="workers 2 are not paused"):
        await update.apply(admin, workers[0], -5)
    assert sent == [] and admin.calls == []
