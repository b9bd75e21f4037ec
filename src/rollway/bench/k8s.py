"""`rollway bench k8s`: what `rollway k8s run` costs beside what the cluster itself takes.

It needs a cluster with both operators and an infra file with one graph and a job. Without real ones
`python -m tests.kubernetes.lab` serves a real control plane with stand-in operators.

`requests` counts what a run asks of the API server until all gates are passed, against the fewest
that could do: one write for each object, one watch for each kind, two questions to each frontend.
`many` runs 1, 8 and 32 graphs: from the first apply until all gates are passed, and what of that is
the command's own (its CPU time, and how long after the last graph was ready it noticed). Operators
make pods in their own time, and the API server validates graphs in its own: the ratio of the whole
says something only where pods take some seconds (`lab --ready-after`). `memory` runs the command in
a namespace with 10 and with 1,000 pods of others. `scale` grows the graph from 2 to 32 workers, and
compares how long each took from its first listing until it served the current version with its own
refit in that.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rollway
from rollway.bench import round_floats
from rollway.errors import RollwayError
from rollway.fleet.discovery import Worker, list_instances
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.infra import load_infra
from rollway.kubernetes.kinds import DGD, POD
from rollway.kubernetes.manifests import Manifests, render_all
from rollway.kubernetes.names import KEY_LABEL
from rollway.kubernetes.run import bring_up, start_run
from rollway.kubernetes.scale import scale
from rollway.kubernetes.spec import Infra
from rollway.kubernetes.steps import Limits, RunOptions
from rollway.kubernetes.teardown import take_down

PARTS = ("requests", "many", "memory", "scale")
SIZES = (1, 8, 32)
_PODS = (10, 1000)
_WORKERS = (2, 32)
_BENCH_LABEL = "rollway.dev/bench"
_REPEATS = 3
_AT_ONCE = 16
Report = Callable[[str], None]


@dataclass
class Place:
    """The cluster and the run that are measured."""

    kubeconfig: Path | None
    namespace: str | None
    infra_file: Path
    overrides: list[str] = field(default_factory=list)

    def connect(self) -> Cluster:
        return Cluster.connect(kubeconfig=self.kubeconfig, namespace=self.namespace)

    def load(self, namespace: str, graphs: int) -> tuple[Infra, Manifests]:
        """Return the run with its first graph as often as asked for."""
        infra = load_infra(None, self.infra_file, self.overrides)
        infra = infra.model_copy(update={"namespace": namespace})
        manifests = render_all(infra)
        key, graph = next(iter(manifests.graphs.items()))
        copies, specs = {}, {}
        for number in range(graphs):
            name = key if number == 0 else f"{key}-{number}"
            body = copy.deepcopy(graph)
            body["metadata"]["name"] = f"{graph['metadata']['name']}-{number}"
            body["metadata"]["labels"][KEY_LABEL] = f"dynamo.{name}"
            copies[name], specs[name] = body, infra.dynamo[key]
        return infra.model_copy(update={"dynamo": specs}), replace(manifests, graphs=copies)


def bench_k8s(place: Place, only: tuple[str, ...], report: Report) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    parts = only or PARTS
    if "requests" in parts or "many" in parts:
        runs = {size: _measure_runs(place, size, report) for size in SIZES}
        figures["runs"] = runs
        for name in ("applied", "ready"):
            few, many = runs[1][f"{name}_seconds"], runs[SIZES[-1]][f"{name}_seconds"]
            figures[f"{name}_ratio"] = many / few
    if "memory" in parts:
        figures["memory"] = _measure_memory(place, report)
    if "scale" in parts:
        figures["scale"] = _measure_scale(place, report)
    return round_floats(figures, ".4g")


def _measure_runs(place: Place, graphs: int, report: Report) -> dict[str, Any]:
    """Run several times; return the counts of the last run, and the shortest times."""
    measured = []
    for turn in range(_REPEATS):
        report(f"{graphs} graphs, run {turn + 1} of {_REPEATS}")
        measured.append(_measure_run(place, graphs))
    best = dict(measured[-1])
    for name in ("applied_seconds", "ready_seconds", "noticed_seconds", "overhead_seconds"):
        best[name] = min(figures[name] for figures in measured)
    return best


def _measure_run(place: Place, graphs: int) -> dict[str, Any]:
    cluster = place.connect()
    infra, manifests = place.load(cluster.namespace, graphs)
    asked: Counter[tuple[str, str]] = Counter()
    times: dict[str, float] = {}

    def note(text: str) -> None:
        if text.endswith(" is suspended"):
            times["cpu"] = time.process_time()
        elif text.startswith("resume "):
            asked.update(cluster.requests)
            times["resumed"] = time.monotonic()
            times["cpu"] = time.process_time() - times["cpu"]

    try:
        options = RunOptions(wait=False, limits=Limits(grace=30.0))
        with _watch_graphs(place) as watcher:
            steps = start_run(cluster, infra, manifests, options, note).steps
    finally:
        take_down(cluster, infra.name)
        cluster.close()
    # A write for each object, a watch of jobs, graphs and pods, and two questions to each frontend:
    # for its workers, and for its models.
    fewest = 1 + graphs + 3 + 2 * graphs
    return {
        "graphs": graphs,
        "requests": sum(asked.values()),
        "fewest": fewest,
        "ratio": sum(asked.values()) / fewest,
        "asked": {f"{verb} {plural}": count for (verb, plural), count in sorted(asked.items())},
        "applied_seconds": steps["graphs applied"] - steps["suspended"],
        "ready_seconds": steps["gates"] - steps["suspended"],
        "noticed_seconds": times["resumed"] - watcher.ready_at,
        "own_cpu_seconds": times["cpu"] - watcher.cpu_seconds,
        "overhead_seconds": steps["driver"] - steps["gates"],
    }


@dataclass
class _Watcher:
    """What another client of the API server saw."""

    ready_at: float = 0.0
    """When the operator called the last graph successful."""
    cpu_seconds: float = 0.0


@contextmanager
def _watch_graphs(place: Place) -> Iterator[_Watcher]:
    """Note when the operator is done with graphs, independently of the run."""
    cluster, stop, watcher = place.connect(), threading.Event(), _Watcher()

    def watch() -> None:
        done: set[str] = set()
        for change in cluster.watch(DGD, stop=stop):
            state = (change.object.get("status") or {}).get("state")
            if state == "successful" and change.name not in done:
                done.add(change.name)
                watcher.ready_at = time.monotonic()
            watcher.cpu_seconds = time.thread_time()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        stop.set()
        thread.join()
        cluster.close()


# --- memory --------------------------------------------------------------------------------------


def _measure_memory(place: Place, report: Report) -> dict[str, Any]:
    cluster, peaks = place.connect(), {}
    try:
        for count in _PODS:
            report(f"memory with {count} pods of others")
            _make_pods(cluster, count)
            peaks[count] = _run_command(place, cluster)
    finally:
        _delete_pods(cluster)
        cluster.close()
    few, many = (peaks[count] for count in _PODS)
    return {"pods": list(_PODS), "peak_mib": [few, many], "ratio": many / few}


def _make_pods(cluster: Cluster, count: int) -> None:
    """Create pods that nothing schedules, up to a number in all."""
    there = len(cluster.list(POD, labels=_BENCH_LABEL, metadata_only=True)[0])

    def make(number: int) -> None:
        metadata = {"name": f"bench-{number}", "labels": {_BENCH_LABEL: "others"}}
        containers = [{"name": "main", "image": "none:1.0.0"}]
        spec = {"schedulerName": "nobody", "containers": containers}
        cluster.create(POD, {"metadata": metadata, "spec": spec})

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(make, range(there, count)))


def _delete_pods(cluster: Cluster) -> None:
    pods = cluster.list(POD, labels=_BENCH_LABEL, metadata_only=True)[0]

    def delete(name: str) -> None:
        cluster.delete(POD, name, grace_seconds=0)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(delete, [body["metadata"]["name"] for body in pods]))


def _run_command(place: Place, cluster: Cluster) -> float:
    """Run `rollway k8s run` as a process of its own; return the most memory it had, in MiB."""
    arguments = ["run", "--infra", str(place.infra_file), "--no-wait", "--json", "--quiet"]
    arguments += ["-n", cluster.namespace]
    for override in place.overrides:
        arguments += ["--set", override]
    if place.kubeconfig is not None:
        arguments += ["--kubeconfig", str(place.kubeconfig)]
    command = [sys.executable, "-m", "rollway.cli", "k8s", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    result = json.loads(answer or "{}")
    if process.returncode != 0:
        raise RollwayError("A run failed.", str(result.get("message", "")))
    take_down(cluster, result["name"])
    return usage.ru_maxrss / 1024


# --- scaling -------------------------------------------------------------------------------------


def _measure_scale(place: Place, report: Report) -> dict[str, Any]:
    """Grow a graph, and compare the admission of its workers with their own refits."""
    cluster = place.connect()
    if place.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(place.kubeconfig)  # `attach` takes no other
    infra, manifests = place.load(cluster.namespace, 1)
    few, many = _WORKERS
    [graph] = manifests.graphs.values()
    component = next(each for each in graph["spec"]["components"] if each["type"] != "frontend")
    component["replicas"] = few
    checkpoint = infra.launch.env.get("ROLLWAY_BENCH_CHECKPOINT")
    if not isinstance(checkpoint, str):
        raise RollwayError(
            "No checkpoint is named.", "Give --set launch.env.ROLLWAY_BENCH_CHECKPOINT=DIR."
        )

    def grow() -> None:
        scale(cluster, infra.name, f"{component['name']}={many}")

    try:
        bring_up(cluster, infra, replace(manifests, jobs={}, clusters={}), RunOptions(), report)
        target = f"dgd://{cluster.namespace}/{graph['metadata']['name']}"
        joins = asyncio.run(_follow_joins(target, checkpoint, grow, many, report))
    finally:
        take_down(cluster, infra.name)
        cluster.close()
    waits = [join.served - join.listed for join in joins]
    own = [join.served - join.begun for join in joins]
    return {
        "workers": list(_WORKERS),
        "all_listed_seconds": max(join.listed for join in joins),
        "all_served_seconds": max(join.served for join in joins),
        "longest_admission_seconds": max(waits),
        "slowest_refit_seconds": max(own),
        "ratio": max(waits) / max(own),
        "longest_wait_seconds": max(join.begun - join.listed for join in joins),
    }


@dataclass
class _Join:
    """When a new worker was first listed, began its refit, and served; seconds from the scaling."""

    listed: float
    begun: float = 0.0
    served: float = 0.0


async def _follow_joins(
    target: str, checkpoint: str, grow: Callable[[], None], many: int, report: Report
) -> list[_Join]:
    """Scale a graph while the fleet watches it; return what became of the new workers."""
    joins: dict[int, _Join] = {}
    async with rollway.attach(target) as stack, Http() as http:
        await stack.refit(1, checkpoint)
        fleet, before = stack.fleet, set(stack.fleet.versions.by_worker)
        began = time.monotonic()

        async def note_step(step: str, worker: Worker) -> None:
            join = joins.setdefault(worker.instance_id, _Join(time.monotonic() - began))
            join.begun = join.begun or time.monotonic() - began

        fleet.observer = note_step
        async with _repeat(lambda: _note_listed(http, fleet, before, joins, began), 0.25):
            await asyncio.to_thread(grow)
            while sum(bool(join.served) for join in joins.values()) < many - len(before):
                for worker, version in fleet.versions.by_worker.items():
                    if version == 1 and worker in joins and not joins[worker].served:
                        joins[worker].served = time.monotonic() - began
                await asyncio.sleep(0.02)  # of memory only: nobody is asked
            report(f"{len(joins)} workers joined")
    return list(joins.values())


async def _note_listed(
    http: Http, fleet: Fleet, before: set[int], joins: dict[int, _Join], began: float
) -> None:
    """Note the workers that the frontend lists, independently of the fleet."""
    for worker in await list_instances(http, fleet.membership.source) or ():
        if worker not in before:
            joins.setdefault(worker, _Join(time.monotonic() - began))


@asynccontextmanager
async def _repeat(work: Callable[[], Awaitable[None]], seconds: float) -> AsyncIterator[None]:
    """Repeat something until the block ends."""

    async def run() -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def format_figures(figures: dict[str, Any]) -> str:
    lines = []
    for size, run in figures.get("runs", {}).items():
        lines.append(
            f"{size} graphs: {run['requests']} requests until ready, {run['ratio']} times the "
            f"fewest; applied in {run['applied_seconds']} s, ready in {run['ready_seconds']} s, "
            f"which took {run['own_cpu_seconds']} s of CPU and was noticed after "
            f"{run['noticed_seconds']} s; driver {run['overhead_seconds']} s after the gates"
        )
    if "ready_ratio" in figures:
        lines.append(
            f"{SIZES[-1]} graphs are applied in {figures['applied_ratio']} times one's time, and "
            f"applied and ready in {figures['ready_ratio']} times"
        )
    for part in ("memory", "scale"):
        if part in figures:
            values = (f"{name.replace('_', ' ')} {value}" for name, value in figures[part].items())
            lines.append(f"{part}: {', '.join(values)}")
    return "\n".join(lines)
