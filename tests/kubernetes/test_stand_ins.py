"""The stand-ins themselves: that KubeRay's passes through the real one's states."""

from __future__ import annotations

import json

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.gates import wait_until_ready
from rollway.kubernetes.objects import DGD, RAYCLUSTER, RAYJOB, SCALING_ADAPTER, Object
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.kuberay_operator import KubeRayOperator
from tests.kubernetes.manifests import make_graph, make_job
from tests.waiting import stays, wait_until

LONG = 60.0


def read_status(cluster: Cluster, name: str = "train") -> Object:
    return (cluster.get(RAYJOB, name) or {}).get("status") or {}


def wait_for_state(cluster: Cluster, state: str) -> Object:
    def reached() -> Object | None:
        status = read_status(cluster)
        return status if status.get("jobDeploymentStatus") == state else None

    return wait_until(reached, LONG, what=state) or {}


def test_a_suspended_job_gets_new_names_when_it_resumes(
    admin: Cluster, kuberay: KubeRayOperator
) -> None:
    kuberay.get_faults("train").step_seconds = 0.5
    admin.apply(RAYJOB, make_job())
    early = wait_for_state(admin, "Initializing")["rayClusterName"]
    status = wait_for_state(admin, "Suspended")
    assert not status.get("rayClusterName") and not status.get("jobId")
    assert admin.get(RAYCLUSTER, early) is None
    admin.patch(RAYJOB, "train", {"spec": {"suspend": False}})
    status = wait_for_state(admin, "Complete")
    assert status["rayClusterName"] != early and status["jobStatus"] == "SUCCEEDED"
    states = ["Initializing", "Suspending", "Suspended", "New", "Initializing"]
    assert kuberay.history["train"][:5] == states
    wait_until(lambda: admin.get(RAYCLUSTER, status["rayClusterName"]) is None, LONG)


def test_what_cannot_be_suspended_is_a_status(admin: Cluster, kuberay: KubeRayOperator) -> None:
    admin.apply(RAYJOB, make_job(shutdownAfterJobFinishes=False))
    assert "not allowed to be suspended" in wait_for_state(admin, "ValidationFailed")["message"]


def test_a_driver_that_is_not_submitted_can_be_submitted_by_others(
    admin: Cluster, kuberay: KubeRayOperator
) -> None:
    kuberay.get_faults("train").no_submission = True
    admin.apply(RAYJOB, make_job(suspend=False, entrypoint="exit 3"))
    status = wait_for_state(admin, "Running")
    service = f"{status['rayClusterName']}-head-svc"
    assert admin.ask_service(service, 8265, "/api/jobs/") == (200, b"[]")
    body = json.dumps({"entrypoint": "exit 3", "submission_id": status["jobId"]}).encode()
    code, _ = admin.ask_service(service, 8265, "/api/jobs/", method="POST", body=body)
    assert code == 200
    code, answer = admin.ask_service(service, 8265, "/api/jobs/", method="POST", body=body)
    assert code == 400 and b"already exists" in answer
    assert wait_for_state(admin, "Failed")["jobStatus"] == "FAILED"


def test_a_scaling_adapter_scales_its_component(admin: Cluster, dynamo: DynamoOperator) -> None:
    graph = make_graph()
    graph["spec"]["components"][1]["scalingAdapter"] = {}
    wait_until_ready(admin, [admin.apply(DGD, graph)], timeout=LONG)
    name = "policy-worker"
    wait_until(lambda: admin.get(SCALING_ADAPTER, name), LONG)
    admin.patch(SCALING_ADAPTER, name, {"spec": {"replicas": 3}}, subresource="scale")

    def count() -> int:
        live = admin.get(DGD, "policy") or {}
        return int(live["status"]["components"]["worker"]["readyReplicas"])

    wait_until(lambda: count() == 3, LONG)
    assert stays(lambda: count() == 3, 1.0, every=0.3)
