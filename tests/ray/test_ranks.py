"""A replica over two nodes of Ray: served, refitted, and started again when one rank dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rollway
from rollway.errors import NoWorkers
from rollway.stack.ray import cluster as names
from rollway.stack.ray import launcher
from rollway.stack.state import ProcessState
from tests.conftest import Footprint
from tests.ray.clusters import list_left, on_ray
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
PROMPT = list(range(40, 100))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_on_two_nodes_live_and_die_together(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint, rank: int
) -> None:
    spec = on_ray(base_model, "ranks", 1)
    spec["models"][0]["tensor_parallel"] = 4  # no node has more than two GPUs
    with rollway.up(spec) as stack:
        found = launcher.find("ranks")
        assert found is not None

        def read_ranks() -> list[ProcessState]:
            processes = found.access.read_state().processes
            return [process for process in processes if process.role == "worker"]

        assert [(p.nodes, p.state) for p in read_ranks()] == [(2, "ready")] * 2
        assert sum(node.gpus for node in names.read_nodes()) == 0
        stack.refit(1, policies[1].path)
        pids = [process.pid for process in read_ranks()]
        leader = pids[rank]
        assert leader is not None
        os.kill(leader, signal.SIGKILL)

        def is_healed() -> bool:
            again = read_ranks()
            is_new = not {process.pid for process in again} & set(pids)
            try:
                versions = list(stack.fleet.read_versions().values())
            except NoWorkers:  # the dead worker is no longer listed, the new one not yet
                return False
            return is_new and {p.state for p in again} == {"ready"} and versions == [1]

        wait_until(is_healed, 120, every=0.5)
        assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=4)) < TOLERANCE
    assert list_left() == {}
    assert footprint.settle() == {}
