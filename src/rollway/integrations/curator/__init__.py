"""NeMo Curator on Rollway: Curator's inference server, with Rollway in place of its Dynamo backend.

    from rollway.integrations.curator import (
        DynamoServerConfig, DynamoVLLMModelConfig, InferenceServer,
    )

    with InferenceServer(models=[DynamoVLLMModelConfig("Qwen/Qwen3-0.6B")],
                         backend=DynamoServerConfig()) as server:
        ...                                    # server.endpoint, as in Curator

translate   Curator's configs as the spec of a stack (needs neither Curator nor Ray)
server      `InferenceServer`, `RollwayServerConfig`; `install` and `uninstall`
backend     one start of a server: the stack, its files, its health
owner       the process that holds a stack on Ray while its driver connects and disconnects

Names are loaded when they are used: only `translate` works without the package `nemo-curator`.
"""

from __future__ import annotations

import importlib
from typing import Any

_OURS = ("InferenceServer", "RollwayServerConfig", "install", "uninstall")
_CURATORS = (
    "BaseModelConfig",
    "BaseServerConfig",
    "DynamoRoleConfig",
    "DynamoRouterConfig",
    "DynamoServerConfig",
    "DynamoVLLMModelConfig",
    "RayServeModelConfig",
    "RayServeServerConfig",
    "is_inference_server_active",
)
"""Curator's own names, so that a user changes the module of one import and nothing else."""

__all__ = [*_OURS, *_CURATORS]


def __getattr__(name: str) -> Any:
    if name in _OURS:
        return getattr(importlib.import_module(f"{__name__}.server"), name)
    if name in _CURATORS:
        importlib.import_module(f"{__name__}.server")  # explains a missing package
        return getattr(importlib.import_module("nemo_curator.core.serve"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
