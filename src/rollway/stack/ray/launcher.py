"""The driver's side of stacks on Ray: start, find, read and stop them.

`start` plans first, refuses what cannot work, and then creates the Head (rollway.stack.ray.head),
which does the rest. All functions work in any process that reaches the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import importlib.util
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollway.config import StackSpec
from rollway.errors import (
    RollwayError,
    SpecError,
    StackNotRunning,
    StartError,
    restore_error,
)
from rollway.fleet.discovery import Worker
from rollway.stack.ray import cluster
from rollway.stack.ray.placement import NodeInfo, Placement, plan_placement
from rollway.stack.ready import is_at
from rollway.stack.state import StackState

Progress = Callable[[StackState], None]
_POLL_SECONDS = 0.3
_NAME_SECONDS = 60.0
_STOP_SECONDS = 90.0
"""What a stop may take beyond the stop time of the stack."""
_STATE_SECONDS = 1.0
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


class RayAccess:
    """A stack on Ray, by its Head."""

    def __init__(self, head: Any, name: str, witness: Any = None) -> None:
        self.head = head
        self.name = name
        self._witness = witness
        self._state: tuple[float, StackState] | None = None

    def read_state(self) -> StackState:
        state: StackState = msgspec.json.decode(self.call("read_state"), type=StackState)
        self._state = time.monotonic(), state
        return state

    def read_secret(self) -> str:
        return str(self.call("read_secret"))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the Head and wait; raise StackNotRunning if it has ended."""
        import ray

        try:
            return ray.get(getattr(self.head, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise make_gone_error(self.name, error) from None

    async def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return await getattr(self.head, method).remote(*arguments)
        except ray.exceptions.RayActorError as error:
            raise make_gone_error(self.name, error) from None

    async def replace_worker(self, worker: Worker) -> bool:
        return bool(await self._call("replace_worker", worker))

    def is_supervised(self, worker: Worker) -> bool:
        if self._state is None or time.monotonic() - self._state[0] > _STATE_SECONDS:
            self.read_state()
        assert self._state is not None
        processes = self._state[1].processes
        return any(p.role == "worker" and is_at(worker.admin_url, p) for p in processes)

    @asynccontextmanager
    async def hold_refit_lock(self, model: str) -> AsyncIterator[None]:
        if self._witness is None:
            self._witness = await asyncio.to_thread(_create_witness)
        lock, token = f"refit/{model}", secrets.token_hex(8)
        try:
            if not await self._call("lock", lock, token, self._witness):
                raise RollwayError(f"The lock of `{model}` was given up.", "Try again.")
            yield
        finally:
            # Also when the wait was cancelled: then this gives the place in the queue up.
            self.head.unlock.remote(lock, token)

    def open_record(self, model: str) -> _Record:
        return _Record(self, model)

    def wait_until_over(self) -> str:
        """Return the cause when the stack has ended without this process."""
        try:
            error = self.call("wait_until_over")
        except StackNotRunning as gone:
            return gone.message
        return f"The stack `{self.name}` was stopped." if error is None else str(error["message"])


class _Record:
    """The versions of a model, kept by the Head. One call takes about a millisecond."""

    def __init__(self, access: RayAccess, model: str) -> None:
        self._access, self._model = access, model

    def put(self, version: int, path: Path) -> None:
        self._call("put", version, str(path))

    def get(self) -> tuple[int, Path] | None:
        current = self._call("get")
        return None if current is None else (current[0], Path(current[1]))

    def claim(self, version: int, identity: str) -> None:
        self._call("claim", version, identity)

    def claims(self) -> dict[int, str]:
        return dict(self._call("claims"))

    def newest(self) -> int | None:
        newest: int | None = self._call("newest")
        return newest

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._access.call("call_ledger", method, self._model, *arguments)


class RayStack:
    """A stack on Ray that this process started, or found by its name."""

    def __init__(self, access: RayAccess, state: StackState, connection: ExitStack) -> None:
        self.access = access
        self.state = state
        self._connection = connection

    def detach(self) -> None:
        """Leave the stack running when this process ends."""
        self.access.call("detach")
        self.close()

    def stop(self, progress: Progress | None = None) -> None:
        """Stop the stack; return when nothing of it is left."""
        try:
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
    given_gpus: Mapping[str, list[str]] | None = None,
) -> RayStack:
    """Start a stack and return when it is ready.

    On failure, and on KeyboardInterrupt, everything that has started is stopped first. A caller
    that has placed the replicas gives the `placement`, and the GPUs that it holds for them."""
    with ExitStack() as connection:
        connection.enter_context(cluster.connect(spec.ray.address))
        cluster.clear_leftovers()
        nodes = cluster.read_nodes()
        placement = placement or plan_placement(spec, nodes)
        _check_placement(spec, placement, nodes)
        witness = _create_witness()
        head = _create_head(spec, placement, given_gpus, witness)
        access = RayAccess(head, spec.name, witness)
        try:
            state = _wait_until_ready(access, progress)
        except BaseException:
            with contextlib.suppress(StackNotRunning):
                _stop(access, spec.stop_seconds, progress)
            raise
        return RayStack(access, state, connection.pop_all())


def plan(spec: StackSpec) -> tuple[Placement, list[NodeInfo]]:
    """Return where the stack would run now."""
    with cluster.connect(spec.ray.address):
        nodes = cluster.read_nodes()
        return plan_placement(spec, nodes), nodes


def _check_placement(spec: StackSpec, placement: Placement, nodes: list[NodeInfo]) -> None:
    """Refuse what cannot work on the nodes of the plan, before anything is started there."""
    from rollway.stack.ray.parts import get_python

    used = {placement.services, *(r.node for p in placement.replicas for r in p.ranks)}
    if len(used) > 1 and any(model.engine == "mocker" for model in spec.models):
        raise SpecError(
            "Mockers run on one node only: no listing shows which stack a mocker belongs to.",
            "Lower `replicas`, or use `engine: custom`.",
        )
    needs_etcd = spec.needs_etcd or (len(used) > 1 and spec.etcd_endpoints is None)
    programs = {"etcd": needs_etcd, "nats-server": spec.needs_nats}
    cluster.check_nodes(
        {node.id: node.address for node in nodes if node.id in used},
        {
            "python": get_python(spec),
            "models": [model.path for model in spec.models],
            "programs": {name: placement.services for name, is_needed in programs.items()
                         if is_needed},
        },
    )  # fmt: skip


def _create_witness() -> Any:
    """Create the actor that dies with this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rollway.stack.ray.keeper import Witness

    # On this node: the loss of another one must not look like the death of this process.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = ray.remote(Witness).options(
        num_cpus=0, max_concurrency=1000, scheduling_strategy=here
    )
    return options.remote()


def _create_head(
    spec: StackSpec,
    placement: Placement,
    given_gpus: Mapping[str, list[str]] | None,
    witness: Any,
) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rollway.stack.ray.head import Head

    options = ray.remote(Head).options(
        name=cluster.get_head_name(spec.name),
        namespace=spec.ray.namespace,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=10_000,
        runtime_env={"env_vars": cluster.ACTOR_ENV},
        scheduling_strategy=NodeAffinitySchedulingStrategy(placement.services, soft=False),
    )
    owner = {"user": getpass.getuser(), "host": socket.gethostname(), "pid": os.getpid()}
    fields = spec.model_dump(mode="json")
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            return options.remote(
                fields, placement, secrets.token_hex(8), owner, witness, given_gpus
            )
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
    while True:
        done, _ = ray.wait([ready], timeout=_POLL_SECONDS)
        if done:
            try:
                error = ray.get(ready)
            except ray.exceptions.RayActorError as gone:
                raise make_gone_error(access.name, gone) from None
            if error is not None:
                raise restore_error(error)
        state = access.read_state()
        if progress is not None:
            progress(state)
        if done:
            return state


# --- find and stop -------------------------------------------------------------------------------


def is_likely() -> bool:
    """Whether this process may reach a Ray cluster without being told its address."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return True
    has_address = "RAY_ADDRESS" in os.environ or _CURRENT_CLUSTER.is_file()
    return has_address and importlib.util.find_spec("ray") is not None


def find(target: str, address: str | None = None) -> RayStack | None:
    """Return a running stack by NAME or NAMESPACE/NAME; None if there is none."""
    namespace, _, name = target.rpartition("/")
    with ExitStack() as connection:
        connection.enter_context(cluster.connect(address))
        head = cluster.find_head(name, namespace or None)
        if head is None:
            return None
        access = RayAccess(head, name)
        try:
            state = access.read_state()
        except StackNotRunning:
            return None
        return RayStack(access, state, connection.pop_all())


def list_stacks(address: str | None = None) -> list[StackState]:
    """Return the states of all stacks of the cluster."""
    states = []
    with cluster.connect(address):
        for namespace, name in cluster.list_heads():
            head = cluster.find_head(name, namespace)
            with contextlib.suppress(StackNotRunning):
                if head is not None:
                    states.append(RayAccess(head, name).read_state())
    return states


def clear_leftovers(address: str | None = None) -> list[str]:
    """Remove what dead runs have left in the cluster; return the names of their groups."""
    with cluster.connect(address):
        return cluster.clear_leftovers()


def follow_log(stack: RayStack, process: str, lines: int) -> Iterator[str]:
    """Yield the last lines of a log, then new ones as they come, until the stack ends."""
    reader = secrets.token_hex(4)
    while True:
        try:
            new = stack.access.call("read_log", process, lines, reader)
        except StackNotRunning:
            return
        yield from new or ()
        if not new:
            time.sleep(_POLL_SECONDS)


def _stop(access: RayAccess, stop_seconds: float, progress: Progress | None) -> None:
    import ray

    head = access.head
    try:
        stopped = head.stop.remote()
        deadline = time.monotonic() + stop_seconds + _STOP_SECONDS
        while time.monotonic() < deadline:
            done, _ = ray.wait([stopped], timeout=_POLL_SECONDS)
            if done:
                ray.get(stopped)
                break
            if progress is not None:
                progress(access.read_state())
    except (ray.exceptions.RayActorError, StackNotRunning):
        return  # it has ended by itself, after it had cleared up
    # Its work is done, and its name is free at once.
    ray.kill(head)


def make_gone_error(name: str, error: Exception) -> StackNotRunning:
    """Make the error of a call to a Head that has ended."""
    text = " ".join(str(error).split())
    is_lost = "node" in text and ("died" in text or "dead" in text)
    cause = "the node of its frontend and services is lost" if is_lost else "its Head has ended"
    return StackNotRunning(
        f"The stack `{name}` no longer runs on Ray: {cause}.",
        "See `ray status`, and start it again with `rollway up --on ray`.",
    )
