"""verl's own vLLM rollout in place of a stack that did not start, if the user set `fallback`.

The pool tries to start the stack, so it knows the result. Replicas ask it when they launch, and the
trainer's ranks before they first use their rollout, which is later. So all decide alike.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

from rollway.errors import RollwayError

log = logging.getLogger(__name__)

VLLM = "vllm"
REPLICA_METHODS = (
    *("wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache"),
    *("release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"),
)
"""The methods that verl calls on a replica once it is launched."""


def warn(error: RollwayError) -> None:
    """Warn so loudly that nobody mistakes the run for one on Dynamo."""
    message = (
        "rollway: THIS RUN DOES NOT USE DYNAMO. Its stack did not start, and verl's own vLLM "
        "rollout replaces it, since engine_kwargs.dynamo.fallback=vllm is set. "
        f"The cause: {error}"
    )
    rule = "!" * 80
    print(f"{rule}\n{message}\n{rule}", file=sys.stderr, flush=True)
    log.warning(message)


def rename_to_vllm(config: Any) -> Any:
    """Copy verl's RolloutConfig under the name by which verl's classes find each other."""
    return dataclasses.replace(config, name=VLLM)


def make_verl_adapter(config: Any, model_config: Any, device_mesh: Any, replica_rank: int) -> Any:
    from verl.workers.rollout.base import get_rollout_class

    return get_rollout_class(VLLM, "async")(
        config=rename_to_vllm(config),
        model_config=model_config,
        device_mesh=device_mesh,
        replica_rank=replica_rank,
    )


async def launch_verl_replica(replica: Any) -> None:
    """Launch verl's replica on the workers of one of ours, and redirect ours to it."""
    from verl.workers.rollout.replica import get_rollout_replica_class

    verl_replica = get_rollout_replica_class(VLLM)(
        replica_rank=replica.replica_rank,
        config=rename_to_vllm(replica.config),
        model_config=replica.model_config,
        gpus_per_node=replica.gpus_per_node,
        is_reward_model=replica.is_reward_model,
        is_teacher_model=replica.is_teacher_model,
        name_suffix=replica.name_suffix.removeprefix("_"),
    )
    for field in ("rollout_mode", "workers", "resource_pool", "bundle_indices"):
        setattr(verl_replica, field, getattr(replica, field))
    await verl_replica.launch_servers()
    for field in ("servers", "_server_handle", "_server_address", *REPLICA_METHODS):
        setattr(replica, field, getattr(verl_replica, field))
