"""`checkpoint_engine.backend=rollway`: weights for engines that do not share the trainer's GPUs.

verl would send them to a worker beside each engine, which hands them on. Here the trainer's first
rank publishes, and the engines take them from there: the workers beside them have nothing to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine

from rollway.errors import UsageError
from rollway.integrations.verl.options import WHERE_SEPARATE, WeightOptions, checked
from rollway.integrations.verl.stream import drained
from rollway.integrations.verl.updates import Publishing

WIRE = "rollway"
"""What verl tells an adapter of how these weights come: not through it."""


class RollwayCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Options are those of the rollout that say how weights move: `weights`, `weights_dir`; give
    them under `checkpoint_engine.engine_kwargs.rollway`."""

    wire_format = WIRE

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        said = checked(WeightOptions, options, WHERE_SEPARATE)
        if said.weights == "verl_buckets":
            raise UsageError(
                "weights=verl_buckets is for engines beside the trainer's ranks.",
                f"Choose another at {WHERE_SEPARATE}.weights.",
            )
        address = ray.util.get_node_ip_address()
        # The other ranks, and the workers beside engines, publish nothing.
        self._publishing = Publishing(said, bucket_size, address) if is_master else None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, trainer_ranks: int, rollout_ranks: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """There is none."""

    def finalize(self) -> None:
        """Nothing is let go: memory and connections are for the next version too."""

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        if self._publishing is None:
            await drained(weights)
            return None
        from rollway.integrations.verl.replica import STANDALONE, pool_name

        pool = ray.get_actor(pool_name(STANDALONE))
        figures = await self._publishing.send(weights, pool, global_steps)
        return {f"rollway/refit_{name}": value for name, value in figures.items()}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Any]]:
        nothing: tuple[tuple[str, Any], ...] = ()
        for one in nothing:
            yield one
