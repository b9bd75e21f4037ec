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


class Shadow:
    """A model with the served one's shape, and nothing in it yet."""

    def __init__(self, worker: Any) -> None:
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

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill it with vLLM's loader."""
        with torch.no_grad():
            self.model.load_weights(tensors)

    def prepare(self) -> None:
        """Make of the weights what the engine computes with."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with torch.no_grad():
            process_weights_after_loading(self.model, self._config, torch.device("cpu"))
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


def _shapes(module: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
