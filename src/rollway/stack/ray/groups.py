"""The placement groups of a run: one for the services, one for each replica.

A group holds the resources of its bundles, one bundle per rank, on the nodes that the placement
chose. Ray then chooses the GPUs of each bundle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollway.errors import StartError
from rollway.model_spec import slug
from rollway.spec import StackSpec
from rollway.stack.ray import cluster
from rollway.stack.ray.placement import RankPlace, ReplicaPlace

GROUP_SECONDS = 60.0
_REPORT_SECONDS = 5.0
_REPORT_POLL_SECONDS = 0.02


Bundles = Sequence[tuple[str, Mapping[str, float]]]
"""The node and the resources of each bundle of a group."""


class Groups:
    """Creates the groups of a run, and reads which GPUs they hold."""

    def __init__(self, spec: StackSpec, run_id: str) -> None:
        self._spec = spec
        self._run_id = run_id
        self._gpus: dict[tuple[ReplicaPlace, int], list[str]] = {}
        self._calls: set[asyncio.Future[Any]] = set()

    def name(self, place: ReplicaPlace) -> str:
        """Return the name of a replica's group."""
        parts = (slug(place.model), place.role, str(place.replica))
        return cluster.get_part_name(self._run_id, "-".join(part for part in parts if part))

    async def create(
        self, replicas: Sequence[ReplicaPlace], services: str | None = None
    ) -> dict[str, Any]:
        """Create the groups of these replicas, and of the services on a node; return them, by their
        names, when Ray has reserved their resources."""
        bundles = {
            self.name(place): [(r.node, {"CPU": r.cpus, "GPU": r.gpus}) for r in place.ranks]
            for place in replicas
            if all(rank.cpus or rank.gpus for rank in place.ranks)
        }
        if services is not None and self._spec.ray.cpus:
            name = cluster.get_part_name(self._run_id, "services")
            bundles = {name: [(services, {"CPU": self._spec.ray.cpus})], **bundles}
        # In a thread, which continues if this run is cancelled.
        call = asyncio.ensure_future(asyncio.to_thread(_create_groups, bundles))
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

    async def remove(self, replicas: Sequence[ReplicaPlace]) -> None:
        """Remove the groups of these replicas; return when their resources are free."""
        await self._settle()
        names = [self.name(place) for place in replicas]
        freed = await asyncio.to_thread(remove_groups, names)
        await asyncio.to_thread(wait_until_free, freed)

    async def remove_all(self) -> list[str]:
        """Remove all groups of the run, also those that are being created; return their ids."""
        await self._settle()
        return await asyncio.to_thread(remove_run, self._run_id)

    async def _settle(self) -> None:
        """Wait until nothing is being created: what is removed must not appear after it."""
        await asyncio.gather(*self._calls, return_exceptions=True)

    def get_gpus(self, place: ReplicaPlace, rank: RankPlace) -> list[str]:
        """Return the GPUs of a rank; none where Ray only counts them, until they are read."""
        return self._gpus.get((place, rank.node_rank), list(rank.gpu_ids))

    async def read_gpus(
        self,
        replicas: Sequence[ReplicaPlace],
        groups: Mapping[str, Any],
        has_gpus: Mapping[str, bool],
    ) -> None:
        """Read which GPUs Ray assigned to each bundle; none on nodes where Ray only counts them."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        tasks = {}
        for place in replicas:
            for index, rank in enumerate(place.ranks):
                if rank.gpus and has_gpus.get(rank.node):
                    group = PlacementGroupSchedulingStrategy(groups[self.name(place)], index)
                    task = ray.remote(_get_gpus).options(
                        num_cpus=0, num_gpus=rank.gpus, scheduling_strategy=group
                    )
                    tasks[place, rank.node_rank] = task.remote()
        self._gpus |= zip(tasks, await asyncio.gather(*tasks.values()), strict=True)


def _create_groups(bundles: Mapping[str, Bundles]) -> dict[str, Any]:
    return {name: create_group(name, ranks) for name, ranks in bundles.items()}


def _get_gpus() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


# --- groups of any run ---------------------------------------------------------------------------


def create_group(name: str, bundles: Bundles) -> Any:
    """Ask Ray for a detached placement group whose bundles are on the nodes given."""
    from ray.util.placement_group import placement_group

    return placement_group(
        [{name: held for name, held in resources.items() if held} for _, resources in bundles],
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node} for node, _ in bundles],
    )


def remove_groups(names: Collection[str]) -> list[str]:
    """Remove placement groups by their exact names; return their ids."""
    from ray import PlacementGroupID
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group_table,
        remove_placement_group,
    )

    # From the table: a lookup by name sees only the groups of this process's namespace, and each
    # would be a call of its own.
    wanted = set(names)
    removed = [
        PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))
        for identity, entry in (placement_group_table() if wanted else {}).items()
        if entry["name"] in wanted and entry["state"] != "REMOVED"
    ]
    for group in removed:
        remove_placement_group(group)
    return [group.id.hex() for group in removed]


def wait_until_free(groups: Collection[str]) -> None:
    """Wait until Ray shows the resources of removed groups as free.

    Ray forgets a group at once, but each node reports what it has freed up to 0.1 s later. A stack
    that is started again before that would be refused, because its GPUs seem to be in use."""
    deadline = time.monotonic() + _REPORT_SECONDS
    while groups and _are_held(groups) and time.monotonic() < deadline:
        time.sleep(_REPORT_POLL_SECONDS)


def _are_held(groups: Collection[str]) -> bool:
    """Return whether a node still reports resources of these groups, as `GPU_group_0_<group>`."""
    from ray._private.state import available_resources_per_node

    nodes = available_resources_per_node().values()
    names = (name for resources in nodes for name in resources)
    return any(name.rpartition("_")[2] in groups for name in names)


def list_groups() -> dict[str, str]:
    """Return the run id of every placement group of Rollway by the group's name."""
    from ray.util.placement_group import placement_group_table

    return {
        entry["name"]: match[1]
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED" and (match := cluster.PART_NAME.fullmatch(entry["name"]))
    }


def remove_run(run_id: str) -> list[str]:
    """Remove the groups of a run; return their ids."""
    return remove_groups([name for name, run in list_groups().items() if run == run_id])


def clear_leftovers() -> list[str]:
    """Remove the groups of runs of which no actor lives; return their names.

    A Keeper whose Head has died stops its own processes, and then removes its groups."""
    import ray

    # Groups first: the Head of a run exists before its groups, so a group that is seen here and
    # belongs to a living run has its Head in the list below.
    groups = list_groups()
    if not groups:
        return []
    actors = ray.util.list_named_actors(all_namespaces=True)
    living = {match[1] for entry in actors if (match := cluster.PART_NAME.fullmatch(entry["name"]))}
    heads = [
        ray.get_actor(entry["name"], namespace=entry["namespace"])
        for entry in actors
        if cluster.HEAD_NAME.fullmatch(entry["name"])
    ]
    for head in heads:
        try:
            living.add(ray.get(head.identify.remote(), timeout=cluster.ANSWER_SECONDS)["run_id"])
        except ray.exceptions.RayActorError:
            continue
        except ray.exceptions.GetTimeoutError:
            return []  # which groups are this Head's is unknown, so none is touched
    left = [name for name, run_id in groups.items() if run_id not in living]
    wait_until_free(remove_groups(left))
    return left
