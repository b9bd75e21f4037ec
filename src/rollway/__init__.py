"""Rollway: NVIDIA Dynamo as the rollout backend of any RL trainer.

with rollway.up(model="/models/policy", workers=2) as stack, stack.publisher() as weights:
    group = stack.rollouts().generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
    stack.refit(1, weights.publish(1, model.named_parameters()))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test compares these with the table below
    from rollway import aio as aio
    from rollway import observe as observe
    from rollway.api import attach as attach
    from rollway.api import make_spec as make_spec
    from rollway.api import up as up
    from rollway.errors import AdminError as AdminError
    from rollway.errors import ClusterError as ClusterError
    from rollway.errors import NoWorkers as NoWorkers
    from rollway.errors import PortInUse as PortInUse
    from rollway.errors import RefitError as RefitError
    from rollway.errors import RequestFailed as RequestFailed
    from rollway.errors import RolloutError as RolloutError
    from rollway.errors import RollwayError as RollwayError
    from rollway.errors import SpecError as SpecError
    from rollway.errors import StackNotRunning as StackNotRunning
    from rollway.errors import StartError as StartError
    from rollway.errors import StateUnreadable as StateUnreadable
    from rollway.errors import Unreachable as Unreachable
    from rollway.errors import UsageError as UsageError
    from rollway.errors import WeightsError as WeightsError
    from rollway.fleet.report import RefitReport as RefitReport
    from rollway.fleet.report import SleepReport as SleepReport
    from rollway.rollout.conversation import Conversation as Conversation
    from rollway.rollout.sampling import Sampling as Sampling
    from rollway.rollout.sequence import TokenSequence as TokenSequence
    from rollway.rollout.teacher import Scores as Scores
    from rollway.rollout.trajectory import Rollout as Rollout
    from rollway.spec import StackSpec as StackSpec
    from rollway.spec import load_spec as load_spec
    from rollway.sync import Fleet as Fleet
    from rollway.sync import Rollouts as Rollouts
    from rollway.sync import Stack as Stack
    from rollway.sync import Teacher as Teacher
    from rollway.weights.megatron.tensors import from_megatron as from_megatron
    from rollway.weights.offer import Offer as Offer
    from rollway.weights.sources import from_module as from_module
    from rollway.weights.transports.base import Publisher as Publisher
    from rollway.weights.transports.shm import join_offers as join_offers

__version__ = "0.1.0"

# The public names, in the order of docs/api.md, by the modules that define them.
_HOMES = {
    "rollway.api": ("up", "attach", "make_spec"),
    "rollway.spec": ("load_spec", "StackSpec"),
    "rollway.sync": ("Stack", "Fleet", "Rollouts", "Teacher"),
    "rollway.fleet.report": ("RefitReport", "SleepReport"),
    "rollway.rollout.sampling": ("Sampling",),
    "rollway.rollout.trajectory": ("Rollout",),
    "rollway.rollout.conversation": ("Conversation",),
    "rollway.rollout.sequence": ("TokenSequence",),
    "rollway.rollout.teacher": ("Scores",),
    "rollway.weights.transports.base": ("Publisher",),
    "rollway.weights.offer": ("Offer",),
    "rollway.weights.sources": ("from_module",),
    "rollway.weights.megatron.tensors": ("from_megatron",),
    "rollway.weights.transports.shm": ("join_offers",),
    "rollway.errors": (
        "RollwayError",
        "UsageError",
        "SpecError",
        "StartError",
        "PortInUse",
        "StackNotRunning",
        "StateUnreadable",
        "Unreachable",
        "RequestFailed",
        "AdminError",
        "NoWorkers",
        "RefitError",
        "RolloutError",
        "WeightsError",
        "ClusterError",
    ),
    "rollway.aio": ("aio",),
    "rollway.observe": ("observe",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    The code inside an engine imports this package too, and needs none of it."""
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(f"module 'rollway' has no attribute {name!r}")
    module = importlib.import_module(_HOME_OF[name])
    return module if name in ("aio", "observe") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
