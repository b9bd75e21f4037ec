"""verl's own vLLM rollout in place of a stack that did not start, for those who asked for it.

The pool tried to start the stack, so it knows; replicas ask it when they launch, and the trainer's
ranks before they first use their rollout, which is later. So all of them come to the same answer.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

from rollway.errors import RollwayError

log = logging.getLogger(__name__)

VLLM = "vllm"
CALLED = (
    *("wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache"),
    *("release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"),
)
"""What verl calls on a replica once it is launched."""


def warn(error: RollwayError) -> None:
    """Nobody may take the run for one on Dynamo."""
    words = (
        "rollway: THIS RUN DOES NOT USE DYNAMO. Its stack did not start, and "
        "engine_kwargs.dynamo.fallback=vllm asks for verl's own vLLM rollout instead. "
        f"The cause: {error}"
    )
    line = "!" * 80
    print(f"{line}\n{words}\n{line}", file=sys.stderr, flush=True)
    log.warning(words)


def as_vllm(config: Any) -> Any:
    """verl's RolloutConfig under the name that its own classes look each other up by."""
    return dataclasses.replace(config, name=VLLM)


def own_adapter(config: Any, model_config: Any, device_mesh: Any, replica_rank: int) -> Any:
    from verl.workers.rollout.base import get_rollout_class

    made = get_rollout_class(VLLM, "async")
    return made(
        config=as_vllm(config),
        model_config=model_config,
        device_mesh=device_mesh,
        replica_rank=replica_rank,
    )


async def launch_own(replica: Any) -> None:
    """Launch verl's own replica on the workers of one of ours, which then acts through it."""
    from verl.workers.rollout.replica import get_rollout_replica_class

    own = get_rollout_replica_class(VLLM)(
        replica_rank=replica.replica_rank,
        config=as_vllm(replica.config),
        model_config=replica.model_config,
        gpus_per_node=replica.gpus_per_node,
        is_reward_model=replica.is_reward_model,
        is_teacher_model=replica.is_teacher_model,
        name_suffix=replica.name_suffix.removeprefix("_"),
    )
    for field in ("rollout_mode", "workers", "resource_pool", "bundle_indices"):
        setattr(own, field, getattr(replica, field))
    await own.launch_servers()
    for field in ("servers", "_server_handle", "_server_address", *CALLED):
        setattr(replica, field, getattr(own, field))
