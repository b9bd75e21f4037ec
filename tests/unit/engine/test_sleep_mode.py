"""Memory that sleeps is never written, and what was staged before a sleep is discarded.

The worker has a real vLLM model in CPU memory. vLLM's allocator needs CUDA: a stand-in has its
table of allocations, and forgets contents as the real one does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import sleep_mode
from rollway.engine.patching import Served, get_served, set_served
from rollway.engine.worker import WorkerExtension
from tests.unit.engine.staging import (
    FakeReader,
    is_serving,
    parameters_of,
    stage,
    start_staging,
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
    staging = start_staging(worker, FakeReader(tensors))
    assert stage(staging)["state"] == "ready"
    allocator.sleep(keeps=keeps)
    with pytest.raises(RuntimeError, match="nothing may be copied into it before it is woken"):
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
    staging = start_staging(worker, FakeReader(tensors))
    stage(staging)
    extension = Extension(worker)
    extension._rollway_staging = staging
    allocator.sleep(keeps=True)
    identity = staging.offer.identity
    with pytest.raises(RuntimeError, match="sleeps"):
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
    with pytest.raises(RuntimeError, match="sleeps"):
        Extension(worker).rollway_stage({})


def test_a_parameter_sleeps_with_the_allocation_that_it_is_in(
    worker: Any, allocator: Allocator
) -> None:
    """Several parameters may share one, and another may end where they begin."""
    model = worker.model_runner.get_model()
    parameter = next(model.parameters())
    first = parameter.data_ptr()
    for start, nbytes, sleeps in ((-64, 64, False), (-64, 65, True), (0, 1, True), (1, 64, False)):
        data = SimpleNamespace(handle=(0, nbytes, 0, 0), tag="weights", is_asleep=True)
        allocator.pointer_to_data = {first + start: data}
        if sleeps:
            with pytest.raises(RuntimeError, match="sleeps"):
                sleep_mode.refuse_sleeping(torch.nn.ParameterList([parameter]))
        else:
            sleep_mode.refuse_sleeping(torch.nn.ParameterList([parameter]))


def test_without_the_allocator_nothing_sleeps(worker: Any) -> None:
    assert sleep_mode.find_asleep() == []
    sleep_mode.refuse_sleeping(worker.model_runner.get_model())


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
    staging = start_staging(worker, reader)
    stage(staging)
    extension = Extension(worker)
    extension._rollway_staging = staging
    set_served(extension, Served("w1", {}))
    extension.rollway_before_sleep(level)
    assert extension._rollway_staging is None and staging._staged is None
    assert reader.released == 1 and (get_served(extension) is None) is (level == 2)
