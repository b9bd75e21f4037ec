"""Owner references move in one patch. The cluster is a fake: it says when a conflict comes."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from rollway.errors import ClusterError, Conflict
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import DGD, Kind, Object
from rollway.kubernetes.owners import add_owner, make_reference, move_owner

JOB = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "train", "uid": "job"}}
RAY = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "train-x", "uid": "r"}}
OTHER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "other"}


class FakeCluster:
    """Holds one object; `rivals` are changes that others make just before our next patches."""

    def __init__(self, live: Object, rivals: list[Any]) -> None:
        self.live: Object | None = live
        self.rivals = rivals
        self.patches: list[Object] = []

    def get(self, kind: Kind, name: str) -> Object | None:
        return copy.deepcopy(self.live)

    def patch(self, kind: Kind, name: str, body: Object, *, resource_version: str) -> Object:
        if self.rivals:
            self.live = self.rivals.pop(0)(self.live)
        if self.live is None or self.live["metadata"]["resourceVersion"] != resource_version:
            raise Conflict("changed", "read again")
        self.patches.append(body)
        self.live["metadata"] |= body["metadata"]
        return self.live


def make_graph(*references: Object) -> Object:
    metadata = {"name": "g", "uid": "graph", "resourceVersion": "1"}
    return {"metadata": {**metadata, "ownerReferences": list(references)}}


def write(live: Object) -> Object:
    version = str(int(live["metadata"]["resourceVersion"]) + 1)
    return {"metadata": {**live["metadata"], "resourceVersion": version}}


def move(fake: FakeCluster, graph: Object) -> Object:
    return move_owner(cast(Cluster, fake), DGD, graph, RAY, ["job"])


def test_old_and_new_change_in_one_patch_and_others_stay() -> None:
    graph = make_graph(OTHER, make_reference(JOB))
    fake = FakeCluster(graph, [])
    move(fake, copy.deepcopy(graph))
    assert fake.patches == [{"metadata": {"ownerReferences": [OTHER, make_reference(RAY)]}}]


def test_an_object_that_was_moved_is_not_written_again() -> None:
    graph = make_graph(make_reference(RAY))
    fake = FakeCluster(graph, [])
    move(fake, copy.deepcopy(graph))
    assert fake.patches == []


def test_a_reference_that_somebody_adds_in_between_is_kept() -> None:
    graph = make_graph(make_reference(JOB))

    def add(live: Object) -> Object:
        live = write(live)
        live["metadata"]["ownerReferences"] = [make_reference(JOB), OTHER]
        return live

    fake = FakeCluster(graph, [add])
    live = move(fake, copy.deepcopy(graph))
    assert live["metadata"]["ownerReferences"] == [OTHER, make_reference(RAY)]


def test_endless_conflicts_end_with_an_error() -> None:
    fake = FakeCluster(make_graph(make_reference(JOB)), [write] * 100)
    with pytest.raises(ClusterError, match="could not be changed"):
        move(fake, make_graph(make_reference(JOB)))


@pytest.mark.parametrize("replace", [lambda live: None, lambda live: _with_uid(live, "another")])
def test_an_object_that_went_in_between_is_named(replace: Any) -> None:
    fake = FakeCluster(make_graph(make_reference(JOB)), [replace])
    with pytest.raises(ClusterError, match="was deleted by somebody else"):
        move(fake, make_graph(make_reference(JOB)))


def _with_uid(live: Object, uid: str) -> Object:
    live = write(live)
    return {"metadata": {**live["metadata"], "uid": uid}}


def test_an_owner_neither_controls_nor_blocks() -> None:
    [reference] = add_owner({"metadata": {"name": "g"}}, JOB)["metadata"]["ownerReferences"]
    assert reference["controller"] is False
    assert reference["blockOwnerDeletion"] is False
