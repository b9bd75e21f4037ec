"""An extension of vLLM's worker that writes down what it holds after each swap.

vLLM packs linear layers for CPU, so that their parameters are empty. Here it uses its own fallback,
torch's linear, as it does on CPUs without oneDNN: the parameters are then those of the checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rollway.engine.worker import WorkerExtension

VARIABLE = "ROLLWAY_TEST_REVEALED"
ARGS = {"worker-extension-cls": "tests.stack.revealing_worker.RevealingWorker"}


def make_environment(revealed: Path) -> dict[str, str]:
    """Return a worker's environment; it writes to the file `revealed`."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: str(revealed), "PYTHONPATH": os.pathsep.join(paths)}


if VARIABLE in os.environ:  # in a worker
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


class RevealingWorker(WorkerExtension):
    def rollway_swap(self, identity: str) -> dict[str, Any]:
        report = super().rollway_swap(identity)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        models = {"policy": runner.get_model()}
        if getattr(runner, "drafter", None) is not None:
            models["draft"] = runner.drafter.model
        held = {
            f"{kind}.{name}": tensor.clone()
            for kind, model in models.items()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        numbers = {
            f"policy.{name}": [getattr(layer, f"_{kind}_scale_float") for kind in "qkv"]
            for name, layer in models["policy"].named_modules()
            if hasattr(layer, "_k_scale_float")
        }
        torch.save({"tensors": held, "scales": numbers}, os.environ[VARIABLE])
        return report
