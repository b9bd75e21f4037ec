"""`rollway bench ray`: how long it takes to place 1,000 replicas on 1,000 nodes.

The cluster is mixed (nodes of 8, 6, 4 and 1 GPUs, some in use, a fifth without the stack's label),
and so is the stack: replicas of 1 to 16 ranks, with tensor, pipeline and data parallelism, and two
models with prefill and decode apart.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from benchmarks import round_floats
from benchmarks.inputs import read_parts
from rollway.spec import StackSpec, load_spec
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.placement import plan_placement


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    read_parts(options, ("planning",))
    return 0, {"planning": bench_planning()}


def bench_planning(replicas: int = 1000, nodes: int = 1000) -> dict[str, Any]:
    """Place a large mixed stack on a large mixed cluster."""
    spec, free = make_stack(replicas), make_cluster(nodes)
    began, cpu_began = time.monotonic(), time.process_time()
    plan = plan_placement(spec, free)
    figures = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "replicas": len(plan.replicas),
        "nodes": len(free),
        "nodes_used": len({rank.node for place in plan.replicas for rank in place.ranks}),
        "replicas_over_nodes": sum(len(place.ranks) > 1 for place in plan.replicas),
        "gpus": sum(rank.gpus for place in plan.replicas for rank in place.ranks),
    }
    return round_floats(figures, ".4g")


def make_stack(replicas: int) -> StackSpec:
    """Return a stack of seven models with so many replicas in all."""

    def share(part: float, **fields: Any) -> dict[str, Any]:
        return {"replicas": round(replicas * part), **fields}

    def divide(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
        return {"serving": "disaggregated", "prefill": prefill, "decode": decode}

    models = [
        share(0.3),
        share(0.2, tensor_parallel=2),
        share(0.1, tensor_parallel=8),
        share(0.05, tensor_parallel=8, pipeline_parallel=2),
        share(0.05, args={"tp": 2}, data_parallel=3),
        divide(share(0.05, tensor_parallel=4), share(0.15, args={"tp": 4})),
        divide(share(0.02, tensor_parallel=2), share(0.08)),
    ]
    named = [{"path": f"org/m{number}", **model} for number, model in enumerate(models)]
    return load_spec({"launcher": "ray", "ray": {"labels": {"use": "!other"}}, "models": named})


def make_cluster(nodes: int, seed: int = 0) -> list[NodeInfo]:
    """Return a cluster in which other jobs hold some of the GPUs and CPUs."""
    rng = random.Random(seed)
    infos = []
    for i in range(nodes):
        size = rng.choice((8, 8, 8, 6, 4, 1))
        gpus, cpus = size - rng.choice((0, 0, 0, 1, 2)), 4 * size - rng.randrange(2 * size)
        labels = {"use": "other"} if rng.random() < 1 / 5 else {}
        infos.append(NodeInfo(f"{i:04x}", f"10.0.{i >> 8}.{i & 255}", i == 0, cpus, gpus, labels))
    return infos
