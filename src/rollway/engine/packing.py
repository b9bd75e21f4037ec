"""Packs the weights of CPU layers after they serve, so that a refit does not wait for it.

    background   load ─► verify the bits
    pause        exchange: layers multiply with the loaded weights
    afterwards   a thread packs layer by layer ─► each layer multiplies with its packed weights

vLLM packs linear layers for oneDNN, at about 1 GB/s for each core: longer than all other parts of
a refit together. The packed kernel is up to twice as fast as the plain one for a few tokens, and
gives the same numbers but for rounding. So new weights serve unpacked for a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollway.engine.background import share_cores

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name

KERNEL = "cpu_linear"
"""The attribute of a linear layer on CPU that multiplies with its weights, as a function."""
_LAYERS = "vllm.model_executor.layers"
_LINEAR = f"{_LAYERS}.linear.UnquantizedLinearMethod"
_EMBEDDING = f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod"
_PACKING = "_rollway_packing"
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LateKernel:
    """Multiplies with loaded weights, and with packed ones as soon as there are some.

    It is a layer's kernel for good: a thread that replaced the kernel itself could overwrite one
    that vLLM has just made for newer weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._loaded: torch.Tensor | None = weight
        self._packed: Multiply | None = None

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # The loaded weights are read first: they go after the packed ones have come.
        loaded, packed = self._loaded, self._packed
        if packed is not None:
            return packed(x, weight, bias)
        assert loaded is not None
        return torch.nn.functional.linear(x, loaded, bias)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self) -> None:
        """Pack the weights and let the loaded ones go. Where that fails, keep a copy of them."""
        assert self._loaded is not None
        try:
            packed = _pack(self._loaded)
        except Exception as error:  # noqa: BLE001 (the loaded weights serve as well, only slower)
            log.warning("weights of a layer are not packed, so it is slower: %s", error)
            self._loaded = self._loaded.clone()  # their memory is needed for the next version
            return
        self._packed = packed
        self._loaded = None


class Packing:
    """A thread that packs the layers of the version that a worker has begun to serve."""

    def __init__(self, kernels: Sequence[LateKernel], replaced: list[Any]) -> None:
        """Start it. `replaced` holds the last references to what served before: releasing that
        memory takes longer than the swap, so the thread does it."""
        self._kernels = list(kernels)
        self._replaced = replaced
        self._done = threading.Event()
        threading.Thread(target=self._run, name="rollway-packing", daemon=True).start()

    def wait(self) -> None:
        """Wait until no layer needs its loaded weights."""
        self._done.wait()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            torch.get_num_threads()  # initialises this thread's setting, which share_cores changes
            share_cores(alone=False)
            self._replaced.clear()
            with torch.no_grad():
                while self._kernels:
                    self._kernels.pop(0).pack()
        finally:
            self._done.set()
        log.info("its layers are packed (%.3f s)", time.perf_counter() - began)


def set_packing(worker: Any, packing: Packing | None) -> None:
    """Note which thread packs the layers of a worker."""
    worker.__dict__[_PACKING] = packing


def wait_until_packed(worker: Any) -> None:
    """Wait until the served version is packed: before that, layers read what the next one would
    overwrite, and vLLM would reload layers in a form that it does not know."""
    packing: Packing | None = worker.__dict__.get(_PACKING)
    if packing is not None:
        packing.wait()
        set_packing(worker, None)


def defer_packing(model: torch.nn.Module, serving: torch.nn.Module) -> list[LateKernel]:
    """Give layers that vLLM would only pack a `LateKernel`, and keep vLLM from packing them.

    These are unquantised layers with a plain weight matrix that are packed in the serving model.
    vLLM packs all others before they serve: experts, and layers with a bias, which it may convert
    together with the weights."""
    kernels = []
    live = dict(serving.named_modules())
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = f"{type(method).__module__}.{type(method).__qualname__}"
        weight: Any = getattr(module, "weight", None)
        is_plain = (
            kind in (_LINEAR, _EMBEDDING)
            and weight is not None
            and weight.dim() == 2
            and getattr(module, "bias", None) is None
        )
        if not is_plain or not _is_packed(live.get(name), kind):
            continue
        kernel = LateKernel(weight.detach())
        setattr(module, KERNEL, kernel)
        module.quant_method = None
        kernels.append(kernel)
        if kind == _LINEAR:  # as vLLM leaves a packed layer; an embedding is also looked up
            empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
            module.weight = torch.nn.Parameter(empty, requires_grad=False)
    return kernels


def _is_packed(layer: Any, kind: str) -> bool:
    """Return whether vLLM packed the weights of a serving layer: its kernel holds on to them."""
    if layer is None or (kind == _LINEAR and layer.weight.numel()):
        return False
    kernel = layer.__dict__.get(KERNEL)
    return isinstance(kernel, LateKernel) or bool(getattr(kernel, "__closure__", None))


def _pack(weight: torch.Tensor) -> Multiply:
    """Return vLLM's kernel with packed weights.

    It must not be called here: vLLM's oneDNN kernels share scratch memory, so that two threads that
    multiply at the same time get wrong products (348 of 600 in a trial). Packing uses none."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    if layer.weight.numel():
        raise RuntimeError("vLLM has no packed form for them")
    packed: Multiply = layer.cpu_linear
    return packed
