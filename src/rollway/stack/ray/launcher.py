"""The driver's side of stacks on Ray: start, find, read and stop them.

`start` plans first, refuses what cannot work, and then creates the Head (rollway.stack.ray.head),
which does the rest. All functions work in any process that reaches the cluster.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rollway import private_files
from rollway.errors import (
    SpecError,
    StackNotRunning,
    StartError,
    UsageError,
    restore_error,
)
from rollway.spec import StackSpec, is_loopback
from rollway.stack import local
from rollway.stack.local import Progress
from rollway.stack.ray import cluster, groups
from rollway.stack.ray.head_client import RayAccess, make_gone_error
from rollway.stack.ray.node_check import check_runtime_envs, get_python, make_import_error
from rollway.stack.ray.placement import Placement, check_ranks, plan_placement
from rollway.stack.state import StackState, home, make_home

_POLL_SECONDS = 0.3
_STATE_SECONDS = 1.0
"""How often a start reads the state of all nodes."""
_NAME_SECONDS = 60.0
_STOP_SECONDS = 90.0
"""What a stop may take beyond the stop time of the stack."""


class RayStack:
    """A stack on Ray that this process started, or found by its name."""

    def __init__(self, access: RayAccess, state: StackState, connection: ExitStack) -> None:
        self.access = access
        self.state = state
        self._connection = connection
        self._address = cluster.get_address()

    def detach(self) -> None:
        """Leave the stack running when this process ends."""
        self.access.call("detach")
        self.close()

    def stop(self, progress: Progress | None = None) -> None:
        """Stop the stack; return when nothing of it is left."""
        try:
            # The user may have closed the connection since, or opened another.
            with cluster.connect(self._address):
                _stop(self.access, self.state.stop_seconds, progress)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection if Rollway opened it."""
        self._connection.close()


# --- start ---------------------------------------------------------------------------------------


def start(
    spec: StackSpec,
    progress: Progress | None = None,
    *,
    placement: Placement | None = None,
) -> RayStack:
    """Start a stack and return when it is ready.

    On failure, and on KeyboardInterrupt, everything that has started is stopped first. A caller
    that has placed the replicas itself gives the `placement`."""
    with ExitStack() as connection:
        connection.enter_context(cluster.connect(spec.ray.address))
        import ray

        groups.clear_leftovers()
        placement, _ = plan(spec, placement)
        witness, access = cluster.create_witness(), None
        try:
            head = _create_head(spec, placement, witness)
            _remember(spec)
            access = RayAccess(head, spec.name, spec.ray.namespace, witness)
            state = _wait_until_ready(access, progress)
        except BaseException:
            ray.kill(witness)  # the Head, if there is one, then stops: its owner is gone
            if access is not None:
                _stop(access, spec.stop_seconds, progress)
            raise
        if spec.ray.lifetime == "detached":
            access.call("detach")
        return RayStack(access, state, connection.pop_all())


def plan(
    spec: StackSpec, placement: Placement | None = None
) -> tuple[Placement, list[cluster.NodeInfo]]:
    """Return where the stack would run now, and the nodes; refuse what cannot work on any nodes.
    `node_check` looks at those of the plan."""
    check_ranks(spec)
    check_runtime_envs(spec)
    get_python(spec)
    with cluster.connect(spec.ray.address):
        nodes = cluster.read_nodes()
    placement = placement or plan_placement(spec, nodes)
    used = placement.nodes
    if len(used) > 1 and any(model.engine == "mocker" for model in spec.models):
        raise SpecError(
            "Mockers run on one node only: no listing shows which stack a mocker belongs to.",
            "Lower `replicas`, or use `engine: custom`.",
        )
    if len({node.address for node in nodes if node.id in used}) > 1:
        for field in ("etcd_endpoints", "nats_server"):
            address = getattr(spec, field)
            if address and is_loopback(urlsplit(address).hostname or ""):
                raise SpecError(
                    f"`{field}` is {address}, which each of the {len(used)} nodes of this stack "
                    "would look for on itself.",
                    "Give an address that all nodes reach, or leave it out: Rollway starts one.",
                )
    return placement, nodes


def _create_head(spec: StackSpec, placement: Placement, witness: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rollway.stack.ray.head import Head

    options = ray.remote(Head).options(
        name=cluster.get_head_name(spec.name),
        namespace=spec.ray.namespace,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(placement.services, soft=False),
    )
    owner = {"user": getpass.getuser(), "host": socket.gethostname(), "pid": os.getpid()}
    fields = spec.model_dump(mode="json")
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            return options.remote(fields, placement, secrets.token_hex(8), owner, witness)
        except ray.exceptions.ActorAlreadyExistsError:
            _wait_for_name(spec, deadline)


def _wait_for_name(spec: StackSpec, deadline: float) -> None:
    """Wait for the end of a stack of this name that is stopping; raise if it is not."""
    import ray

    head = cluster.find_head(spec.name, spec.ray.namespace)
    if head is None:
        return
    try:
        holder = ray.get(head.identify.remote(), timeout=10.0)
    except ray.exceptions.RayActorError:
        return
    if holder["phase"] in ("starting", "ready") or time.monotonic() > deadline:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        raise StartError(
            f"A stack named `{spec.name}` is {holder['phase']} on this cluster: {holder['user']} "
            f"on {holder['host']} (process {holder['pid']}) started it, {since}.",
            f"Stop it with `rollway down {spec.name}`, or choose another name with --name.",
        )
    time.sleep(_POLL_SECONDS)


def _wait_until_ready(access: RayAccess, progress: Progress | None) -> StackState:
    import ray

    ready = access.head.wait_until_ready.remote()
    while not ray.wait([ready], timeout=_STATE_SECONDS)[0]:
        # Only for a reader: a look costs every node CPU time, which its engines need now.
        if progress is not None:
            with contextlib.suppress(StackNotRunning):  # the next turn says why
                progress(access.read_state())
    try:
        error = ray.get(ready)
    except ray.exceptions.RayActorError as gone:
        unable = make_import_error(gone, "The node of the services")
        raise unable or make_gone_error(access.name, gone) from None
    if error is not None:
        raise restore_error(error)
    state = access.read_state()
    if progress is not None:
        progress(state)
    return state


# --- find and stop -------------------------------------------------------------------------------


def _get_place(namespace: str, name: str) -> Path:
    """Return the private file that has the address of the cluster where a stack of this user runs.
    It is there until the stack is stopped."""
    return home() / "ray" / quote(f"{namespace}/{name}", safe="")


def _remember(spec: StackSpec) -> None:
    # Without it, for example on a full disk, the stack is found by the address of its cluster.
    with contextlib.suppress(OSError, StartError):
        private_files.make_directory(make_home() / "ray")
        place = _get_place(spec.ray.namespace, spec.name)
        private_files.replace_file(place, cluster.get_address().encode())


def _choose_clusters(address: str | None, namespace: str = "") -> list[str | None]:
    """Return the clusters to ask about stacks: the one that the user has named or connected this
    process to (None); without, those of this user where, by their places, stacks run."""
    ray = sys.modules.get("ray")
    if address or cluster.get_environment_address() or (ray is not None and ray.is_initialized()):
        return [address] if importlib.util.find_spec("ray") else []
    places = []
    for place in (home() / "ray").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            places.append(private_files.read_file(place, 1000).decode())
    # The port of a cluster that has ended may be another user's by now.
    own = cluster.list_own_clusters() if places else []
    known: list[str | None] = [
        address
        for address in own
        if any(cluster.is_same_address(address, place) for place in places)
    ]
    return known or (
        [cluster.find_address()] if namespace else []
    )  # NAMESPACE/NAME is on Ray alone


def may_reach_cluster() -> bool:
    """Return whether there is a Ray cluster to ask without an address from the user."""
    return bool(_choose_clusters(None))


def resolve_name(name: str | None) -> str:
    """Return the name, or that of the only stack of this machine, or of the cluster it is in."""
    if name is not None:
        return name
    try:
        return local.resolve_name(None)
    except StackNotRunning:
        return resolve_on_cluster()


def resolve_on_cluster(address: str | None = None) -> str:
    """Return the name of the only stack of a cluster, as NAMESPACE/NAME."""
    names = [f"{state.ray_namespace}/{state.name}" for state in list_stacks(address)]
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"There are several stacks: {', '.join(names)}.", "Name the one you mean.")
    raise local.make_not_running_error(None)


def find(target: str, address: str | None = None) -> RayStack | None:
    """Return a running stack by NAME or NAMESPACE/NAME; None if there is none."""
    namespace, _, name = target.rpartition("/")
    for place in _choose_clusters(address, namespace):
        with ExitStack() as connection, contextlib.suppress(StackNotRunning):
            connection.enter_context(cluster.connect(place))
            access = RayAccess(cluster.find_head(name, namespace or None), name, namespace)
            state = access.read_state()
            access.namespace = state.ray_namespace  # later it finds no other stack of this name
            return RayStack(access, state, connection.pop_all())
    return None


def list_stacks(address: str | None = None) -> list[StackState]:
    """Return the states of all stacks of the cluster."""
    states = []
    for place in _choose_clusters(address):
        with cluster.connect(place):
            for namespace, name in cluster.list_heads():
                head = cluster.find_head(name, namespace)
                with contextlib.suppress(StackNotRunning):
                    states.append(RayAccess(head, name, namespace).read_state())
    return states


def clear_leftovers(address: str | None = None) -> None:
    """Remove what dead runs have left in the cluster."""
    for place in _choose_clusters(address):
        with cluster.connect(place):
            groups.clear_leftovers()


def follow_log(stack: RayStack, process: str, lines: int) -> Iterator[str]:
    """Yield the last lines of a log, then new ones as they come, until the stack ends."""
    reader = secrets.token_hex(4)
    while True:
        try:
            new = stack.access.read_log(process, lines, reader)
        except StackNotRunning:
            return
        yield from new
        if not new:
            time.sleep(_POLL_SECONDS)


def _stop(access: RayAccess, stop_seconds: float, progress: Progress | None) -> None:
    import ray

    with contextlib.suppress(OSError):
        _get_place(access.namespace, access.name).unlink()
    try:
        head = access.head
        stopped = head.stop.remote()
        deadline = time.monotonic() + stop_seconds + _STOP_SECONDS
        while not ray.wait([stopped], timeout=_POLL_SECONDS)[0] and time.monotonic() < deadline:
            if progress is not None:
                progress(access.read_state())
        freed = ray.get(stopped, timeout=0)
    except (ray.exceptions.RayActorError, StackNotRunning):
        # It has ended by itself, after it had cleared up, or with its node and all Keepers.
        groups.clear_leftovers()
        return
    except ray.exceptions.GetTimeoutError:
        freed = []
    # Its work is done; its name and the resources are to be free when this returns.
    ray.kill(head)
    groups.wait_until_free(freed)
    deadline = time.monotonic() + _POLL_SECONDS * 30
    while cluster.find_head(access.name, access.namespace) and time.monotonic() < deadline:
        time.sleep(0.02)
