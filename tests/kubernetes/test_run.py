"""Runs from beginning to end, on a real control plane with stand-in operators."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollway.errors import ClusterError, RunExists, UsageError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import (
    DEPLOYMENT,
    DGD,
    POD,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    SERVICE,
    name_mark,
)
from rollway.kubernetes.spec import Infra
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.flows import RAY, RUN, World, make_graph, open_world
from tests.kubernetes.node import delete_now
from tests.waiting import wait_until


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


def test_training_waits_for_inference_and_then_owns_it(world: World) -> None:
    infra, _ = world.load(make_graph("policy"), make_graph("judge", workers=2))
    reports: list[str] = []
    result = world.run(infra, reports=reports)
    assert result.order == "suspended"
    assert result.state == "submitted"
    assert result.driver is not None and result.driver.by == "KubeRay"
    states = world.kuberay.history[RUN]
    assert states[:3] == ["Initializing", "Suspending", "Suspended"]
    # The cluster's name is the one that was set after the resumption.
    assert world.get_owners(DGD, "policy") == [f"RayCluster {result.ray_cluster}"]
    assert world.get_owners(DGD, "judge") == [f"RayCluster {result.ray_cluster}"]
    order = [step for step in result.steps if step != "deployments"]
    assert order == [
        "suspended",
        "graphs applied",
        "gates",
        "resumed",
        "cluster",
        "owned",
        "driver",
    ]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_no_pod_of_training_is_there_before_the_gates(world: World) -> None:
    infra, _ = world.load()
    seen: list[tuple[str, int]] = []

    def note(text: str) -> None:
        if text.startswith(("applied DynamoGraph", "resume")):
            seen.append((text, len(world.list(RAYCLUSTER))))

    from rollway.kubernetes.cluster_run import RunOptions
    from rollway.kubernetes.manifests import render_all
    from rollway.kubernetes.run import start_run
    from tests.kubernetes.flows import QUICK

    start_run(world.cluster, infra, render_all(infra), RunOptions(wait=False, limits=QUICK), note)
    assert [count for _, count in seen] == [0, 0]
    take_down(world.cluster, RUN)


def test_a_run_that_is_awaited_ends_with_its_job_and_frees_inference(world: World) -> None:
    infra, _ = world.load()
    result = world.run(infra, wait=True)
    assert result.state == "Complete"
    # KubeRay removes the cluster, and the garbage collector what it owns. The RayJob stays, and
    # with it the mark.
    world.wait_until_empty(but=(RUN, name_mark(RUN)))
    assert [body["metadata"]["name"] for body in world.list(RAYJOB)] == [RUN]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_driver_that_fails_is_a_failure_of_the_run(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "echo before; exit 3"})
    with pytest.raises(ClusterError, match="ended as Failed"):
        world.run(infra, wait=True)
    take_down(world.cluster, RUN)


def test_the_name_of_the_graph_reaches_the_driver(world: World) -> None:
    infra, _ = world.load(
        launch={"entrypoint": "echo of ${dynamo.policy}; sleep 60", "ttl_seconds": 600}
    )
    world.run(infra)
    read = lambda: world.call("logs", RUN, "--role", "driver")["lines"]  # noqa: E731
    lines = wait_until(read, 30, every=0.5)
    assert lines[0] == {"source": "driver", "line": "of policy"}
    take_down(world.cluster, RUN)


def test_jobs_that_cannot_be_suspended_come_after_inference(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60", "shutdown": False})
    result = world.run(infra)
    assert result.order == "inference-first"
    assert "Suspended" not in world.kuberay.history[RUN]
    assert world.get_owners(DGD, "policy") == [f"RayCluster {result.ray_cluster}"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()
    with pytest.raises(UsageError, match="cannot be suspended"):
        world.run(infra, order="suspended")
    assert world.list_left() == []


def test_inference_first_can_be_asked_for(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    assert world.run(infra, order="inference-first").order == "inference-first"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_job_that_may_be_retried_keeps_inference(world: World) -> None:
    """KubeRay retries in a new cluster, and the garbage collector would take the graph away."""
    infra, _ = world.load(launch={"entrypoint": "sleep 60", "retries": 2})
    world.run(infra)
    assert world.get_owners(DGD, "policy") == [f"RayJob {RUN}"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_driver_that_kuberay_forgets_is_submitted_once(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "echo once", "ttl_seconds": 600})
    world.kuberay.get_faults(RUN).no_submission = True
    result = world.run(infra)
    assert result.driver is not None and result.driver.by == "rollway"
    jobs = world.kuberay.clusters[result.ray_cluster].dashboard.list_jobs()
    assert [job["submission_id"] for job in jobs] == [result.driver.id]
    job = world.get(RAYJOB, RUN)
    assert job["status"]["jobId"] == result.driver.id
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_long_lived_cluster_owns_inference_and_takes_submissions(world: World) -> None:
    daemon = {
        "entrypoint": "sleep 600 # ${dynamo.policy}",
        "health": {"port": 8265, "path": "/api/jobs/"},
    }

    def load(entrypoint: str) -> Infra:
        infra, _ = world.load(
            kuberay={"training": {"spec": RAY}, "gym": {"spec": RAY, "daemon": daemon}},
            launch={"entrypoint": entrypoint, "mode": "raycluster"},
        )
        return infra

    infra = load("echo of ${dynamo.policy}")
    result = world.run(infra, wait=True)
    assert (result.order, result.state) == ("long-lived", "SUCCEEDED")
    assert world.get_owners(DGD, "policy") == [f"RayCluster {RUN}"]
    assert world.get_owners(RAYCLUSTER, f"{RUN}-gym") == [f"RayCluster {RUN}"]
    jobs = world.kuberay.clusters[f"{RUN}-gym"].dashboard.list_jobs()
    assert [job["submission_id"] for job in jobs] == [f"{RUN}-gym"]
    assert jobs[0]["entrypoint"] == "sleep 600 # policy"
    with pytest.raises(RunExists, match="has ended as SUCCEEDED"):
        world.run(infra)
    for entrypoint in ("sleep 60", "sleep 61"):  # after one that has ended, and one that runs
        assert world.run(load(entrypoint), recreate=True).state == "submitted"
        [job] = world.kuberay.clusters[RUN].dashboard.list_jobs()
        assert job["entrypoint"] == entrypoint
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_code_is_uploaded_to_a_long_lived_cluster(world: World) -> None:
    code = world.folder / "infra" / "code"
    code.mkdir(parents=True)
    (code / "train.py").write_text("import helper; print('trained with', helper.NAME)")
    (code / "helper.py").write_text("NAME = 'own files'")
    infra, _ = world.load(
        launch={
            "entrypoint": "python3 train.py",
            "mode": "raycluster",
            "code": {"source": "upload", "path": "code"},  # beside the infra file
        }
    )
    assert world.run(infra, wait=True).state == "SUCCEEDED"
    [line] = world.call("logs", RUN, "--role", "driver")["lines"]
    assert line["line"] == "trained with own files"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("mode", ["raycluster", "rayjob"])
def test_a_cluster_of_the_user_is_used_and_stays(world: World, mode: str) -> None:
    body = {"apiVersion": RAYCLUSTER.api_version, "kind": RAYCLUSTER.kind}
    spec = copy.deepcopy(RAY)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["image"] = "registry/ray:1.0.0"
    world.admin.create(RAYCLUSTER, {**body, "metadata": {"name": "theirs"}, "spec": spec})
    infra, _ = world.load(
        kuberay={"training": {"spec": {}, "existing": "theirs"}},
        launch={"entrypoint": "echo", "mode": mode},
    )
    world.run(infra, wait=True)
    take_down(world.cluster, RUN, timeout=30)
    world.wait_until_empty(but=("theirs", "theirs-head", "theirs-worker-0", "theirs-head-svc"))
    assert "deletionTimestamp" not in world.get(RAYCLUSTER, "theirs")["metadata"]


def test_deployments_come_before_graphs_and_go_with_them(world: World) -> None:
    gym = {
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "gym"}]}}},
        "ports": {"http": 8080},
    }
    infra, _ = world.load(
        deployments={"gym": gym}, launch={"entrypoint": "echo ${deployments.gym}; sleep 60"}
    )
    reports: list[str] = []
    graphs: list[int] = []
    stop = threading.Event()

    def play_kubelet() -> None:
        """Report the pods of the Deployment as ready, once it is known that no graph is there."""
        while not stop.wait(0.2):
            for body in world.admin.list(POD, labels="rollway.dev/key=deployments.gym"):
                if not (body.get("status") or {}).get("containerStatuses"):
                    graphs.append(len(world.list(DGD)))
                    report_ready(world, body["metadata"]["name"])

    kubelet = threading.Thread(target=play_kubelet)
    kubelet.start()
    try:
        result = world.run(infra, reports=reports)
    finally:
        stop.set()
        kubelet.join()
    assert graphs == [0]
    owner = [f"RayCluster {result.ray_cluster}"]
    assert world.get_owners(DEPLOYMENT, "math-gym") == owner
    assert world.get_owners(SERVICE, "math-gym") == owner
    take_down(world.cluster, RUN)
    for body in world.list(POD):  # no kubelet ends the pods of a Deployment here
        delete_now(world.admin, body["metadata"]["name"])
    world.wait_until_empty()


def report_ready(world: World, name: str) -> None:
    container = {
        "name": "gym", "ready": True, "restartCount": 0, "image": "x", "imageID": "",
        "state": {"running": {}},
    }  # fmt: skip
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [container],
    }
    world.admin.patch(POD, name, {"status": status}, subresource="status")


def test_up_brings_up_servers_without_a_job(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})  # its end takes the graphs along
    assert world.up(infra).state == "ready"
    assert world.list(RAYJOB) == []
    before = world.get(DGD, "policy")["metadata"]["resourceVersion"]
    world.up(infra)  # the same again changes nothing
    assert world.get(DGD, "policy")["metadata"]["resourceVersion"] == before
    result = world.run(infra)  # takes over what `up` made
    assert world.get_owners(DGD, "policy") == [f"RayCluster {result.ray_cluster}"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_second_run_of_one_name_resumes_refuses_and_never_doubles(world: World) -> None:
    infra, _ = world.load(launch={"entrypoint": "sleep 60"})
    first = world.run(infra)
    with pytest.raises(RunExists, match="exists"):
        world.run(infra)
    second = world.run(infra, resume=True)
    assert second.ray_cluster == first.ray_cluster
    assert second.driver is not None and first.driver is not None
    assert second.driver.id == first.driver.id
    other, _ = world.load(launch={"entrypoint": "sleep 61"})
    with pytest.raises(RunExists, match=r"spec\.entrypoint"):
        world.run(other, resume=True)
    assert world.get(RAYJOB, RUN)["spec"]["entrypoint"] == "sleep 60"
    again = world.run(other, recreate=True)
    assert again.ray_cluster != first.ray_cluster
    assert len(world.list(RAYJOB)) == len(world.list(DGD)) == 1
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_two_commands_at_once_make_one_run(world: World) -> None:
    """One starts it, the others are refused, and none of them undoes it."""
    infra, _ = world.load(
        make_graph("policy"), make_graph("judge"), launch={"entrypoint": "sleep 60"}
    )
    world.dynamo.get_faults("judge").ready_after = 2.0
    with ThreadPoolExecutor(3) as pool:
        ended = [pool.submit(world.run, infra) for _ in "123"]
    [result] = [future.result() for future in ended if future.exception() is None]
    refusals = [error for future in ended if (error := future.exception()) is not None]
    assert [type(error) for error in refusals] == [RunExists, RunExists]
    assert all("is being started by" in str(error) for error in refusals)
    assert world.run(infra, resume=True).ray_cluster == result.ray_cluster
    assert len(world.list(RAYJOB)) == len(world.list(RAYCLUSTER)) == 1
    assert len(world.list(DGD)) == 2
    dashboard = world.kuberay.clusters[result.ray_cluster].dashboard
    assert len(dashboard.list_jobs()) == 1
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_run_that_has_ended_is_not_taken_up(world: World) -> None:
    infra, _ = world.load()
    world.run(infra, wait=True)
    with pytest.raises(RunExists, match="has ended"):
        world.run(infra)
    take_down(world.cluster, RUN)


def test_another_owner_is_refused_and_the_users_graph_is_never_touched(world: World) -> None:
    graph = make_graph("policy")
    world.admin.create(DGD, graph)
    before = wait_until(lambda: _find_settled(world), 30)
    infra, _ = world.load(make_graph("policy"), make_graph("judge"))
    with pytest.raises(ClusterError, match=r"policy .*was not created by Rollway"):
        world.run(infra)
    world.wait_until_empty(
        but=("policy", "policy-frontend", "policy-frontend-0", "policy-worker-0")
    )
    after = world.get(DGD, "policy")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert RUN_LABEL not in (after["metadata"].get("labels") or {})
    assert "ownerReferences" not in after["metadata"]


def _find_settled(world: World) -> dict[str, object] | None:
    body = world.get(DGD, "policy")
    return body if body.get("status", {}).get("state") == "successful" else None
