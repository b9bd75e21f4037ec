"""What goes wrong in a run: each time, nothing of the run is left, and nothing else is touched."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import ClusterError, InvalidObject, RollwayError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import RunOptions
from rollway.kubernetes.manifests import render_all
from rollway.kubernetes.objects import DGD, NAMESPACE, POD, RAYJOB
from rollway.kubernetes.run import start_run
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.flows import QUICK, RUN, World, make_graph, meanwhile, open_world
from tests.waiting import wait_until

ORDERS = ["suspended", "inference-first"]
GRAPHS = ("first", "second", "third")
SLEEP: dict[str, Any] = {"launch": {"entrypoint": "sleep 60", "ttl_seconds": 600}}


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


def when(condition: Callable[[], Any], action: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        wait_until(condition, 30, every=0.05)
        return action()

    return call


def fail(world: World, *, order: str = "suspended", match: str, **options: Any) -> RollwayError:
    """Run; expect a failure that leaves nothing."""
    graphs = [make_graph(name) for name in GRAPHS]
    fields = {**SLEEP, **options.pop("fields", {})}
    infra, _ = world.load(*graphs, **fields)
    with pytest.raises(RollwayError, match=match) as caught:
        world.run(infra, order=order, **options)
    world.wait_until_empty()
    return caught.value


# --- inference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_fails_takes_all_with_it(world: World, order: str, name: str) -> None:
    world.dynamo.get_faults(name).failed = "no such image"
    error = fail(world, order=order, match="no such image")
    assert name in error.message
    assert "Nothing of math was left behind" in error.hint


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_that_never_gets_ready_takes_all_with_it(world: World, order: str) -> None:
    world.dynamo.get_faults("second").never_ready = True
    limits = dataclasses.replace(QUICK, gates=3)
    assert "second" in fail(world, order=order, match="second", limits=limits).message


def test_a_graph_that_the_api_refuses_takes_all_with_it(world: World) -> None:
    graphs = [make_graph("first"), make_graph("second", minAvailable=5)]
    infra, _ = world.load(*graphs, **SLEEP)
    with pytest.raises(InvalidObject, match="minAvailable"):
        world.run(infra)
    world.wait_until_empty()


def test_an_operator_that_is_successful_too_early_is_not_believed(world: World) -> None:
    faults = world.dynamo.get_faults("policy")
    faults.too_early, faults.ready_after = True, 2.0
    infra, _ = world.load(**SLEEP)
    ready: list[bool] = []

    def note(text: str) -> None:
        if text.startswith("resume"):
            pods = [p for p in world.list(POD) if p["metadata"]["name"].startswith("policy")]
            statuses = [c for p in pods for c in p["status"].get("containerStatuses", [])]
            ready.append(len(pods) == 2 and all(each["ready"] for each in statuses))

    reports = _Reports(note)
    world.run(infra, reports=reports)
    assert ready == [True]
    take_down(world.cluster, RUN)


def test_a_frontend_that_answers_503_holds_the_job_back(world: World) -> None:
    infra, _ = world.load(**SLEEP)
    resumed = threading.Event()

    def hold() -> None:
        backing = wait_until(lambda: world.dynamo.graphs.get("policy"), 30).backing
        backing.status = 503  # type: ignore[attr-defined]
        seen = lambda: [  # noqa: E731
            p for p in world.list(POD) if p.get("status", {}).get("containerStatuses")
        ]
        wait_until(lambda: len(seen()) == 2, 30)
        assert not resumed.wait(2.0)
        backing.status = 200  # type: ignore[attr-defined]

    reports = _Reports(lambda text: resumed.set() if text.startswith("resume") else None)
    world.dynamo.get_faults("policy").ready_after = 1.0
    with meanwhile(hold):
        world.run(infra, reports=reports)
    take_down(world.cluster, RUN)


class _Reports(list[str]):
    def __init__(self, on_report: Callable[[str], object]) -> None:
        super().__init__()
        self._on_report = on_report

    def append(self, text: str) -> None:
        super().append(text)
        self._on_report(text)


# --- the job -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_job_that_the_api_refuses_takes_all_with_it(world: World, order: str) -> None:
    fields = {"launch": {**SLEEP["launch"], "overrides": {"backoffLimit": "many"}}}
    fail(world, order=order, match="backoffLimit", fields=fields)


def test_a_job_that_kuberay_refuses_takes_all_with_it(world: World) -> None:
    """KubeRay refuses in the job's status, not as an error of the API."""
    infra, manifests = world.load(**SLEEP)
    job = manifests.jobs["training"]
    job["spec"]["shutdownAfterJobFinishes"] = False
    del job["spec"]["ttlSecondsAfterFinished"]
    options = RunOptions(wait=False, limits=QUICK)
    with pytest.raises(ClusterError, match=r"ValidationFailed.*not allowed") as caught:
        start_run(world.cluster, infra, manifests, options)
    assert "inference-first" in caught.value.hint
    world.wait_until_empty()


def test_an_old_kuberay_that_cannot_suspend_is_named(world: World) -> None:
    world.kuberay.get_faults(RUN).never_suspended = True
    assert "inference-first" in fail(world, match="although it was created suspended").hint


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", ["no_cluster_name", "no_cluster"])
def test_a_cluster_that_never_comes_takes_all_with_it(world: World, order: str, fault: str) -> None:
    setattr(world.kuberay.get_faults(RUN), fault, True)
    limits = dataclasses.replace(QUICK, cluster=3)
    match = "got no cluster" if fault == "no_cluster_name" else "did not appear"
    fail(world, order=order, match=match, limits=limits)


def test_a_cluster_without_its_pods_takes_all_with_it(world: World) -> None:
    world.kuberay.get_faults(RUN).not_provisioned = True
    limits = dataclasses.replace(QUICK, driver=3)
    fail(world, match="is not provisioned", limits=limits)


def test_a_job_that_fails_before_its_driver_takes_all_with_it(world: World) -> None:
    world.kuberay.get_faults(RUN).failed = "no quota"
    fail(world, match="no quota")


@pytest.mark.parametrize("hides", [True, False])
def test_an_entry_point_that_fails_inside_a_pipe(world: World, hides: bool) -> None:
    """`sh` takes the last command's status: `check` names it, and pipefail corrects it."""
    entrypoint = "(exit 3) | tee out" if hides else "bash -o pipefail -c '(exit 3) | cat'"
    infra, manifests = world.load(launch={"entrypoint": entrypoint})
    assert bool(manifests.warnings) == hides
    if hides:
        assert world.run(infra, wait=True).state == "Complete"
    else:
        with pytest.raises(ClusterError, match="ended as Failed"):
            world.run(infra, wait=True)
    take_down(world.cluster, RUN)


# --- others --------------------------------------------------------------------------------------


def test_owners_move_while_somebody_writes_to_the_graphs(world: World) -> None:
    infra, _ = world.load(*[make_graph(name) for name in GRAPHS], **SLEEP)
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.wait(0.02):
            count += 1
            for body in world.list(DGD):
                change = {"metadata": {"annotations": {"theirs": str(count)}}}
                try:
                    world.admin.patch(DGD, body["metadata"]["name"], change)
                except RollwayError:
                    return

    with meanwhile(write):
        try:
            result = world.run(infra)
        finally:
            stop.set()
    for name in GRAPHS:
        assert world.get_owners(DGD, name) == [f"RayCluster {result.ray_cluster}"]
        assert world.get(DGD, name)["metadata"]["annotations"]["theirs"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("kind", [DGD, RAYJOB])
def test_an_object_that_somebody_deletes_ends_the_run(world: World, kind: Any) -> None:
    for name in GRAPHS:
        world.dynamo.get_faults(name).ready_after = 3.0
    name = RUN if kind == RAYJOB else "second"
    delete = when(lambda: len(world.list(DGD)) == 3, lambda: world.admin.delete(kind, name))
    with meanwhile(delete):
        fail(world, match="deleted")


@pytest.mark.parametrize("kind", [DGD, RAYJOB])
def test_a_leftover_that_is_going_away_is_waited_for(world: World, kind: Any) -> None:
    infra, manifests = world.load(**SLEEP)
    body = manifests.jobs["training"] if kind == RAYJOB else manifests.graphs["policy"]
    name = body["metadata"]["name"]
    metadata = {**body["metadata"], "finalizers": ["tests/hold"]}
    spec = {**body["spec"], **({"suspend": True} if kind == RAYJOB else {})}
    old = world.admin.create(kind, {**body, "metadata": metadata, "spec": spec})
    world.admin.delete(kind, name)
    reports: list[str] = []

    def release() -> None:
        wait_until(lambda: any("going away" in text for text in reports), 30)
        world.admin.patch(kind, name, {"metadata": {"finalizers": None}})

    with meanwhile(release):
        world.run(infra, reports=reports)
    assert world.get(kind, name)["metadata"]["uid"] != old["metadata"]["uid"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_finalizer_that_hangs_is_named(world: World) -> None:
    infra, _ = world.load(**SLEEP)
    world.run(infra)
    world.admin.patch(DGD, "policy", {"metadata": {"finalizers": ["tests/hold"]}})
    with pytest.raises(ClusterError, match=r"policy.*tests/hold"):
        take_down(world.cluster, RUN, timeout=3)
    answer = world.call("status", RUN)
    [waits] = [text for text in answer["waits_for"] if "policy" in text]
    assert "tests/hold" in waits
    world.admin.patch(DGD, "policy", {"metadata": {"finalizers": None}})
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_rollback_that_hangs_says_what_to_do(world: World) -> None:
    world.dynamo.get_faults("policy").failed = "no such image"
    world.dynamo.get_faults("policy").hanging_finalizer = True
    infra, _ = world.load(**SLEEP)
    with pytest.raises(ClusterError, match="no such image") as caught:
        world.run(infra, limits=dataclasses.replace(QUICK, gone=3))
    assert "rollway k8s down math" in caught.value.hint
    world.dynamo.get_faults("policy").hanging_finalizer = False
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_namespace_that_is_deleted_ends_the_run(world: World) -> None:
    world.dynamo.get_faults("second").ready_after = 5.0
    namespace = world.admin.namespace
    delete = when(
        lambda: len(world.list(DGD)) == 3, lambda: world.admin.delete(NAMESPACE, namespace)
    )
    with meanwhile(delete):
        fail(world, match="deleted")


def test_an_api_server_that_restarts_costs_only_time(
    world: World, control_plane: ControlPlane
) -> None:
    world.dynamo.get_faults("policy").ready_after = 4.0
    infra, _ = world.load(**SLEEP)

    def restart() -> None:
        wait_until(lambda: world.list(DGD), 30)
        control_plane.kill()
        control_plane.revive()

    with meanwhile(restart):
        result = world.run(infra, limits=dataclasses.replace(QUICK, gates=120, driver=120))
    assert result.state == "submitted"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_render_is_not_changed_by_a_run(world: World) -> None:
    infra, _ = world.load(**SLEEP)
    before = render_all(infra).objects
    world.run(infra)
    assert render_all(infra).objects == before
    take_down(world.cluster, RUN)
