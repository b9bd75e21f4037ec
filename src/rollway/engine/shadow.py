"""A second model beside the one that serves, exchanged with it in milliseconds.

It is built and loaded by vLLM's own code, exactly as a worker that starts would: fused, cut, padded
and packed anew, so what is served after the exchange is what a fresh engine would serve, also for
layers that vLLM itself cannot load twice (its mixture-of-experts layers on CPU). All of that takes
place while the other one generates. Then the two models exchange their parameters.

Only where nothing holds on to a parameter's address: on CPU without compiled graphs. Elsewhere
`rollway.engine.staging` has vLLM load in place what was brought and checked before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

_ALIGNED = 64
_KERNEL = "cpu_linear"
"""A packed linear layer's product with its weights, which it keeps nowhere else."""


def exchangeable(worker: Any) -> str:
    """Why the parameters of this worker cannot be exchanged; empty when they can."""
    config = worker.model_config
    parameters = worker.model_runner.get_model().parameters()
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "graphs on a GPU hold on to the addresses of parameters"
    if not config.enforce_eager:
        return "compiled code holds on to parameters; start the worker with enforce-eager"
    if config.quantization is not None:
        return "the model is quantised"
    if worker.vllm_config.lora_config is not None:
        return "adapters wrap the layers"
    if config.use_mla:
        return "latent attention keeps products of its weights"
    return ""


class Room:
    """Memory in which a second model is loaded, kept from one version to the next: fresh pages
    cost more than what is copied into them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes)

    @property
    def free(self) -> bool:
        """Whether nobody else holds on to any of it: no model that is still being loaded, and
        nothing that serves, which the next version would be written over."""
        return _holders(self._memory) == _holders(torch.empty(1, dtype=torch.uint8))

    def move_in(self, model: torch.nn.Module) -> None:
        """Place all parameters, which hold nothing yet, into it."""
        lengths = {name: one.nbytes for name, one in model.named_parameters()}
        needed = sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths.values())
        if self._memory.nbytes < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        offset = 0
        for name, parameter in model.named_parameters():
            part = self._memory[offset : offset + lengths[name]]
            parameter.data = part.view(parameter.dtype).view(parameter.shape)
            offset += -(-lengths[name] // _ALIGNED) * _ALIGNED

    def move_out(self, model: torch.nn.Module) -> None:
        """Give what is still here memory of its own: it is going to be served."""
        first = self._memory.data_ptr()
        for parameter in model.parameters():
            if first <= parameter.data_ptr() < first + self._memory.nbytes:
                parameter.data = parameter.data.clone()


class Shadow:
    """A model with the served one's shape, and nothing in it yet."""

    def __init__(self, worker: Any, room: Room) -> None:
        """Quick, and on the thread that serves: vLLM sets things for the whole process here."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self._worker = worker
        self._config = worker.model_config
        config = copy.copy(worker.vllm_config)
        # Layers enter themselves here by name; those of the served model stay.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_default_torch_dtype(self._config.dtype), torch.device("cpu"):
            self.model = initialize_model(vllm_config=config, model_config=self._config)
        self._room = room
        room.move_in(self.model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill it with vLLM's loader."""
        with torch.no_grad():
            self.model.load_weights(tensors)

    def prepare(self) -> None:
        """Make of the weights what the engine computes with."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with torch.no_grad():
            process_weights_after_loading(self.model, self._config, torch.device("cpu"))
            self._room.move_out(self.model)
        self.model.eval()

    def exchange(self) -> None:
        """Serve this model's parameters from now on; the worker must be paused."""
        for live, fresh in paired(self.model, self._worker.model_runner.get_model()):
            exchange(live, fresh)
        self._worker.model_runner.reset_encoder_cache()
        self._worker.model_runner.reset_mm_cache()


def exchange(live: Any, fresh: Any) -> None:
    """The parameters of two layers of one kind. Whoever holds on to a layer has the new ones."""
    live._parameters, fresh._parameters = fresh._parameters, live._parameters
    if _KERNEL in fresh.__dict__:
        live.cpu_linear, fresh.cpu_linear = fresh.cpu_linear, live.cpu_linear


def paired(
    model: torch.nn.Module, served: torch.nn.Module, besides: frozenset[int] = frozenset()
) -> list[tuple[Any, Any]]:
    """Modules of both with the same place; all are looked at before any is touched. Modules of the
    served one whose id is in `besides` are passed over."""
    theirs = dict(served.named_modules())
    found = []
    for name, fresh in model.named_modules():
        live = theirs.get(name)
        if id(live) in besides:
            continue
        if type(live) is not type(fresh) or _shapes(live) != _shapes(fresh):
            raise RuntimeError(f"layer {name or 'root'} differs from the one that serves")
        found.append((live, fresh))
    return found


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _shapes(module: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
