"""Rollway: NVIDIA Dynamo as the rollout backend of any RL trainer.

with rollway.up(model="/models/policy", workers=2) as stack:
    group = stack.rollouts().generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
    stack.refit(1, "/checkpoints/step-1")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollway.api import Stack, attach, make_spec, up
    from rollway.config import StackSpec, load_spec
    from rollway.errors import RollwayError
    from rollway.fleet.fleet import Fleet, RefitReport
    from rollway.rollout.client import Rollout, Rollouts
    from rollway.rollout.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "Fleet",
    "RefitReport",
    "Rollout",
    "Rollouts",
    "RollwayError",
    "Sampling",
    "Stack",
    "StackSpec",
    "attach",
    "load_spec",
    "make_spec",
    "up",
]

_HOMES = {
    "rollway.api": ("Stack", "attach", "make_spec", "up"),
    "rollway.config": ("StackSpec", "load_spec"),
    "rollway.errors": ("RollwayError",),
    "rollway.fleet.fleet": ("Fleet", "RefitReport"),
    "rollway.rollout.client": ("Rollout", "Rollouts"),
    "rollway.rollout.sampling": ("Sampling",),
}


def __getattr__(name: str) -> Any:
    """Loaded when first used: the code inside an engine imports this package too, and needs none
    of it."""
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'rollway' has no attribute {name!r}")
