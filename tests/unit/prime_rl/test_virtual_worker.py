"""The fleet as one worker, as prime-rl's `client.dynamo` discovers and calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from rollway.errors import UsageError
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.groups import InitRequest
from rollway.integrations.prime_rl.memory import Memory
from rollway.integrations.prime_rl.updates import WeightUpdates
from rollway.integrations.prime_rl.virtual_worker import VirtualWorker


class FakeUpdates:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.memory = Memory(run="r")

    async def update(self, name: str) -> int:
        self.calls.append(name)
        return 1

    async def init_broadcaster(self, read: Callable[[], InitRequest]) -> None:
        self.calls.append(read())


@pytest.fixture
def updates() -> FakeUpdates:
    return FakeUpdates()


@pytest.fixture
def worker(updates: FakeUpdates) -> VirtualWorker:
    return VirtualWorker("m", cast(WeightUpdates, updates))


def test_the_listing_has_the_address_that_was_asked(worker: VirtualWorker) -> None:
    listing = worker.list_workers("http://10.0.0.5:8100")
    (entry,) = listing["workers"]
    assert entry["admin_base_url"] == entry["system_url"] == "http://10.0.0.5:8100"
    assert listing["protocol_version"] == 1 and entry["world_size"] == 1
    assert worker.list_workers("http://10.0.0.5:8100") == listing
    assert worker.list_workers("http://a", "starting")["workers"][0]["error"] == "starting"


async def test_an_update_is_answered_by_one_null(
    worker: VirtualWorker, updates: FakeUpdates
) -> None:
    body = {"method": "update_weights_from_path", "args": ["/runs/step_1"], "kwargs": {}}
    assert await worker.call_method(body) == {"results": [None]}
    assert updates.calls == ["/runs/step_1"]
    with pytest.raises(UsageError, match="one path"):
        await worker.call_method(body | {"args": []})


async def test_a_group_is_formed(worker: VirtualWorker, updates: FakeUpdates) -> None:
    arguments = ["10.0.0.1", 29501, 0, 2, 1200, "default"]
    answer = await worker.call_method({"method": "init_broadcaster", "args": arguments})
    assert answer == {"results": [None]}
    assert updates.calls == [InitRequest("10.0.0.1", 29501, 2, 1200.0)]


async def test_only_known_methods_are_called(worker: VirtualWorker) -> None:
    for method in ("save_sharded_state", "apply_model", None, ["x"]):
        with pytest.raises(Refused, match="may not be called") as refusal:
            await worker.call_method({"method": method})
        assert refusal.value.status == 403
    with pytest.raises(UsageError, match="kwargs"):
        await worker.call_method({"method": "liveness_probe", "kwargs": {"a": 1}})
