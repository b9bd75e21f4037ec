"""A cluster of `ray start` processes, which a stack shares with a job of Ray Data."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rollway
from rollway.stack.locks import Lease
from rollway.stack.ray import cluster as names
from tests.conftest import Footprint
from tests.ray.clusters import SIZES, list_left, on_ray
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
PROMPT = list(range(40, 100))


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
def started(tmp_path: Path) -> Iterator[str]:
    """The address of two nodes that were started by `ray start`, as on two machines."""
    lease = Lease()
    port = lease.reserve_port(0, "127.0.0.1", "the port of Ray's GCS")
    lease.release()
    home = tmp_path / "ray-home"
    nodes = [start_ray(home, "--head", f"--port={port}", "--include-dashboard=false")]
    try:
        address = f"{ray.util.get_node_ip_address()}:{port}"
        wait_until(lambda: _connects(address), 60, every=0.5)
        nodes.append(start_ray(home, f"--address={address}"))
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60, every=0.5)
        yield address
    finally:
        ray.shutdown()
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
            node.wait(30)


def _connects(address: str) -> bool:
    try:
        ray.init(address=address, namespace="users-own", log_to_driver=False)
    except ConnectionError:
        return False
    return True


def test_a_stack_and_a_pipeline_share_a_cluster(
    started: str, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """Three of four GPUs are the stack's. A job that wants all it can get never has more than one,
    and ends all the same."""
    data = pytest.importorskip("ray.data", reason="pip install 'ray[data]'")
    data.DataContext.get_current().enable_progress_bars = False
    with rollway.up(on_ray(base_model, "shares", 3)) as stack:
        assert sum(node.gpus for node in names.read_nodes()) == 1
        rows = data.range(6, override_num_blocks=6).map(use_gpu, num_gpus=1, num_cpus=0).take_all()
        stack.refit(1, policies[1].path)
        group = stack.rollouts().generate(PROMPT, SHORT, n=4)
        assert worst(policies[1], group) < TOLERANCE
    assert len(rows) == 6
    spans = sorted((row["began"], row["ended"]) for row in rows)
    for (_, ended), (began, _) in itertools.pairwise(spans):
        assert ended <= began, "two tasks of the job had a GPU at the same time"
    assert list_left() == {}
    assert sum(node.gpus for node in names.read_nodes()) == 4
    assert footprint.settle() == {}


def use_gpu(row: dict[str, int]) -> dict[str, float]:
    import time

    began = time.monotonic()
    time.sleep(0.2)  # the work of the task
    return {"began": began, "ended": time.monotonic()}
