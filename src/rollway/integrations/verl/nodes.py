"""A pool over several nodes: which replicas are where, and the actor that runs a node's workers.

    the pool's node      Pool ── stack: etcd, the frontend, its workers
    every other node     Node ── stack that joins it: workers alone

Each node's supervisor restarts its own workers when they die. If a node's actor or supervisor ends,
its engines are lost for good, and the run ends with that cause: it must not continue with fewer
engines for days, unnoticed. A node's stack ends with its pool.

`open_proxy` gives each replica an address, `write_targets` gives Prometheus those of all metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway.config import StackSpec
from rollway.fleet.discovery import Worker
from rollway.stack import local
from rollway.stack.state import StackState

ACTOR_ENV = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""The stack's supervisor ends by itself when the actor does, after it has cleaned up."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The replicas of a pool that are on one node."""

    node: str
    first_rank: int
    """The rank of its first worker in the pool: the number of workers on the nodes before it."""
    replicas: int
    gpus: list[str]


def group_by_node(places: Mapping[int, tuple[str, Sequence[str]]]) -> list[NodeShare]:
    """Group replicas, given as node and GPUs by rank. Nodes are in the order of their first
    replicas, whichever joined first, so that a worker has the same rank and seed in every run."""
    by_node: dict[str, list[int]] = {}
    for replica in sorted(places):
        by_node.setdefault(places[replica][0], []).append(replica)
    shares: list[NodeShare] = []
    first_rank = 0
    for node, replicas in by_node.items():
        gpus = [gpu for replica in replicas for gpu in places[replica][1]]
        shares.append(NodeShare(node, first_rank, len(replicas), gpus))
        first_rank += len(replicas)
    return shares


class Node:
    """Ray actor: runs the workers of a pool on a node that is not the pool's."""

    def __init__(self) -> None:
        self._running: local.RunningStack | None = None

    async def start(self, spec: dict[str, Any]) -> None:
        self._running = await asyncio.to_thread(local.start, StackSpec.model_validate(spec))

    async def replace(self, worker: Worker) -> bool:
        """Kill a worker that does not answer, if it is on this node, so that it restarts."""
        running = self._running
        return running is not None and await local.replace_worker(running.directory.name, worker)

    async def wait_until_unsupervised(self) -> None:
        # The supervisor's state is in a file, which has to be polled.
        while self._running is not None and self._running.state.is_supervised:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await asyncio.to_thread(running.stop)


@asynccontextmanager
async def start_on_nodes(
    specs: Mapping[str, StackSpec], on_loss: Callable[[str], None]
) -> AsyncIterator[list[Any]]:
    """Run a stack on each of these nodes, by an actor there, and yield the actors. Call `on_loss`
    with the cause if one ends before the block."""
    actors = {node: create_actor(node) for node in specs}
    starts = [
        actors[node].start.remote(spec.model_dump(mode="json")) for node, spec in specs.items()
    ]
    watches: list[asyncio.Task[None]] = []
    try:
        # All starts must have ended before any is stopped.
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        watches = [
            asyncio.create_task(_watch(actors[node], spec, on_loss)) for node, spec in specs.items()
        ]
        yield list(actors.values())
    finally:
        for task in watches:
            task.cancel()
        stops = [actor.stop.remote() for actor in actors.values()]
        with contextlib.suppress(Exception):  # a dead actor's supervisor stops its stack itself
            await asyncio.gather(*stops, return_exceptions=True)


async def _watch(actor: Any, spec: StackSpec, on_loss: Callable[[str], None]) -> None:
    place = f"node {spec.admin_host} (stack {spec.name})"
    results: list[object] = await asyncio.gather(
        actor.wait_until_unsupervised.remote(), return_exceptions=True
    )
    if isinstance(results[0], BaseException):
        cause = " ".join(str(results[0]).split())
        on_loss(f"The actor that ran the engines of {place} died: {cause}")
    else:
        on_loss(f"The supervisor of the engines of {place} ended.")


async def replace_worker(worker: Worker, pool_stack: str, actors: Sequence[Any]) -> bool:
    """Kill a worker so that its supervisor, the pool's or another node's, restarts it."""
    if await local.replace_worker(pool_stack, worker):
        return True
    return any(await asyncio.gather(*(actor.replace.remote(worker) for actor in actors)))


def create_actor(node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = ray.remote(Node).options(
        num_cpus=0,
        runtime_env={"env_vars": ACTOR_ENV},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return options.remote()


def get_own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def get_address(node: str) -> str:
    """Return a node's address in Ray's network; engines use the same network."""
    import ray

    return str(next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node))


# --- addresses of replicas and of metrics --------------------------------------------------------


@asynccontextmanager
async def open_proxy(host: str, port: int, bind: str = "127.0.0.1") -> AsyncIterator[str]:
    """Forward a free port of `bind` to `host:port`; yield its address, as "host:port"."""
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        writers = {writer, upstream_writer}
        open_writers.update(writers)
        try:
            await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))
        finally:
            open_writers.difference_update(writers)
            for side in writers:
                side.close()

    server = await asyncio.start_server(serve, bind, 0)
    try:
        yield f"{bind}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(open_writers):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def write_targets(path: Path, state: StackState) -> None:
    """Write the frontend and every worker in the format of Prometheus' `file_sd_configs`."""
    urls = [("frontend", state.frontend)]
    urls += [(process.name, process.admin_url) for process in state.processes if process.admin_url]
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"stack": state.name, "process": process}}
        for process, url in urls
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere and renamed, so that Prometheus never reads half a file.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(targets, indent=1) + "\n")
    partial.replace(path)
