"""The log of a part of a run: of the driver by the dashboard, of pods by the API server."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rollway.errors import ClusterError, UsageError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.driver import JOB_ENDED, find_dashboard
from rollway.kubernetes.objects import (
    DGD,
    KEY_LABEL,
    POD,
    RAY_LABEL,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    TYPE_LABEL,
    Object,
    select_pods,
    select_run,
)
from rollway.kubernetes.spec import TRAINING
from rollway.kubernetes.teardown import list_kind

ROLES = ("driver", "head", "workers", "frontend")
_POLL_SECONDS = 2.0
_NODE_TYPE = "ray.io/node-type"


def read_logs(
    cluster: Cluster, run: str, role: str, *, follow: bool, tail: int
) -> Iterator[tuple[str, str]]:
    """Yield (pod or driver, line) of a role. With `follow` there must be one pod."""
    if role == "driver":
        yield from _read_driver(cluster, run, follow=follow, tail=tail)
        return
    pods = sorted(_find_pods(cluster, run, role), key=lambda body: str(body["metadata"]["name"]))
    if not pods:
        raise ClusterError(
            f"Run {run} has no pod for {role}.", f"`rollway k8s status {run}` shows what it has."
        )
    if follow and len(pods) > 1:
        names = ", ".join(body["metadata"]["name"] for body in pods[:8])
        raise UsageError(
            f"{len(pods)} pods match {role}; one can be followed.", f"Give a pod's name: {names}."
        )
    for body in pods:
        name = body["metadata"]["name"]
        container = str(body["spec"]["containers"][0]["name"])
        for line in cluster.read_log(name, container, follow=follow, tail=tail):
            yield name, line


def _find_pods(cluster: Cluster, run: str, role: str) -> list[Object]:
    section, _, _ = role.partition(".")
    if role in ("head", "workers"):
        name = _find_training_cluster(cluster, run)["metadata"]["name"]
        node = "head" if role == "head" else "worker"
        return cluster.list(POD, labels=f"{RAY_LABEL}={name},{_NODE_TYPE}={node}")
    if role == "frontend" or section == "dynamo":
        graphs = list_kind(cluster, DGD, select_run(run))
        names = [
            body["metadata"]["name"]
            for body in graphs
            if role == "frontend" or body["metadata"]["labels"].get(KEY_LABEL) == role
        ]
        if not names:
            return []
        labels = select_pods(names)
        labels += f",{TYPE_LABEL}=frontend" if role == "frontend" else ""
        return cluster.list(POD, labels=labels)
    if section in ("kuberay", "deployments"):
        return cluster.list(POD, labels=f"{select_run(run)},{KEY_LABEL}={role}")
    pod = cluster.get(POD, role)
    if pod is None:
        raise UsageError(
            f"{role!r} is neither a role nor a pod.",
            f"Roles are {', '.join(ROLES)}, dynamo.KEY, kuberay.ROLE and deployments.KEY.",
        )
    return [pod]


def _find_training_cluster(cluster: Cluster, run: str) -> Object:
    """Return the RayCluster of the driver: that of the RayJob, or the long-lived one."""
    for job in list_kind(cluster, RAYJOB, select_run(run)):
        name = (job.get("status") or {}).get("rayClusterName")
        if name and (body := cluster.get(RAYCLUSTER, name)) is not None:
            return body
    labels = f"{RUN_LABEL}={run},{KEY_LABEL}=kuberay.{TRAINING}"
    for body in list_kind(cluster, RAYCLUSTER, labels):
        return body
    raise ClusterError(
        f"Run {run} has no Ray cluster now.",
        "A job that waits for inference has none yet; one that has ended has none any more.",
    )


def _read_driver(
    cluster: Cluster, run: str, *, follow: bool, tail: int
) -> Iterator[tuple[str, str]]:
    ray_cluster = _find_training_cluster(cluster, run)
    jobs = list_kind(cluster, RAYJOB, select_run(run))
    job_id = str((jobs[0].get("status") or {}).get("jobId") or "") if jobs else run
    dashboard, shown = find_dashboard(cluster, ray_cluster), 0
    while True:
        job = dashboard.find_job(job_id) if job_id else None
        if job is None:
            raise ClusterError(f"The driver of {run} is not submitted yet.", "Try again later.")
        lines = dashboard.read_log(job_id).splitlines()
        start = shown if shown else max(0, len(lines) - tail)
        for line in lines[start:]:
            yield "driver", line
        shown = len(lines)
        if not follow or job.get("status") in JOB_ENDED:
            return
        time.sleep(_POLL_SECONDS)
