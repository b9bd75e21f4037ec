"""Staged weights are copied into the parameters that serve, and memory is never exhausted.

The workers have real vLLM models in CPU memory; what a GPU would do differently is said where it
matters."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import math
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.engine import loading, memory
from rollway.engine.memory import FreeMemory
from rollway.engine.worker import WorkerExtension
from tests.unit.engine.staging import (
    FakeReader,
    is_serving,
    parameters_of,
    stage,
    start_staging,
)
from tests.unit.engine.vllm_models import (
    Tensors,
    create_model,
    create_worker,
    headers_of,
    use_ranks,
    write_model,
)
from tests.waiting import wait_until

PLENTY, NOTHING = FreeMemory("a device", 1 << 50, 0), FreeMemory("a device", 100, 100)


def limit_memory(monkeypatch: pytest.MonkeyPatch, device: FreeMemory, host: FreeMemory) -> None:
    monkeypatch.setattr(memory, "read_device_memory", lambda *_: device)
    monkeypatch.setattr(memory, "read_host_memory", lambda *_: host)


@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize("strategy", ["direct", "device", "host"])
def test_each_strategy_serves_what_vllm_would_load(
    strategy: str,
    has_sums: bool,
    worker: Any,
    tensors: Tensors,
    expected: Tensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_memory(monkeypatch, NOTHING if strategy == "host" else PLENTY, PLENTY)
    before = parameters_of(worker.model_runner.get_model())
    addresses = [p.data_ptr() for p in worker.model_runner.get_model().parameters()]
    reader = FakeReader(tensors, shares=strategy == "direct", has_sums=has_sums)
    staging = start_staging(worker, reader)
    report = stage(staging)
    assert (report["state"], staging.strategy, report["error"]) == ("ready", strategy, "")
    assert staging.incoming.seconds.keys() == {"plan", "load", "prove", "prepare"}
    assert (staging._staged is None) == (strategy == "direct")
    assert is_serving(worker, before) and reader.finished == []  # until the swap
    result = staging.swap()
    assert is_serving(worker, expected) and reader.finished == [3]
    assert [p.data_ptr() for p in worker.model_runner.get_model().parameters()] == addresses
    assert json.loads(json.dumps([report, result])) == [report, result]
    assert result["strategy"] == strategy and result["reason"] and "reloads" not in result["reason"]
    assert result["seconds"].keys() == {"copy", "verify"}
    assert staging._staged is None


def test_without_memory_the_weights_are_read_during_the_pause(
    worker: Any, tensors: Tensors, expected: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, NOTHING, NOTHING)
    model = worker.model_runner.get_model()
    worker.reload_weights = lambda weights_iterator: model.load_weights(weights_iterator)
    staging = start_staging(worker, FakeReader(tensors))
    assert stage(staging)["state"] == "ready"
    assert staging._staged is None and "read during the pause" in staging.reason
    result = staging.swap()
    assert is_serving(worker, expected)
    assert result["strategy"] == "reload"


def test_a_model_without_a_plan_is_staged_and_reloaded(
    worker: Any, tensors: Tensors, expected: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "explain_no_plan", lambda _: "latent attention")
    model = worker.model_runner.get_model()
    worker.reload_weights = lambda weights_iterator: model.load_weights(weights_iterator)
    staging = start_staging(worker, FakeReader(tensors))
    stage(staging)
    assert staging.strategy == "reload" and staging._staged is not None
    assert staging.reason.endswith("latent attention")
    assert staging.swap()["seconds"].keys() == {"reload", "verify"}
    assert is_serving(worker, expected)


def test_only_layers_without_a_plan_are_reloaded(
    worker: Any, tensors: Tensors, expected: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layerwise reload leaves the other layers alone. Its packing for CPU is left out, as
    on a GPU."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    layer = "model.layers.1.mlp.gate_up_proj"
    monkeypatch.setattr(loading, "list_changed_layers", lambda _: {layer: "it is shuffled"})
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda *_: None)
    model = worker.model_runner.get_model()
    record_metadata_for_reloading(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    with use_ranks():
        staging = start_staging(worker, FakeReader(tensors))
        stage(staging)
        result = staging.swap()
    assert result["strategy"] == "device" and "reload" in result["seconds"]
    assert result["reason"].endswith(f"vLLM reloads {layer}: it is shuffled")
    assert is_serving(worker, expected)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_the_plan_is_recorded_once(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    record = loading.record_plan
    monkeypatch.setattr(loading, "record_plan", lambda *args: recorded.append(1) or record(*args))
    for _ in range(2):
        staging = start_staging(worker, FakeReader(tensors))
        stage(staging)
        staging.swap()
    assert recorded == [1]


def test_host_buffers_are_reused(
    worker: Any, tensors: Tensors, expected: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, NOTHING, PLENTY)
    allocated = []
    allocate = memory.allocate
    monkeypatch.setattr(
        memory, "allocate", lambda *a, **k: allocated.append(a) or allocate(*a, **k)
    )
    host: list[torch.Tensor] = []
    for _ in range(2):
        staging = start_staging(worker, FakeReader(tensors), host)
        stage(staging)
        assert not host  # in use
        staging.swap()
        assert host
    assert len(allocated) == 1 and is_serving(worker, expected)


def refuse_all(*_: Any, **__: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")


@pytest.mark.parametrize("strategy", ["device", "host"])
def test_an_allocation_that_fails_is_a_refusal_with_figures(
    strategy: str, worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, NOTHING if strategy == "host" else PLENTY, PLENTY)
    monkeypatch.setattr(memory, "allocate", refuse_all)
    before = parameters_of(worker.model_runner.get_model())
    reader = FakeReader(tensors)
    staging = start_staging(worker, reader)
    report = stage(staging)
    assert report["state"] == "failed" and staging._staged is None
    for words in ("memory does not hold version 3", "GB are needed", "free", "stay free"):
        assert words in report["error"]
    with pytest.raises(RuntimeError, match="memory does not hold"):
        staging.swap()
    assert is_serving(worker, before) and reader.released == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("out of memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),  # of mmap
    ],
)
def test_memory_that_ends_half_way_is_released(
    error: Exception, worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []
    allocate = memory.allocate

    def remember(*args: Any, **options: Any) -> torch.Tensor:
        buffer = allocate(*args, **options)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(memory, "allocate", remember)
    reader = FakeReader(tensors)

    def fail_at_the_end(name: str) -> None:
        if name == list(tensors)[-1]:
            raise error

    reader.before_each = fail_at_the_end
    before = parameters_of(worker.model_runner.get_model())
    staging = start_staging(worker, reader)
    report = stage(staging)
    assert report["state"] == "failed" and "GB are needed" in report["error"]
    gc.collect()
    assert buffers and all(buffer() is None for buffer in buffers)
    assert is_serving(worker, before)


def test_a_staged_tensor_that_is_damaged_is_refused_before_the_pause(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = memory.StagedTensors.put

    def damage(self: Any, name: str, tensor: torch.Tensor) -> None:
        put(self, name, tensor)
        if name == "model.norm.weight":
            self.views[name][3] += 1

    monkeypatch.setattr(memory.StagedTensors, "put", damage)
    report = stage(start_staging(worker, FakeReader(tensors)))
    assert report["state"] == "failed" and "model.norm.weight" in report["error"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shares", [False, True])
def test_a_tensor_that_is_not_finite_is_refused_before_the_pause(
    shares: bool, value: float, worker: Any, tensors: Tensors
) -> None:
    tensors["model.norm.weight"][3] = value
    before = parameters_of(worker.model_runner.get_model())
    report = stage(start_staging(worker, FakeReader(tensors, shares=shares, has_sums=True)))
    assert report["state"] == "failed" and is_serving(worker, before)
    assert report["error"].startswith("model.norm.weight of version 3 has NaN or infinity")


def test_a_cast_that_overflows_is_refused_before_the_pause(worker: Any, tensors: Tensors) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(worker.model_runner.get_model().half())
    tensors["model.norm.weight"][3] = 70_000
    report = stage(start_staging(worker, FakeReader(tensors)))
    assert report["error"].startswith("model.norm.weight of version 3 has NaN or infinity")
    tensors["model.norm.weight"][3] = 60_000
    assert stage(start_staging(worker, FakeReader(tensors)))["state"] == "ready"


def test_numbers_whose_sum_is_too_large_are_accepted(worker: Any, tensors: Tensors) -> None:
    tensors["model.norm.weight"].fill_(3e38)
    assert stage(start_staging(worker, FakeReader(tensors)))["state"] == "ready"


def test_the_kv_cache_is_cleared_when_a_version_that_is_not_finite_leaves(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWAY_ALLOW_NON_FINITE", "1")
    cache = worker.model_runner.kv_caches = [torch.ones(4), [torch.ones(2)]]
    cleared = []
    for value in (1.0, math.nan, 1.0, 1.0):
        tensors["model.norm.weight"][3] = value
        staging = start_staging(worker, FakeReader(tensors))
        assert stage(staging)["state"] == "ready"
        staging.swap()
        cleared.append(not cache[0].any() and not cache[1][0].any())
        cache[0].fill_(1)
        cache[1][0].fill_(1)
    assert cleared == [False, False, True, False]


@pytest.mark.parametrize("shares", [False, True])
def test_a_publisher_that_changes_its_tensors_is_noticed(
    shares: bool, worker: Any, tensors: Tensors
) -> None:
    reader = FakeReader(tensors, shares=shares, has_sums=True)
    tensors["model.norm.weight"] += 1
    report = stage(start_staging(worker, reader))
    assert report["state"] == "failed"
    assert re.match("model.norm.weight .* changed while", report["error"])


def test_direct_tensors_that_change_before_the_swap_are_noticed(
    worker: Any, tensors: Tensors
) -> None:
    staging = start_staging(worker, FakeReader(tensors, shares=True))
    assert stage(staging)["state"] == "ready"
    tensors["model.norm.weight"] += 1
    with pytest.raises(RuntimeError, match=r"1 of .* parameters differ.*model\.norm\.weight"):
        staging.swap()


def test_missing_tensors_are_refused_before_the_pause(worker: Any, tensors: Tensors) -> None:
    del tensors["model.norm.weight"]
    report = stage(start_staging(worker, FakeReader(tensors)))
    assert report["state"] == "failed" and "nothing for 1 parameters" in report["error"]


def test_a_discarded_staging_stops_and_gives_its_memory_back(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, NOTHING, PLENTY)
    reader, host = FakeReader(tensors), list[torch.Tensor]()
    begun, proceed = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        begun.set()
        proceed.wait(10)

    reader.before_each = wait
    staging = start_staging(worker, reader, host)
    assert begun.wait(10)
    assert staging.report()["state"] == "running" and staging.report()["error"] == ""
    staging.discard()
    assert not host  # the background task still writes to them
    proceed.set()
    wait_until(lambda: staging.report()["state"] == "failed")
    assert "discarded" in staging.report()["error"] and host


def test_a_staging_that_is_ready_is_released_when_it_is_discarded(
    worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, NOTHING, PLENTY)
    host: list[torch.Tensor] = []
    staging = start_staging(worker, FakeReader(tensors), host)
    assert stage(staging)["state"] == "ready"
    staging.discard()
    assert host


def test_the_workers_methods_report_instead_of_raising(worker: Any, tensors: Tensors) -> None:
    class Worker(WorkerExtension):
        pass

    vllm_worker = Worker()
    unknown = vllm_worker.rollway_staging("identity-of-3")
    assert unknown["state"] == "failed" and "not staged here" in unknown["error"]
    staging = start_staging(worker, FakeReader(tensors))
    vllm_worker._rollway_staging = staging
    stage(staging)
    assert vllm_worker.rollway_staging("identity-of-3")["state"] == "ready"
    result = vllm_worker.rollway_swap("identity-of-3")
    assert result["strategy"] == "device"
    assert vllm_worker.rollway_staging("identity-of-3")["state"] == "failed"


def test_experts_are_copied_where_the_backend_uses_them_as_loaded(tmp_path: Path) -> None:
    """With the Triton kernels of a GPU; vLLM itself cannot reload experts on CPU."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    tensors = write_model("qwen3-moe", tmp_path)
    with use_ranks():
        loaded, _ = create_model(tmp_path)
        loaded.load_weights(iter(tensors.items()))
        worker = create_worker(tmp_path)
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "unquantized_backend"):
            module.unquantized_backend = UnquantizedMoeBackend.TRITON
    staging = start_staging(worker, FakeReader(tensors, has_sums=True))
    report = stage(staging)
    assert report["state"] == "ready", report["error"]
    result = staging.swap()
    assert result["strategy"] == "device" and "reload" not in result["seconds"]
    assert is_serving(worker, parameters_of(loaded))


class FailingAllocations:
    """Lets the n-th allocation of a staging fail. Only those that take memory count."""

    def __init__(self, patch: pytest.MonkeyPatch, failing: int) -> None:
        self._real, self._failing, self.count = torch.empty, failing, 0
        patch.setattr(torch, "empty", self._allocate)

    def _allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        device = torch.get_default_device() if options.get("device") is None else options["device"]
        if torch.device(device).type != "meta":
            self.count += 1
            if self.count == self._failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")
        return self._real(*args, **options)


@pytest.mark.parametrize("way", ["device", "host"])
def test_the_old_version_serves_whichever_allocation_fails(
    way: str, worker: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers on the device, pinned buffers, and scratch of the copies."""
    limit_memory(monkeypatch, NOTHING if way == "host" else PLENTY, PLENTY)
    model = worker.model_runner.get_model()
    before, host, refusals = parameters_of(model), list[torch.Tensor](), 0
    loading.find_plan(worker, headers_of(tensors))  # it is recorded once, on `meta`
    for failing in itertools.count(1):
        with monkeypatch.context() as patch, use_ranks():
            allocations = FailingAllocations(patch, failing)
            staging = start_staging(worker, FakeReader(tensors), host)
            report = stage(staging)
        if report["state"] == "ready":  # nothing failed, or vLLM itself could do without
            staging.discard()
        else:
            refusals += 1
            for words in ("memory does not hold version 3", "GB are needed", "GB free"):
                assert words in report["error"], (failing, report["error"])
        assert staging._staged is None and is_serving(worker, before)
        if allocations.count < failing:
            break
        host.clear()  # the next one begins without kept buffers
    assert refusals >= failing - 1 >= 2
