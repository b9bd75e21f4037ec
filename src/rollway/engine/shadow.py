"""A second model beside the serving one, whose parameters are swapped in within milliseconds.

vLLM's own code builds and loads it, exactly as in a starting worker: fused, cut, padded and packed.
So the swapped-in weights are what a fresh engine would serve, also for layers that vLLM cannot load
twice (its mixture-of-experts layers on CPU). All of this happens while the serving model generates.
Then the two models exchange their parameters. Plain linear layers are packed after that
(`rollway.engine.packing`).

This works only if nothing caches a parameter's address: on CPU without compiled graphs. Elsewhere
`rollway.engine.staging` lets vLLM load the verified tensors in place.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rollway.engine.packing import KERNEL, LateKernel, Packing, defer_packing, set_packing

if TYPE_CHECKING:
    from rollway.engine.patching import Served

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
        """Convert the weights to the form in which the engine uses them, but for what is packed
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
        if type(live) is not type(fresh) or _shapes(live) != _shapes(fresh):
            raise RuntimeError(f"layer {name or 'root'} differs from the serving one")
        pairs.append((live, fresh))
    return pairs


def _count_users(tensor: torch.Tensor) -> int:
    """Return how many tensors share this tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _shapes(module: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
