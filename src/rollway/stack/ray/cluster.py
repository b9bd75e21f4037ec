"""The Ray cluster as this process sees it: the nodes, names, groups, leftovers.

Every lookup passes its namespace. Everything is read from the GCS: Ray's dashboard, which may be
off, is not asked.

    rollway/<stack>                    the Head of a running stack: the name is the lock
    rollway/<run id>/node-<n>          a Keeper
    rollway/<run id>/services          a placement group; one more for each replica
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollway.errors import UsageError
from rollway.stack.ray.placement import NodeInfo

_HEAD_NAME = re.compile(r"rollway/([a-z0-9-]+)")
_PART_NAME = re.compile(r"rollway/([0-9a-f]{16})/.+")
_ANSWER_SECONDS = 10.0
_UNAVAILABLE_SECONDS = 0.5
_REPORT_SECONDS = 5.0
_REPORT_POLL_SECONDS = 0.02


def get_head_name(stack: str) -> str:
    return f"rollway/{stack}"


def get_part_name(run_id: str, part: str) -> str:
    return f"rollway/{run_id}/{part}"


# --- nodes ---------------------------------------------------------------------------------------


def read_nodes() -> list[NodeInfo]:
    """Return the living nodes, each with what is free on it."""
    import ray
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return [
        NodeInfo(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            is_head="node:__internal_head__" in node["Resources"],
            cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            labels=node.get("Labels", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


# --- names and groups ----------------------------------------------------------------------------


def list_heads() -> list[tuple[str, str]]:
    """Return namespace and stack name of every Head, by exact names."""
    import ray

    return sorted(
        (entry["namespace"], match[1])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if (match := _HEAD_NAME.fullmatch(entry["name"]))
    )


def find_head(stack: str, namespace: str | None = None) -> Any:
    """Return the Head of a stack, or None; raise if the name is used in several namespaces."""
    import ray

    spaces = [n for n, name in list_heads() if name == stack and namespace in (None, n)]
    if len(spaces) > 1:
        raise UsageError(
            f"There are stacks named `{stack}` in several Ray namespaces: {', '.join(spaces)}.",
            f"Name the one you mean, for example {spaces[0]}/{stack}.",
        )
    if not spaces:
        return None
    try:
        return ray.get_actor(get_head_name(stack), namespace=spaces[0])
    except ValueError:  # it has ended since
        return None


def is_alive(actor: Any) -> bool:
    """Return whether an actor runs, as far as this process can tell."""
    import ray

    try:
        ray.get(actor.identify.remote(), timeout=_ANSWER_SECONDS)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    return True


async def outlast(call: Callable[[], Any], seconds: float = math.inf) -> Any:
    """Await a call of an actor through interruptions of the network, for so many seconds at most;
    raise when the actor is dead.

    Ray answers `unavailable` as soon as a connection breaks, and learns some 20 s later whether the
    actor, or its node, has died. The call may be repeated although it was received."""
    import ray

    deadline = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_UNAVAILABLE_SECONDS)


async def get_result(ref: Any) -> Any:
    """Await the result of a call. asyncio accepts coroutines, and a Ray ref is not one."""
    return await ref


def create_group(name: str, bundles: Sequence[tuple[str, Mapping[str, float]]]) -> Any:
    """Ask Ray for a detached placement group whose bundles are on the nodes given."""
    from ray.util.placement_group import placement_group

    return placement_group(
        [dict(resources) for _, resources in bundles],
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
    # Each removal waits for an answer of the GCS.
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(remove_placement_group, removed))
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
        if entry["state"] != "REMOVED" and (match := _PART_NAME.fullmatch(entry["name"]))
    }


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
    living = {match[1] for entry in actors if (match := _PART_NAME.fullmatch(entry["name"]))}
    heads = [
        ray.get_actor(entry["name"], namespace=entry["namespace"])
        for entry in actors
        if _HEAD_NAME.fullmatch(entry["name"])
    ]
    for head in heads:
        try:
            living.add(ray.get(head.identify.remote(), timeout=_ANSWER_SECONDS)["run_id"])
        except ray.exceptions.RayActorError:
            continue
        except ray.exceptions.GetTimeoutError:
            return []  # which groups are this Head's is unknown, so none is touched
    left = [name for name, run_id in groups.items() if run_id not in living]
    wait_until_free(remove_groups(left))
    return left
