"""The actor that stands for a process. Ray starts a process for it, so this module imports nothing
of Rollway that takes time."""

from __future__ import annotations

import asyncio
from typing import Any


class Witness:
    """Lives as long as the process that created it; others wait for its end."""

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
