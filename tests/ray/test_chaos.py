"""`rollway chaos` on a stack over two raylets, and its control."""

from __future__ import annotations

import pytest
from ray.cluster_utils import Cluster

from tests.conftest import Cli, Footprint
from tests.light.spec import WITH_LIGHT_WORKERS
from tests.ray.clusters import list_left
from tests.stack.chaos import BAD, chaos

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
ON_TWO_NODES = (
    *WITH_LIGHT_WORKERS, "--set", "launcher=ray", "--set", "models.0.replicas=4",
)  # fmt: skip
FAULTS = (
    "none", "kill_worker", "stop_worker", "worker_leave", "worker_join", "connection_reset",
    "corrupt_checkpoint", "frontend_restart", "supervisor_crash", "refit_cancelled",
)  # fmt: skip


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_tokens_are_exact_while_things_break_on_two_nodes(
    two_nodes: Cluster, cli: Cli, footprint: Footprint, rounds: int
) -> None:
    only = [word for fault in FAULTS for word in ("--fault", fault)]
    report = chaos(cli, *ON_TWO_NODES, "--rounds", str(rounds), *only, timeout=800)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["rounds"] == rounds and report["tokens_checked"] > 400 * rounds
    assert len(report["faults"]) >= rounds // 3
    assert list_left() == {}
    assert footprint.settle() == {}


def test_without_protection_stale_tokens_are_found_on_two_nodes(
    two_nodes: Cluster, cli: Cli
) -> None:
    report = chaos(cli, *ON_TWO_NODES, "--rounds", "3", "--unprotected")
    assert report["stale_tokens"] > 0 and report["wrong_logprobs"] > 0
