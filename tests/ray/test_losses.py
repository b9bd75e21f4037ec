"""Nodes that are lost: raylets are killed with all their processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import rollway
from rollway.errors import StackNotRunning
from rollway.stack.ray import launcher
from tests.conftest import Footprint
from tests.ray.clusters import on_ray, run_cluster, settle
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
PROMPT = list(range(40, 100))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with run_cluster(2, tmp_path / "ray-home") as running:
        ray.init(address=running.address, namespace="users-own", log_to_driver=False)
        yield running


def kill_other_node(cluster: Cluster) -> None:
    (other,) = cluster.worker_nodes
    cluster.remove_node(other, allow_graceful=False)


def count_ready(found: launcher.RayStack) -> int:
    state = found.access.read_state()
    return sum(p.role == "worker" and p.state == "ready" for p in state.processes)


def test_replicas_of_a_lost_node_wait_for_room_and_start_there(
    cluster: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    with rollway.up(on_ray(base_model, "waits", 4)) as stack:
        stack.refit(1, policies[1].path)
        found = launcher.find("waits")
        assert found is not None
        kill_other_node(cluster)
        wait_until(lambda: found.access.read_state().waiting, 120, every=0.5)
        assert len(found.access.read_state().waiting) == 2
        assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=4)) < TOLERANCE

        cluster.add_node(num_cpus=16, num_gpus=2)
        wait_until(lambda: count_ready(found) == 4, 120, every=0.5)
        assert found.access.read_state().waiting == []
        served = lambda: list(stack.fleet.read_versions().values()).count(1)  # noqa: E731
        wait_until(lambda: served() == 4, 120, every=0.5)
        events = [entry["event"] for entry in found.access.call("read_events")]
        assert [e for e in events if e in ("node lost", "waiting", "placed again")] == [
            "node lost", "waiting", "placed again",
        ]  # fmt: skip
    assert settle() == {}
    assert footprint.settle(60) == {}


def test_a_lost_node_ends_the_stack_if_it_is_to_fail(
    cluster: Cluster, base_model: Path, footprint: Footprint
) -> None:
    with rollway.up(on_ray(base_model, "fails", 4, on_node_lost="fail")) as stack:
        kill_other_node(cluster)
        found = launcher.find("fails")
        if found is not None:  # it may have ended already
            wait_until(lambda: launcher.find("fails") is None, 120, every=0.5)
        with pytest.raises(StackNotRunning, match="no longer runs on Ray"):
            stack.rollouts().generate(PROMPT, SHORT)
    assert settle() == {}
    assert footprint.settle(60) == {}
