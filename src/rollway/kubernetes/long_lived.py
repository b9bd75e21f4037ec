"""Ray clusters that outlive a job: the roles beside the training, their daemons, submissions.

    RayCluster training ──▶ Deployments ──▶ DGDs, gates ──▶ other roles ──▶ daemons ──▶ driver
         └── owns all of them

A driver is submitted to the dashboard under the run's name. Ray refuses a second job of one id, so
a second `run` finds the first one's driver.
"""

from __future__ import annotations

import hashlib
import io
import time
import zipfile
from pathlib import Path
from typing import Any

from rollway.errors import ClusterError, RunExists, UsageError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.drift import find_drift
from rollway.kubernetes.driver import (
    JOB_ENDED,
    Dashboard,
    Driver,
    find_dashboard,
    is_provisioned,
)
from rollway.kubernetes.entrypoint import resolve_entrypoint
from rollway.kubernetes.jobs import make_entrypoint, make_runtime_env
from rollway.kubernetes.kinds import RAYCLUSTER, Object
from rollway.kubernetes.spec import TRAINING
from rollway.kubernetes.steps import Run, RunResult
from rollway.kubernetes.waits import wait_for, wait_for_answer

_POLL_SECONDS = 5.0
_LARGEST_UPLOAD = 100 << 20  # bytes, as Ray's own limit
_SKIPPED = frozenset({".git", "__pycache__", ".venv", "node_modules"})


class ClusterRun:
    """A driver in a long-lived cluster, with its inference."""

    def __init__(self, run: Run) -> None:
        self._run, self._cluster, self._limits = run, run.cluster, run.limits

    def start(self) -> RunResult:
        run = self._run
        if TRAINING not in run.infra.kuberay:
            raise UsageError("The infra file has no `kuberay.training`.", "Add it, or use `up`.")
        with run.lease:
            dashboard = self._start()
        if run.options.wait:
            self._wait_for_end(dashboard)
        return run.result

    def _start(self) -> Dashboard:
        """Bring all up, and submit the driver."""
        run = self._run
        run.keep_what_is_there()
        with run.undo_on_failure():
            owner = self._bring_up_training()
            run.lease.give_to(owner)
            run.bring_up_deployments(owner)
            run.bring_up_graphs(owner)
            bring_up_roles(run, owner)
            name = owner["metadata"]["name"]
            training = self._wait_until_provisioned(name)
            run.result.ray_cluster = name
            start_daemon(run, TRAINING, training)
            dashboard = find_dashboard(self._cluster, training)
            self._submit(dashboard)
        return dashboard

    def _bring_up_training(self) -> Object:
        run = self._run
        if existing := run.infra.kuberay[TRAINING].existing:
            live = self._cluster.get(RAYCLUSTER, existing)
            if live is None:
                raise UsageError(
                    f"There is no RayCluster {existing}.", "Correct `kuberay.training.existing`."
                )
            return live
        body = run.manifests.clusters[TRAINING]
        run.report(f"create RayCluster {body['metadata']['name']}")
        live, existed = run.create_or_take_up(RAYCLUSTER, body)
        if existed and (drift := find_drift(self._cluster, RAYCLUSTER, body)):
            raise RunExists(
                f"RayCluster {body['metadata']['name']} exists with other fields: "
                f"{', '.join(field.path for field in drift)}.",
                f"`rollway k8s down {run.name}` removes it; then run again.",
            )
        run.finish("cluster")
        return live

    def _wait_until_provisioned(self, name: str) -> Object:
        self._run.report(f"wait until RayCluster {name} is provisioned")
        return wait_until_provisioned(self._cluster, name, self._limits.driver)

    def _submit(self, dashboard: Dashboard) -> None:
        run, job_id = self._run, self._run.name
        known = dashboard.find_job(job_id)
        if known is not None and run.options.recreate:
            dashboard.delete_job(job_id)
        elif known is not None and known.get("status") in JOB_ENDED:
            raise RunExists(
                f"The driver {job_id} has ended as {known['status']}.",
                "--recreate submits it again.",
            )
        environment: dict[str, Any] = make_runtime_env(run.infra)
        if run.infra.launch.code.source == "upload":
            environment["working_dir"] = upload(dashboard, Path(run.infra.launch.code.path))
        entry_point = make_entrypoint(run.infra, run.manifests.names)
        is_new = dashboard.submit(job_id, entry_point, runtime_env=environment)
        run.result.driver = Driver(job_id, "rollway")
        run.result.state = "submitted"
        run.report(f"driver {job_id} {'was submitted' if is_new else 'runs already'}")
        run.finish("driver")

    def _wait_for_end(self, dashboard: Dashboard) -> None:
        run = self._run
        run.report(f"wait until {run.name} ends; Ctrl-C leaves it running")
        while True:
            job = dashboard.find_job(run.name) or {}
            if not job or job.get("status") in JOB_ENDED:
                break
            time.sleep(_POLL_SECONDS)
        run.result.state = str(job.get("status") or "gone")
        run.finish("ended")
        if run.result.state != "SUCCEEDED":
            raise ClusterError(
                f"The driver {run.name} ended as {run.result.state}: {job.get('message') or ''}",
                f"`rollway k8s logs {run.name} --role driver` has its output.",
            )


def bring_up_roles(run: Run, owner: Object | None) -> None:
    """Apply the clusters of the roles beside the training, and start their daemons."""
    others = {role: body for role, body in run.manifests.clusters.items() if role != TRAINING}
    if not others:
        return
    run.apply_all(list(others.values()), owner)
    if not run.waits:
        return
    for role, body in others.items():
        name = body["metadata"]["name"]
        run.report(f"wait until RayCluster {name} is provisioned")
        start_daemon(run, role, wait_until_provisioned(run.cluster, name, run.limits.driver))
    run.finish("roles")


def wait_until_provisioned(cluster: Cluster, name: str, timeout: float) -> Object:
    return wait_for(
        cluster, RAYCLUSTER, name, lambda body: body if is_provisioned(body) else None,
        timeout=timeout, what="was not provisioned",
    )  # fmt: skip


def start_daemon(run: Run, role: str, ray_cluster: Object) -> None:
    """Submit the daemon of a role, if it has one, and wait until it answers."""
    daemon = run.infra.kuberay[role].daemon
    if daemon is None:
        return
    dashboard = find_dashboard(run.cluster, ray_cluster)
    run.report(f"start the daemon of {role}")
    field = f"kuberay.{role}.daemon.entrypoint"
    dashboard.submit(
        f"{run.name}-{role}", resolve_entrypoint(daemon.entrypoint, run.manifests.names, field),
        runtime_env={"env_vars": daemon.env} if daemon.env else None,
    )  # fmt: skip
    if daemon.health is not None:
        wait_for_answer(run.cluster, dashboard.service, daemon.health)


def upload(dashboard: Dashboard, folder: Path) -> str:
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
