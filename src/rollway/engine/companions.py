"""Refit what belongs to a version beside the policy: a draft model, and scales of a KV cache.

A publisher adds their tensors to the policy's, with a prefix before their names. They are staged
with the policy and take effect in the same pause, so they never have another version than it.

    draft.fc.weight                                     a name of the draft checkpoint (EAGLE, …)
    kv_scale.model.layers.0.self_attn.k_scale           keys of layer 0, float32 [1]
    kv_scale.model.layers.0.self_attn.v_scale           values
    kv_scale.model.layers.0.self_attn.attn.q_scale      queries; may be missing

vLLM reloads the draft model. Modules that both models share, usually embeddings and head, are the
policy's. A version without draft tensors leaves the draft model as it is: its guesses get worse,
but samples do not change, because the policy judges every guess.

Scales of a quantised KV cache are set when the cache is emptied: its blocks were written with the
old ones. A version without scales leaves them as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollway.engine.fingerprint import Proof, list_non_finite
from rollway.engine.layers import reload_layers, watch_loading
from rollway.weights.checkpoint import TensorHeader, differences, read_headers, refuse_differences

DRAFT, SCALE = "draft.", "kv_scale."
Headers = dict[str, TensorHeader]


def split_headers(headers: Mapping[str, TensorHeader]) -> tuple[Headers, Headers, Headers]:
    """Return the policy's tensors, the draft model's and the scales; these without their prefix."""
    policy = {n: header for n, header in headers.items() if not n.startswith((DRAFT, SCALE))}
    draft, scales = (
        {n.removeprefix(prefix): header for n, header in headers.items() if n.startswith(prefix)}
        for prefix in (DRAFT, SCALE)
    )
    return policy, draft, scales


# --- the draft model -----------------------------------------------------------------------------

# vLLM does not load these of EAGLE-3: the inverse of a loaded table, and a computed table.
_NOT_LOADED = ("t2d", "rotary_emb.inv_freq")
# Two names of the only layer of an EAGLE-3 head. Trainers export the first, and vLLM loads either.
_ONLY_LAYER = ("midlayer.", "layers.0.")


def _list_loaded(headers: Headers) -> Headers:
    """Return the tensors that vLLM loads, each under one name."""
    return {
        name.replace(*_ONLY_LAYER): header
        for name, header in headers.items()
        if not name.endswith(_NOT_LOADED)
    }


class Draft:
    """The draft model of one worker, and a version of it that is being staged."""

    def __init__(self, worker: Any, new: Headers, allow_cast: bool = False) -> None:
        """Raise if this worker could not serve the version."""
        runner = worker.model_runner
        # vLLM's second model runner, the default where Triton works, has another name for it.
        drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        live = getattr(drafter, "model", None)
        if not isinstance(live, torch.nn.Module):
            raise RuntimeError(
                "the version has weights of a draft model, but this worker has none; start it with "
                f"a speculative-config, or publish without names that begin with {DRAFT}"
            )
        self._live: Any = live
        self._config: Any = drafter.speculative_config.draft_model_config
        self._vllm_config = worker.vllm_config
        policy = worker.model_runner.get_model()
        self._shared = frozenset(id(module) for module in policy.modules())
        self._tensors: dict[str, torch.Tensor] = {}
        if self._config.quantization is not None or getattr(drafter, "parallel_drafting", False):
            raise RuntimeError(
                "the draft model is quantised or drafts in parallel, so it has more state than its "
                "weights; restart the worker with the new draft model"
            )
        self._refuse_differences(worker, new, allow_cast)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor, which is small."""
        self._tensors[name] = tensor.clone()

    def list_non_finite(self) -> list[str]:
        """Return the staged tensors that have NaN or infinity in the draft model's dtype."""
        dtype, tensors = self._config.dtype, self._tensors.items()
        served = {DRAFT + n: t.to(dtype) for n, t in tensors if t.is_floating_point()}
        return list_non_finite(served)

    def load(self) -> None:
        """Have vLLM reload the draft model; the worker must be paused."""
        with (
            watch_loading(self._live, lambda *_: None),
            reload_layers(self._live, self._vllm_config, self._config),
        ):
            self._live.load_weights(iter(self._tensors.items()))
            self._refuse_unloaded()
        self.discard()

    def discard(self) -> None:
        """Release what was staged."""
        self._tensors = {}

    def _refuse_differences(self, worker: Any, new: Headers, allow_cast: bool) -> None:
        """Raise unless names, shapes and dtypes are those of the draft model's own checkpoint,
        without the modules that it shares with the policy."""
        shared = {
            name.rpartition(".")[2]
            for name, module in self._live.named_modules()
            if id(module) in self._shared
        }
        duplicates = [name for name in new if _get_module(name) in shared]
        if duplicates:
            raise RuntimeError(
                f"the draft model shares {duplicates[0]} with the policy; publish without it, or "
                "start the worker with a draft checkpoint that has one of its own"
            )
        path = Path(self._config.model)
        if not path.is_dir() or path == Path(worker.model_config.model):
            raise RuntimeError(
                "the draft model has no checkpoint directory to compare with; start the worker "
                "with one in its speculative-config"
            )
        headers = read_headers(path).items()
        own = {name: header for name, header in headers if _get_module(name) not in shared}
        served = Proof(self._live).read_served(_list_loaded(own), self._config.dtype)
        problems = differences(_list_loaded(new), served, allow_cast=allow_cast)
        refuse_differences(problems, "The draft model")

    def _refuse_unloaded(self) -> None:
        """Raise if vLLM's loader gave a parameter nothing; it would keep its old weights. vLLM
        lists what it has kept for a layer until that is complete."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded, others = set[int](), dict[int, str]()
        for name, module in self._live.named_modules():
            if id(module) in self._shared:
                continue
            info = get_layerwise_info(module)
            incomplete = info.kernel_tensors if info.can_load() else None
            arrived = {key for key, _ in info.loaded_weights}
            for key, parameter in module.named_parameters(recurse=False):
                # Of layers that are tied, one is loaded: compare what they serve.
                served = parameter if incomplete is None else incomplete[0].get(key, parameter)
                if incomplete is None or key in arrived:
                    loaded.add(id(served))
                elif parameter.is_floating_point():  # not a table of tokens, which may be missing
                    others[id(served)] = f"{name}.{key}"
        empty = [name for number, name in others.items() if number not in loaded]
        if empty:
            raise RuntimeError(f"vLLM loaded nothing into {empty[0]} of the draft model")


def _get_module(name: str) -> str:
    """Return the name of the module that has a tensor."""
    return f".{name}".split(".")[-2]


# --- scales of the KV cache ----------------------------------------------------------------------

_NAME = re.compile(r"(.+)\.([qkv])_scale")
_FLOATS = ("F32", "F16", "BF16")
_KEPT = "_rollway_kv_scales"


class KvScales:
    """The scales of one worker's KV cache, and those of a version that is being staged."""

    def __init__(self, worker: Any, new: Headers) -> None:
        """Raise if this worker could not serve the version."""
        self._worker = worker
        self._layers = _list_scaled_layers(worker.model_runner.get_model())
        self._new: dict[tuple[str, str], float] = {}
        if not self._layers:
            raise RuntimeError(
                "the version has scales of a quantised KV cache, but this worker's cache is not "
                "quantised; start it with kv-cache-dtype fp8, or publish without scales"
            )
        self._targets = {name: self._find_target(name) for name in new}
        for name, header in new.items():
            if header.dtype not in _FLOATS or math.prod(header.shape) != 1:
                raise RuntimeError(f"{name} is {header}; a scale is one float for each layer")
        needed = {(layer, kind) for layer in self._layers for kind in "kv"}
        missing = needed - set(self._targets.values())
        if missing:
            layer, kind = min(missing)
            raise RuntimeError(
                f"the version has no {kind}_scale for {layer} and {len(missing) - 1} more; publish "
                "the scales of all layers, or of none"
            )
        keeps = any(_keeps_numbers(layer) for layer in self._layers.values())
        if keeps and not worker.model_config.enforce_eager:
            raise RuntimeError(
                "this worker's attention backend has the scales in its captured graphs; start it "
                "with the attention backend FLASH_ATTN, or with enforce-eager"
            )

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        value = float(tensor.item())
        if not (math.isfinite(value) and value > 0):
            raise RuntimeError(f"{name} is {value}; a scale is a positive number")
        self._new[self._targets[name]] = value

    def install(self) -> None:
        """Use the new scales from now on; the worker must be paused, and its cache emptied."""
        setattr(self._worker, _KEPT, self._new)
        restore_scales(self._worker)

    def _find_target(self, name: str) -> tuple[str, str]:
        """Return the layer and the kind of a scale."""
        match = _NAME.fullmatch(name)
        if match is not None:
            mapper = getattr(self._worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
            path = "".join(mapper.apply_list([match[1]])) if mapper is not None else match[1]
            # vLLM's own loaders add the name of the attention layer, too.
            for layer in (path, f"{path}.attn", f"{path}.mla_attn"):
                if layer in self._layers:
                    return layer, match[2]
        raise RuntimeError(
            f"{name} is no scale of a quantised layer of this model; those are called like "
            f"{next(iter(self._layers)).removesuffix('.attn')}.k_scale"
        )


def restore_scales(worker: Any) -> None:
    """Set the scales that were installed last, wherever attention backends read them: where vLLM
    loads a layer again, it sets 1."""
    kept: dict[tuple[str, str], float] = getattr(worker, _KEPT, {})
    layers = _list_scaled_layers(worker.model_runner.get_model()) if kept else {}
    for (name, kind), value in kept.items():
        layer = layers[name]
        scale = getattr(layer, f"_{kind}_scale")
        with torch.inference_mode():
            scale.fill_(value)  # in place: captured graphs hold on to the address
        exact = float(scale.item())
        setattr(layer, f"_{kind}_scale_float", exact)
        on_host = getattr(layer, f"_{kind}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(exact)
        if _keeps_numbers(layer):
            layer.impl.bmm1_scale = layer.impl.bmm2_scale = None  # computed again at the next step


def _list_scaled_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attention layers whose cache has one scale for all keys and one for all values.
    Caches with a scale for each token and head compute them as they write."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale")
        and str(getattr(module, "kv_cache_dtype", "")).startswith("fp8")
        and not module.kv_cache_dtype.endswith("per_token_head")
    }


def _keeps_numbers(layer: Any) -> bool:
    """Return whether the attention backend (FlashInfer) computes with copies of the scales."""
    return hasattr(getattr(layer, "impl", None), "bmm1_scale")
