"""A cluster of `ray start` processes, which a stack shares with a job of Ray Data."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rollway.stack.locks import Lease
from tests.conftest import Footprint
from tests.ray.clusters import SIZES, on_ray, spawn_driver
from tests.stack.policies import Policy
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

DRIVER = """
import json, os, pathlib, subprocess, sys, time
import ray, ray.data, rollway
from rollway.stack.ray import cluster
from tests.ray.clusters import list_left
from tests.stack.serving import SHORT
from tests.waiting import wait_until

def use_gpu(row):
    began = time.monotonic()
    time.sleep(0.2)  # the work of the task
    return {"began": began, "ended": time.monotonic()}

def count_free():
    return sum(node.gpus for node in cluster.read_nodes())

ray.init(address=sys.argv[1], log_to_driver=False)
wait_until(lambda: count_free() == 4, 60)
with rollway.up(json.loads(sys.argv[2])) as stack:
    free = count_free()
    job = ray.data.range(6, override_num_blocks=6).map(use_gpu, num_gpus=1, num_cpus=0)
    rows = job.take_all()
    report = stack.refit(1, sys.argv[3])
    # Another process of ours finds the stack by its name alone.
    line = [sys.executable, "-m", "rollway.cli", "status", "shares", "--json"]
    status = subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout
    rollouts = stack.rollouts().generate(list(range(40, 100)), SHORT, n=4)
wait_until(lambda: count_free() == 4, 30)  # the job's own GPU is reported free a moment later
answer = {
    "phases": [each["phase"] for each in json.loads(status)["stacks"]],
    "places": len(list(pathlib.Path(os.environ["ROLLWAY_HOME"], "ray").iterdir())),
    "free": free, "rows": rows, "serving": report.serving, "left": list_left(),
    "versions": [rollout.weight_version for rollout in rollouts], "free again": count_free(),
}
print("ANSWER", json.dumps(answer), flush=True)
"""
"""A driver of its own: Ray reads the settings of its tokens once in the life of a process."""


def start_ray(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Run `ray start` until it gets a signal. (`ray stop` would end other people's clusters.)"""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    sizes = [f"--{name.replace('_', '-')}={count}" for name, count in SIZES.items()]
    # Several nodes of one machine must not share Ray's default ranges of ports.
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=150000000"]
    return subprocess.Popen(
        [*command, *sizes, *ports, "--disable-usage-stats", *arguments],
        env={**os.environ, "ROLLWAY_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of two nodes that were started by `ray start`, as on two machines, with a token
    of their own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    lease = Lease()
    port = lease.reserve_port(0, "127.0.0.1", "the port of Ray's GCS")
    lease.release()
    home, address = tmp_path / "ray-home", f"{ray.util.get_node_ip_address()}:{port}"
    nodes = [start_ray(home, "--head", f"--port={port}", "--include-dashboard=false")]
    try:
        wait_until(lambda: _is_listening(address), 60)
        nodes.append(start_ray(home, f"--address={address}"))
        yield address
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(60)


def test_a_stack_and_a_pipeline_share_a_cluster(
    started: str, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """Three of four GPUs are the stack's. A job that wants all it can get never has more than one,
    and ends all the same."""
    spec = json.dumps(on_ray(base_model, "shares", 3))
    driver = spawn_driver(DRIVER, started, spec, policies[1].path)
    output, _ = driver.communicate(timeout=200)
    (line,) = (line for line in output.splitlines() if line.startswith("ANSWER "))
    answer = json.loads(line.removeprefix("ANSWER "))
    assert answer["free"] == 1
    assert len(answer["rows"]) == 6
    spans = sorted((row["began"], row["ended"]) for row in answer["rows"])
    for (_, ended), (began, _) in itertools.pairwise(spans):
        assert ended <= began, "two tasks of the job had a GPU at the same time"
    assert (answer["phases"], answer["places"]) == (["ready"], 0)
    assert answer["serving"] == 3 and answer["versions"] == [1] * 4
    assert answer["left"] == {} and answer["free again"] == 4
    assert footprint.settle() == {}


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True
