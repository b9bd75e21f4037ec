"""Get tensor names from Megatron-Bridge if it is installed: it knows more families than our table.

Only mappings that move elements without changing them are used. Where Bridge would compute (norms
that are stored minus one, permuted axes), the tensor is refused: the engine would serve wrong
bytes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError

_PLAIN = {"AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping"}
_PLAIN |= {"DirectMapping", "QKVMapping", "GatedMLPMapping", "ConcatenatedQKVMapping"}
_ORDER = ("q", "k", "v", "gate", "up")


@dataclass(frozen=True)
class BridgeRegistry:
    """`megatron.bridge`'s mapping registry as a `names.Registry`."""

    mappings: Any

    def hf_names(self, name: str) -> tuple[str, ...] | None:
        """Return the Hugging Face names in `name`, or None if Bridge does not know it.

        Our own table is used then."""
        try:
            mapping = self.mappings.megatron_to_hf_lookup(name)
        except (ValueError, KeyError, IndexError):  # a name that Bridge cannot parse
            return None
        if mapping is None:
            return None
        kind = type(mapping).__name__
        if kind not in _PLAIN or getattr(mapping, "permute_dims", None):
            raise UsageError(
                f"Megatron-Bridge changes the values of {name} ({kind}), not only their places.",
                "Add an override for this name if its bytes may go as they are.",
            )
        names = mapping.hf_param
        if isinstance(names, str):
            return (names,)
        if names.keys() - set(_ORDER):
            raise UsageError(
                f"Megatron-Bridge splits {name} into {', '.join(sorted(names))}; Rollway cannot.",
                "Add an override for this name.",
            )
        return tuple(names[part] for part in _ORDER if part in names)


def bridge_registry(hf_config: Any) -> BridgeRegistry | None:
    """Return a model's registry by its transformers config; None without a usable Bridge."""
    try:
        bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_config(hf_config)
        return BridgeRegistry(bridge._model_bridge.mapping_registry())
    except (ImportError, AttributeError, ValueError):
        return None  # not installed, not importable without a GPU, or an unknown family
