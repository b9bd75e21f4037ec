"""Find the layers of a vLLM model that keep their weights exactly as vLLM's loader wrote them.

Only these may be written by a `LoadPlan`. Others are changed after loading: quantised, shuffled for
a kernel, packed, or used to compute something that is kept. A changed layout can have the same
shapes and the same sums as the loaded one, so neither would reveal a wrong copy. Therefore this is
a list of what is allowed, read from vLLM 0.31, and everything else is reloaded by vLLM itself.

On CPU, vLLM packs nearly all layers, and packed weights cannot be read. So `watch_loading` shows
each layer between its loading and its packing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers"
_PLAIN_METHODS = frozenset(
    {
        f"{_LAYERS}.linear.UnquantizedLinearMethod",
        f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
    }
)
"""Quantisation methods that change nothing after loading on CUDA."""
_MOE_METHOD = f"{_LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod"
_MOE_WRAPPER = f"{_LAYERS}.fused_moe.fused_moe_modular_method.FusedMoEModularMethod"
_MOE_BACKENDS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Backends that use w13 and w2 as they were loaded. FlashInfer swaps halves or permutes blocks."""
_ATTENTION = f"{_LAYERS}.attention_layer_base.AttentionLayerBase"
_ATTENTION_BACKEND = "vllm.v1.attention.backend"
PACKED = "it keeps its weights in a packed form"
_HOOK = "process_weights_after_loading"


def explain_no_plan(worker: Any) -> str:
    """Return why no layer of this worker may be written in place; "" if some may."""
    model, config = worker.model_runner.get_model(), worker.model_config
    if config.quantization is not None:
        return "the model is quantised"
    if config.use_mla:
        return "latent attention keeps products of its weights"
    if getattr(worker.vllm_config.parallel_config, "enable_eplb", False):
        return "experts move between ranks"
    if torch.version.hip is not None:
        return "vLLM pads and shuffles weights on ROCm"
    if hasattr(model, _HOOK):
        return f"{type(model).__name__} changes its weights after loading"
    for name, module in model.named_modules():
        if _keeps_derived_weights(module):
            return f"{name} keeps values that are computed from weights"
    return ""


def list_changed_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return the layers whose parameters are not what vLLM's loader wrote, each with the reason.

    A layer that shares a parameter with such a layer counts too, for example embeddings that are
    tied to a packed head."""
    device = next(model.parameters()).device.type
    owners: dict[int, list[str]] = {}
    changed: dict[str, str] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        for parameter in parameters:
            owners.setdefault(id(parameter), []).append(name)
        reason = _explain_change(module, parameters, device) if parameters else ""
        if reason:
            changed[name] = reason
    for names in owners.values():
        reasons = [changed[name] for name in names if name in changed]
        changed |= {name: reasons[0] for name in names if reasons and name not in changed}
    return changed


def explain_no_reload(model: torch.nn.Module) -> str:
    """Return why vLLM must not load this model a second time; "" if it may."""
    for name, module in model.named_modules() if _is_on_cpu(model) else ():
        has_experts = any(
            key.startswith("w13") for key, _ in module.named_parameters(recurse=False)
        )
        if has_experts and _qualify_name(type(_get_method(module))) != _MOE_METHOD:
            return (
                f"vLLM packs the experts of {name} for CPU only when it loads them for the first "
                "time; start the worker without quantisation and without adapters"
            )
    return ""


def find_unpacked(model: torch.nn.Module) -> str:
    """Return a layer on CPU that vLLM's own reload does not pack, unlike `watch_loading`: experts,
    or one that is tied to another; "" if there is none."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules() if _is_on_cpu(model) else ():
        for key, parameter in module.named_parameters(recurse=False):
            if key.startswith("w13") or owners.setdefault(id(parameter), name) != name:
                return str(name)
    return ""


def list_loaded_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters in the shapes that vLLM's loader fills. On CPU these are on
    `meta`, because packed layers keep other parameters, or none."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    loaded: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        info = LAYERWISE_INFO.get(modules[path]) if parameter.device.type == "cpu" else None
        loaded[name] = parameter if info is None else info.restore_metadata[0].get(key, parameter)
    return loaded


@contextlib.contextmanager
def watch_loading(model: torch.nn.Module, seen: Callable[[str, Any], None]) -> Iterator[None]:
    """Call `seen` with name and layer when vLLM has reloaded a layer of a model on CPU, before it
    packs it. Have it pack experts and tied layers, too.

    If the reload breaks off, undo what it began, so that the next one starts from the beginning."""
    names = {module: name for name, module in model.named_modules()} if _is_on_cpu(model) else {}
    methods = {method for method in map(_get_method, names) if hasattr(method, _HOOK)}
    loaded: set[Any] = set()

    def watch(process: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(layer: Any) -> None:
            loaded.add(layer)
            seen(names[layer], layer)
            if hasattr(layer.quant_method, "moe_kernel"):
                # With a kernel, vLLM takes this for an update on a GPU, and packs nothing: the
                # kernel would read loaded weights as packed ones.
                layer.quant_method.moe_kernel = None
            process(layer)

        return run

    for method in methods:
        setattr(method, _HOOK, watch(getattr(method, _HOOK)))
    try:
        yield
    except BaseException:
        _undo_reload(model)
        raise
    finally:
        for method in methods:
            delattr(method, _HOOK)
    # A head that is tied to the embeddings gets no tensors, so vLLM leaves it packed as it was.
    shared = {id(parameter) for layer in loaded for parameter in layer.parameters(recurse=False)}
    for layer in names.keys() - loaded:
        tied = any(id(parameter) in shared for parameter in layer.parameters(recurse=False))
        if tied and hasattr(_get_method(layer), _HOOK):
            layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def reload_layers(layers: torch.nn.Module, vllm_config: Any, model_config: Any) -> Iterator[None]:
    """Have vLLM reload a module with what its loader is given inside of the block. vLLM treats the
    module and its submodules, and no other layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    # The kernels of experts, which are built again on CPU, read the config.
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(layers)
        yield
        finalize_layerwise_reload(layers, model_config)  # type: ignore[no-untyped-call]


def _undo_reload(model: torch.nn.Module) -> None:
    """Give back the parameters of layers that vLLM began to reload. It has no way back: they would
    stay on `meta`, and the next reload would add to the tensors that this one has kept."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()  # type: ignore[no-untyped-call]


def _is_on_cpu(model: torch.nn.Module) -> bool:
    # A reload by vLLM alone that broke off leaves parameters on `meta`.
    return all(parameter.device.type in ("cpu", "meta") for parameter in model.parameters())


def _get_method(module: Any) -> Any:
    return getattr(module, "quant_method", None)


def _explain_change(module: Any, parameters: Iterable[torch.Tensor], device: str) -> str:
    for parameter in parameters:
        if parameter.device.type != device:
            return "it is offloaded to another device"
        if parameter.numel() == 0:
            return PACKED
        if not parameter.is_contiguous():
            return "its parameters are not contiguous"
    kernel = module.__dict__.get("cpu_linear")
    # The kernels of packed layers hold on to the packed weights; the fallback holds on to nothing
    # and reads the parameter.
    if kernel is not None and getattr(kernel, "__closure__", None):
        return PACKED
    method = _get_method(module)
    return "" if method is None else _explain_method(method, device)


def _explain_method(method: Any, device: str) -> str:
    name = _qualify_name(type(method))
    if name in _PLAIN_METHODS:
        return "" if device in ("cpu", "cuda") else f"vLLM may transpose weights on {device}"
    if name == _MOE_WRAPPER:
        return _explain_method(method.old_quant_method, device)
    if name == _MOE_METHOD:
        backend = getattr(method.unquantized_backend, "name", "unknown")
        return "" if backend in _MOE_BACKENDS else f"the MoE backend {backend} reorders weights"
    return f"{type(method).__name__} may change weights after loading"


def _keeps_derived_weights(module: Any) -> bool:
    """Return whether an attention layer keeps something computed from other layers' weights:
    FlashInfer, for example, keeps attention sinks in float32."""
    # vLLM calls the hook of quantisation methods, and of attention layers, and of no other module.
    is_attention = any(_qualify_name(cls) == _ATTENTION for cls in type(module).__mro__)
    if not is_attention or not callable(getattr(module, _HOOK, None)):
        return False
    implementation = getattr(module, "impl", None)
    hook = getattr(type(implementation), _HOOK, None)
    if hook is not None and hook.__module__ == _ATTENTION_BACKEND:
        return False  # the base class's, which does nothing
    return getattr(implementation, "_sinks_source", module) is not None


def _qualify_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
