"""The real garbage collector deletes inference with training, and nothing of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD, POD, RAYCLUSTER, RAYJOB, name_mark
from tests.kubernetes.flows import RUN, World, make_graph, open_world
from tests.waiting import wait_until


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


@pytest.fixture
def theirs(world: World) -> tuple[str, ...]:
    """A graph that the user manages, in the same namespace."""
    world.admin.create(DGD, make_graph("theirs"))
    names = ("theirs", "theirs-frontend", "theirs-frontend-0", "theirs-worker-0")
    wait_until(lambda: world.admin.get(POD, names[-1]), 30)
    return names


def test_inference_goes_with_the_ray_cluster(world: World, theirs: tuple[str, ...]) -> None:
    infra, _ = world.load(
        make_graph("policy"), make_graph("judge"), launch={"entrypoint": "sleep 60"}
    )
    result = world.run(infra)
    world.kuberay.get_faults(RUN).no_cluster = True  # a real KubeRay would not make another
    world.admin.delete(RAYCLUSTER, result.ray_cluster)
    world.wait_until_empty(but=(*theirs, RUN, name_mark(RUN)))
    assert world.get_owners(DGD, "theirs") == []
    world.admin.delete(RAYJOB, RUN)
    world.wait_until_empty(but=theirs)


def test_all_goes_with_the_ray_job(world: World, theirs: tuple[str, ...]) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    world.run(infra)
    world.admin.delete(RAYJOB, RUN)
    world.wait_until_empty(but=theirs)


def test_down_leaves_what_the_user_manages(world: World, theirs: tuple[str, ...]) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    world.run(infra)
    planned = world.call("down", RUN, "--dry-run")["would_delete"]
    assert planned == [f"RayJob {RUN}", "DynamoGraphDeployment policy"]
    answer = world.call("down", RUN)
    assert answer["deleted"] == planned
    assert world.list_left(but=theirs) == []
