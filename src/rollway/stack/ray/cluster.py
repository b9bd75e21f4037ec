"""The Ray cluster as this process sees it: the connection, the nodes, names, groups, leftovers.

Rollway never owns the user's connection: it uses the one there is, passes the namespace with every
lookup, and closes only a connection that it opened. Everything is read from the GCS: Ray's
dashboard, which may be off, is not asked.

    rollway/<stack>                    the Head of a running stack: the name is the lock
    rollway/<run id>/node-<n>          a Keeper
    rollway/<run id>/services          a placement group; one more for each replica
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.stack.ray.placement import NodeInfo

INSTALL = "Install it with `pip install 'rollway[ray]'`."
_HEAD_NAME = re.compile(r"rollway/([a-z0-9-]+)")
_PART_NAME = re.compile(r"rollway/([0-9a-f]{16})/.+")
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where Ray writes the address of the cluster that was last started on this machine."""
_REACH_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_UNAVAILABLE_SECONDS = 0.5
_REPORT_SECONDS = 5.0
_REPORT_POLL_SECONDS = 0.02
_lock = threading.Lock()
_users = 0
"""How many objects of this process use the connection that Rollway opened."""


def get_head_name(stack: str) -> str:
    return f"rollway/{stack}"


def get_part_name(run_id: str, part: str) -> str:
    return f"rollway/{run_id}/{part}"


# --- the connection ------------------------------------------------------------------------------


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[None]:
    """Use a Ray cluster for the block: the connection of this process, or one of its own."""
    global _users
    ray = _import_ray()
    with _lock:
        is_own = _users > 0 or not ray.is_initialized()
        if is_own and _users == 0:
            _open(ray, address)
        else:
            _check_connection(ray, address)
        _users += is_own
    try:
        yield
    finally:
        with _lock:
            _users -= is_own
            if is_own and _users == 0:
                ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is not installed in this Python.", INSTALL) from None
    return ray


def _open(ray: Any, address: str | None) -> None:
    address = address or get_environment_address()
    _check_reachable(address)
    try:
        # A namespace of its own: all lookups name the one they mean.
        ray.init(
            address=address or "auto",
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )
    except ConnectionError:
        if _is_host_and_port(address):  # something listens there
            raise UsageError(
                f"The Ray cluster at {address} does not accept this process.",
                "If it uses tokens, set RAY_AUTH_MODE=token here, and give the cluster's token.",
            ) from None
        raise _make_absent_error(address) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise UsageError(
            f"The cluster and this process differ: {' '.join(str(error).split())[:400]}",
            "Run this command with the cluster's versions of Ray and Python.",
        ) from None


def has_local_cluster() -> bool:
    """Return whether a cluster runs where Ray's file says so: a killed one leaves the file."""
    try:
        return _listens(_CURRENT_CLUSTER.read_text().strip())
    except OSError:
        return False


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def get_environment_address() -> str | None:
    """Return the address that RAY_ADDRESS names, which Ray uses where it is given none."""
    return os.environ.get("RAY_ADDRESS") or None


def _is_node() -> bool:
    """Return whether Ray finds a raylet of this machine. A driver needs one; without, Ray looks for
    it for a minute."""
    try:
        from ray._private.services import find_node_ids
    except ImportError:
        return True  # another version of Ray, which says itself what it lacks
    return bool(find_node_ids())


def _list_process_addresses() -> set[str]:
    """Return the addresses of clusters whose processes this machine shows, as Ray finds them."""
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:
        return set()
    return set(find_gcs_addresses())


def _make_absent_error(address: str | None) -> UsageError:
    where = f"at {address}" if address else "on this machine, and RAY_ADDRESS is not set"
    return UsageError(
        f"There is no Ray cluster {where}.",
        "Start one with `ray start --head`, or give its address: --on ray=HOST:PORT.",
    )


def _check_reachable(address: str | None) -> None:
    """Raise unless something listens at the address; Ray itself would try for minutes."""
    if address in (None, "auto"):
        if _CURRENT_CLUSTER.is_file():
            is_there = has_local_cluster()
        else:
            # Ray looks for processes. Those of a container are seen, but not reached; if there are
            # none, Ray fails at once.
            seen = _list_process_addresses()
            is_there = not seen or any(map(_listens, seen))
        if not is_there:
            raise _make_absent_error(None)
        return
    if not _is_host_and_port(address):
        # Ray would try `ray://` for half a minute, and start a cluster of its own for `local`.
        raise UsageError(
            f"`{address}` is not the address of a Ray cluster that Rollway can use.",
            "Give the HOST:PORT that `ray start --head` printed, by --on ray=HOST:PORT or "
            "RAY_ADDRESS.",
        )
    host, _, port = (address or "").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"There is no Ray cluster at {address}: {error.strerror or error}.",
            "Give the address that `ray start --head` printed, by --on ray=HOST:PORT or "
            "RAY_ADDRESS.",
        ) from None
    if not _is_node():
        raise UsageError(
            f"This machine is no node of the Ray cluster at {address}: it runs no raylet.",
            f"Run the command on a node, or make this one: `ray start --address {address}`.",
        )


def _is_host_and_port(address: str | None) -> bool:
    host, _, port = (address or "").rpartition(":")
    return "://" not in host and bool(host) and port.isdecimal()


def _check_connection(ray: Any, address: str | None) -> None:
    """Refuse a connection that leads to another cluster, or that cannot do what Rollway needs."""
    if ray.util.client.ray.is_connected():
        raise UsageError(
            "This process uses Ray Client (ray://), over which Rollway cannot run stacks.",
            "Run it on a node of the cluster, with `ray.init()` or the address HOST:PORT.",
        )
    if address in (None, "auto"):
        return
    current = ray.get_runtime_context().gcs_address
    if not _is_same_address(str(address), current):
        raise UsageError(
            f"This process is connected to the Ray cluster at {current}, not to {address}.",
            "Leave the address out, or disconnect first: `ray.shutdown()`.",
        )


def _is_same_address(first: str, second: str) -> bool:
    """Return whether both are one port of one machine. Ray names a cluster by its node's address,
    Curator's client by what the host's name stands for, often 127.0.0.1."""
    if first == second:
        return True
    if not (_is_host_and_port(first) and _is_host_and_port(second)):
        return False
    (host, _, port), (other_host, _, other_port) = first.rpartition(":"), second.rpartition(":")
    hosts, other_hosts = _resolve(host), _resolve(other_host)
    is_here = any(map(_is_own_host, hosts)) and any(map(_is_own_host, other_hosts))
    return port == other_port and (is_here or bool(hosts & other_hosts))


def _resolve(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _is_own_host(host: str) -> bool:
    """Return whether an IP address is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def get_address() -> str:
    """Return the address of the cluster that this process is connected to."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


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
    """Return whether an actor runs, for all that this process knows."""
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
    """Await the result of a call. asyncio takes coroutines, and a ref of Ray's is none."""
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
    that is started again before that would be refused for want of GPUs."""
    deadline = time.monotonic() + _REPORT_SECONDS
    while groups and _are_held(groups) and time.monotonic() < deadline:
        time.sleep(_REPORT_POLL_SECONDS)


def _are_held(groups: Collection[str]) -> bool:
    """Return whether a node still reports resources of these groups, as `GPU_group_0_<group>`."""
    from ray._private.state import available_resources_per_node

    names = (name for held in available_resources_per_node().values() for name in held)
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
