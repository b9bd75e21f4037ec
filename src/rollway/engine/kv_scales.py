"""Refit the scales of a quantised KV cache together with the policy, as one version.

A publisher adds each scale as a tensor of one element, with the prefix `kv_scale.` before the name
by which vLLM's loaders know it:

    kv_scale.model.layers.0.self_attn.k_scale           keys of layer 0, float32 [1]
    kv_scale.model.layers.0.self_attn.v_scale           values
    kv_scale.model.layers.0.self_attn.attn.q_scale      queries; may be missing

They are received and verified with the policy, and set in the pause of its swap, in which the cache
is emptied: its blocks were written with the old scales. A version without scales leaves them as
they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rollway.weights.checkpoint import TensorHeader

PREFIX = "kv_scale."
_NAME = re.compile(r"(.+)\.([qkv])_scale")
_FLOATS = ("F32", "F16", "BF16")
_KEPT = "_rollway_kv_scales"
Headers = dict[str, TensorHeader]


def split_scales(headers: Mapping[str, TensorHeader]) -> tuple[Headers, Headers]:
    """Return the other tensors, and the scales without their prefix."""
    others = {name: header for name, header in headers.items() if not name.startswith(PREFIX)}
    scales = {n.removeprefix(PREFIX): header for n, header in headers.items() if n not in others}
    return others, scales


class KvScales:
    """The scales of one worker's KV cache, and those of a version that is being staged."""

    def __init__(self, worker: Any, new: Headers) -> None:
        """Raise if this worker could not serve the version."""
        self._worker = worker
        self._layers = _list_layers(worker.model_runner.get_model())
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

    def keep_scales(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the other tensors; keep the scales."""
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                name = name.removeprefix(PREFIX)
                value = float(tensor.item())
                if not (math.isfinite(value) and value > 0):
                    raise RuntimeError(f"{name} is {value}; a scale is a positive number")
                self._new[self._targets[name]] = value
            else:
                yield name, tensor

    def install(self) -> None:
        """Use the new scales from now on; the worker must be paused, and its cache emptied."""
        if set(self._new) != set(self._targets.values()):
            raise RuntimeError("not all scales of the KV cache arrived")
        setattr(self._worker, _KEPT, dict(self._new))
        set_scales(self._layers, self._new)

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
    """Set the scales that were installed last: where vLLM loads a layer again, it sets 1."""
    kept: dict[tuple[str, str], float] = getattr(worker, _KEPT, {})
    if kept:
        set_scales(_list_layers(worker.model_runner.get_model()), kept)


def set_scales(layers: Mapping[str, Any], scales: Mapping[tuple[str, str], float]) -> None:
    """Set scales by layer and kind, wherever attention backends read them, and compare."""
    for (name, kind), value in scales.items():
        layer = layers[name]
        scale = getattr(layer, f"_{kind}_scale")
        with torch.inference_mode():
            scale.fill_(value)  # in place: captured graphs hold on to the address
        exact = float(scale.item())
        setattr(layer, f"_{kind}_scale_float", exact)
        on_host = getattr(layer, f"_{kind}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(exact)
        if exact != float(torch.tensor(value, dtype=scale.dtype)):
            raise RuntimeError(f"{name} does not hold its {kind}_scale")
        if _keeps_numbers(layer):
            layer.impl.bmm1_scale = layer.impl.bmm2_scale = None  # computed again at the next step


def _list_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attention layers whose cache has one scale for all keys and one for all values."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale") and _is_scaled(str(getattr(module, "kv_cache_dtype", "")))
    }


def _is_scaled(dtype: str) -> bool:
    # Caches with a scale for each token and head compute them as they write.
    return dtype.startswith("fp8") and not dtype.endswith("per_token_head")


def _keeps_numbers(layer: Any) -> bool:
    """Return whether the attention backend (FlashInfer) computes with copies of the scales."""
    return hasattr(getattr(layer, "impl", None), "bmm1_scale")
