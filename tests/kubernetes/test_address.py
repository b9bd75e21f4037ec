"""Attach to a graph by its name: through the API server's proxy, to a real frontend and workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollway
from rollway.errors import Forbidden, StackNotRunning, UsageError
from rollway.kubernetes.address import parse_target, reach_graph
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.gates import wait_until_ready
from rollway.kubernetes.objects import DGD
from tests.conftest import Cli
from tests.kubernetes.accounts import connect_as
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.graphs import SECRET
from tests.kubernetes.manifests import make_graph
from tests.waiting import wait_until

LONG = 90.0


@pytest.fixture
def graph(
    admin: Cluster, light_dynamo: DynamoOperator, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a graph with two light workers."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    applied = admin.apply(DGD, make_graph(workers=2))
    wait_until_ready(admin, [applied], timeout=LONG)
    yield f"dgd://{admin.namespace}/policy"


def test_tokens_and_workers_come_through_the_proxy(
    graph: str, admin: Cluster, base_model: Path
) -> None:
    with rollway.attach(graph, secret=SECRET) as stack:
        rollouts = stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4), n=3)
        assert [len(rollout.token_ids) for rollout in rollouts] == [4, 4, 4]
        workers = stack.fleet.workers()
        assert len(workers) == 2 and all(worker.error is None for worker in workers)
        # Admin addresses lead through the forwarder, to the pods.
        assert all("127.0.0.1" in worker.admin_url for worker in workers)
        stack.refit(1, base_model)
        assert list(stack.fleet.read_versions().values()) == [1, 1]
        # A pod that joins is brought up to date, through the proxy as well.
        scaled = admin.apply(DGD, make_graph(workers=3))
        wait_until_ready(admin, [scaled], timeout=LONG)
        wait_until(lambda: list(stack.fleet.read_versions().values()) == [1, 1, 1], LONG)


def test_a_dashboard_shows_a_graph(graph: str, base_model: Path, cli: Cli) -> None:
    with rollway.attach(graph, secret=SECRET) as stack:
        stack.refit(1, base_model)
    shown = cli("top", graph, "--json")
    assert shown.returncode == 0, shown.stderr
    fleet = json.loads(shown.stdout)["sections"]["fleet"]
    assert [(row["state"], row["version"]) for row in fleet] == [("serving", 1)] * 2


async def test_the_forwarder_answers_only_those_who_know_its_secret(
    graph: str, control_plane: ControlPlane
) -> None:
    import aiohttp

    async with reach_graph(graph) as (frontend, _), aiohttp.ClientSession() as session:
        root = frontend.split("/", 3)
        async with session.get(f"{frontend}/v1/models") as answer:
            assert answer.status == 200
        for path in ("service/v1/models", "wrong/service/v1/models"):
            async with session.get(f"{root[0]}//{root[2]}/{path}") as answer:
                assert answer.status == 404


async def test_what_is_missing_is_named(
    admin: Cluster, dynamo: DynamoOperator, control_plane: ControlPlane, tmp_path: Path
) -> None:
    async def reach(name: str, cluster: Cluster) -> None:
        async with reach_graph(f"dgd://{admin.namespace}/{name}", cluster=cluster):
            pass

    with pytest.raises(StackNotRunning, match="no DynamoGraphDeployment policy"):
        await reach("policy", admin)
    faults = dynamo.get_faults("policy")
    faults.ignore = True
    applied = admin.apply(DGD, make_graph())
    with pytest.raises(StackNotRunning, match="no running pod"):
        await reach("policy", admin)
    faults.ignore = False
    wait_until_ready(admin, [applied], timeout=LONG)
    rules = [
        {"apiGroups": ["nvidia.com"], "resources": ["dynamographdeployments"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["services/proxy"], "verbs": ["get"]},
    ]
    user = connect_as(control_plane, admin, tmp_path, rules)
    with pytest.raises(Forbidden, match="proxy of services") as raised:
        await reach("policy", user)
    assert raised.value.rule["verbs"] == ["create"]


def test_a_target_has_a_namespace_and_a_name() -> None:
    assert parse_target("dgd://rl/policy") == ("rl", "policy")
    for wrong in ("dgd://rl", "dgd:///policy", "dgd://rl/a/b", "http://rl/policy"):
        with pytest.raises(UsageError, match="names no DynamoGraphDeployment"):
            parse_target(wrong)
