"""Deaths in the middle of work, and two drivers that want the same name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

import rollway
from rollway.stack.ray import launcher
from tests.conftest import Footprint
from tests.ray.clusters import DRIVER, list_left, on_ray, settle, spawn_driver
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
PROMPT = list(range(40, 100))

BUSY_DRIVER = """
import asyncio, json, sys
from pathlib import Path
import rollway.aio
from rollway.rollout.sampling import Sampling

async def hold(step, worker):
    if step == "update":  # the workers are paused, and this one is about to load
        print("busy", flush=True)
        await asyncio.Event().wait()

async def main():
    async with rollway.aio.up(json.loads(sys.argv[1])) as stack:
        if sys.argv[2] == "refit":
            stack.fleet.observer = hold
            await stack.refit(1, Path(sys.argv[3]))
        long = Sampling(max_tokens=200, ignore_eos=True)
        async for _ in stack.rollouts().stream(list(range(9)), long):
            print("busy", flush=True)

asyncio.run(main())
"""
"""A driver that says when it is in the middle of a refit, or of a request."""


def read_until(driver: subprocess.Popen[str], word: str) -> None:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"the driver ended without `{word}`")


@pytest.mark.parametrize("work", ["refit", "request"])
def test_a_driver_that_dies_at_work_leaves_nothing(
    two_nodes: Cluster,
    base_model: Path,
    policies: list[Policy],
    footprint: Footprint,
    work: str,
) -> None:
    spec = on_ray(base_model, "busy", 4)
    spec["models"][0]["env"]["LIGHT_STEP_SECONDS"] = "0.2"
    driver = spawn_driver(BUSY_DRIVER, json.dumps(spec), work, policies[1].path)
    read_until(driver, "busy")
    driver.kill()
    driver.wait()
    assert settle() == {}
    assert footprint.settle() == {}


def test_one_of_two_drivers_gets_the_name(
    two_nodes: Cluster, base_model: Path, footprint: Footprint
) -> None:
    """Both start at the same moment, and neither has been told of the other."""
    spec = json.dumps(on_ray(base_model, "same", 1))
    drivers = [spawn_driver(DRIVER, spec) for _ in range(2)]
    refused = wait_until(lambda: [d for d in drivers if d.poll() is not None], 60)
    assert len(refused) == 1
    (holder,) = (d for d in drivers if d is not refused[0])
    read_until(holder, "ready")
    assert refused[0].returncode == 1
    found = launcher.find("same")
    assert found is not None
    assert {p.state for p in found.state.processes} == {"ready"}
    holder.communicate("")  # it stops its stack, which the other has not touched
    assert holder.returncode == 0
    assert list_left() == {}
    assert footprint.settle() == {}


def test_a_killed_etcd_is_restarted_and_the_fleet_serves_on(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """Its data is on disk: workers of both nodes are listed again, and refits reach all of them."""
    with rollway.up(on_ray(base_model, "etcd", 4)) as stack:
        stack.refit(1, policies[1].path)
        found = launcher.find("etcd")
        assert found is not None
        (etcd,) = (p for p in found.state.processes if p.name == "etcd")
        assert etcd.pid is not None
        os.kill(etcd.pid, signal.SIGKILL)

        def is_healed() -> bool:
            state = found.access.read_state()
            (now,) = (p for p in state.processes if p.name == "etcd")
            served = list(stack.fleet.read_versions().values())
            is_ready = all(p.state == "ready" for p in state.processes)
            return now.pid != etcd.pid and is_ready and served.count(1) == 4

        wait_until(is_healed, 120, every=0.5)
        assert stack.refit(2, policies[2].path).serving == 4
        group = stack.rollouts().generate(PROMPT, SHORT, n=8)
        assert worst(policies[2], group) < TOLERANCE
    assert list_left() == {}
    assert footprint.settle() == {}


def test_nothing_needs_the_dashboard(two_nodes: Cluster) -> None:
    """All tests of this directory run without it; this one shows that it is off."""
    with pytest.raises(Exception, match="dashboard"):
        list_actors(address=two_nodes.address, timeout=5)
