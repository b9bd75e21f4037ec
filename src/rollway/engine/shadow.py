"""A second model beside the serving one, whose parameters are swapped in within milliseconds.

vLLM's own code builds and loads it, exactly as in a starting worker: fused, cut, padded and packed.
So the swapped-in weights are what a fresh engine would serve, also for layers that vLLM cannot load
twice (its mixture-of-experts layers on CPU). All of this happens while the serving model generates.
Then the two models exchange their parameters. Plain linear layers are packed after that
(`LateKernel`).

This works only if nothing caches a parameter's address: on CPU without compiled graphs. Elsewhere
`rollway.engine.staging` lets vLLM load the verified tensors in place.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollway.engine.background import share_cores

if TYPE_CHECKING:
    from rollway.engine.patching import Served


log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name

_ALIGNED = 64


def explain_no_swap(worker: Any) -> str:
    """Return why this worker's parameters cannot be swapped; "" if they can."""
    config = worker.model_config
    parameters = worker.model_runner.get_model().parameters()
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "CUDA graphs keep the addresses of parameters"
    if not config.enforce_eager:
        return "compiled code keeps parameters; start the worker with enforce-eager"
    if config.quantization is not None:
        return "the model is quantised"
    if worker.vllm_config.lora_config is not None:
        return "adapters wrap the layers"
    if config.use_mla:
        return "latent attention keeps products of its weights"
    return ""


class ParameterArena:
    """Memory for the second model's parameters, kept from one version to the next: fresh pages cost
    more than the copy into them. Its contents stay too, so that a delta can be applied to them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.contents: Served | None = None
        """The version whose loaded parameters it has; None if that is not known."""

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes)

    @property
    def is_free(self) -> bool:
        """Whether no tensor uses it: neither a model that is being loaded, nor the serving model,
        which the next version would overwrite."""
        return _count_users(self._memory) == _count_users(torch.empty(1, dtype=torch.uint8))

    def place(self, model: torch.nn.Module) -> None:
        """Move all parameters of an empty model into this memory, or into new memory if somebody
        still uses this: a version that was discarded while it was loaded, or the serving model."""
        lengths = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        needed = sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths.values())
        with self._lock:
            if self._memory.nbytes < needed or not self.is_free:
                self.contents = None
                self._memory = torch.empty(needed, dtype=torch.uint8)
            offset = 0
            for name, parameter in model.named_parameters():
                part = self._memory[offset : offset + lengths[name]]
                parameter.data = part.view(parameter.dtype).view(parameter.shape)
                offset += -(-lengths[name] // _ALIGNED) * _ALIGNED

    def release(self, model: torch.nn.Module) -> None:
        """Copy parameters out of this memory, because the model is going to serve."""
        first = self._memory.data_ptr()
        for parameter in model.parameters():
            if first <= parameter.data_ptr() < first + self._memory.nbytes:
                parameter.data = parameter.data.clone()


class Shadow:
    """A second model with the shape of the serving one."""

    def __init__(self, worker: Any, arena: ParameterArena) -> None:
        """Create the empty model. It is quick, and runs on the serving thread, because vLLM sets
        process-wide state here."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self._worker = worker
        self._config = worker.model_config
        config = copy.copy(worker.vllm_config)
        # Layers register themselves here by name; the serving model's entries must stay.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_default_torch_dtype(self._config.dtype), torch.device("cpu"):
            self.model = initialize_model(vllm_config=config, model_config=self._config)
        self.arena = arena
        self._kernels: list[LateKernel] = []

    def place(self) -> None:
        """Move the parameters into the arena; nothing may read what that had."""
        self.arena.place(self.model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors with vLLM's loader."""
        self.arena.contents = None
        with torch.no_grad():
            self.model.load_weights(tensors)

    def prepare(self) -> None:
        """Convert the weights to the form in which the engine uses them, except what is packed
        after the swap."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with torch.no_grad():
            serving = self._worker.model_runner.get_model()
            self._kernels = defer_packing(self.model, serving)
            process_weights_after_loading(self.model, self._config, torch.device("cpu"))
            self.arena.release(self.model)
        self.model.eval()

    def exchange(self) -> None:
        """Serve this model's parameters from now on; the worker must be paused."""
        for live, fresh in pair_modules(self.model, self._worker.model_runner.get_model()):
            exchange(live, fresh)
        self._worker.model_runner.reset_encoder_cache()
        self._worker.model_runner.reset_mm_cache()

    def start_packing(self) -> None:
        """Start to pack what serves now, and release what served before."""
        replaced, self.model = [self.model], torch.nn.Module()
        set_packing(self._worker, Packing(self._kernels, replaced))


def exchange(live: Any, fresh: Any) -> None:
    """Exchange the parameters of two layers of one kind. References to the layer stay valid."""
    live._parameters, fresh._parameters = fresh._parameters, live._parameters
    if KERNEL in fresh.__dict__:
        live.cpu_linear, fresh.cpu_linear = fresh.cpu_linear, live.cpu_linear


def pair_modules(
    model: torch.nn.Module, served: torch.nn.Module, skipped: frozenset[int] = frozenset()
) -> list[tuple[Any, Any]]:
    """Pair the modules of two models by name; raise before anything is changed if they differ. Skip
    modules of the serving model whose id is in `skipped`."""
    serving = dict(served.named_modules())
    pairs = []
    for name, fresh in model.named_modules():
        live = serving.get(name)
        if id(live) in skipped:
            continue
        if type(live) is not type(fresh) or _list_shapes(live) != _list_shapes(fresh):
            raise RuntimeError(f"layer {name or 'root'} differs from the serving one")
        pairs.append((live, fresh))
    return pairs


def _count_users(tensor: torch.Tensor) -> int:
    """Return how many tensors share this tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _list_shapes(module: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


KERNEL = "cpu_linear"
"""The attribute of a linear layer on CPU that multiplies with its weights, as a function."""
_LAYERS = "vllm.model_executor.layers"
_LINEAR = f"{_LAYERS}.linear.UnquantizedLinearMethod"
_EMBEDDING = f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod"
_PACKING = "_rollway_packing"
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LateKernel:
    """Multiplies with loaded weights, and with packed ones as soon as there are some.

    It stays the layer's kernel: a thread that replaced the kernel itself could overwrite one
    that vLLM has just made for newer weights.

        background   load ─► verify the bits
        pause        exchange: layers multiply with the loaded weights
        afterwards   generation continues ─► a thread packs layer by layer, and each then multiplies
                     with its packed weights

    vLLM packs linear layers for oneDNN, at about 1 GB/s for each core: longer than all other parts
    of a refit together. The packed kernel is up to twice as fast as the plain one for a few tokens,
    and gives the same numbers but for rounding. So new weights serve unpacked for a moment.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._loaded: torch.Tensor | None = weight
        self._packed: Multiply | None = None

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # Read the loaded weights first: `pack` releases them after it has set the packed ones.
        loaded, packed = self._loaded, self._packed
        if packed is not None:
            return packed(x, weight, bias)
        assert loaded is not None
        return torch.nn.functional.linear(x, loaded, bias)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self) -> None:
        """Pack the weights and release the loaded ones. Where that fails, keep a copy of them."""
        assert self._loaded is not None
        try:
            packed = _pack(self._loaded)
        except Exception as error:  # noqa: BLE001 (the loaded weights serve as well, only slower)
            log.warning("weights of a layer are not packed, so it is slower: %s", error)
            self._loaded = self._loaded.clone()  # their memory is needed for the next version
            return
        self._packed = packed
        self._loaded = None


_HEAD_START = 0.5
"""Seconds after a swap in which nothing is packed. Requests that the swap cut compute their tokens
again in these, on all cores: that is the longest time without a token that they see."""
_TURN = 3.0
"""How long generation gets its turn after each layer, in units of what the layer took. Plain layers
cost it less than cores that are busy with packing."""


class Packing:
    """A thread that packs the layers of the version that a worker has begun to serve, in turns with
    generation."""

    def __init__(self, kernels: Sequence[LateKernel], replaced: list[Any]) -> None:
        """Start it. `replaced` holds the last references to what served before: releasing that
        memory takes longer than the swap, so the thread does it."""
        self._kernels = list(kernels)
        self._replaced = replaced
        self._is_awaited = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._run, name="rollway-packing", daemon=True).start()

    def wait(self) -> None:
        """Wait until no layer needs its loaded weights; from now on there are no turns."""
        self._is_awaited.set()
        self._done.wait()

    def _run(self) -> None:
        busy = 0.0
        try:
            torch.get_num_threads()  # initialises this thread's setting, which share_cores changes
            share_cores(alone=False)
            self._is_awaited.wait(_HEAD_START)
            self._replaced.clear()
            with torch.no_grad():
                while self._kernels:
                    began = time.perf_counter()
                    self._kernels.pop(0).pack()
                    seconds = time.perf_counter() - began
                    busy += seconds
                    # Where a packed layer takes as many cores as there are, generation stands
                    # still meanwhile. So it gets its turn after each layer, and not after all.
                    self._is_awaited.wait(_TURN * seconds)
        finally:
            self._done.set()
        log.info("its layers are packed (%.3f s)", busy)


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
