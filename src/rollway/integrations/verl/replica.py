"""`DynamoReplica`: verl's replica, which stands for one worker of its pool's stack."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollway.errors import UsageError
from rollway.integrations.verl.checkpoint_engine import WIRE
from rollway.integrations.verl.fallback import launch_verl_replica
from rollway.integrations.verl.pool import Pool
from rollway.integrations.verl.router import CONFIG
from rollway.integrations.verl.spec import read_lora_rank, read_options

HYBRID, STANDALONE = "hybrid", "standalone"
_MAX_CALLS = 100_000
"""Requests wait in the actor while weights move; the calls that end the wait must not queue."""


class DynamoReplica(RolloutReplica):  # type: ignore[misc]
    """All replicas of a pool have the same server, at different addresses."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        # verl makes its router from this same config object, after the replicas.
        self._shared_config = config
        is_policy = not (kwargs.get("is_reward_model") or kwargs.get("is_teacher_model"))
        if is_policy and hasattr(config, "router_config_path") and not config.router_config_path:
            config.router_config_path = str(CONFIG)
        super().__init__(replica_rank, config, *args, **kwargs)
        self._replicas_in_pool = 1
        self._pool_actor: Any = None

    async def init_hybrid(self, worker_group: Any) -> None:
        self._replicas_in_pool = worker_group.world_size // self.world_size
        await super().init_hybrid(worker_group)

    async def init_standalone(self) -> None:
        if not self.is_reward_model:
            gpus = self.config.n_gpus_per_node * self.config.nnodes
            self._replicas_in_pool = gpus // self.world_size
        await super().init_standalone()

    async def launch_servers(self) -> None:
        calls = [worker.__ray_call__.remote(_get_place) for worker in self.workers]
        places = [await call for call in calls]
        kind = self._get_pool_kind()
        if kind == STANDALONE and read_lora_rank(self.model_config):
            raise UsageError(
                "verl sends LoRA adapters only to engines that share the trainer's GPUs.",
                "Merge them: actor_rollout_ref.model.lora.merge=True.",
            )
        # The attribute keeps the actor alive: ranks ask it for its failure even if no stack runs.
        pool = self._pool_actor = self._get_or_create_pool(kind, places[0][0])
        try:
            address = await pool.join.remote(self.replica_rank, places)
        except Exception:
            if not read_options(self.config.engine_kwargs).fallback:
                raise
            if not await pool.failure.remote():
                raise  # not a failed start, so verl's own rollout might fail as well
            await self._fall_back(kind)
            return
        self.servers = [pool]
        self._server_handle = pool
        self._server_address = address

    def _get_pool_kind(self) -> str:
        """Return the kind of this replica's pool. Replicas of the policy share one; each replica of
        a reward model or teacher has its own, since verl does not tell it how many there are, and
        it scores prompts that no other has cached."""
        if self.is_reward_model:
            return f"reward{self.name_suffix}_{self.replica_rank}"
        if self.is_teacher_model:
            return f"teacher{self.name_suffix}_{self.replica_rank}"
        return HYBRID if self.rollout_mode == RolloutMode.HYBRID else STANDALONE

    async def _fall_back(self, kind: str) -> None:
        if kind == STANDALONE and self.config.checkpoint_engine.backend == WIRE:
            raise UsageError(
                "fallback=vllm is set, and checkpoint_engine.backend=rollway sends weights to "
                "Dynamo's engines alone.",
                "Use another backend, or fix what keeps the stack from starting.",
            )
        if getattr(self._shared_config, "router_config_path", None) == str(CONFIG):
            self._shared_config.router_config_path = None  # verl's servers accept no sessions
        await launch_verl_replica(self)

    def _get_or_create_pool(self, kind: str, node: str) -> Any:
        """Return the actor of this pool; the first replica creates it."""
        actor = ray.remote(Pool).options(
            name=get_pool_name(kind),
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return actor.remote(kind, self.config, self.model_config, self._replicas_in_pool)


def get_pool_name(kind: str) -> str:
    return f"rollway_{kind}"


def _get_place(_: Any) -> tuple[str, list[str]]:
    """Return the node and GPUs of the worker that runs this; no GPUs if Ray only counts them."""
    import torch

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", []) if torch.cuda.is_available() else []
    return context.get_node_id(), list(gpus)
