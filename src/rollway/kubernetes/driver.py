"""Make sure that the driver of a training job runs, also when KubeRay forgets to submit it.

KubeRay submits over HTTP in a reconciliation that may never come back after the cluster is up
("the HTTPMode stall"). So once the cluster is provisioned, KubeRay has a grace period; then we
submit the same entry point under the job's own id. Ray refuses a second job of that id, so whoever
comes first, the driver runs once.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import ClusterError, UsageError
from rollway.kubernetes.client import Cluster, make_deleted_error
from rollway.kubernetes.objects import RAYCLUSTER, RAYJOB, Object
from rollway.kubernetes.waits import Deadline, describe_state
from rollway.yaml_input import read_yaml

DASHBOARD_PORT = 8265
ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})
"""The states of a RayJob in which nothing more happens."""
JOB_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
"""The same of a job in Ray."""
_ATTEMPTS = 5
_STOP_SECONDS = 60.0
_LARGEST_UPLOAD = 100 << 20  # bytes, as Ray's own limit
_SKIPPED = frozenset({".git", "__pycache__", ".venv", "node_modules"})


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that was submitted."""

    id: str
    by: str
    """`KubeRay`, or `rollway` after the grace period."""


class RayDashboard:
    """The job API of a Ray head, reached through its Service."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self.service = service
        self._cluster = cluster

    def find_job(self, job_id: str) -> Object | None:
        """Return what Ray knows of a job; None if it has none of this id."""
        status, body = self._ask("GET", f"/api/jobs/{job_id}", also=404)
        return None if status == 404 else dict(json.loads(body))

    def submit(self, job_id: str, entry_point: str, **fields: Any) -> bool:
        """Submit a job; return whether it is new. One of this id that exists is a success."""
        order = {"entrypoint": entry_point, "submission_id": job_id}
        order |= {name: value for name, value in fields.items() if value}
        try:
            self._ask("POST", "/api/jobs/", json.dumps(order).encode())
        except ClusterError as error:
            # Ray answers 400 or 500, by version, and always says "already exists".
            if "exists" not in error.message:
                raise
            return False
        return True

    def delete_job(self, job_id: str) -> None:
        """Stop a job, and forget it when it has ended, so that its id is free."""
        self._ask("POST", f"/api/jobs/{job_id}/stop", also=404)
        deadline = Deadline(_STOP_SECONDS)
        while (job := self.find_job(job_id)) and job.get("status") not in JOB_ENDED:
            if not deadline.pause():
                break  # Ray refuses to delete it, and says so
        self._ask("DELETE", f"/api/jobs/{job_id}", also=404)

    def upload(self, name: str, content: bytes) -> None:
        """Put a package of files into Ray's store, unless it is there."""
        path = f"/api/packages/gcs/{name}"
        if self._ask("GET", path, also=404)[0] == 404:
            self._ask("PUT", path, content)

    def read_log(self, job_id: str) -> str:
        return str(json.loads(self._ask("GET", f"/api/jobs/{job_id}/logs")[1]).get("logs") or "")

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, also: int = 200
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer; raise unless it is 200, or `also`."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                # The head's Service is there before its dashboard listens.
                time.sleep(min(2.0**attempt, 5.0))
            status, answer = self._cluster.ask_service(
                self.service, DASHBOARD_PORT, path, method=method, body=body
            )
            if status not in (502, 503, 504):
                break
        if status not in (200, also):
            raise self._make_error(status, answer)
        return status, answer

    def _make_error(self, status: int, body: bytes) -> ClusterError:
        text = body.decode(errors="replace").strip()[:300]
        return ClusterError(
            f"The Ray dashboard behind Service {self.service} answered {status}: {text}",
            "Look at `rollway k8s logs --role head`.",
        )


def find_dashboard(cluster: Cluster, ray_cluster: Object) -> RayDashboard:
    """Return the dashboard of a RayCluster, by the Service that KubeRay reports."""
    head = (ray_cluster.get("status") or {}).get("head") or {}
    name = head.get("serviceName") or f"{ray_cluster['metadata']['name']}-head-svc"
    return RayDashboard(cluster, name)


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
    deadline, grace_ends = Deadline(timeout), None
    while True:
        job, ray_cluster = cluster.get(RAYJOB, job_name), cluster.get(RAYCLUSTER, cluster_name)
        if job is None:
            raise make_deleted_error(RAYJOB, job_name)
        status = job.get("status") or {}
        job_id = str(status.get("jobId") or "")
        if status.get("jobStatus"):
            return Driver(job_id, "KubeRay")
        if status.get("jobDeploymentStatus") in ENDED:
            raise make_ended_error(job)
        if job_id and ray_cluster is not None and is_provisioned(ray_cluster):
            if grace_ends is None:
                grace_ends = Deadline(grace)
                report(
                    f"RayCluster {cluster_name} is provisioned; KubeRay has {grace:.0f} s to "
                    "submit the driver"
                )
            if not grace_ends.left:
                return _submit(cluster, job, ray_cluster, job_id, report)
        cluster.check_fence()
        if not deadline.pause():
            break
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
    environment = spec.get("runtimeEnvYAML")
    if dashboard.find_job(job_id) is not None:
        return Driver(job_id, "KubeRay")  # submitted, and not yet in the RayJob's status
    report(f"KubeRay did not submit the driver; submitting it as {job_id}")
    is_new = dashboard.submit(
        job_id,
        spec["entrypoint"],
        runtime_env=read_yaml(environment, "runtimeEnvYAML") if environment else None,
        metadata=spec.get("metadata"),
        entrypoint_num_cpus=spec.get("entrypointNumCpus"),
        entrypoint_num_gpus=spec.get("entrypointNumGpus"),
    )
    return Driver(job_id, "rollway" if is_new else "KubeRay")


def make_ended_error(job: Object) -> ClusterError:
    """Say that a RayJob ended, and why."""
    status = job.get("status") or {}
    words = " ".join(filter(None, (status.get("reason"), status.get("message"))))
    return ClusterError(
        f"RayJob {job['metadata']['name']} ended as {status.get('jobDeploymentStatus')}"
        f"{': ' + words if words else '.'}",
        "`rollway k8s logs --role driver` has its output, if it got that far.",
    )


def upload(dashboard: RayDashboard, folder: Path) -> str:
    """Upload a directory to Ray; return its address for `working_dir`."""
    if not folder.is_dir():
        raise UsageError(f"There is no directory {folder}.", "Correct `launch.code.path`.")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not _SKIPPED.intersection(path.relative_to(folder).parts):
                # A fixed date: the same files are the same package.
                entry = zipfile.ZipInfo(str(path.relative_to(folder)))
                entry.external_attr = path.stat().st_mode << 16
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
                if content.tell() > _LARGEST_UPLOAD:
                    raise UsageError(
                        f"{folder} has more than {_LARGEST_UPLOAD >> 20} MiB.",
                        "Use `launch.code.source: volume` or `image`.",
                    )
    digest = hashlib.sha256(content.getvalue()).hexdigest()[:16]
    name = f"_ray_pkg_{digest}.zip"
    dashboard.upload(name, content.getvalue())
    return f"gcs://{name}"
