"""`ServerAdapter`: the rollout as a rank of verl's trainer sees it, for memory and new weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from rollway.errors import UsageError
from rollway.integrations.verl.checkpoint_engine import WIRE
from rollway.integrations.verl.fallback import make_verl_adapter
from rollway.integrations.verl.replica import HYBRID, STANDALONE, get_pool_name
from rollway.integrations.verl.spec import find_tied_names, read_options
from rollway.integrations.verl.verl_buckets import BucketSender, drain
from rollway.integrations.verl.weights import WeightSender, strip_base_layer


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The adapter of one rank. Rank 0 acts for the whole trainer, since there is one pool."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._options = read_options(self.config.engine_kwargs)
        rank = int(os.environ.get("RANK", "0"))
        engine_ranks = int(self.config.tensor_model_parallel_size)
        # verl passes a replica's rank only to workers beside separate engines.
        self._is_hybrid = replica_rank == -1
        self.replica_rank = rank // engine_ranks if self._is_hybrid else replica_rank
        self.is_leader_rank = rank % engine_ranks == 0
        self.sleep_level = 1
        self._is_first = rank == 0 and self._is_hybrid
        self._sender: WeightSender | None = None
        self._bucket_sender: BucketSender | None = None
        megabytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes)
        if self._options.weights == "verl_buckets":
            job = ray.get_runtime_context().get_job_id()
            tied = find_tied_names(Path(self.model_config.local_path))
            world = int(os.environ.get("WORLD_SIZE", "1"))
            self._bucket_sender = BucketSender(job, rank, world, megabytes, tied)
        elif self._is_first:
            address = ray.util.get_node_ip_address()
            self._sender = WeightSender(self._options, megabytes << 20, address)
        self._pool: Any = None
        self._verl_adapter: Any = None
        self._fallback_known = not self._options.fallback

    def _get_pool(self) -> Any:
        """Look the pool up lazily: it starts after the trainer's ranks."""
        if self._pool is None:
            kind = HYBRID if self._is_hybrid else STANDALONE
            self._pool = ray.get_actor(get_pool_name(kind))
        return self._pool

    async def _get_verl_adapter(self) -> Any:
        """Return verl's vLLM adapter if the stack did not start and the user set a fallback."""
        if not self._fallback_known:
            if await self._get_pool().failure.remote():
                rank = -1 if self._is_hybrid else self.replica_rank
                self._verl_adapter = make_verl_adapter(
                    self.config, self.model_config, self.device_mesh, rank
                )
            self._fallback_known = True
        return self._verl_adapter

    async def resume(self, tags: list[str]) -> None:
        if (verl_adapter := await self._get_verl_adapter()) is not None:
            await verl_adapter.resume(tags)
        elif self._is_first:
            await self._get_pool().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if (verl_adapter := await self._get_verl_adapter()) is not None:
            await verl_adapter.release()
        elif self._is_first:
            await self._get_pool().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **options: Any,
    ) -> None:
        if (verl_adapter := await self._get_verl_adapter()) is not None:
            await verl_adapter.update_weights(
                weights, wire_format=wire_format, global_steps=global_steps, **options
            )
        elif wire_format == WIRE:
            await drain(weights)  # the checkpoint engine has updated the pool itself
        elif wire_format != "named_tensors" or not self._is_hybrid:
            raise UsageError(
                f"rollout.name=dynamo cannot receive weights (`{wire_format}`) from this backend.",
                "Use checkpoint_engine.backend=rollway.",
            )
        elif self._bucket_sender is not None:
            await self._send_buckets(self._bucket_sender, weights, global_steps, options)
        elif self._sender is None:
            await drain(weights)
        elif (lora := options.get("peft_config")) is None:
            await self._sender.send(weights, self._get_pool(), global_steps)
        elif not options.get("base_sync_done", True):
            await self._sender.send(strip_base_layer(weights), self._get_pool(), global_steps)
        else:
            await self._sender.send_adapter(weights, self._get_pool(), global_steps, lora)

    async def _send_buckets(
        self, sender: BucketSender, weights: Any, step: int | None, options: dict[str, Any]
    ) -> None:
        if options.get("peft_config") is not None:
            raise UsageError(
                "weights=verl_buckets sends whole models, no adapters.",
                "Use another of `weights`, or merge: actor_rollout_ref.model.lora.merge=True.",
            )
        if self._is_first:
            await sender.send_as_first(weights, self._get_pool(), step)
        else:
            await sender.send(weights)
