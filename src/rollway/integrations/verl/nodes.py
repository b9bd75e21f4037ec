"""A pool over several nodes: which replicas are where, and the actor that runs a node's workers.

    the pool's node      Pool ── stack: etcd, the frontend, its workers
    every other node     Node ── stack that joins it: workers alone

Each node's supervisor starts its own workers again when they die. A node whose actor or supervisor
ends has lost its engines for good, and that ends the run, with the cause: nobody has asked to go on
with fewer of them, for days and unseen. A node ends with its pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollway.config import StackSpec
from rollway.fleet.discovery import Worker
from rollway.stack import local

ACTOR_ENV = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""The stack's supervisor ends by itself when the actor does, after it has cleared up."""


@dataclass(frozen=True, slots=True)
class Share:
    """The replicas of a pool that are on one node."""

    node: str
    before: int
    """How many workers the nodes before it have: the rank of its first."""
    replicas: int
    gpus: list[str]


def shares(places: Mapping[int, tuple[str, Sequence[str]]]) -> list[Share]:
    """Of each replica's node and GPUs, by its rank. Nodes come in the order of their first
    replicas, whichever called first, so that a worker has the same rank and seed in every run."""
    by_node: dict[str, list[int]] = {}
    for replica in sorted(places):
        by_node.setdefault(places[replica][0], []).append(replica)
    found: list[Share] = []
    before = 0
    for node, replicas in by_node.items():
        gpus = [gpu for replica in replicas for gpu in places[replica][1]]
        found.append(Share(node, before, len(replicas), gpus))
        before += len(replicas)
    return found


class Node:
    """Ray actor: the workers of a pool on a node that is not the pool's."""

    def __init__(self) -> None:
        self._running: local.RunningStack | None = None

    async def start(self, spec: dict[str, Any]) -> None:
        made = StackSpec.model_validate(spec)
        self._running = await asyncio.to_thread(local.start, made)

    async def replace(self, worker: Worker) -> bool:
        """End a worker that does not answer, if it is of this node, so that it starts anew."""
        running = self._running
        return running is not None and await local.replace_worker(running.directory.name, worker)

    async def ended(self) -> None:
        """Return when the workers have nobody who looks after them."""
        while True:
            if self._running is None or not self._running.state.supervised:
                return
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await asyncio.to_thread(running.stop)


@asynccontextmanager
async def joined(
    specs: Mapping[str, StackSpec], lost: Callable[[str], None]
) -> AsyncIterator[list[Any]]:
    """Run a stack on each of these nodes, by an actor there; `lost` is told why one has ended
    unasked."""
    actors = {node: actor_on(node) for node in specs}
    starts = [
        actors[node].start.remote(spec.model_dump(mode="json")) for node, spec in specs.items()
    ]
    watching: list[asyncio.Task[None]] = []
    try:
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        watching = [
            asyncio.create_task(_watch(actors[node], spec, lost)) for node, spec in specs.items()
        ]
        yield list(actors.values())
    finally:
        for task in watching:
            task.cancel()
        stops = [actor.stop.remote() for actor in actors.values()]
        with contextlib.suppress(Exception):  # one that has died has ended its stack already
            await asyncio.gather(*stops, return_exceptions=True)


async def _watch(actor: Any, spec: StackSpec, lost: Callable[[str], None]) -> None:
    where = f"node {spec.admin_host} (stack {spec.name})"
    results: list[object] = await asyncio.gather(actor.ended.remote(), return_exceptions=True)
    if isinstance(results[0], BaseException):
        words = " ".join(str(results[0]).split())
        lost(f"The actor that ran the engines of {where} died: {words}")
    else:
        lost(f"The supervisor of the engines of {where} ended.")


async def replaced(worker: Worker, pool_stack: str, actors: Sequence[Any]) -> bool:
    """End a worker so that its own supervisor, the pool's or another node's, starts it anew."""
    if await local.replace_worker(pool_stack, worker):
        return True
    return any(await asyncio.gather(*(actor.replace.remote(worker) for actor in actors)))


def actor_on(node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = ray.remote(Node).options(
        num_cpus=0,
        runtime_env={"env_vars": ACTOR_ENV},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return options.remote()


def own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def address_of(node: str) -> str:
    """Its address in Ray's network, which engines then use too."""
    import ray

    return str(next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node))
