"""Garbage collection by the real controller-manager: what an owner takes with it."""

from __future__ import annotations

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.gates import wait_until_ready
from rollway.kubernetes.objects import DGD, POD, RAYCLUSTER, RAYJOB, RUN_LABEL, SERVICE, Object
from rollway.kubernetes.waits import Deadline, wait_until_gone
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.kuberay_operator import KubeRayOperator
from tests.kubernetes.manifests import make_graph, make_job, make_ray_cluster
from tests.kubernetes.node import make_reference
from tests.waiting import stays, wait_until

LONG = 90.0


def own(graph: Object, owner: Object) -> Object:
    graph["metadata"]["ownerReferences"] = [make_reference(owner, controller=False)]
    return graph


def list_names(cluster: Cluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.list(POD)]


def test_a_deleted_cluster_takes_its_graphs_and_their_pods(
    admin: Cluster, dynamo: DynamoOperator, kuberay: KubeRayOperator
) -> None:
    cluster = admin.apply(RAYCLUSTER, make_ray_cluster())
    graphs = [admin.apply(DGD, own(make_graph(f"policy-{n}"), cluster)) for n in range(2)]
    foreign = make_graph("theirs")  # as a user makes it, without our labels and an owner
    del foreign["metadata"]["labels"]
    theirs = admin.create(DGD, foreign)
    wait_until_ready(admin, graphs, timeout=LONG)
    wait_until_ready(admin, [theirs], timeout=LONG)
    # The head, and three graphs.
    wait_until(lambda: len(list_names(admin)) == 1 + 3 * 2, 20, what="pods")
    admin.delete(RAYCLUSTER, "train")
    wait_until_gone(admin, DGD, ["policy-0", "policy-1"], Deadline(LONG))
    wait_until(
        lambda: sorted(list_names(admin)) == ["theirs-frontend-0", "theirs-worker-0"],
        LONG,
        what="the pods of the graphs",
    )
    services = [entry["metadata"]["name"] for entry in admin.list(SERVICE)]
    assert services == ["theirs-frontend"]
    live = admin.get(DGD, "theirs")
    assert live is not None and RUN_LABEL not in (live["metadata"].get("labels") or {})
    assert sorted(dynamo.graphs) == ["theirs"]


def test_a_deleted_job_takes_everything_also_while_it_is_suspended(
    admin: Cluster, dynamo: DynamoOperator, kuberay: KubeRayOperator
) -> None:
    job = admin.apply(RAYJOB, make_job())
    wait_until(lambda: kuberay.history.get("train", [])[-1:] == ["Suspended"], LONG)
    applied = admin.apply(DGD, own(make_graph(), job))
    wait_until_ready(admin, [applied], timeout=LONG)
    admin.delete(RAYJOB, "train")
    wait_until_gone(admin, RAYJOB, ["train"], Deadline(LONG))
    wait_until_gone(admin, DGD, ["policy"], Deadline(LONG))
    wait_until(lambda: list_names(admin) == [], LONG)


def test_a_graph_with_two_owners_goes_with_the_last(admin: Cluster, dynamo: DynamoOperator) -> None:
    """While the owner reference moves from the job to its cluster, either keeps the graph."""
    first = admin.apply(RAYCLUSTER, make_ray_cluster("first"))
    second = admin.apply(RAYCLUSTER, make_ray_cluster("second"))
    graph = own(make_graph(), first)
    graph["metadata"]["ownerReferences"].append(make_reference(second, controller=False))
    admin.apply(DGD, graph)
    admin.delete(RAYCLUSTER, "first")
    assert stays(lambda: admin.get(DGD, "policy") is not None, 3.0, every=0.5)
    admin.delete(RAYCLUSTER, "second")
    wait_until_gone(admin, DGD, ["policy"], Deadline(LONG))


def test_an_owner_that_never_existed_collects_at_once(admin: Cluster) -> None:
    """A reference to a name read too early deletes the graph: its owner has no such uid."""
    cluster = admin.apply(RAYCLUSTER, make_ray_cluster())
    cluster["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    admin.apply(DGD, own(make_graph(), cluster))
    wait_until_gone(admin, DGD, ["policy"], Deadline(LONG))


@pytest.mark.parametrize("name", ["train"])
def test_a_finalizer_that_hangs_keeps_the_job_and_is_named(
    admin: Cluster, kuberay: KubeRayOperator, name: str
) -> None:
    kuberay.get_faults(name).hanging_finalizer = True
    admin.apply(RAYJOB, make_job(name))
    wait_until(lambda: kuberay.history.get(name, [])[-1:] == ["Suspended"], LONG)
    admin.delete(RAYJOB, name)
    with pytest.raises(Exception, match=r"ray\.io/rayjob-finalizer"):
        wait_until_gone(admin, RAYJOB, [name], Deadline(2.0))
    kuberay.get_faults(name).hanging_finalizer = False
    wait_until_gone(admin, RAYJOB, [name], Deadline(LONG))
