"""`rollway bench k8s`: what `rollway k8s run` costs beside what the cluster itself takes.

It needs a cluster with both operators and an infra file with one graph and a job. Without real ones
`python -m tests.kubernetes.lab` serves a real control plane with stand-in operators.

    requests   what a run asks of the API server until all gates are passed, against the fewest
               that could do: one write for each object, one watch for each kind, two questions to
               each frontend. A run polls, so it asks more the longer the graphs take
    many       1, 8 and 32 graphs: from the first apply until all gates are passed, and what of
               that is the command's own: its CPU time, and how long after the last graph was ready
               it noticed. Both names give the same runs
    memory     the command's memory in a namespace with 10 and with 1,000 pods of others
    scale      a graph grows from 2 to 32 workers: how long each took from its first listing until
               it served the current version, against its own refit in that

Operators make pods in their own time, and the API server validates graphs in its own: the ratio of
the whole says something only where pods take some seconds (`lab --ready-after`).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import rollway
from benchmarks import round_floats
from benchmarks.inputs import read_parts
from rollway.cli.output import print_progress as say
from rollway.errors import RollwayError
from rollway.fleet.workers import Worker, list_instances
from rollway.http import Http
from rollway.kubernetes.api_server import ApiServer, Refusal, explain
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import Limits, RunOptions, do_at_once
from rollway.kubernetes.infra import load_infra
from rollway.kubernetes.manifests import Manifests, render_all
from rollway.kubernetes.objects import DGD, DGD_ALPHA, KEY_LABEL, POD
from rollway.kubernetes.run import bring_up, start_run
from rollway.kubernetes.scale import scale
from rollway.kubernetes.spec import Infra
from rollway.kubernetes.teardown import take_down

Options = argparse.Namespace
PARTS = ("requests", "many", "memory", "scale")
_SIZES = (1, 8, 32)
_PODS = (10, 1000)
_WORKERS = (2, 32)
_BENCH_LABEL = "rollway.dev/bench"
_REPEATS = 3
_LIST_SECONDS = 0.25
_WATCH_SECONDS = 3600


def run(options: Options) -> tuple[int, dict[str, Any]]:
    parts = read_parts(options, PARTS)
    figures: dict[str, Any] = {}
    if "requests" in parts or "many" in parts:
        figures["runs"] = runs = {size: _measure_runs(options, size) for size in _SIZES}
        for name in ("applied", "ready"):
            few, many = (runs[size][f"{name}_seconds"] for size in (1, _SIZES[-1]))
            figures[f"{name}_ratio"] = many / few
    if "memory" in parts:
        figures["memory"] = _measure_memory(options)
    if "scale" in parts:
        figures["scale"] = _measure_scale(options)
    return 0, round_floats(figures, ".4g")


def _connect(options: Options) -> Cluster:
    return Cluster.connect(kubeconfig=options.kubeconfig, namespace=options.namespace)


def _load(options: Options, namespace: str, graphs: int) -> tuple[Infra, Manifests]:
    """Return the run with its first graph as often as asked for."""
    infra = load_infra(None, options.infra, options.set)
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


def _measure_runs(options: Options, graphs: int) -> dict[str, Any]:
    """Run several times; return the counts of the last run, and the shortest times."""
    measured = []
    for turn in range(_REPEATS):
        say(f"{graphs} graphs, run {turn + 1} of {_REPEATS}")
        measured.append(_measure_run(options, graphs))
    names = [f"{name}_seconds" for name in ("applied", "ready", "noticed", "overhead")]
    return measured[-1] | {name: min(figures[name] for figures in measured) for name in names}


def _measure_run(options: Options, graphs: int) -> dict[str, Any]:
    cluster = _connect(options)
    infra, manifests = _load(options, cluster.namespace, graphs)
    sent, asked = _note_requests(cluster.connection), Counter[str]()
    times: dict[str, float] = {}

    def note(text: str) -> None:
        if text.endswith(" is suspended"):
            times["cpu"] = time.process_time()
        elif text.startswith("resume "):
            asked.update(sent)
            times["resumed"] = time.monotonic()
            times["cpu"] = time.process_time() - times["cpu"]

    watcher, seen = _watch_graphs(options, graphs)
    # A run that fails undoes itself; one of this name that was there before stays.
    how = RunOptions(wait=False, limits=Limits(grace=30.0))
    steps = start_run(cluster, infra, manifests, how, note).steps
    take_down(cluster, infra.name)
    watcher.join()
    # A write for each object, a watch of jobs, graphs and pods, and two questions to each frontend:
    # for its workers, and for its models.
    fewest = 1 + graphs + 3 + 2 * graphs
    return {
        "graphs": graphs,
        "requests": asked.total(),
        "fewest": fewest,
        "ratio": asked.total() / fewest,
        "asked": dict(sorted(asked.items())),
        "applied_seconds": steps["graphs applied"] - steps["suspended"],
        "ready_seconds": steps["gates"] - steps["suspended"],
        "noticed_seconds": times["resumed"] - seen["ready_at"],
        "own_cpu_seconds": times["cpu"] - seen["cpu_seconds"],
        "overhead_seconds": steps["driver"] - steps["gates"],
    }


def _note_requests(server: ApiServer) -> list[str]:
    """Return a list that gets every request from now on, repeats included, as verb and plural.
    In a pod the questions to frontends are not in it: they do not go to the API server."""
    sent, send = list[str](), server.send

    def note(method: str, path: str, **rest: Any) -> Any:
        sent.append(name_request(method, path))
        return send(method, path, **rest)

    server.send = note  # type: ignore[method-assign]
    return sent


def name_request(method: str, path: str) -> str:
    """Return the verb, as RBAC has it, or `proxy`, and the plural that a request is for."""
    plural, *name = re.split("/namespaces/[^/]+/", path.partition("?")[0])[-1].split("/")
    verbs = {"GET": "get" if name else "list", "POST": "create"}
    return f"{'proxy' if 'proxy' in name else verbs.get(method, method.lower())} {plural}"


def _watch_graphs(options: Options, graphs: int) -> tuple[threading.Thread, dict[str, float]]:
    """Note when the operator is done with so many graphs, as another client of the API server;
    return the thread that watches, and what it has seen when it has ended."""
    cluster, done, seen = _connect(options), set[str](), dict[str, float]()
    cluster.list(DGD)  # says which version is served
    asked = Refusal("watch", DGD_ALPHA if cluster.has_old_graphs else DGD, cluster.namespace)
    path = f"{asked.kind.make_path(cluster.namespace)}?watch=true&timeoutSeconds={_WATCH_SECONDS}"
    response = cluster.connection.send(
        "GET", path, headers={}, read_seconds=_WATCH_SECONDS, preload=False
    )
    if response.status != 200:
        raise explain(asked.with_answer(response.status, response.read()))

    def watch() -> None:
        for line in response:
            body = json.loads(line)["object"]
            if (body.get("status") or {}).get("state") == "successful":
                done.add(body["metadata"]["name"])
            if len(done) == graphs:
                seen.update(ready_at=time.monotonic(), cpu_seconds=time.thread_time())
                break
        response.close()

    # A daemon: of a run that fails it does not see the end.
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread, seen


# --- memory --------------------------------------------------------------------------------------


def _measure_memory(options: Options) -> dict[str, Any]:
    cluster, peaks = _connect(options), {}
    try:
        for count in _PODS:
            say(f"memory with {count} pods of others")
            _make_pods(cluster, count)
            peaks[count] = _run_command(options, cluster)
    finally:
        names = [body["metadata"]["name"] for body in cluster.list(POD, labels=_BENCH_LABEL)]
        do_at_once(lambda name: cluster.delete(POD, name), names)
    few, many = (peaks[count] for count in _PODS)
    return {"pods": list(_PODS), "peak_mib": [few, many], "ratio": many / few}


def _make_pods(cluster: Cluster, count: int) -> None:
    """Create pods that nothing schedules, up to a number in all."""

    def make(number: int) -> None:
        metadata = {"name": f"bench-{number}", "labels": {_BENCH_LABEL: "others"}}
        containers = [{"name": "main", "image": "none:1.0.0"}]
        spec = {"schedulerName": "nobody", "containers": containers}
        cluster.create(POD, {"metadata": metadata, "spec": spec})

    do_at_once(make, range(len(cluster.list(POD, labels=_BENCH_LABEL)), count))


def _run_command(options: Options, cluster: Cluster) -> float:
    """Run `rollway k8s run` as a process of its own; return the most memory it had, in MiB."""
    command = [sys.executable, "-m", "rollway.cli", "k8s", "run", "--infra", str(options.infra)]
    command += ["--no-wait", "--json", "--quiet", "-n", cluster.namespace]
    command += [part for override in options.set for part in ("--set", override)]
    if options.kubeconfig is not None:
        command += ["--kubeconfig", str(options.kubeconfig)]
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


def _measure_scale(options: Options) -> dict[str, Any]:
    """Grow a graph, and compare the admission of its workers with their own refits."""
    cluster = _connect(options)
    if options.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(options.kubeconfig)  # `attach` takes no other
    infra, manifests = _load(options, cluster.namespace, 1)
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

    bring_up(cluster, infra, replace(manifests, jobs={}, clusters={}), RunOptions(), say)
    try:
        target = f"dgd://{cluster.namespace}/{graph['metadata']['name']}"
        joins = asyncio.run(_follow_joins(target, checkpoint, grow))
    finally:
        take_down(cluster, infra.name)
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


async def _follow_joins(target: str, checkpoint: str, grow: Callable[[], None]) -> list[_Join]:
    """Scale a graph while the fleet watches it; return what became of the new workers."""
    joins: dict[int, _Join] = {}
    async with rollway.attach(target) as stack, Http() as http:
        await stack.refit(1, checkpoint)
        fleet, before = stack.fleet, set(stack.fleet.versions.by_worker)
        began = time.monotonic()

        async def note_step(step: str, worker: Worker) -> None:
            join = joins.setdefault(worker.instance_id, _Join(time.monotonic() - began))
            join.begun = join.begun or time.monotonic() - began

        async def note_listed() -> None:
            """Note the workers that the frontend lists, independently of the fleet."""
            while True:
                for worker in await list_instances(http, fleet.membership.source) or ():
                    if worker not in before:
                        joins.setdefault(worker, _Join(time.monotonic() - began))
                await asyncio.sleep(_LIST_SECONDS)

        fleet.observer = note_step
        listing = asyncio.create_task(note_listed())
        await asyncio.to_thread(grow)
        while sum(bool(join.served) for join in joins.values()) < _WORKERS[1] - len(before):
            for worker, version in fleet.versions.by_worker.items():
                if version == 1 and worker in joins and not joins[worker].served:
                    joins[worker].served = time.monotonic() - began
            await asyncio.sleep(0.02)  # of memory only: nobody is asked
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)
    say(f"{len(joins)} workers joined")
    return list(joins.values())
