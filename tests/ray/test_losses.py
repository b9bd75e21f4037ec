"""Nodes that are lost: raylets are killed with all their processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import rollway
from rollway.errors import StackNotRunning
from rollway.stack.ray import launcher
from tests.conftest import Footprint
from tests.ray.clusters import SIZES, on_ray, run_cluster, settle
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
PROMPT = list(range(40, 100))


@pytest.fixture(scope="module")
def head_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("ray-home")
    with run_cluster(1, home) as running:
        patch = pytest.MonkeyPatch()
        patch.setenv("ROLLWAY_HOME", str(home))  # nodes that are added inherit it
        ray.init(address=running.address, namespace="users-own", log_to_driver=False)
        yield running
        patch.undo()


@pytest.fixture
def cluster(head_node: Cluster) -> Iterator[Cluster]:
    """A cluster of two nodes, of which a test may kill the second."""
    head_node.add_node(**SIZES)
    yield head_node
    for node in list(head_node.worker_nodes):
        head_node.remove_node(node)
    assert settle() == {}


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
        wait_until(lambda: found.access.read_state().waiting, 60, every=0.2)
        assert len(found.access.read_state().waiting) == 2
        assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=4)) < TOLERANCE

        cluster.add_node(**SIZES)
        wait_until(lambda: count_ready(found) == 4, 60, every=0.2)
        wait_until(lambda: found.access.read_state().waiting == [], 10)
        served = lambda: list(stack.fleet.read_versions().values()).count(1)  # noqa: E731
        wait_until(lambda: served() == 4, 60, every=0.2)
        pieces = found.access.call("ask_keepers", "read_record", {}, frozenset()).values()
        lines = [line for files in pieces for name, data in files.items()
                 for line in data.splitlines() if name.startswith("head-")]  # fmt: skip
        events = [json.loads(line).get("event") for line in lines]
        assert [e for e in events if e in ("node lost", "waiting", "placed again")] == [
            "node lost", "waiting", "placed again",
        ]  # fmt: skip
    assert settle() == {}
    assert footprint.settle(60) == {}


def test_a_lost_node_ends_the_stack_if_it_is_to_fail(
    cluster: Cluster, base_model: Path, footprint: Footprint
) -> None:
    with rollway.up(on_ray(base_model, "fails", 4, on_node_lost="fail")) as stack:
        rollouts = stack.rollouts()
        kill_other_node(cluster)
        wait_until(lambda: launcher.find("fails") is None, 60, every=0.2)
        with pytest.raises(StackNotRunning, match="The actor that ran the engines of node"):
            rollouts.generate(PROMPT, SHORT)
    assert settle() == {}
    assert footprint.settle(60) == {}


def test_calls_name_the_loss_of_the_services_node(
    cluster: Cluster, base_model: Path, footprint: Footprint
) -> None:
    """Nothing of the stack is on the head node, so that the cluster survives."""
    with rollway.up(on_ray(base_model, "unserved", 2, head="avoid")) as stack:
        rollouts = stack.rollouts()
        kill_other_node(cluster)
        wait_until(lambda: launcher.find("unserved") is None, 60, every=0.2)
        with pytest.raises(StackNotRunning, match="the node of its frontend and services is lost"):
            rollouts.generate(PROMPT, SHORT)
    assert settle() == {}
    assert footprint.settle(60) == {}
