"""`rollway k8s` as a user types it, against a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD, RAYJOB
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.flows import RUN, World, make_env, make_graph, open_world, write_infra
from tests.waiting import wait_until

LAUNCH: dict[str, Any] = {"entrypoint": "echo trained; sleep 60", "ttl_seconds": 600}


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


@pytest.fixture
def infra(world: World) -> Path:
    return write_infra(world.folder / "cli", launch=LAUNCH)


def test_a_run_from_check_to_down(world: World, infra: Path) -> None:
    answer = world.call("check", "--infra", infra)
    assert answer["ok"], [each for each in answer["findings"] if not each["ok"]]
    assert answer["graphs"][0]["components"] == {"Frontend": 1, "worker": 1}
    planned = world.call("run", "--infra", infra, "--dry-run")
    assert planned["ok"]
    assert world.list_left() == []
    result = world.call("run", "--infra", infra, "--no-wait")
    assert result["state"] == "submitted"
    status = world.call("status")
    assert status["run"] == RUN
    assert status["waits_for"] == []
    parts = {(part["kind"], part["name"]): part for part in status["parts"]}
    graph = parts[DGD.kind, "policy"]
    assert graph["owner"] == f"RayCluster {result['ray_cluster']}"
    assert parts["RayCluster", result["ray_cluster"]]["owner"] == f"RayJob {RUN}"
    assert parts["RayJob", RUN]["details"]["driver"] == result["driver"]["id"]
    pods = {pod["name"]: pod["ready"] for pod in status["pods"]}
    assert pods["policy-worker-0"] == "1/1"
    assert f"{result['ray_cluster']}-head" in pods
    read = lambda: world.call("logs", "--role", "driver")["lines"]  # noqa: E731
    assert wait_until(read, 30, every=0.5)[0]["line"] == "trained"
    assert world.call("logs", "--role", "head")["lines"][0]["source"].endswith("-head")
    assert world.call("logs", "--role", "dynamo.policy", "--lines", "1")["lines"]
    assert world.call("down")["deleted"] == [f"RayJob {RUN}", "DynamoGraphDeployment policy"]
    world.wait_until_empty()
    assert world.call("status", RUN, status=1)["error"] == "ClusterError"


def test_status_says_why_a_run_waits(world: World, infra: Path) -> None:
    faults = world.dynamo.get_faults("policy")
    faults.never_ready, faults.event = (
        True,
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    )
    command = world.command("run", "--infra", infra)
    process = subprocess.Popen(command, env=make_env(), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: world.admin.get(DGD, "policy"), 60)

        def has_event() -> Any:
            status = world.call("status", RUN)
            return [pod for pod in status["pods"] if "Insufficient" in pod["event"]] and status

        status = wait_until(has_event, 60, every=1.0)
    finally:
        process.terminate()
        process.wait(60)
    waits = " ".join(status["waits_for"])
    assert "DynamoGraphDeployment policy" in waits
    assert "RayJob math" in waits
    world.wait_until_empty()


def test_up_of_one_target_starts_only_that(world: World) -> None:
    infra = write_infra(world.folder / "two", make_graph("policy"), make_graph("judge"))
    world.call("up", "--infra", infra, "--target", "dynamo.judge")
    assert [body["metadata"]["name"] for body in world.list(DGD)] == ["judge"]
    world.call("up", "--infra", infra)
    world.call("down", RUN, "--target", "dynamo.judge")
    assert [body["metadata"]["name"] for body in world.list(DGD)] == ["policy"]
    error = world.call("up", "--infra", infra, "--target", "dynamo.polcy", status=2)
    assert "dynamo.policy" in error["hint"]
    world.call("down", RUN)


def test_up_again_shows_drift_of_our_fields_only(world: World, infra: Path) -> None:
    world.call("up", "--infra", infra)
    world.admin.patch(DGD, "policy", {"metadata": {"annotations": {"theirs": "1"}}})
    same = world.call("up", "--infra", infra, "--dry-run")
    texts = {each["what"]: each["text"] for each in same["findings"]}
    assert texts["DynamoGraphDeployment policy"] == "it is there, as described"
    changed = write_infra(world.folder / "cli", make_graph("policy", workers=2), launch=LAUNCH)
    drift = world.call("up", "--infra", changed, "--dry-run")
    texts = {each["what"]: each["text"] for each in drift["findings"]}
    assert "replicas" in texts["DynamoGraphDeployment policy"]
    old = world.get(DGD, "policy")["metadata"]["uid"]
    world.call("up", "--infra", changed, "--recreate")
    assert world.get(DGD, "policy")["metadata"]["uid"] != old
    world.call("down", RUN)


def test_a_namespace_that_is_not_there_is_named(world: World, infra: Path) -> None:
    world.admin.namespace = "nowhere"
    for command in ("check", "run"):
        answer = world.call(command, "--infra", infra, status=1)
        assert "nowhere does not exist" in str(answer)


def test_two_namespaces_are_refused(world: World) -> None:
    infra = write_infra(world.folder / "own", namespace="another")
    assert "another" in world.call("run", "--infra", infra, status=2)["message"]


def test_no_cluster_and_wrong_tokens_are_one_sentence(
    world: World, infra: Path, control_plane: ControlPlane, tmp_path: Path
) -> None:
    expired = control_plane.write_kubeconfig(tmp_path / "expired", "no-such-token", "rl")
    world.kubeconfig = expired
    assert "credentials" in world.call("status", RUN, status=1)["message"]
    world.kubeconfig = tmp_path / "none"
    assert "No cluster" in world.call("status", RUN, status=2)["message"]


def test_a_missing_operator_is_named_with_its_installation(
    world: World, infra: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CRDs cannot be removed under other tests, so the group is another one."""
    import dataclasses

    from rollway.kubernetes import check
    from rollway.kubernetes.manifests import render_all

    gone = dataclasses.replace(RAYJOB, version="v9")
    monkeypatch.setattr(check, "RAYJOB", gone)
    loaded, _ = world.load(launch=LAUNCH)
    findings = {each.what: each for each in check.check_cluster(world.cluster, render_all(loaded))}
    assert findings["CRD rayjobs.ray.io"].level == "error"
    assert "helm install kuberay-operator" in findings["CRD rayjobs.ray.io"].fix


def test_quota_is_compared_with_what_is_asked_for(world: World) -> None:
    from rollway.kubernetes.objects import QUOTA

    world.admin.create(
        QUOTA,
        {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}},
    )
    graph = make_graph("policy", workers=4)
    container = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    graph["spec"]["components"][1]["podTemplate"] = {
        "spec": {"containers": [{**container, "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    }
    infra = write_infra(world.folder / "gpus", graph, launch=LAUNCH)
    answer = world.call("check", "--infra", infra, status=1)
    [quota] = [each for each in answer["findings"] if each["what"] == "quota"]
    assert "4 GPUs are asked for, 1 are left" in quota["text"]
