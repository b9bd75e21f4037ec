"""prime-rl's one adapter name, as an alias of numbered versions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rollway.errors import AdminError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.memory import Memory
from rollway.observe import steps
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.publishing import AsyncPublisher

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


class FakeFleet:
    def __init__(self) -> None:
        self.adapters = SimpleNamespace(loaded=[])
        self.unloaded: list[str] = []
        self.fail: Exception | None = None

    async def load_adapter(
        self, name: str, version: int, offer: Any, config: Any, *, keep: int
    ) -> str:
        if self.fail is not None:
            raise self.fail
        assert config == CONFIG
        self.adapters.loaded = [*self.adapters.loaded, f"{name}@{version}"][-keep:]
        return f"{name}@{version}"

    async def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


class FakePublisher:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.is_closed = False

    async def __aenter__(self) -> FakePublisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True

    async def publish(self, version: int, tensors: Any) -> Any:
        self.versions.append(version)
        assert [name for name, _ in tensors] == ["layer.lora_A.weight"]
        return SimpleNamespace(repeatable=True, version=version)


def write_adapter(root: Path, step: int, config: dict[str, Any] | None = CONFIG) -> str:
    directory = root / f"step_{step}"
    directory.mkdir()
    save_file({"layer.lora_A.weight": torch.ones(4, 2)}, directory / "adapter_model.safetensors")
    if config is not None:
        (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "STABLE").touch()
    return directory.name


def make(
    fleet: FakeFleet, root: Path, publisher: FakePublisher, file: Path | None = None
) -> AdapterAliases:
    rules = BroadcastRules([root], root, marker_seconds=0.0)
    opened = cast(AsyncPublisher, publisher)
    return AdapterAliases(cast(Fleet, fleet), rules, Memory(file, "r"), lambda: opened)


async def test_every_broadcast_has_a_name_of_its_own(tmp_path: Path) -> None:
    """A name that is taken would be kept with its old weights, and reported as loaded."""
    fleet, publisher = FakeFleet(), FakePublisher()
    aliases = make(fleet, tmp_path, publisher)
    assert aliases.find("policy") is None and aliases.list_models("m") == []
    served = [await aliases.load("policy", write_adapter(tmp_path, s)) for s in (3, 5)]
    assert served == ["policy@3", "policy@5"] and aliases.find("policy") == "policy@5"
    # A resumed run begins at a lower step; numbers only rise.
    assert await aliases.load("policy", write_adapter(tmp_path, 4)) == "policy@6"
    assert aliases.find("policy@5") == "policy@5" and aliases.find("policy@3") is None
    assert publisher.versions == [1, 2, 3]
    assert fleet.unloaded == []  # the fleet has unloaded the oldest, and would be asked twice
    (model,) = aliases.list_models("m")
    assert model["id"] == "policy" and model["parent"] == "m"
    assert model["root"] == str(tmp_path / "step_4")
    await aliases.close()
    assert publisher.is_closed


async def test_the_alias_changes_only_when_all_workers_have_it(tmp_path: Path) -> None:
    fleet = FakeFleet()
    aliases = make(fleet, tmp_path, FakePublisher())
    await aliases.load("policy", write_adapter(tmp_path, 1))
    fleet.fail = AdminError("worker 3 refused.")
    with pytest.raises(Refused, match="worker 3") as refusal:
        await aliases.load("policy", write_adapter(tmp_path, 2))
    assert refusal.value.status == 500  # the only 5xx after which prime-rl repeats this call
    assert aliases.find("policy") == "policy@1"
    fleet.fail = None
    assert await aliases.load("policy", "step_2") == "policy@2"


async def test_adapters_that_vllm_would_read_otherwise_are_refused(tmp_path: Path) -> None:
    aliases = make(FakeFleet(), tmp_path, FakePublisher())
    for step, config, reason in (
        (1, None, "adapter_config.json"),
        (2, {**CONFIG, "rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        (3, {"r": 4}, "lora_alpha"),
    ):
        with pytest.raises(UsageError, match=reason):
            await aliases.load("policy", write_adapter(tmp_path, step, config))
    with pytest.raises(UsageError, match="cannot be the name"):
        await aliases.load("a/b", write_adapter(tmp_path, 4))
    assert aliases.list_models("m") == []


async def test_a_successor_knows_the_alias_and_what_is_loaded(tmp_path: Path) -> None:
    file, fleet = tmp_path / "home" / "state.json", FakeFleet()
    first = make(fleet, tmp_path, FakePublisher(), file)
    for step in (1, 2):
        await first.load("policy", write_adapter(tmp_path, step))
    fleet.adapters.loaded = []  # a new process knows nothing of what the old one loaded
    second = make(fleet, tmp_path, FakePublisher(), file)
    assert second.find("policy") == "policy@2"
    assert await second.load("policy", write_adapter(tmp_path, 3)) == "policy@3"
    assert fleet.unloaded == ["policy@1"]
    await second.unload("policy")
    assert second.find("policy") is None and fleet.unloaded[1:] == ["policy@2", "policy@3"]
    with pytest.raises(Refused, match="no adapter"):
        await second.unload("policy")


async def test_broadcasts_of_one_adapter_are_the_trainers_steps(tmp_path: Path) -> None:
    """Two adapters have steps of their own, which would be counted as one trainer's."""
    recorder = Recorder(tmp_path / "run", "driver")
    aliases = make(FakeFleet(), tmp_path, FakePublisher())
    steps.register(recorder)
    try:
        for step in (1, 2, 3):
            await aliases.load("run", write_adapter(tmp_path, step))
        await aliases.load("other", write_adapter(tmp_path, 4))
        await aliases.load("run", write_adapter(tmp_path, 5))
    finally:
        steps.unregister(recorder)
        recorder.close()
    entries = [entry for entry in Run(tmp_path / "run").read() if entry["kind"] == "trainer"]
    assert [entry["step"] for entry in entries] == [2, 3]
    assert all(entry["parts"]["publish"] > 0 for entry in entries)
