"""Let prime-rl's orchestrator be imported where its trainer's GPU packages are not installed.

The orchestrator needs `prime_rl.trainer.model` for the tokenizer alone, and that module imports
kernels that exist for GPUs only. Python runs this file in every process that has its directory on
PYTHONPATH; a package of the list that is not installed becomes a module whose names do nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

ABSENT = {
    "deep_ep", "deep_gemm", "dion", "fla", "flash_attn", "flash_attn_interface", "liger_kernel",
    "prime_kernels", "quack", "ring_flash_attn", "tilelang", "torchao", "torchtitan", "triton",
    "vllm", "wandb_gql", "wandb_workspaces",
}  # fmt: skip


class StandInClass(type):
    """A class of such a module, with any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class StandIn(ModuleType):
    """A module of a package that is not here."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # it may be inherited from, and asked for by isinstance
            return StandInClass(name, (), {"__init__": lambda self, *args, **options: None})
        return MagicMock(name=f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that an installed package is taken first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
