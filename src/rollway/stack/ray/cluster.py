"""The Ray cluster as this process sees it: the connection, nodes, names; and the actor that stands
for the process.

Rollway never owns the user's connection: it uses the one there is, and closes only a connection
that it opened. It finds out first whether there is a cluster: Ray itself would try for minutes.

Ray unpickles what an actor answers, so a cluster runs code in every process that asks it something.
Rollway therefore dials only a cluster that the user names (an address, RAY_ADDRESS), or one that
runs as this user. It never lets Ray search (`address="auto"`): Ray trusts a file in /tmp that any
user can write, and processes of all users.

Every lookup passes its namespace. Everything is read from the GCS: Ray's dashboard, which may be
off, is not asked.

    rollway/<stack>                    the Head of a running stack: the name is the lock
    rollway/<run id>/node-<n>          a Keeper
    rollway/<run id>/services          a placement group; one more for each replica (groups.py)
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway import processes
from rollway.errors import UsageError

HEAD_NAME = re.compile(r"rollway/([a-z0-9-]+)")
PART_NAME = re.compile(r"rollway/([0-9a-f]{16})/.+")
ANSWER_SECONDS = 10.0
_UNAVAILABLE_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_lock = threading.Lock()
_users = 0
"""How many objects of this process use the connection that Rollway opened."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of the cluster, with what is free on it."""

    id: str
    address: str
    is_head: bool
    cpus: float
    gpus: float
    labels: Mapping[str, str]


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
        raise UsageError(
            "Ray is not installed in this Python.", "Install it with `pip install 'rollway[ray]'`."
        ) from None
    return ray


def _open(ray: Any, address: str | None) -> None:
    address = find_address() if address in (None, "auto") else str(address)
    _check_reachable(address)
    try:
        # A namespace of its own: all lookups name the one they mean.
        ray.init(
            address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR"
        )
    except ConnectionError:  # but something listens there
        raise UsageError(
            f"The Ray cluster at {address} does not accept this process.",
            "If it uses tokens, set RAY_AUTH_MODE=token here, and give the cluster's token.",
        ) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise UsageError(
            f"The cluster and this process differ: {' '.join(str(error).split())[:400]}",
            "Run this command with the cluster's versions of Ray and Python.",
        ) from None


def find_address() -> str:
    """Return the cluster of a user who gives no address: RAY_ADDRESS, or the only one of theirs
    that this machine is in."""
    named = get_environment_address()
    own = [named] if named else list_own_clusters()
    if len(own) == 1:
        return own[0]
    cause = "There is no Ray cluster of yours on this machine, and RAY_ADDRESS is not set."
    raise UsageError(
        f"This machine is in several Ray clusters of yours: {', '.join(own)}." if own else cause,
        "Give the address, --on ray=HOST:PORT, or start a cluster with `ray start --head`.",
    )


def list_own_clusters() -> list[str]:
    """Return the addresses of the clusters that raylets of this user on this machine belong to."""
    flag = "--gcs-address="
    arguments = (argument for line in processes.list_own_commands("raylet") for argument in line)
    addresses = {each.removeprefix(flag) for each in arguments if each.startswith(flag)}
    return sorted(filter(_is_own, addresses))


def _is_own(address: str) -> bool:
    """Return whether it is this user who listens at the address, if that is here: a raylet outlives
    its GCS for a minute, and anybody may take the port."""
    host, _, port = address.rpartition(":")
    if not any(map(_is_own_host, _resolve(host))):
        return True
    rows = [line.split() for table in Path("/proc/net").glob("tcp*") for line in table.open()]
    listening = (row for row in rows if row[3] == "0A" and row[1].endswith(f":{int(port):04X}"))
    return {int(row[7]) for row in listening} == {os.getuid()}


def get_environment_address() -> str | None:
    """Return the address that RAY_ADDRESS names; `auto` names none."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address == "auto" else address or None


def _is_node() -> bool:
    """Return whether Ray finds a raylet of this machine. A driver needs one; without, Ray looks for
    it for a minute."""
    try:
        from ray._private.services import find_node_ids
    except ImportError:
        return True  # another version of Ray, which says itself what it lacks
    return bool(find_node_ids())


def _check_reachable(address: str) -> None:
    """Raise unless something listens at the address; Ray itself would try for minutes."""
    if not _is_host_and_port(address):
        # Ray would try `ray://` for half a minute, and start a cluster of its own for `local`.
        raise UsageError(
            f"`{address}` is not the address of a Ray cluster that Rollway can use.",
            "Give the HOST:PORT that `ray start --head` printed, by --on ray=HOST:PORT or "
            "RAY_ADDRESS.",
        )
    host, _, port = address.rpartition(":")
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


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
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
    if not is_same_address(str(address), current):
        raise UsageError(
            f"This process is connected to the Ray cluster at {current}, not to {address}.",
            "Leave the address out, or disconnect first: `ray.shutdown()`.",
        )


def is_same_address(first: str, second: str) -> bool:
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


# --- actors --------------------------------------------------------------------------------------


def get_head_name(stack: str) -> str:
    return f"rollway/{stack}"


def get_part_name(run_id: str, part: str) -> str:
    return f"rollway/{run_id}/{part}"


def list_heads() -> list[tuple[str, str]]:
    """Return namespace and stack name of every Head, by exact names."""
    import ray

    return sorted(
        (entry["namespace"], match[1])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if (match := HEAD_NAME.fullmatch(entry["name"]))
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


class Witness:
    """The actor that lives as long as the process that created it; others wait for its end. Ray
    starts a process for it, so this module imports nothing of Rollway that takes time."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


def create_witness() -> Any:
    """Create the actor that dies with this process."""
    import ray

    # On this node: the loss of another one must not look like the death of this process. A soft
    # node affinity is not enough: a raylet that does not know this node yet runs the actor itself.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    options = ray.remote(Witness).options(num_cpus=0, max_concurrency=1000, label_selector=here)
    return options.remote()
