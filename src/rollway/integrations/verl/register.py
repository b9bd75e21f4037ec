"""Register `rollout.name=dynamo` with verl; `import verl` loads this module by its entry point.

verl hides errors of plug-ins, and users would only read that `dynamo` is unknown, so errors go to
stderr too. Nothing heavy is imported here: every process of a run pays for it.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

NAME = "dynamo"
BACKEND = "rollway"
"""The value of `rollout.checkpoint_engine.backend`."""


def register() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _import_replica)
    # verl has no function to register an adapter.
    adapters: dict[tuple[str, str], str] = base._ROLLOUT_REGISTRY
    adapters[NAME, "async"] = "rollway.integrations.verl.adapter.ServerAdapter"

    from rollway.integrations.verl.checkpoint_engine import RollwayCheckpointEngine

    CheckpointEngineRegistry.register(BACKEND)(RollwayCheckpointEngine)


def _import_replica() -> type[Any]:
    from rollway.integrations.verl.replica import DynamoReplica

    return DynamoReplica


try:
    register()
except Exception:
    print(
        f"rollway: rollout.name={NAME} could not be registered with verl. Rollway supports verl "
        f"0.9.1; check the installed version.\n{traceback.format_exc()}",
        file=sys.stderr,
        flush=True,
    )
    raise
