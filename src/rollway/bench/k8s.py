"""`rollway bench k8s`: what `rollway k8s run` costs beside what the cluster itself takes.

It needs a cluster with both operators and an infra file with one graph and a job. Without real ones
`python -m tests.kubernetes.lab` serves a real control plane with stand-in operators.

`requests` counts what a run asks of the API server until all gates are passed, against the fewest
that could do: one write for each object, one watch for each kind, two questions to each frontend.
`many` runs 1, 8 and 32 graphs. `memory` runs the command in a namespace with 10 and with 1,000
pods of others. `scale` grows the graph from 2 to 32 workers, and waits until all serve the current
version.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollway.bench import round_floats
from rollway.errors import RollwayError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.infra import load_infra
from rollway.kubernetes.kinds import POD
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
        figures["applied_ratio"] = runs[SIZES[-1]]["applied_seconds"] / runs[1]["applied_seconds"]
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
    for name in ("applied_seconds", "overhead_seconds"):
        best[name] = min(figures[name] for figures in measured)
    return best


def _measure_run(place: Place, graphs: int) -> dict[str, Any]:
    cluster = place.connect()
    infra, manifests = place.load(cluster.namespace, graphs)
    asked: Counter[tuple[str, str]] = Counter()

    def note(text: str) -> None:
        if text.startswith("resume "):
            asked.update(cluster.requests)

    try:
        options = RunOptions(wait=False, limits=Limits(grace=30.0))
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
        "gates_seconds": steps["gates"] - steps["graphs applied"],
        "overhead_seconds": steps["driver"] - steps["gates"],
    }


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
    import rollway

    cluster = place.connect()
    if place.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(place.kubeconfig)  # `attach` takes no other
    infra, manifests = place.load(cluster.namespace, 1)
    few, many = _WORKERS
    [graph] = manifests.graphs.values()
    component = next(each for each in graph["spec"]["components"] if each["type"] != "frontend")
    component["replicas"] = few
    name = graph["metadata"]["name"]
    checkpoint = infra.launch.env.get("ROLLWAY_BENCH_CHECKPOINT")
    if not isinstance(checkpoint, str):
        raise RollwayError(
            "No checkpoint is named.", "Give --set launch.env.ROLLWAY_BENCH_CHECKPOINT=DIR."
        )
    try:
        bring_up(cluster, infra, replace(manifests, jobs={}, clusters={}), RunOptions(), report)
        with rollway.attach(f"dgd://{cluster.namespace}/{name}") as stack:
            stack.refit(1, checkpoint)
            began = time.monotonic()
            scale(cluster, infra.name, f"{component['name']}={many}")
            listed: dict[int, float] = {}
            served: dict[int, float] = {}
            while len(served) < many:
                for worker, version in _read_versions(stack).items():
                    now = time.monotonic() - began
                    listed.setdefault(worker, now)
                    if version == 1:
                        served.setdefault(worker, now)
                report(f"{len(served)} of {many} workers serve version 1")
                time.sleep(1.0)
            again = stack.refit(2, checkpoint)
        slowest = max(
            worker.preflight_seconds
            + worker.pause_seconds
            + worker.update_seconds
            + worker.resume_seconds
            for worker in again.workers
        )
        waits = [served[worker] - listed[worker] for worker in served]
    finally:
        take_down(cluster, infra.name)
        cluster.close()
    return {
        "workers": list(_WORKERS),
        "all_listed_seconds": max(listed.values()),
        "all_served_seconds": max(served.values()),
        "longest_admission_seconds": max(waits),
        "slowest_refit_seconds": slowest,
        "ratio": max(waits) / slowest,
    }


def _read_versions(stack: Any) -> dict[int, int]:
    try:
        versions: dict[int, int] = stack.fleet.read_versions()
    except RollwayError:
        return {}
    return versions


def format_figures(figures: dict[str, Any]) -> str:
    lines = []
    for size, run in figures.get("runs", {}).items():
        lines.append(
            f"{size} graphs: {run['requests']} requests until ready, {run['ratio']} times the "
            f"fewest; applied in {run['applied_seconds']} s, driver {run['overhead_seconds']} s "
            "after the gates"
        )
    if "applied_ratio" in figures:
        lines.append(
            f"{SIZES[-1]} graphs are applied in {figures['applied_ratio']} times one's time"
        )
    for part in ("memory", "scale"):
        if part in figures:
            values = (f"{name.replace('_', ' ')} {value}" for name, value in figures[part].items())
            lines.append(f"{part}: {', '.join(values)}")
    return "\n".join(lines)
