"""`rollway bench ray`: what a stack on a Ray cluster costs, as ratios within one run.

`planning` places 1,000 replicas on 1,000 nodes. The cluster is mixed (nodes of 8, 6, 4 and 1 GPUs,
some in use, a fifth without the stack's label), and so is the stack: replicas of 1 to 16 ranks,
with tensor, pipeline and data parallelism, and two models with prefill and decode apart.

`launching` runs the workers of a stack file under one supervisor of this machine, and then over
several raylets of this machine, which it starts: until they are ready, requests through the
frontend, a refit, and until they are gone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollway.api import up
from rollway.async_stack import Stack
from rollway.bench import round_floats
from rollway.bench.fleet import make_single, measure
from rollway.config import StackSpec, load_spec
from rollway.errors import RollwayError, require
from rollway.fleet.discovery import RlListing
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.stack.ray.placement import NodeInfo, plan_placement


def bench_planning(replicas: int = 1000, nodes: int = 1000) -> dict[str, Any]:
    """Place a large mixed stack on a large mixed cluster."""
    spec, cluster = make_stack(replicas), make_cluster(nodes)
    began, cpu_began = time.monotonic(), time.process_time()
    plan = plan_placement(spec, cluster)
    figures = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "replicas": len(plan.replicas),
        "nodes": len(cluster),
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
    cluster = []
    for i in range(nodes):
        size = rng.choice((8, 8, 8, 6, 4, 1))
        gpus, cpus = size - rng.choice((0, 0, 0, 1, 2)), 4 * size - rng.randrange(2 * size)
        labels = {"use": "other"} if rng.random() < 1 / 5 else {}
        cluster.append(NodeInfo(f"{i:04x}", f"10.0.{i >> 8}.{i & 255}", i == 0, cpus, gpus, labels))
    return cluster


# --- launching -----------------------------------------------------------------------------------

_REQUESTS = 256
_REPEATS = 3
_BATCHES = 8
_PROMPT = range(10, 42)
_SAMPLING = Sampling(max_tokens=4, ignore_eos=True)


async def bench_launching(
    spec: StackSpec, nodes: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the same workers under one supervisor, and over raylets of this machine."""
    require("ray")
    workers = spec.models[0].replicas
    progress(f"{workers} workers under one supervisor")
    local = await _measure_stack(spec.model_copy(update={"launcher": "local"}))
    with _run_raylets(nodes, workers) as address:
        progress(f"{workers} workers over {nodes} raylets")
        settings = spec.ray.model_copy(update={"address": address, "gpus": 0.0})
        on_ray = await _measure_stack(spec.model_copy(update={"launcher": "ray", "ray": settings}))
    ratios = {
        f"{name}_ratio": on_ray[name] / local[name]
        for name in ("ready_seconds", "stop_seconds", "requests_per_second")
    }
    figures = {
        "workers": workers,
        "nodes": nodes,
        "local": round_floats(local, ".4g"),
        "ray": round_floats(on_ray, ".4g"),
    }
    return figures | round_floats(ratios, ".3f")


@contextmanager
def _run_raylets(nodes: int, workers: int) -> Iterator[str]:
    """Run a cluster whose nodes have room for an even share of the workers each."""
    from ray.cluster_utils import Cluster

    share = -(-workers // nodes)
    # One more for the frontend and etcd, which run on the head node.
    head = {"num_cpus": share + 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=share)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


async def _measure_stack(spec: StackSpec) -> dict[str, float]:
    running = up(spec)
    began = time.monotonic()
    async with running as stack:
        figures = {"ready_seconds": time.monotonic() - began}
        await stack.unwatch()  # the watcher's listings would disturb the measurement
        figures |= await _measure_refit(stack, spec)
        figures["requests_per_second"] = await _measure_requests(stack)
        began = time.monotonic()
    figures["stop_seconds"] = time.monotonic() - began
    return figures


async def _measure_requests(stack: Stack) -> float:
    """Return the best of several batches: other jobs of the machine only make them slower."""
    rollouts = stack.rollouts()
    rates = []
    for batch in range(_BATCHES + 1):  # the first opens the connections
        prompts = [[*_PROMPT, batch + 10, i % 200 + 10] for i in range(_REQUESTS)]
        rates.append(_REQUESTS / await measure(rollouts.generate_batch(prompts, _SAMPLING)))
    return max(rates[1:])


async def _measure_refit(stack: Stack, spec: StackSpec) -> dict[str, float]:
    """Refit single workers, then all of them, as `rollway bench fleet` does."""
    path = Path(spec.models[0].path)
    async with Http() as http:
        secret = stack.weights_secret
        fleet = Fleet(http, RlListing(stack.rl_url, stack.frontend_url), secret=secret)
        workers = await fleet.workers()
        if len(workers) != spec.models[0].replicas:
            raise RollwayError(f"{len(workers)} workers are listed.")
        singles = [make_single(http, fleet, worker, secret) for worker in workers[:_REPEATS]]
        alone = max([await measure(single.refit(1, path)) for single in singles])
        refits = [await measure(fleet.refit(2 + turn, path)) for turn in range(_REPEATS)]
    seconds = statistics.median(refits)
    return {"alone_seconds": alone, "refit_seconds": seconds, "refit_ratio": seconds / alone}


PARTS = ("planning", "launching")
"""What `rollway bench ray` measures, by the names that `--only` takes."""


def format_figures(figures: dict[str, Any]) -> str:
    """Format the figures as text, one line per part."""
    lines = []
    if "planning" in figures:
        part = figures["planning"]
        lines.append(
            f"planning: {part['replicas']} replicas ({part['gpus']:g} GPUs) over {part['nodes']} "
            f"nodes in {part['seconds']} s; {part['replicas_over_nodes']} of them over several "
            "nodes"
        )
    if "launching" in figures:
        part = figures["launching"]
        lines.append(f"launching: {part['workers']} workers, {part['nodes']} raylets")
        for name, local in part["local"].items():
            ratio = part.get(f"{name}_ratio")
            against = "" if ratio is None else f" ({ratio} of it)"
            lines.append(f"  {name}: {local} under one supervisor, {part['ray'][name]}{against}")
    return "\n".join(lines)
