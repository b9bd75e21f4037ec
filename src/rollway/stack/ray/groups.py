"""The placement groups of a run: one for the services, one for each replica.

A group holds the resources of its bundles, one bundle per rank, on the nodes that the placement
chose. Ray then chooses the GPUs of each bundle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollway.config import StackSpec
from rollway.errors import StartError
from rollway.model_spec import slug
from rollway.stack.ray import cluster
from rollway.stack.ray.placement import RankPlace, ReplicaPlace

GROUP_SECONDS = 60.0

Bundles = dict[str, list[tuple[str, dict[str, float]]]]
"""The node and the resources of each bundle, by the names of groups."""


class Groups:
    """Creates the groups of a run, and reads which GPUs they hold."""

    def __init__(self, spec: StackSpec, run_id: str) -> None:
        self._spec = spec
        self._run_id = run_id
        self.nodes: dict[str, set[str]] = {}
        """The nodes of each group's bundles. An entry is written before its group exists."""
        self._gpus: dict[tuple[str, int], list[str]] = {}
        self._calls: set[asyncio.Future[Any]] = set()

    def name(self, place: ReplicaPlace) -> str:
        """Return the name of a replica's group."""
        parts = (slug(place.model), place.role, str(place.replica))
        return cluster.get_part_name(self._run_id, "-".join(part for part in parts if part))

    def list_on(self, node: str) -> dict[str, bool]:
        """Return the groups with a bundle on a node; whether other nodes have bundles, too."""
        entries = self.nodes.items()
        return {name: len(nodes) > 1 for name, nodes in entries if node in nodes}

    def record_bundles(
        self, replicas: Sequence[ReplicaPlace], services: str | None = None
    ) -> Bundles:
        """Record the groups of these replicas, and of the services; return their bundles."""
        wanted: Bundles = {}
        if services is not None:
            wanted[cluster.get_part_name(self._run_id, "services")] = [
                (services, {"CPU": self._spec.ray.cpus})
            ]
        for place in replicas:
            name = self.name(place)
            self._gpus |= {(name, rank.node_rank): list(rank.gpu_ids) for rank in place.ranks}
            wanted[name] = [
                (rank.node, {"CPU": rank.cpus, "GPU": rank.gpus}) for rank in place.ranks
            ]
        bundles = {
            name: [(node, {k: v for k, v in resources.items() if v}) for node, resources in ranks]
            for name, ranks in wanted.items()
        }
        # Unless the spec reserves nothing.
        bundles = {name: ranks for name, ranks in bundles.items() if all(r for _, r in ranks)}
        self.nodes |= {name: {n for n, _ in ranks} for name, ranks in bundles.items()}
        return bundles

    async def create(self, bundles: Bundles) -> dict[str, Any]:
        """Create groups; return them when Ray has reserved their resources."""
        # In a thread, which continues if this run is cancelled.
        call = asyncio.ensure_future(asyncio.to_thread(_create, bundles))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        groups = await asyncio.shield(call)
        deadline = time.monotonic() + GROUP_SECONDS
        for name, group in groups.items():
            # For a second only: a thread that waits cannot be cancelled, and a stop needs threads.
            while not await asyncio.to_thread(group.wait, 1):
                if time.monotonic() > deadline:
                    raise StartError(
                        f"Ray has not reserved the resources of {name.rpartition('/')[2]} after "
                        f"{GROUP_SECONDS:g} s; others may have taken them meanwhile.",
                        "See `ray status`, then start the stack again.",
                    )
        return groups

    async def wait_for_calls(self) -> None:
        """Wait until nothing is being created; then what the record has can be removed."""
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def remove(self, replicas: Sequence[ReplicaPlace]) -> None:
        """Remove the groups of these replicas; return when their resources are free."""
        names = [self.name(place) for place in replicas]
        freed = await asyncio.to_thread(cluster.remove_groups, names)
        await asyncio.to_thread(cluster.wait_until_free, freed)
        for name in names:
            self.nodes.pop(name, None)

    def get_gpus(self, place: ReplicaPlace, rank: RankPlace) -> list[str]:
        """Return the GPUs of a rank; none where Ray only counts them, until they are read."""
        return self._gpus.get((self.name(place), rank.node_rank), [])

    async def read_gpus(
        self,
        replicas: Sequence[ReplicaPlace],
        groups: Mapping[str, Any],
        has_gpus: Mapping[str, bool],
    ) -> None:
        """Read which GPUs Ray assigned to each bundle; none on nodes where Ray only counts them."""
        await asyncio.gather(
            *(self._read_gpus_of(place, groups[self.name(place)], has_gpus) for place in replicas
              if self.name(place) in groups)
        )  # fmt: skip

    async def _read_gpus_of(
        self, place: ReplicaPlace, group: Any, has_gpus: Mapping[str, bool]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for index, rank in enumerate(place.ranks):
            if rank.gpus and has_gpus.get(rank.node):
                task = ray.remote(_get_gpus).options(
                    num_cpus=0,
                    num_gpus=rank.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                )
                self._gpus[self.name(place), rank.node_rank] = await task.remote()


def _create(bundles: Bundles) -> dict[str, Any]:
    return {name: cluster.create_group(name, ranks) for name, ranks in bundles.items()}


def _get_gpus() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
