"""Memory that sleeps is never written, and staging never allocates where the next sleep takes it.

The worker has a real vLLM model in CPU memory. vLLM's allocator needs CUDA: a stand-in has its
table of allocations, and forgets contents as the real one does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import memory, sleep_mode
from rollway.engine.memory import StagedTensors
from rollway.engine.patching import Served, get_served, set_served
from rollway.engine.sleep_mode import AsleepError
from rollway.engine.worker import WorkerExtension
from tests.unit.engine.staging import (
    FakeReader,
    is_serving,
    make_staging,
    parameters_of,
    stage,
)
from tests.unit.engine.vllm_models import Tensors, headers_of


class Allocator:
    """vLLM's `CuMemAllocator` over tensors in CPU memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {p.data_ptr(): p.detach() for p in model.parameters()}
        self._backups: dict[int, torch.Tensor] = {}
        self.pointer_to_data = {
            address: SimpleNamespace(
                handle=(0, tensor.nbytes, address, 0), tag="weights", is_asleep=False
            )
            for address, tensor in self._tensors.items()
        }

    def sleep(self, *, keeps: bool) -> None:
        for address, tensor in self._tensors.items():
            if keeps:
                self._backups[address] = tensor.clone()
            tensor.fill_(torch.nan)
            self.pointer_to_data[address].is_asleep = True

    def wake_up(self) -> None:
        for address, data in self.pointer_to_data.items():
            data.is_asleep = False
            if address in self._backups:
                self._tensors[address].copy_(self._backups.pop(address))


@pytest.fixture
def allocator(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator(worker.model_runner.get_model())
    kind = SimpleNamespace(instance=allocator)
    monkeypatch.setitem(sys.modules, sleep_mode._ALLOCATOR, SimpleNamespace(CuMemAllocator=kind))  # type: ignore[arg-type]
    return allocator


class Extension(WorkerExtension):
    """The extension around as much of a worker as the tests have."""

    def __init__(self, worker: Any) -> None:
        self.__dict__.update(vars(worker))


@pytest.mark.parametrize("keeps", [True, False], ids=["level 1", "level 2"])
def test_weights_staged_before_or_after_a_sleep_are_copied_to_the_same_addresses(
    keeps: bool, worker: Any, tensors: Tensors, expected: Tensors, allocator: Allocator
) -> None:
    """A plan and its prepared copies outlive a sleep."""
    model = worker.model_runner.get_model()
    before, addresses = parameters_of(model), [p.data_ptr() for p in model.parameters()]
    staging = make_staging(worker, FakeReader(tensors))
    assert stage(staging)["state"] == "ready"
    allocator.sleep(keeps=keeps)
    with pytest.raises(AsleepError, match="nothing may be copied into it before it is woken"):
        sleep_mode.refuse_sleeping(model)
    allocator.wake_up()
    sleep_mode.refuse_sleeping(model)
    assert is_serving(worker, before) is keeps
    staging.swap()
    assert is_serving(worker, expected)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_swap_into_memory_that_sleeps_is_refused(
    worker: Any, tensors: Tensors, expected: Tensors, allocator: Allocator
) -> None:
    staging = make_staging(worker, FakeReader(tensors))
    stage(staging)
    extension = Extension(worker)
    extension._rollway_staging = staging
    allocator.sleep(keeps=True)
    identity = staging.offer.identity
    with pytest.raises(AsleepError):
        extension.rollway_swap(identity)
    allocator.wake_up()
    extension.rollway_swap(identity)
    assert is_serving(worker, expected)


def test_nothing_is_staged_while_weights_sleep(
    worker: Any, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta would read the old weights. vLLM's own loads are refused by the guard."""
    allocator.sleep(keeps=True)
    monkeypatch.setattr("rollway.engine.worker.read_offer", lambda _: None)
    with pytest.raises(AsleepError):
        Extension(worker).rollway_stage({})


def test_parameters_that_moved_are_not_written(worker: Any, tensors: Tensors) -> None:
    staging = make_staging(worker, FakeReader(tensors))
    stage(staging)
    parameter = next(worker.model_runner.get_model().parameters())
    moved = parameter.data = parameter.data.clone()
    before = moved.clone()
    with pytest.raises(RuntimeError, match="parameters have moved"):
        staging.swap()
    assert torch.equal(moved, before)


def test_staged_buffers_in_a_pool_are_refused(
    worker: Any, tensors: Tensors, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory.allocate

    def allocate(nbytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
        buffer = real(nbytes, device, pinned=pinned)
        allocator.pointer_to_data[buffer.data_ptr()] = SimpleNamespace(
            handle=(0, nbytes, buffer.data_ptr(), 0), tag="kv_cache", is_asleep=False
        )
        return buffer

    assert stage(make_staging(worker, FakeReader(tensors)))["state"] == "ready"
    monkeypatch.setattr(memory, "allocate", allocate)
    report = stage(make_staging(worker, FakeReader(tensors)))
    assert report["state"] == "failed" and "vLLM's pool for kv_cache" in report["error"]


def test_addresses_are_found_in_their_allocation() -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    first = buffer.data_ptr()
    allocations = [
        sleep_mode.Allocation(first, 40, "weights", False),
        sleep_mode.Allocation(first + 60, 40, "kv_cache", True),
    ]
    tags = [
        getattr(sleep_mode.find_allocation(buffer[offset:], allocations), "tag", None)
        for offset in (0, 39, 40, 59, 60, 99)
    ]
    assert tags == ["weights", "weights", None, None, "kv_cache", "kv_cache"]
    assert sleep_mode.find_allocation(buffer, []) is None


def test_without_the_allocator_nothing_sleeps(worker: Any) -> None:
    assert sleep_mode.list_allocations() == []
    sleep_mode.refuse_sleeping(worker.model_runner.get_model())
    staged = StagedTensors(torch.device("cpu"))
    staged.allocate({"a": ("F32", (4,))})
    sleep_mode.refuse_pooled(staged.views.values())


def test_a_worker_says_why_it_may_not_sleep(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = headers_of(tensors)

    def explain(level: int, headers: Any = served) -> str:
        return sleep_mode.explain_no_sleep(worker, headers, level)

    assert explain(1) == explain(2) == ""  # on a CPU, where nothing is released anyway
    assert explain(2, None) == ""
    less = {name: header for name, header in served.items() if "norm" not in name}
    assert "the checkpoint lacks" in explain(2, less) and explain(1, less) == ""
    worker.get_draft_model = object
    assert "a draft model" in explain(2) and explain(1) == ""
    worker.get_draft_model = lambda: None
    with monkeypatch.context() as patch:
        patch.setattr(worker.vllm_config, "lora_config", object())
        assert "adapters are enabled" in explain(2) and explain(1) == ""
    with monkeypatch.context() as patch:
        patch.setattr(worker.model_config, "quantization", "fp8")
        assert "quantised (fp8)" in explain(2) and explain(1) == ""
    on_gpu = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))])
    )
    monkeypatch.setattr(worker.model_runner, "get_model", lambda: on_gpu)
    assert "set `enable-sleep-mode: true`" in explain(1)


def test_memory_is_reported_as_far_as_it_is_known(worker: Any, allocator: Allocator) -> None:
    report = sleep_mode.describe_memory(worker, None, 0)
    assert report["device"] == "cpu" and 0 < report["free"] <= report["total"]
    assert report["resident"] > 1 << 20 and report["asleep_bytes"] == {}
    assert report["releases"] is False and report["refusal"] == ""
    allocator.sleep(keeps=True)
    held = sum(p.nbytes for p in worker.model_runner.get_model().parameters())
    assert sleep_mode.describe_memory(worker, None, 0)["asleep_bytes"] == {"weights": held}


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_discards_what_was_staged_and_level_2_what_was_served(
    level: int, worker: Any, tensors: Tensors
) -> None:
    reader = FakeReader(tensors)
    staging = make_staging(worker, reader)
    stage(staging)
    extension = Extension(worker)
    extension._rollway_staging = staging
    set_served(extension, Served("w1", {}))
    extension.rollway_before_sleep(level)
    assert extension._rollway_staging is None and staging.report()["bytes"] == 0
    assert reader.released == 1 and (get_served(extension) is None) is (level == 2)
