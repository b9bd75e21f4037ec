"""Names of families that Rollway's table lacks, from Megatron-Bridge, where it is installed.

Bridge has a registry of mappings for each family: a parameter of Megatron, the Hugging Face tensors
in it, and how it converts one into the other. Rollway takes the names and moves the bytes itself.
So it reads only mappings that move elements. Where Bridge would compute (norms that are stored
minus one, permuted axes, experts joined in one tensor), the engine would serve wrong bytes.

Bridge is imported when the first name is looked up: that takes tens of seconds, and needs
Transformer Engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollway.errors import UsageError

_PARTS = ("q", "k", "v", "gate", "up")
_FUSED = {"QKVMapping", "ConcatenatedQKVMapping", "GatedMLPMapping"}
_PLAIN = {"AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping"}
_PLAIN |= {"DirectMapping"}


@dataclass(frozen=True)
class Bridge:
    """Megatron-Bridge's registry of the model that a `config.json` describes."""

    config: Mapping[str, Any]

    @cached_property
    def registry(self) -> Any:
        """The registry; raises `UsageError` if there is none."""
        family = self.config.get("model_type")
        fix = (
            "Use the names of a similar family with overrides: "
            "NameMap('llama', geometry, overrides)."
        )
        try:
            bridge: Any = importlib.import_module("megatron.bridge")
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError(
                f"Megatron-Bridge, which may know a model of type {family!r}, cannot be imported "
                f"({error}).",
                f"Install megatron-bridge where the trainer runs. {fix}",
            ) from error
        try:
            config = transformers.AutoConfig.for_model(**self.config)
            return bridge.AutoBridge.from_hf_config(config)._model_bridge.mapping_registry()
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"Megatron-Bridge does not know a model of type {family!r} ({reason}).", fix
            ) from error

    @cached_property
    def gated(self) -> bool:
        """Whether the model's MLPs have a gate beside their first matrix."""
        return any(type(mapping).__name__ == "GatedMLPMapping" for mapping in self.registry)

    def hf_names(self, name: str) -> tuple[str, ...] | None:
        """Return the Hugging Face tensors in a parameter, in canonical order, or None if Bridge
        does not know it. `name` has the global numbers of its layer and of its expert."""
        try:
            mapping = self.registry.megatron_to_hf_lookup(name)
        except UsageError as error:
            raise UsageError(
                f"Rollway's own table lacks Megatron's {name}. {error.message}", error.hint
            ) from error
        if mapping is None:
            return None
        kind, (module, leaf) = type(mapping).__name__, name.split(".")[-2:]
        is_fused = module == "linear_qkv" or (module == "linear_fc1" and self.gated)
        allowed = _FUSED if is_fused and not leaf.startswith("layer_norm_") else _PLAIN
        if kind not in allowed or getattr(mapping, "permute_dims", None):
            raise UsageError(
                f"Megatron-Bridge converts {name} by {kind}, which does more than move elements.",
                "Add an override for this name if its bytes may go as they are.",
            )
        names = mapping.hf_param
        if isinstance(names, str):
            return (names,)
        return tuple(names[part] for part in _PARTS if part in names)
