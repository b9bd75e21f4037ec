"""`rollway bench ray`: what a stack on a Ray cluster costs, as ratios within one run.

`planning` places 1,000 replicas on 1,000 nodes. The cluster is mixed (nodes of 8, 6, 4 and 1 GPUs,
some in use, a fifth without the stack's label), and so is the stack: replicas of 1 to 16 ranks,
with tensor, pipeline and data parallelism, and two models with prefill and decode apart.

`launching` runs the workers of a stack file under one supervisor of this machine, and over several
raylets of this machine, which it starts: until they are ready, requests through the frontend, a
refit, and until they are gone. Both take turns, and the raylets run all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import round_floats
from benchmarks.children import read_cpu_seconds
from benchmarks.fleet import make_single, measure
from benchmarks.inputs import read_parts, read_spec
from rollway.aio import Stack, up
from rollway.cli.output import print_progress
from rollway.errors import RollwayError, UsageError, require
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import RlListing
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.spec import StackSpec, load_spec
from rollway.stack.ray import cluster
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.placement import plan_placement

PARTS = ("planning", "launching")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    spec = read_spec(options)
    parts = read_parts(options, PARTS if spec or options.only else PARTS[:1])
    figures: dict[str, Any] = {}
    if "planning" in parts:
        figures["planning"] = bench_planning()
    if "launching" in parts:
        if spec is None:
            raise UsageError(
                "`launching` needs a stack file.", "Give one: rollway bench ray -f FILE."
            )
        figures["launching"] = asyncio.run(bench_launching(spec, options.nodes))
    return 0, figures


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


# --- launching -----------------------------------------------------------------------------------

_ROUNDS = 3
_REQUESTS = 256
_REPEATS = 3
_BATCHES = 8
_PROMPT = range(10, 42)
_IDLE_SECONDS = 120.0
_IDLE_SHARE = 0.2
"""Of a core; four idle raylets with their agents take less than a tenth."""
_SAMPLING = Sampling(max_tokens=4, ignore_eos=True)


async def bench_launching(spec: StackSpec, nodes: int) -> dict[str, Any]:
    """Run the same workers under one supervisor, and over raylets of this machine."""
    require("ray", "ray")
    workers = spec.models[0].replicas
    local, on_ray = [], []
    with _run_raylets(nodes, workers) as address, cluster.connect(address):
        await _wait_until_idle()
        settings = spec.ray.model_copy(update={"address": address, "gpus": 0.0})
        for number in range(1, _ROUNDS + 1):
            print_progress(f"round {number} of {_ROUNDS}: {workers} workers under one supervisor")
            local.append(await _measure_stack(spec.model_copy(update={"launcher": "local"})))
            print_progress(f"round {number} of {_ROUNDS}: {workers} workers over {nodes} raylets")
            placed = spec.model_copy(update={"launcher": "ray", "ray": settings})
            on_ray.append(await _measure_stack(placed))
    return {
        "workers": workers,
        "nodes": nodes,
        "local": round_floats(_take_medians(local), ".4g"),
        "ray": round_floats(_take_medians(on_ray), ".4g"),
        **round_floats(_compare(local, on_ray), ".3f"),
        "rounds": {"local": local, "ray": on_ray},
    }


def _take_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def _compare(local: list[dict[str, float]], on_ray: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the ratios in each round: the machine's speed changes between them."""
    return {
        f"{name}_ratio": statistics.median(
            there[name] / here[name] for here, there in zip(local, on_ray, strict=True)
        )
        for name in ("ready_seconds", "stop_seconds", "requests_per_second")
    }


async def _wait_until_idle() -> None:
    """Wait until the raylets have started their own processes, also those that Ray starts for its
    first driver. They take more CPU time than a stack."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        before = _read_cpu_seconds()
        await asyncio.sleep(1.0)
        if _read_cpu_seconds() - before < _IDLE_SHARE:
            return


def _read_cpu_seconds() -> float:
    """Return the CPU time of all descendants of this process."""
    return sum(read_cpu_seconds(child.pid) for child in psutil.Process().children(recursive=True))


@contextmanager
def _run_raylets(nodes: int, workers: int) -> Iterator[str]:
    """Run a cluster whose nodes have room for an even share of the workers each."""
    from ray.cluster_utils import Cluster

    share = -(-workers // nodes)
    # One more for the frontend and etcd, which run on the head node.
    head = {"num_cpus": share + 1, "include_dashboard": False}
    raylets = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            raylets.add_node(num_cpus=share)
        yield str(raylets.address)
    finally:
        raylets.shutdown()


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
