"""Print what Rollway reads of the real Megatron-Bridge, on CPU; run by `test_bridge.py`.

Bridge imports Transformer Engine and others that need a GPU, of which its registries use nothing:
they are replaced by empty modules here. Nothing of Bridge is replaced.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

from rollway.errors import UsageError
from rollway.weights.megatron.geometry import Position
from rollway.weights.megatron.names import NameMap

EMPTY = {
    *("transformer_engine", "mamba_ssm", "causal_conv1d", "fla", "nvidia_resiliency_ext", "timm"),
    *("qwen_vl_utils", "open_clip", "mlflow", "wandb", "datasets", "tensorboard", "modelopt"),
    *("multistorageclient", "nvdlfw_inspect", "omegaconf", "hydra", "accelerate", "torchvision"),
}


class Anything(type):
    """A class that has every attribute: another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (torch.nn.Module,), {})


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (torch.nn.Module,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__version__ = "0.0"


def main() -> None:
    # Before the empty modules: Megatron looks for Transformer Engine, and does without.
    for name in ("megatron.core.models.gpt", "megatron.core.optimizer", "transformers"):
        importlib.import_module(name)
    sys.meta_path.insert(0, Finder())
    for name in ("triton", "triton.language"):
        triton = MagicMock(__version__="3.0", __spec__=importlib.machinery.ModuleSpec(name, None))
        sys.modules.setdefault(name, triton)
    asked: list[dict[str, Any]] = json.loads(sys.stdin.read())
    answers = []
    for question in asked:
        names = NameMap.from_hf_config(question["config"])
        found: dict[str, Any] = {"gated": names.gated}
        for name in question["names"]:
            try:
                found[name] = list(names.hf_names(name, Position()))
            except UsageError as error:
                found[name] = error.message
        answers.append(found)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
