"""The fleet as one worker, as two generations of prime-rl discover and call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rollway.errors import UsageError
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.groups import InitRequest
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.memory import Memory
from rollway.integrations.prime_rl.updates import WeightUpdates
from rollway.integrations.prime_rl.virtual_worker import VirtualWorker


class FakeUpdates:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.memory = Memory(run="r")

    def pause(self) -> None:
        self.calls.append("pause")

    async def update(self, name: str, step: int | None = None) -> int:
        self.calls.append((name, step))
        return 1

    async def init_broadcaster(self, read: Callable[[], InitRequest]) -> None:
        self.calls.append(read())

    async def resume(self) -> None:
        self.calls.append("resume")


class FakeAdapters:
    async def load(self, name: str, directory: str) -> str:
        assert directory == "/runs/step 3"
        return f"{name}@3"

    async def unload(self, name: str) -> None: ...


@pytest.fixture
def updates() -> FakeUpdates:
    return FakeUpdates()


@pytest.fixture
def worker(updates: FakeUpdates) -> VirtualWorker:
    adapters = cast(AdapterAliases, FakeAdapters())
    return VirtualWorker("m", cast(WeightUpdates, updates), adapters)


def test_the_listing_has_the_address_that_was_asked(worker: VirtualWorker) -> None:
    listing = worker.list_workers("http://10.0.0.5:8100")
    (entry,) = listing["workers"]
    assert entry["admin_base_url"] == entry["system_url"] == "http://10.0.0.5:8100"
    assert listing["protocol_version"] == 1 and entry["world_size"] == 1
    assert worker.list_workers("http://10.0.0.5:8100") == listing
    assert worker.list_workers("http://a", "starting")["workers"][0]["error"] == "starting"


async def test_a_step_has_two_spellings(worker: VirtualWorker, updates: FakeUpdates) -> None:
    for version in ("step_7", "7", 7, None):
        await worker.call_route(
            "update_weights_from_disk", {"model_path": "/runs/step_7", "weight_version": version}
        )
    assert updates.calls == [("/runs/step_7", step) for step in (7, 7, 7, None)]
    with pytest.raises(UsageError, match="weight_version"):
        await worker.call_route(
            "update_weights_from_disk", {"model_path": "/a", "weight_version": "v7"}
        )


async def test_answers_have_the_words_that_clients_wait_for(
    worker: VirtualWorker, updates: FakeUpdates
) -> None:
    assert (await worker.call_route("pause_generation", {}))["status"] == "ok"
    assert (await worker.call_route("resume_generation", {}))["status"] == "ok"
    source = {"uri": f"file://{Path('/runs/step%203')}"}
    loaded = await worker.call_route("load_lora", {"lora_name": "p", "source": source})
    assert loaded == {"status": "success", "lora_name": "p", "lora_id": 1}
    assert (await worker.call_route("unload_lora", {"lora_name": "p"}))["status"] == "success"
    body = {"method": "update_weights_from_path", "args": ["/runs/step_1"], "kwargs": {}}
    assert await worker.call_method(body) == {"results": [None]}
    assert updates.calls == ["pause", "resume", ("/runs/step_1", None)]
    with pytest.raises(UsageError, match=r"source\.uri"):
        await worker.call_route("load_lora", {"lora_name": "p", "source": {"uri": "s3://b/a"}})


async def test_a_group_is_formed_by_both_generations(
    worker: VirtualWorker, updates: FakeUpdates
) -> None:
    arguments = ["10.0.0.1", 29501, 0, 2, 1200, "default"]
    answer = await worker.call_method({"method": "init_broadcaster", "args": arguments})
    assert answer == {"results": [None]}
    body = {
        "host": "10.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 2,
        "timeout": 1200, "quantize_in_weight_transfer": False, "engine_rpc": "init_broadcaster",
    }  # fmt: skip
    assert (await worker.call_route("init_weights_update_group", body))["status"] == "ok"
    assert updates.calls == [InitRequest("10.0.0.1", 29501, 2, 1200.0)] * 2
    with pytest.raises(UsageError, match="no request to form a group"):
        await worker.call_route("init_weights_update_group", {})
    body = {"weight_version": "step_7", "weight_dir": "out/step_7"}
    body["engine_rpc"] = "update_weights_from_path"
    assert (await worker.call_route("update_weights_from_distributed", body))["status"] == "ok"
    assert updates.calls[-1] == ("out/step_7", 7)


async def test_only_known_methods_are_called(worker: VirtualWorker) -> None:
    for method in ("save_sharded_state", "apply_model", None, ["x"]):
        with pytest.raises(Refused, match="may not be called") as refusal:
            await worker.call_method({"method": method})
        assert refusal.value.status == 403
    for route in ("init_weights_update_group", "update_weights_from_distributed"):
        with pytest.raises(Refused, match="may not be called"):
            await worker.call_route(route, {"engine_rpc": "save_sharded_state"})
    with pytest.raises(UsageError, match="kwargs"):
        await worker.call_method({"method": "liveness_probe", "kwargs": {"a": 1}})
    with pytest.raises(Refused, match="no route"):
        await worker.call_route("sleep", {})
