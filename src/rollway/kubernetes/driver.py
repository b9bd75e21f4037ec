"""Make sure that the driver of a training job runs, also when KubeRay forgets to submit it.

KubeRay submits over HTTP in a reconciliation that may never come back after the cluster is up
("the HTTPMode stall"). So the RayJob and its cluster are watched: once the cluster is provisioned,
KubeRay has a grace period; then we submit the same entry point under the job's own id. Ray refuses
a second job of that id, so whoever comes first, the driver runs once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollway.errors import ClusterError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import RAYCLUSTER, RAYJOB, Object
from rollway.kubernetes.waits import Deadline, describe_state, make_deleted_error
from rollway.kubernetes.watches import Follower, Selection

DASHBOARD_PORT = 8265
ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})
"""The states of a RayJob in which nothing more happens."""
JOB_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
"""The same of a job in Ray."""
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that was submitted."""

    id: str
    by: str
    """`KubeRay`, or `rollway` after the grace period."""


class Dashboard:
    """The job API of a Ray head, reached through its Service."""

    def __init__(self, cluster: Cluster, service: str, port: int = DASHBOARD_PORT) -> None:
        self.service = service
        self._cluster, self._port = cluster, port

    def find_job(self, job_id: str) -> Object | None:
        """Return what Ray knows of a job; None if it has none of this id."""
        status, body = self._ask("GET", f"/api/jobs/{job_id}")
        if status == 404:
            return None
        if status != 200:
            raise self._make_error(status, body)
        job: Object = json.loads(body)
        return job

    def submit(self, job_id: str, entry_point: str, **fields: Any) -> bool:
        """Submit a job; return whether it is new. One of this id that exists is a success."""
        order = {"entrypoint": entry_point, "submission_id": job_id}
        order |= {name: value for name, value in fields.items() if value}
        status, body = self._ask("POST", "/api/jobs/", json.dumps(order).encode())
        if status == 200:
            return True
        # Ray answers 400 or 500, by version, and always says "already exists".
        if b"exists" in body:
            return False
        raise self._make_error(status, body)

    def delete_job(self, job_id: str) -> None:
        """Stop and forget a job, so that its id is free."""
        self._ask("POST", f"/api/jobs/{job_id}/stop")
        self._ask("DELETE", f"/api/jobs/{job_id}")

    def upload(self, name: str, content: bytes) -> None:
        """Put a package of files into Ray's store, unless it is there."""
        path = f"/api/packages/gcs/{name}"
        if self._ask("GET", path)[0] == 200:
            return
        status, body = self._ask("PUT", path, content)
        if status != 200:
            raise self._make_error(status, body)

    def read_log(self, job_id: str) -> str:
        status, body = self._ask("GET", f"/api/jobs/{job_id}/logs")
        if status != 200:
            raise self._make_error(status, body)
        return str(json.loads(body).get("logs") or "")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        status, answer = 0, b""
        for attempt in range(_ATTEMPTS):
            if attempt:
                # The head's Service is there before its dashboard listens.
                time.sleep(min(2.0**attempt, 5.0))
            status, answer = self._cluster.ask_service(
                self.service, self._port, path, method=method, body=body
            )
            if status not in (0, 502, 503, 504):
                break
        return status, answer

    def _make_error(self, status: int, body: bytes) -> ClusterError:
        text = body.decode(errors="replace").strip()[:300]
        return ClusterError(
            f"The Ray dashboard behind Service {self.service} answered {status}: {text}",
            "Look at `rollway k8s logs --role head`.",
        )


def find_dashboard(cluster: Cluster, ray_cluster: Object) -> Dashboard:
    """Return the dashboard of a RayCluster, by the Service that KubeRay reports."""
    head = (ray_cluster.get("status") or {}).get("head") or {}
    name = head.get("serviceName") or f"{ray_cluster['metadata']['name']}-head-svc"
    return Dashboard(cluster, name)


def is_provisioned(ray_cluster: Object) -> bool:
    """Return whether all pods of a RayCluster have been ready once."""
    status = ray_cluster.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    if "RayClusterProvisioned" in conditions:
        return bool(conditions["RayClusterProvisioned"] == "True")
    return bool(status.get("state") == "ready")  # KubeRay before 1.3 has no conditions


def ensure_driver(
    cluster: Cluster,
    job_name: str,
    cluster_name: str,
    *,
    grace: float,
    timeout: float,
    report: Callable[[str], None],
) -> Driver:
    """Return when the driver of a RayJob has been submitted, by KubeRay or after `grace` by us."""
    deadline, job, ray_cluster = Deadline(timeout), dict[str, Any](), dict[str, Any]()
    grace_ends: Deadline | None = None
    selections = [Selection(RAYJOB, fields=f"metadata.name={job_name}"),
                  Selection(RAYCLUSTER, fields=f"metadata.name={cluster_name}")]  # fmt: skip
    with Follower(cluster, selections) as follower:
        while not deadline.is_over:
            pair = follower.take(min(deadline.left, grace_ends.left if grace_ends else 60.0))
            if pair is not None and pair[0].kind == RAYJOB:
                job = pair[1].object
                if pair[1].type == "DELETED":
                    raise make_deleted_error(RAYJOB, job_name)
            elif pair is not None:
                # KubeRay deletes the cluster of a job that has ended; the job says so as well.
                ray_cluster = {} if pair[1].type == "DELETED" else pair[1].object
            status = job.get("status") or {}
            job_id = str(status.get("jobId") or "")
            if status.get("jobStatus"):
                return Driver(job_id, "KubeRay")
            if status.get("jobDeploymentStatus") in ENDED:
                raise make_ended_error(job)
            if not job_id or not is_provisioned(ray_cluster):
                continue
            if grace_ends is None:
                grace_ends = Deadline(grace)
                report(
                    f"RayCluster {cluster_name} is provisioned; KubeRay has {grace:.0f} s to "
                    "submit the driver"
                )
            if grace_ends.is_over:
                return _submit(cluster, job, ray_cluster, job_id, report)
    missing = "is not provisioned" if grace_ends is None else "is provisioned"
    raise ClusterError(
        f"The driver of RayJob {job_name} was not submitted within {timeout:.0f} s: "
        f"{describe_state(job)}, and RayCluster {cluster_name} {missing}.",
        "Look at `rollway k8s status` for pods that wait, and why.",
    )


def _submit(
    cluster: Cluster, job: Object, ray_cluster: Object, job_id: str, report: Callable[[str], None]
) -> Driver:
    dashboard, spec = find_dashboard(cluster, ray_cluster), job["spec"]
    if dashboard.find_job(job_id) is not None:
        return Driver(job_id, "KubeRay")  # submitted, and not yet in the RayJob's status
    report(f"KubeRay did not submit the driver; submitting it as {job_id}")
    is_new = dashboard.submit(
        job_id,
        spec["entrypoint"],
        runtime_env=_read_runtime_env(spec.get("runtimeEnvYAML")),
        metadata=spec.get("metadata"),
        entrypoint_num_cpus=spec.get("entrypointNumCpus"),
        entrypoint_num_gpus=spec.get("entrypointNumGpus"),
    )
    return Driver(job_id, "rollway" if is_new else "KubeRay")


def _read_runtime_env(text: str | None) -> Any:
    if not text:
        return None
    from rollway.plain import read_yaml

    return read_yaml(text, "runtimeEnvYAML")


def make_ended_error(job: Object) -> ClusterError:
    """Say that a RayJob ended, and why."""
    status = job.get("status") or {}
    words = " ".join(filter(None, (status.get("reason"), status.get("message"))))
    return ClusterError(
        f"RayJob {job['metadata']['name']} ended as {status.get('jobDeploymentStatus')}"
        f"{': ' + words if words else '.'}",
        "`rollway k8s logs --role driver` has its output, if it got that far.",
    )
