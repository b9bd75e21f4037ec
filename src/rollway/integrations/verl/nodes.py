"""Where a pool runs: verl has placed the replicas, and `stack/ray/` starts their stack there.

verl's workers hold the GPUs, so the stack reserves nothing. A replica whose workers are on several
nodes has a part of its ranks on each.

`open_proxy` gives each replica an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from rollway.errors import UsageError
from rollway.stack.ray.placement import Placement, RankPlace, ReplicaPlace

WorkerPlace = tuple[str, Sequence[str]]
"""The node of one of verl's workers, and its GPUs; none if Ray only counts them."""


def make_placement(
    model: str, replicas: Mapping[int, Sequence[WorkerPlace]], services: str
) -> Placement:
    """Make the placement of a pool from the places of its replicas' workers, by replica.

    The stack counts replicas in verl's order, whichever joined first, so that each has the same
    name and seed in every run."""
    places = tuple(
        ReplicaPlace(model, number, "", _group_by_node(replica, replicas[replica]))
        for number, replica in enumerate(sorted(replicas))
    )
    return Placement(services, places)


def _group_by_node(replica: int, workers: Sequence[WorkerPlace]) -> tuple[RankPlace, ...]:
    groups = [
        (node, list(members)) for node, members in itertools.groupby(workers, key=lambda w: w[0])
    ]
    nodes = {node for node, _ in groups}
    if len(nodes) < len(groups) or len({len(members) for _, members in groups}) > 1:
        spread = ", ".join(f"{len(members)} on {get_address(node)}" for node, members in groups)
        raise UsageError(
            f"The ranks of replica {replica} are spread unevenly over nodes: {spread}.",
            "Choose rollout.tensor_model_parallel_size so that it divides the GPUs of a node, or "
            "is a multiple of them.",
        )
    return tuple(
        RankPlace(node, number, 0, 0, tuple(gpu for _, gpus in members for gpu in gpus))
        for number, (node, members) in enumerate(groups)
    )


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
