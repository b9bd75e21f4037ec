"""Names from Megatron-Bridge, where that is installed: it knows more families than our table.

Only mappings that move elements without changing them are taken over. What Bridge would compute
(norms that are stored minus one, permuted axes) is refused: the engine would be served wrong bytes.
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
    """`megatron.bridge`'s mapping registry, asked as a `names.Registry`."""

    mappings: Any

    def hf_names(self, name: str) -> tuple[str, ...] | None:
        """None leaves the name to our table: Bridge does not know it, or cannot parse it."""
        try:
            mapping = self.mappings.megatron_to_hf_lookup(name)
        except (ValueError, KeyError, IndexError):
            return None
        if mapping is None:
            return None
        kind = type(mapping).__name__
        if kind not in _PLAIN or getattr(mapping, "permute_dims", None):
            raise UsageError(
                f"Megatron-Bridge changes the values of {name} ({kind}), not only their places.",
                "Add an override for this name if its bytes may go as they are.",
            )
        return _ordered(name, mapping.hf_param)


def bridge_registry(hf_config: Any) -> BridgeRegistry | None:
    """The registry for a model, by its transformers config; None where Bridge is not usable."""
    try:
        bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_config(hf_config)
        return BridgeRegistry(bridge._model_bridge.mapping_registry())
    except (ImportError, AttributeError, ValueError):
        return None  # not installed, not importable without a GPU, or a family it does not have


def _ordered(name: str, hf: str | dict[str, str]) -> tuple[str, ...]:
    if isinstance(hf, str):
        return (hf,)
    unknown = hf.keys() - set(_ORDER)
    if unknown:
        raise UsageError(
            f"Megatron-Bridge splits {name} into {', '.join(sorted(hf))}, which Rollway cannot.",
            "Add an override for this name.",
        )
    return tuple(hf[part] for part in _ORDER if part in hf)
