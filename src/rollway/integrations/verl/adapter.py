"""verl's rollout as a rank of the trainer sees it: memory given and taken, weights handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from rollway.errors import UsageError
from rollway.integrations.verl.checkpoint_engine import WIRE
from rollway.integrations.verl.fallback import own_adapter
from rollway.integrations.verl.handover import HandOver
from rollway.integrations.verl.options import read_options
from rollway.integrations.verl.replica import HYBRID, STANDALONE, pool_name
from rollway.integrations.verl.settings import tied_names
from rollway.integrations.verl.stream import drained
from rollway.integrations.verl.updates import Publishing, base_of, for_adapters, rank, world_size


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """One for each rank; the first rank of all speaks for the trainer, since there is one pool."""

    def __init__(
        self,
        config: Any,
        model_config: Any,
        device_mesh: Any,
        replica_rank: int = -1,
        **_: Any,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._options = read_options(self.config.engine_kwargs)
        world = int(self.config.tensor_model_parallel_size)
        # A rank of the trainer is given none; a worker beside a separate engine is told its own.
        self._hybrid = replica_rank == -1
        self.replica_rank = rank() // world if self._hybrid else replica_rank
        self.is_leader_rank = rank() % world == 0
        self.sleep_level = 1
        self._first = rank() == 0 and self._hybrid
        self._publishing: Publishing | None = None
        self._adapters: Publishing | None = None
        self._hand_over: HandOver | None = None
        megabytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes)
        if self._options.weights == "verl_buckets":
            job = ray.get_runtime_context().get_job_id()
            tied = tied_names(Path(self.model_config.local_path))
            self._hand_over = HandOver(job, rank(), world_size(), megabytes, tied)
        elif self._first:
            address = ray.util.get_node_ip_address()
            self._publishing = Publishing(self._options, megabytes << 20, address)
            # Of its own: an engine that starts anew needs the base's last version too.
            adapters = for_adapters(self._options)
            self._adapters = Publishing(adapters, megabytes << 20, address)
        self._pool: Any = None
        self._own: Any = None
        self._asked = not self._options.fallback

    def _pool_actor(self) -> Any:
        """Lazily: the pool starts after the trainer's ranks."""
        if self._pool is None:
            self._pool = ray.get_actor(pool_name(HYBRID if self._hybrid else STANDALONE))
        return self._pool

    async def _verls_own(self) -> Any:
        """verl's vLLM adapter, if the pool's stack did not start and the user prefers that."""
        if not self._asked:
            if await self._pool_actor().failure.remote():
                said = -1 if self._hybrid else self.replica_rank
                self._own = own_adapter(self.config, self.model_config, self.device_mesh, said)
            self._asked = True
        return self._own

    async def resume(self, tags: list[str]) -> None:
        own = await self._verls_own()
        if own is not None:
            await own.resume(tags)
        elif self._first:
            await self._pool_actor().wake_up.remote(tags=tags)

    async def release(self) -> None:
        own = await self._verls_own()
        if own is not None:
            await own.release()
        elif self._first:
            await self._pool_actor().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **options: Any,
    ) -> None:
        own = await self._verls_own()
        if own is not None:
            said = {"wire_format": wire_format, "global_steps": global_steps, **options}
            await own.update_weights(weights, **said)
            return
        if wire_format == WIRE:
            await drained(weights)  # the trainer has told the pool itself
            return
        if wire_format != "named_tensors" or not self._hybrid:
            raise UsageError(
                f"rollout.name=dynamo takes no weights (`{wire_format}`) from this backend.",
                "Use checkpoint_engine.backend=rollway.",
            )
        lora = options.get("peft_config")
        if lora is not None and self._hand_over is not None:
            raise UsageError(
                "weights=verl_buckets hands over whole models, no adapters.",
                "Use another of `weights`, or merge: actor_rollout_ref.model.lora.merge=True.",
            )
        if self._hand_over is not None and self._first:
            await self._hand_over.send_first(weights, self._pool_actor(), global_steps)
        elif self._hand_over is not None:
            await self._hand_over.send(weights)
        elif self._publishing is None or self._adapters is None:
            await drained(weights)
        elif lora is None:
            await self._publishing.send(weights, self._pool_actor(), global_steps)
        elif not options.get("base_sync_done", True):
            await self._publishing.send(base_of(weights), self._pool_actor(), global_steps)
        else:
            pool = self._pool_actor()
            await self._adapters.send_adapter(weights, pool, global_steps, lora)
