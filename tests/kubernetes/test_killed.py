"""The command is killed, or interrupted, at every step; `down` and a second `run` cope."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD, RAYCLUSTER, RAYJOB
from tests.kubernetes.flows import RUN, World, make_env, make_graph, open_world, write_infra

SUSPENDED = [
    "create RayJob",
    "is suspended",
    "applied DynamoGraphDeployment",
    "wait for the gates",
    "resume RayJob",
    "wait for the RayCluster",
    "owns",
    "was submitted by",
    "wait until math ends",
]
INFERENCE_FIRST = [
    "applied DynamoGraphDeployment",
    "wait for the gates",
    "create RayJob",
    "wait for the RayCluster",
    "owns",
]
LAUNCH: dict[str, Any] = {"entrypoint": "sleep 60", "ttl_seconds": 600}


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


def run_until(world: World, step: str, number: int, *arguments: str) -> tuple[int, str]:
    """Start `rollway k8s run` and send it a signal when it reports a step."""
    graphs = [make_graph("policy"), make_graph("judge")]
    infra = write_infra(world.folder / "cli", *graphs, launch=LAUNCH)
    command = world.command("run", "--infra", infra, "--driver-grace", "2", *arguments)
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=make_env(),
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []
    sent = False
    for line in process.stderr:
        lines.append(line)
        if step in line and not sent:
            sent = True
            os.kill(process.pid, number)
            if number == signal.SIGKILL:
                break
    status = process.wait(60)
    assert sent, f"{step!r} was not reported:\n{''.join(lines)}"
    return status, "".join(lines)


@pytest.mark.parametrize("step", SUSPENDED)
def test_killed_at_any_step_down_leaves_nothing(world: World, step: str) -> None:
    run_until(world, step, signal.SIGKILL)
    world.call("down", RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("step", INFERENCE_FIRST)
def test_killed_before_the_job_down_leaves_nothing(world: World, step: str) -> None:
    run_until(world, step, signal.SIGKILL, "--order", "inference-first")
    world.call("down", RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("step", SUSPENDED[:-1])
def test_killed_at_any_step_a_second_run_goes_on(world: World, step: str) -> None:
    run_until(world, step, signal.SIGKILL)
    before = {body["metadata"]["uid"] for body in world.list(RAYJOB)}
    infra = world.folder / "cli" / "infra.yaml"
    result = world.call("run", "--infra", infra, "--resume", "--no-wait", "--driver-grace", "2")
    assert result["state"] == "submitted"
    jobs = world.list(RAYJOB)
    assert len(jobs) == len(world.list(RAYCLUSTER)) == 1
    assert len(world.list(DGD)) == 2
    assert not before or {body["metadata"]["uid"] for body in jobs} == before
    for name in ("policy", "judge"):
        assert world.get_owners(DGD, name) == [f"RayCluster {result['ray_cluster']}"]
    world.call("down", RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["is suspended", "wait for the gates", "wait for the RayCluster"])
def test_interrupted_before_the_driver_nothing_is_left(
    world: World, step: str, number: signal.Signals
) -> None:
    world.dynamo.get_faults("policy").ready_after = 2.0
    status, text = run_until(world, step, number)
    assert status == 130, text
    world.wait_until_empty()


def test_interrupted_while_it_waits_for_the_end_the_job_goes_on(world: World) -> None:
    status, _ = run_until(world, "wait until math ends", signal.SIGINT)
    assert status == 130
    assert world.get(RAYJOB, RUN)["status"]["jobStatus"] == "RUNNING"
    world.call("down", RUN)
    world.wait_until_empty()
