"""A server that has only v1alpha1 of graphs, as operators before 1.2 install it."""

from __future__ import annotations

import copy
import dataclasses
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD, DGD_ALPHA, POD, RAYJOB
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.flows import QUICK, RUN, World, make_graph, open_world
from tests.kubernetes.kinds import CRD
from tests.waiting import wait_until

GRAPHS = "dynamographdeployments.nvidia.com"
LONG = dataclasses.replace(QUICK, gone=120)
"""The garbage collector looks for new versions every half a minute."""


@pytest.fixture
def old_server(admin: Cluster, control_plane: ControlPlane) -> Iterator[None]:
    """Serve and store v1alpha1 alone for a while; no other test runs meanwhile."""
    live = admin.get(CRD, GRAPHS)
    assert live is not None
    before = {key: live["spec"][key] for key in ("versions", "conversion")}
    versions = copy.deepcopy(before["versions"])
    for version in versions:
        version["served"] = version["storage"] = version["name"] == DGD_ALPHA.version
    conversion = {"strategy": "None", "webhook": None}
    admin.patch(CRD, GRAPHS, {"spec": {"versions": versions, "conversion": conversion}})
    wait_until(lambda: not is_served(control_plane), 60)
    yield
    admin.patch(CRD, GRAPHS, {"spec": before})
    wait_until(lambda: is_served(control_plane), 60)


def is_served(control_plane: ControlPlane) -> bool:
    try:
        control_plane.request("GET", f"/apis/{DGD.api_version}/{DGD.plural}")
    except urllib.error.HTTPError as error:
        assert error.code in (404, 429)  # not served, or about to be
        return False
    return True


@pytest.fixture
def world(old_server: None, admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path, kind=DGD_ALPHA) as world:
        yield world
        take_down(admin, RUN)


def test_every_command_goes_on_in_the_old_version(world: World) -> None:
    graph = make_graph("policy")
    graph["spec"]["components"][1]["podTemplate"]["metadata"] = {"labels": {"team": "rl"}}
    infra, _ = world.load(graph, launch={"entrypoint": "sleep 60", "ttl_seconds": 600})
    file = world.folder / "infra" / "infra.yaml"
    checked = {each["what"]: each for each in world.call("check", "--infra", file)["findings"]}
    assert checked[f"CRD {GRAPHS}"]["text"] == "served: v1alpha1"
    assert checked["DynamoGraphDeployment policy"]["text"] == "the cluster accepts it"
    result = world.run(infra, limits=LONG)
    assert result.state == "submitted"
    live = world.get(DGD_ALPHA, "policy")
    assert set(live["spec"]["services"]) == {"Frontend", "worker"}
    assert world.get_owners(DGD_ALPHA, "policy") == [f"RayCluster {result.ray_cluster}"]
    status = world.call("status")
    assert status["waits_for"] == []
    world.call("scale", RUN, "worker=2")
    wait_until(lambda: world.admin.get(POD, "policy-worker-1"), 30)
    assert "DynamoGraphDeployment policy" in world.call("down", "--timeout", "120")["deleted"]
    assert world.list(DGD_ALPHA) == world.list(POD) == []


def test_a_run_is_taken_up_and_rolled_back_in_the_old_version(world: World) -> None:
    infra, manifests = world.load(launch={"entrypoint": "sleep 60", "ttl_seconds": 600})
    job = copy.deepcopy(manifests.jobs["training"])
    job["spec"]["suspend"] = True
    world.cluster.create(RAYJOB, job)  # of a CLI that was killed
    world.dynamo.get_faults("policy").failed = "no such image"
    with pytest.raises(Exception, match="no such image"):
        world.run(infra, limits=LONG, resume=True)
    wait_until(lambda: not world.list(DGD_ALPHA) and not world.list(RAYJOB), 60)
