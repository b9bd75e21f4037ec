"""Makes `rollout.name=dynamo` known to verl; `import verl` loads this by its entry point.

verl hides whatever goes wrong here, and the user would only read that `dynamo` is unknown. So it is
also written to stderr. Nothing heavy is imported: every process of a run pays for it.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

NAME = "dynamo"
BACKEND = "rollway"
"""Of `rollout.checkpoint_engine.backend`."""


def register() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _replica)
    known: dict[tuple[str, str], str] = base._ROLLOUT_REGISTRY  # verl has no function for it
    known[NAME, "async"] = "rollway.integrations.verl.adapter.ServerAdapter"

    from rollway.integrations.verl.checkpoint_engine import RollwayCheckpointEngine

    CheckpointEngineRegistry.register(BACKEND)(RollwayCheckpointEngine)


def _replica() -> type[Any]:
    from rollway.integrations.verl.replica import DynamoReplica

    return DynamoReplica


try:
    register()
except Exception:
    print(
        f"rollway: rollout.name={NAME} could not be registered with verl. Rollway works with verl "
        f"0.9.1; is it another version?\n{traceback.format_exc()}",
        file=sys.stderr,
        flush=True,
    )
    raise
