"""`checkpoint_engine.backend=rollway`: weights for engines that do not share the trainer's GPUs.

verl sends weights to a worker beside each engine, which passes them on. Here the trainer's first
rank publishes them and the engines receive them directly, so the workers beside them do nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine

from rollway.errors import UsageError
from rollway.integrations.verl.spec import WHERE_SEPARATE, WeightOptions, parse_options
from rollway.integrations.verl.verl_buckets import drain
from rollway.integrations.verl.weights import WeightSender

WIRE = "rollway"
"""The wire format that verl passes to adapters; these weights do not go through them."""


class RollwayCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Its options, `weights` and `weights_dir`, are under
    `checkpoint_engine.engine_kwargs.rollway`."""

    wire_format = WIRE

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        parsed = parse_options(WeightOptions, options, WHERE_SEPARATE)
        if parsed.weights == "verl_buckets":
            raise UsageError(
                "weights=verl_buckets is for engines beside the trainer's ranks.",
                f"Choose another at {WHERE_SEPARATE}.weights.",
            )
        address = ray.util.get_node_ip_address()
        # The other ranks, and the workers beside engines, publish nothing.
        self._sender = WeightSender(parsed, bucket_size, address) if is_master else None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, trainer_ranks: int, rollout_ranks: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Do nothing: there is no process group."""

    def finalize(self) -> None:
        """Do nothing: the next version uses the same memory and connections."""

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        if self._sender is None:
            await drain(weights)
            return None
        from rollway.integrations.verl.replica import STANDALONE, get_pool_name

        pool = ray.get_actor(get_pool_name(STANDALONE))
        figures = await self._sender.send(weights, pool, global_steps)
        return {f"rollway/refit_{name}": value for name, value in figures.items()}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Any]]:
        no_tensors: tuple[tuple[str, Any], ...] = ()
        for pair in no_tensors:
            yield pair
