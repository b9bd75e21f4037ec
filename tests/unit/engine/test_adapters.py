"""LoRA adapters: signatures, directories, shapes, and the order in which workers load them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollway.engine import adapters as engine
from rollway.errors import AdminError, UsageError, WeightsError
from rollway.fleet.adapters import Adapters
from rollway.fleet.workers import Worker
from rollway.weights import adapter as adapter_module
from rollway.weights import leftovers
from rollway.weights.adapter import (
    Adapter,
    attach_adapter,
    detach_adapter,
    directory_of,
    is_adapter,
    served_name,
)
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Offer, read_offer
from rollway.weights.transports.shm import ShmPublisher
from tests.waiting import wait_until

CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
OFFER = Offer("shm", 3, "a" * 32, 10, {"slot": "x"})
WORKERS = [Worker(7, "m", "http://one"), Worker(8, "m", "http://two")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapter_module, "HOME", tmp_path)
    return tmp_path


# --- what is signed, and where it is stored -------------------------------------------------------


def test_the_config_is_signed_with_the_offer() -> None:
    sent = attach_adapter(OFFER, Adapter("style@1", CONFIG, "7")).sign("secret").as_json()
    offer, adapter = detach_adapter(read_offer(sent, "secret"))
    assert offer.where == OFFER.where and adapter.config == CONFIG
    sent["where"]["adapter"]["config"]["lora_alpha"] = 400
    with pytest.raises(WeightsError, match="not signed"):
        read_offer(sent, "secret")


def test_the_directory_is_derived_and_cannot_be_chosen() -> None:
    first = directory_of(OFFER, Adapter("style@1", CONFIG, "../../etc"))
    assert first.parent.parent == adapter_module.HOME and ".." not in str(first)
    others = [
        directory_of(OFFER, Adapter("style@2", CONFIG, "../../etc")),
        directory_of(OFFER, Adapter("style@1", {**CONFIG, "lora_alpha": 5}, "../../etc")),
        directory_of(OFFER, Adapter("style@1", CONFIG, "another worker")),
    ]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("served", ["style", "../x@1", "style@-1", "a/b@1", "@1"])
def test_an_invalid_served_name_is_refused(served: str) -> None:
    where = {**OFFER.where, "adapter": {"served": served, "config": CONFIG, "place": ""}}
    with pytest.raises(WeightsError, match="no offer of an adapter"):
        detach_adapter(Offer("shm", 3, "a" * 32, 10, where))


@pytest.mark.parametrize(
    "field", ["rank_pattern", "alpha_pattern", "layer_replication", "fan_in_fan_out"]
)
def test_config_fields_that_vllm_would_ignore_are_refused(field: str) -> None:
    with pytest.raises(UsageError, match=field):
        detach_adapter(attach_adapter(OFFER, Adapter("style@1", {**CONFIG, field: {"q": 1}}, "")))


def test_names_and_versions_are_checked() -> None:
    assert served_name("style", 2) == "style@2"
    assert is_adapter("style@2") and not is_adapter("org/model") and not is_adapter("a@b")
    for name, version in (("a@b", 1), ("", 1), ("a/b", 1), ("a", -1)):
        with pytest.raises(UsageError):
            served_name(name, version)


def test_files_of_dead_workers_are_removed(home: Path) -> None:
    mine = adapter_module.create_adapter_home("mine")
    dead = adapter_module.home_of("dead")
    dead.mkdir()
    place = leftovers.writer_mark().split("-")[0]
    (dead / f"{place}-4194304-1.owner").touch()
    adapter_module.remove_abandoned()
    assert mine.is_dir() and not dead.exists()
    assert mine.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_not_ours_is_not_used(home: Path) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    adapter_module.home_of("w").symlink_to(elsewhere)
    with pytest.raises((WeightsError, FileExistsError)):
        adapter_module.create_adapter_home("w")
    adapter_module.home_of("open").mkdir()
    os.chmod(adapter_module.home_of("open"), 0o777)  # noqa: PTH101
    with pytest.raises(WeightsError, match="not this worker's"):
        adapter_module.create_adapter_home("open")


# --- inside a worker -----------------------------------------------------------------------------

NAME = "base_model.model.model.layers.0.self_attn"
WIDTH, SLOTS, MOST = 6, 2, 4


def layer(*outputs: int) -> Any:
    """What vLLM's linear layers with adapters have: a slot for each adapter, by slice."""
    return SimpleNamespace(
        tp_size=1,
        lora_a_stacked=tuple(torch.zeros(SLOTS, 1, MOST, WIDTH) for _ in outputs),
        lora_b_stacked=tuple(torch.zeros(SLOTS, 1, out, MOST) for out in outputs),
    )


class Engine(SimpleNamespace):
    """A worker with one attention layer and vLLM's bookkeeping of adapters."""

    def __init__(self) -> None:
        whole = "model.layers.0.self_attn.qkv_proj"
        parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
        manager = SimpleNamespace(
            model=torch.nn.Module(),
            modules={whole: layer(6, 3, 3), "model.layers.0.self_attn.o_proj": layer(6)},
            packed_modules={whole: parts},
            lora_index_to_id=[None] * SLOTS,
        )
        dtype = SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=MOST)
        super().__init__(
            vllm_config=SimpleNamespace(lora_config=dtype),
            model_runner=SimpleNamespace(
                lora_manager=SimpleNamespace(_adapter_manager=manager, add_adapter=lambda _: True)
            ),
            manager=manager,
        )

    def load(self, directory: Path, number: int, slot: int) -> None:
        """As vLLM does: scale in B, everything else zero."""
        tensors = load_file(directory / engine.WEIGHTS)
        qkv = self.manager.modules["model.layers.0.self_attn.qkv_proj"]
        qkv.lora_a_stacked[0][slot, 0, :2] = tensors[f"{NAME}.q_proj.lora_A.weight"]
        qkv.lora_b_stacked[0][slot, 0, :, :2] = tensors[f"{NAME}.q_proj.lora_B.weight"] * 2
        self.manager.lora_index_to_id[slot] = number


def q_proj(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{NAME}.q_proj.lora_A.weight": torch.randn(2, WIDTH, generator=generator),
        f"{NAME}.q_proj.lora_B.weight": torch.randn(6, 2, generator=generator),
    }


def headers(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorHeader]:
    return {name: TensorHeader("F32", tuple(t.shape), "") for name, t in tensors.items()}


def is_ready(adapters: engine.Adapters, served: str) -> bool:
    with contextlib.suppress(RuntimeError):
        adapters.check_ready(served)
        return True
    return False


def test_loaded_layers_are_compared_bit_by_bit() -> None:
    pytest.importorskip("vllm")
    worker = Engine()
    adapters = engine.Adapters(worker, None)
    with ShmPublisher() as publisher:
        offer = publisher.publish(1, q_proj().items())
        adapter = Adapter("style@1", CONFIG, "w")
        directory = directory_of(offer, adapter)
        adapters.receive(attach_adapter(offer, adapter), "")
        wait_until(lambda: is_ready(adapters, "style@1"), 30)
    with pytest.raises(RuntimeError, match="does not hold the weights published"):
        adapters.check_loaded("style@1", 5)
    worker.load(directory, 5, slot=1)
    adapters.check_loaded("style@1", 5)
    adapters.check_loaded("style@1", None)
    with pytest.raises(RuntimeError, match="does not hold"):
        adapters.check_loaded("style@1", 6)
    o_proj = worker.manager.modules["model.layers.0.self_attn.o_proj"]
    o_proj.lora_a_stacked[0][1, 0, 0, 0] = 1.0  # left over from another adapter
    with pytest.raises(RuntimeError, match="does not hold"):
        adapters.check_loaded("style@1", 5)
    adapters.discard("style@1")
    assert not directory.exists()
    with pytest.raises(RuntimeError, match="did not receive"):
        adapters.check_ready("style@1")


def test_an_adapter_dropped_while_it_is_received_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is received again meanwhile: one after the other, into the same directory."""
    pytest.importorskip("vllm")
    may_read = [threading.Event(), threading.Event()]
    readings: list[int] = []

    class Slow:
        def headers(self, offer: Offer) -> dict[str, TensorHeader]:
            return headers(q_proj())

        def tensors(self, offer: Offer) -> Iterator[tuple[str, torch.Tensor]]:
            number = len(readings)
            readings.append(number)
            assert may_read[number].wait(30)
            yield from q_proj().items()

    monkeypatch.setattr(engine, "get_reader", lambda offer, kept: Slow())
    adapters = engine.Adapters(Engine(), None)
    adapter = Adapter("style@1", CONFIG, "w")
    offer, directory = attach_adapter(OFFER, adapter), directory_of(OFFER, adapter)
    adapters.receive(offer, "")
    wait_until(lambda: readings == [0], 30)
    adapters.discard("style@1")
    may_read[1].set()
    adapters.receive(offer, "")
    threading.Timer(0.3, may_read[0].set).start()
    wait_until(lambda: is_ready(adapters, "style@1"), 30)
    wait_until(lambda: not any(t.name == "rollway-background" for t in threading.enumerate()), 30)
    assert readings == [0, 1] and directory.is_dir()


def test_a_version_names_one_set_of_weights() -> None:
    pytest.importorskip("vllm")
    adapters = engine.Adapters(Engine(), None)
    with ShmPublisher() as publisher:
        first = attach_adapter(
            publisher.publish(1, q_proj().items()), Adapter("style@1", CONFIG, "w")
        )
        adapters.receive(first, "")
        adapters.receive(first, "")  # asked again: the same
        other = attach_adapter(
            publisher.publish(2, q_proj(1).items()), Adapter("style@1", CONFIG, "w")
        )
        with pytest.raises(RuntimeError, match="already names other weights"):
            adapters.receive(other, "")
        adapters.discard("style@1")


def test_adapters_that_do_not_fit_are_refused_before_reading() -> None:
    pytest.importorskip("vllm")
    layers = engine.Layers(Engine(), None)
    layers.check_headers(headers(q_proj()), 2)
    fused = {name.replace("q_proj", "k_proj"): tensor for name, tensor in q_proj().items()}
    gone = {name.replace("layers.0", "layers.9"): tensor for name, tensor in q_proj().items()}
    for tensors, words in (
        (fused, r"has shape \(6, 2\), but the served model needs \(3, 2\)"),
        (gone, "has no layer for"),
        (dict(list(q_proj().items())[:1]), "only one of lora_A and lora_B"),
        ({}, "no tensors"),
    ):
        with pytest.raises(RuntimeError, match=words):
            layers.check_headers(headers(tensors), 2)
    with pytest.raises(ValueError, match="max_lora_rank"):
        layers.check_config({**CONFIG, "r": MOST + 1})


def test_the_error_of_a_worker_without_adapters_names_the_option() -> None:
    worker = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=None))
    with pytest.raises(RuntimeError, match="start it with enable-lora"):
        engine.Layers(worker, None)


# --- the fleet -----------------------------------------------------------------------------------


class Admin:
    """Two workers; worker 8 fails in the methods that a test scripts."""

    def __init__(self, **fails: str) -> None:
        self.fails = fails
        self.calls: list[tuple[str, int]] = []
        self.loaded: dict[int, list[str]] = {7: [], 8: []}

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        self.calls.append((method, worker.instance_id))
        if method in self.fails and worker.instance_id == 8:
            raise AdminError(self.fails[method])

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        assert fresh
        self.loaded[worker.instance_id].append(name)
        return 5

    async def unload_lora(self, worker: Worker, name: str) -> None:
        if name not in self.loaded[worker.instance_id]:
            raise AdminError("not found")
        self.loaded[worker.instance_id].remove(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def alive(worker: Worker) -> bool:
        return False

    monkeypatch.setattr("rollway.fleet.admin.is_dead", alive)
    monkeypatch.setattr("rollway.fleet.admin.ASK_SECONDS", 0.0)


async def load(adapters: Adapters, version: int, keep: int = 2, **fields: Any) -> str:
    return await adapters.load(WORKERS, "style", version, OFFER, {**CONFIG, **fields}, keep)


async def test_versions_beyond_keep_are_unloaded() -> None:
    admin = Admin()
    adapters = Adapters(admin, "secret")  # type: ignore[arg-type]
    assert [await load(adapters, version) for version in (1, 2, 3)][-1] == "style@3"
    assert admin.loaded == {7: ["style@2", "style@3"], 8: ["style@2", "style@3"]}
    assert adapters.newest("style") == "style@3" and adapters.newest("style@2") == "style@2"
    with pytest.raises(UsageError, match="older than style@3"):
        await load(adapters, 2)
    await adapters.unload(WORKERS, "style")
    assert admin.loaded == {7: [], 8: []}
    with pytest.raises(UsageError, match="loaded no adapter"):
        adapters.newest("style")


async def test_no_worker_loads_an_adapter_that_another_refuses() -> None:
    admin = Admin(rollway_adapter_ready="the shape is wrong")
    adapters = Adapters(admin, "secret")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the shape is wrong"):
        await load(adapters, 1)
    assert admin.loaded == {7: [], 8: []}
    assert {call for call in admin.calls if call[0] == "rollway_adapter_drop"} == {
        ("rollway_adapter_drop", 7), ("rollway_adapter_drop", 8),
    }  # fmt: skip


async def test_an_adapter_that_cannot_be_verified_is_unloaded_everywhere() -> None:
    admin = Admin()
    adapters = Adapters(admin, "secret")  # type: ignore[arg-type]
    await load(adapters, 1)
    admin.fails = {"rollway_adapter_loaded": "the engine holds something else"}
    with pytest.raises(AdminError, match="holds something else"):
        await load(adapters, 2)
    assert admin.loaded == {7: ["style@1"], 8: ["style@1"]}
    assert adapters.newest("style") == "style@1"


async def test_a_joining_worker_loads_the_adapters() -> None:
    admin = Admin()
    adapters = Adapters(admin, "secret")  # type: ignore[arg-type]
    await adapters.load(WORKERS[:1], "style", 1, OFFER, CONFIG, 2)
    assert list(adapters.missing(WORKERS)) == ["style@1"]
    await adapters.catch_up(WORKERS)
    assert admin.loaded[8] == ["style@1"] and not adapters.missing(WORKERS)
