"""Lets NeMo-RL's trainer be imported on a CPU, below Python 3.12.

Packages of GPUs and of logging services, which its modules import and these tests do not call, are
answered by empty modules. NeMo-RL wants Python 3.13; pydantic refuses `typing.TypedDict` before
3.12.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import typing
from collections.abc import Sequence
from types import ModuleType

import typing_extensions

NAMES = ("megatron", "nixl", "nccl", "cuda", "decord", "wandb", "swanlab", "mlflow", "sglang")


class _StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, whose modules are stand-ins as well

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Answer for what is not installed; call it before the first import of NeMo-RL."""
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Last, so that a package that is installed is found first.
        sys.meta_path.append(_Finder())
