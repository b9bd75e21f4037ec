"""CPU layers serve the weights that were loaded until these are packed, and never others."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollway.engine import shadow
from rollway.engine.incoming import Incoming
from rollway.engine.memory import HostBuffers
from rollway.engine.shadow import (
    LateKernel,
    Packing,
    ParameterArena,
    defer_packing,
    wait_until_packed,
)
from rollway.engine.staging import Staging
from rollway.weights.offer import Offer
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader, Store
from tests.unit.engine.vllm_models import (
    CONFIGS,
    change,
    create_model,
    create_worker,
    use_ranks,
    write_model,
)
from tests.waiting import stays, wait_until

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class Gate:
    """Stands in for vLLM's packing: it waits until it is opened, and counts its calls."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.packed = 0

    def __call__(self, weight: torch.Tensor) -> shadow.Multiply:
        assert self.opened.wait(30)
        self.packed += 1
        own = weight.clone()
        return lambda x, _, bias: torch.nn.functional.linear(x, own, bias)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(shadow, "_pack", gate)
    return gate


def test_a_kernel_gives_the_same_products_before_and_after() -> None:
    weight = torch.randn(8, 16)
    kernel = LateKernel(weight.clone())
    before = kernel(X, torch.empty(0), None)
    kernel.pack()
    assert kernel.is_packed
    torch.testing.assert_close(kernel(X, torch.empty(0), None), before)
    torch.testing.assert_close(before, X @ weight.t())


def test_a_layer_that_cannot_be_packed_keeps_a_copy_of_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: torch.Tensor) -> shadow.Multiply:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(shadow, "_pack", fail)
    weight = torch.randn(8, 16)
    expected = X @ weight.t()
    kernel = LateKernel(weight)
    kernel.pack()
    weight.zero_()  # the next version is loaded there
    torch.testing.assert_close(kernel(X, torch.empty(0), None), expected)


def test_packing_never_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's oneDNN kernels share scratch memory: a second thread would spoil the engine's."""
    from vllm.model_executor.layers import utils

    products: list[str] = []

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = lambda *_: products.append(threading.current_thread().name)
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch)
    kernel = LateKernel(torch.randn(8, 16))
    Packing([kernel], []).wait()
    assert kernel.is_packed and products == []
    kernel(X, torch.empty(0), None)
    assert products == [threading.current_thread().name]


def test_requests_that_the_swap_cut_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_HEAD_START", 1000.0)
    kernel = LateKernel(torch.randn(8, 16))
    packing = Packing([kernel], [])
    assert stays(lambda: not kernel.is_packed, 0.1)
    packing.wait()  # the next version needs the memory
    assert kernel.is_packed


def test_generation_gets_its_turn_after_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with few cores it stands still while a layer is packed: not for all of them."""
    clock = itertools.count(0.0, 1000.0)  # a layer takes very long, by the clock
    monkeypatch.setattr(time, "perf_counter", clock.__next__)
    kernels = [LateKernel(torch.randn(8, 16)) for _ in range(3)]
    packing = Packing(kernels, [])
    wait_until(lambda: kernels[0].is_packed)
    assert stays(lambda: not kernels[1].is_packed, 0.1)
    packing.wait()  # the next version needs the memory: no more turns
    assert all(kernel.is_packed for kernel in kernels)


def test_what_served_before_is_released_by_the_thread() -> None:
    class Old:
        released_by = ""

        def __del__(self) -> None:
            Old.released_by = threading.current_thread().name

    Packing([], [Old()]).wait()
    assert Old.released_by == "rollway-packing"


@pytest.mark.parametrize("kind", CONFIGS)
def test_only_plain_layers_are_packed_later(kind: str, tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    write_model(kind, tmp_path)
    with use_ranks():
        (model, config), (serving, _) = create_model(tmp_path), create_model(tmp_path)
    biased = [m for m in model.modules() if getattr(m, "bias", None) is not None]
    experts = [m for m in model.modules() if hasattr(m, "w13_weight")]
    assert bool(biased) == (kind == "qwen2-bias") and bool(experts) == (kind == "qwen3-moe")
    assert defer_packing(model, serving) == [], "vLLM has not packed the serving model"
    process_weights_after_loading(serving, config.model_config, torch.device("cpu"))
    assert defer_packing(model, serving)
    for module in (*biased, *experts):
        assert not isinstance(getattr(module, "cpu_linear", None), LateKernel)
    assert {n: tuple(p.shape) for n, p in model.named_parameters() if p.dim() < 3} == {
        n: tuple(p.shape) for n, p in serving.named_parameters() if p.dim() < 3
    } or biased, "an exchange needs equal shapes"


class Fleet:
    """A CPU worker whose parameters are exchanged, and a publisher of deltas to it."""

    def __init__(self, directory: Path) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        self.tensors = write_model("qwen3", directory)
        self.publisher = DeltaPublisher(Store(directory / "deltas"), snapshot_every=100)
        self.reader = DeltaReader()
        self.directory = directory
        self.arena = ParameterArena()
        self.worker = create_worker(directory)
        self.worker.model_config.enforce_eager = True
        config, model = self.worker.model_config, self.worker.model_runner.get_model()
        record_metadata_for_reloading(model)
        model.load_weights(iter(self.tensors.items()))
        process_weights_after_loading(model, config, torch.device("cpu"))
        self.version = 0

    def publish(self, share: float = 0.03) -> Offer:
        self.version += 1
        self.tensors = change(self.tensors, self.version, share)
        return self.publisher.publish(self.version, self.tensors.items())

    def start(self, offer: Offer) -> Staging:
        headers = self.reader.headers(offer)
        incoming = Incoming(self.worker, self.reader, offer, headers, 1, torch.clone)
        staging = Staging(incoming, headers, self.arena, HostBuffers())
        staging.start()
        return staging

    def refit(self, offer: Offer) -> dict[str, Any]:
        staging = self.start(offer)
        wait_until(lambda: staging.report()["state"] != "running")
        assert staging.report()["state"] == "ready", staging.report()["error"]
        return staging.swap()

    def assert_serving(self) -> None:
        """Every layer computes what a model does into which vLLM loads the tensors."""
        model, _ = create_model(self.directory)
        model.load_weights(iter(self.tensors.items()))
        live = dict(self.worker.model_runner.get_model().named_modules())
        compared = 0
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is None:
                continue
            served = live[name]
            if weight.dim() == 2:
                x = torch.randn(2, weight.shape[1])
                product = served.cpu_linear(x, served.weight, None)
                torch.testing.assert_close(product, x @ weight.t(), rtol=1e-4, atol=1e-4)
                compared += 1
            if served.weight.numel():
                assert torch.equal(served.weight, weight)
        assert compared >= 10


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with use_ranks():
        yield Fleet(tmp_path)


def test_a_version_serves_before_and_after_it_is_packed(fleet: Fleet, gate: Gate) -> None:
    result = fleet.refit(fleet.publish())
    assert result["strategy"] == "exchange"
    assert gate.packed == 0
    fleet.assert_serving()
    gate.opened.set()
    wait_until_packed(fleet.worker)
    assert gate.packed >= 10
    fleet.assert_serving()


def test_vllm_packs_what_serves(fleet: Fleet) -> None:
    """The same without a stand-in."""
    for _ in range(2):
        fleet.refit(fleet.publish())
        wait_until_packed(fleet.worker)
        fleet.assert_serving()


def test_nothing_is_loaded_over_weights_that_still_serve(fleet: Fleet, gate: Gate) -> None:
    fleet.refit(fleet.publish())
    tensors = dict(fleet.tensors)
    staging = fleet.start(fleet.publish())
    staged, fleet.tensors = fleet.tensors, tensors
    assert staging.report()["state"] == "running"
    fleet.assert_serving()
    gate.opened.set()
    wait_until(lambda: staging.report()["state"] != "running")
    fleet.assert_serving()
    staging.swap()
    fleet.tensors = staged
    fleet.assert_serving()


def test_a_delta_is_applied_where_it_changes_something(fleet: Fleet) -> None:
    first = fleet.refit(fleet.publish())
    assert "no patch, because it is not known which version is served" in first["reason"]
    memory = fleet.arena.nbytes
    for _ in range(3):
        fleet.publish()  # a version that no worker gets
        result = fleet.refit(fleet.publish())
        assert "elements changed since the served version" in result["reason"]
        wait_until_packed(fleet.worker)
        fleet.assert_serving()
    assert fleet.arena.nbytes == memory
    assert fleet.reader._state == {}, "the reader holds no second model"


def forget(fleet: Fleet) -> None:
    fleet.arena.contents = None


def overwrite(fleet: Fleet) -> None:
    """Whatever is wrong with the memory, the published sums show it."""
    fleet.arena._memory[1000:1004] += 1


def discard(fleet: Fleet) -> None:
    """A version is discarded after it was staged: the memory has its weights now."""
    staging = fleet.start(fleet.publish())
    wait_until(lambda: staging.report()["state"] == "ready")
    staging.discard()


@pytest.mark.parametrize("fault", [forget, overwrite, discard])
def test_a_delta_without_its_base_is_loaded_whole(
    fleet: Fleet, fault: Callable[[Fleet], None]
) -> None:
    fleet.refit(fleet.publish())
    wait_until_packed(fleet.worker)
    fault(fleet)
    result = fleet.refit(fleet.publish())
    assert "no patch, because" in result["reason"], result
    fleet.assert_serving()
    assert "elements changed" in fleet.refit(fleet.publish())["reason"]
    fleet.assert_serving()


def test_a_reload_by_vllm_is_not_undone_by_packing(fleet: Fleet, gate: Gate) -> None:
    """Dynamo's own update reloads the layers while older weights are being packed."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    fleet.refit(fleet.publish())
    fleet.publish()
    model = fleet.worker.model_runner.get_model()
    initialize_layerwise_reload(model)
    model.load_weights(iter(fleet.tensors.items()))
    finalize_layerwise_reload(model, fleet.worker.model_config)  # type: ignore[no-untyped-call]
    fleet.assert_serving()
    gate.opened.set()
    wait_until_packed(fleet.worker)
    fleet.assert_serving()
