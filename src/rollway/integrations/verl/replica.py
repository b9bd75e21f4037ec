"""verl's replicas: each stands for one worker of the stack that its pool runs."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollway.errors import UsageError
from rollway.integrations.verl.checkpoint_engine import WIRE
from rollway.integrations.verl.fallback import launch_own
from rollway.integrations.verl.nodes import ACTOR_ENV
from rollway.integrations.verl.options import read_options
from rollway.integrations.verl.pool import Pool
from rollway.integrations.verl.router import CONFIG
from rollway.integrations.verl.settings import lora_rank

HYBRID, STANDALONE = "hybrid", "standalone"
_CALLS_AT_ONCE = 100_000
"""Requests wait in the actor while weights move; those that end the wait must still come in."""


class DynamoReplica(RolloutReplica):  # type: ignore[misc]
    """All replicas of a pool have the same server, under addresses of their own."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        # verl reads it from the same config, after the replicas.
        self._given = config
        beside = kwargs.get("is_reward_model") or kwargs.get("is_teacher_model")
        if not beside and hasattr(config, "router_config_path") and not config.router_config_path:
            config.router_config_path = str(CONFIG)
        super().__init__(replica_rank, config, *args, **kwargs)
        self._replicas_in_pool = 1
        self._kept: Any = None

    async def init_hybrid(self, worker_group: Any) -> None:
        self._replicas_in_pool = worker_group.world_size // self.world_size
        await super().init_hybrid(worker_group)

    async def init_standalone(self) -> None:
        if not self.is_reward_model:
            gpus = self.config.n_gpus_per_node * self.config.nnodes
            self._replicas_in_pool = gpus // self.world_size
        await super().init_standalone()

    async def launch_servers(self) -> None:
        places = [worker.__ray_call__.remote(_place) for worker in self.workers]
        found = [await place for place in places]
        nodes = {node for node, _ in found}
        if len(nodes) != 1:
            raise UsageError(
                f"Replica {self.replica_rank} spans {len(nodes)} nodes.",
                "The GPUs of a replica are on one node: lower rollout.tensor_model_parallel_size.",
            )
        (node,) = nodes
        kind = self._kind()
        if kind == STANDALONE and lora_rank(self.model_config):
            raise UsageError(
                "verl sends LoRA adapters only to engines that share the trainer's GPUs.",
                "Merge them: actor_rollout_ref.model.lora.merge=True.",
            )
        pool = self._kept = self._pool(kind, node)  # ranks ask it also when it runs nothing
        gpus = [gpu for _, some in found for gpu in some]
        try:
            address = await pool.join.remote(self.replica_rank, node, gpus)
        except Exception:
            if not read_options(self.config.engine_kwargs).fallback:
                raise
            if not await pool.failure.remote():
                raise  # it is not the stack: verl's own rollout would be a guess
            await self._fall_back(kind)
            return
        self.servers = [pool]
        self._server_handle = pool
        self._server_address = address

    def _kind(self) -> str:
        """Replicas of the policy share a pool. One of a reward model or a teacher has its own: it
        is not told how many there are, and what it scores is in no cache."""
        if self.is_reward_model:
            return f"reward{self.name_suffix}_{self.replica_rank}"
        if self.is_teacher_model:
            return f"teacher{self.name_suffix}_{self.replica_rank}"
        return HYBRID if self.rollout_mode == RolloutMode.HYBRID else STANDALONE

    async def _fall_back(self, kind: str) -> None:
        if kind == STANDALONE and self.config.checkpoint_engine.backend == WIRE:
            raise UsageError(
                "fallback=vllm is asked for, and checkpoint_engine.backend=rollway moves weights "
                "to Dynamo's engines alone.",
                "Use another backend, or mend what keeps the stack from starting.",
            )
        if getattr(self._given, "router_config_path", None) == str(CONFIG):
            self._given.router_config_path = None  # verl's servers know no sessions
        await launch_own(self)

    def _pool(self, kind: str, node: str) -> Any:
        """The actor of this pool: of whichever replica comes first."""
        actor = ray.remote(Pool).options(
            name=pool_name(kind),
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_CALLS_AT_ONCE,
            runtime_env={"env_vars": ACTOR_ENV},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return actor.remote(kind, self.config, self.model_config, self._replicas_in_pool)


def pool_name(kind: str) -> str:
    return f"rollway_{kind}"


def _place(_: Any) -> tuple[str, list[str]]:
    """Run in a worker: its node, and the GPUs that it has; none where Ray only counts some."""
    import torch

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", []) if torch.cuda.is_available() else []
    return context.get_node_id(), list(gpus)
