"""Rollway: NVIDIA Dynamo as the rollout backend of any RL trainer.

with rollway.up(model="/models/policy", workers=2) as stack:
    group = stack.rollouts().generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
    stack.refit("/checkpoints/step-1", version=1)
"""

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
