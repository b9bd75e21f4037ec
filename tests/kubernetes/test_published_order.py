"""Our order of requests beside that of two published tools for the same job.

tests/data/kubernetes_transcripts has what NeMo-RL's `nrl-k8s run --rayjob` asked of an API server,
as its pull requests 2429 (inference first) and 2990 (a suspended job first) have it. Requests are
reduced to steps. Ours are the same steps in the same order, but for `DIFFERENCES`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import RollwayError
from rollway.kubernetes.cluster import Cluster
from tests.kubernetes.flows import QUICK, RUN, World, make_graph, open_world

TRANSCRIPTS = Path(__file__).parents[1] / "data" / "kubernetes_transcripts"

DIFFERENCES = {
    "pr2429_ok": [],
    "pr2990_ok": [
        # It believes the operator; we ask the frontend before the job is resumed.
        ("insert", "resume job", "ask frontend"),
    ],
    "pr2429_neverready": [
        # It applies graphs one after the other; we apply them at once, so nothing is asked between.
        ("drop", "ask frontend"),
        ("drop again", "create graph"),
        # It leaves the graph that failed; we delete every one of the run.
        ("append", "delete graph"),
    ],
    "pr2429_rollback2": [
        # The same. The graph that the API refused was never there.
        ("drop", "ask frontend"),
        ("drop again", "create graph"),
    ],
    "pr2429_rayjobfail": [],
}
"""By transcript: what we do differently, on purpose."""


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


def name_step(method: str, path: str, body: Any) -> str | None:
    """Name the step that a request is; None for reads of states, which polls and watches do."""
    if "/dash/api/jobs" in path or ("8265" in path and "/api/jobs" in path):
        return "submit driver" if method == "POST" else None
    if "/proxy/" in path:
        return "ask frontend"
    kind = "graph" if "dynamographdeployments" in path else "job" if "rayjobs" in path else ""
    if not kind or method == "GET":
        return None
    if method == "DELETE":
        return f"delete {kind}"
    if method == "PATCH" and "suspend" in json.dumps(body) and kind == "job":
        return "resume job"
    if method == "PATCH" and set(body) == {"metadata"}:
        return "own graph"
    return f"create {kind}"


def reduce_steps(requests: list[tuple[str, str, Any]]) -> list[str]:
    """Name the steps; the same step several times in a row is one, but for deletions."""
    steps: list[str] = []
    for request in requests:
        step = name_step(*request)
        if step and (step != (steps or [""])[-1] or step.startswith("delete")):
            steps.append(step)
    return steps


def read_transcript(name: str) -> list[str]:
    requests = []
    for line in (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines():
        method, path, *rest = [*json.loads(line), "", None]
        if not path:  # a refusal that the experiment put in: POST DGD my-dgd2 -> 422
            method, path = "POST", "/dynamographdeployments"
        body = rest[0] if isinstance(rest[0], dict) else {}
        requests.append((method, path, body.get("body", body)))
    return reduce_steps(requests)


def apply_differences(steps: list[str], name: str) -> list[str]:
    for word, *values in DIFFERENCES[name]:
        if word == "insert":
            steps.insert(steps.index(values[0]), values[1])
        elif word == "append":
            steps.append(values[0])
        elif word == "drop":
            steps = [step for step in steps if step != values[0]]
        elif word == "drop again":
            last = len(steps) - 1 - steps[::-1].index(values[0])
            del steps[last]
    return steps


def record(world: World) -> list[tuple[str, str, Any]]:
    """Note every request of the product from now on."""
    requests: list[tuple[str, str, Any]] = []
    send = world.cluster.connection.send

    def note(method: str, path: str, **rest: Any) -> Any:
        content = rest.get("body")
        is_json = isinstance(content, bytes) and content[:1] == b"{"
        requests.append((method, path, json.loads(content) if is_json else {}))  # type: ignore[arg-type]
        return send(method, path, **rest)

    world.cluster.connection.send = note  # type: ignore[method-assign]
    return requests


def test_the_order_of_a_suspended_job_is_that_of_pull_request_2990(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    requests = record(world)
    world.run(infra)
    assert reduce_steps(requests) == apply_differences(read_transcript("pr2990_ok"), "pr2990_ok")
    world.call("down", RUN)


def test_the_order_of_inference_first_is_that_of_pull_request_2429(world: World) -> None:
    """With a KubeRay that forgets the driver, as in the transcript."""
    world.kuberay.get_faults(RUN).no_submission = True
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    requests = record(world)
    world.run(infra, order="inference-first")
    assert reduce_steps(requests) == apply_differences(read_transcript("pr2429_ok"), "pr2429_ok")
    world.call("down", RUN)


@pytest.mark.parametrize("name", ["pr2429_neverready", "pr2429_rollback2", "pr2429_rayjobfail"])
def test_a_rollback_deletes_what_the_published_one_leaves(world: World, name: str) -> None:
    graphs, launch = [make_graph("policy"), make_graph("second")], {"entrypoint": "sleep 60"}
    limits = dataclasses.replace(QUICK, gates=4)
    if name == "pr2429_neverready":
        world.dynamo.get_faults("policy").never_ready = True
        world.dynamo.get_faults("second").never_ready = True
    elif name == "pr2429_rollback2":
        graphs[1] = make_graph("second", minAvailable=5)
    else:
        graphs, launch = graphs[:1], {**launch, "overrides": {"backoffLimit": "many"}}  # type: ignore[dict-item]
    infra, _ = world.load(*graphs, launch=launch)
    requests = record(world)
    with pytest.raises(RollwayError):
        world.run(infra, order="inference-first", limits=limits)
    assert reduce_steps(requests) == apply_differences(read_transcript(name), name)
    world.wait_until_empty()
