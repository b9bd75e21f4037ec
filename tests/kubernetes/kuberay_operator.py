"""A stand-in for KubeRay's operator. It is ours, small, and in tests only.

A RayJob passes through the states of KubeRay 1.7, as its controller has them:

    New ──► Initializing ──► Running ──► Complete | Failed
             │  jobId and rayClusterName are set, a finalizer is added
             └─ suspend: ──► Suspending ──► Suspended (both names are cleared)
                                              └─ resume: ──► New ──► … with NEW names
    suspend with shutdownAfterJobFinishes: false or a cluster selector: ValidationFailed,
    which is a status and no error of the API.

A RayCluster gets head and worker pods as objects and a head Service. Behind it is a stand-in of
the dashboard's job API (tests/kubernetes/dashboard.py).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from rollway.errors import Conflict, RollwayError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import POD, RAYCLUSTER, RAYJOB, Object
from tests.kubernetes.dashboard import Dashboard
from tests.kubernetes.loop import OperatorLoop
from tests.kubernetes.node import make_reference, now

FINALIZER = "ray.io/rayjob-finalizer"
CLUSTER_LABEL, NODE_LABEL = "ray.io/cluster", "ray.io/node-type"
_ENDED = {"Complete", "Failed", "ValidationFailed"}


@dataclass
class JobFaults:
    """What goes wrong with one RayJob, or with the RayCluster of that name."""

    never_suspended: bool = False
    """An old KubeRay that ignores `suspend`, and starts the cluster."""
    no_cluster_name: bool = False
    """After the resume no `rayClusterName` appears."""
    no_cluster: bool = False
    """`rayClusterName` is set, but the RayCluster does not appear."""
    not_provisioned: bool = False
    """The RayCluster's pods do not get ready."""
    no_submission: bool = False
    """KubeRay forgets to submit the driver."""
    failed: str = ""
    """The job fails before its driver runs, with this message."""
    hanging_finalizer: bool = False
    """The finalizer is not removed."""
    step_seconds: float = 0.05
    """How long each state lasts."""


@dataclass
class Job:
    live: Object
    since: float = 0.0
    finished: float = 0.0


@dataclass
class RayClusterState:
    live: Object
    dashboard: Dashboard
    pods: list[str] = field(default_factory=list)
    written: Object = field(default_factory=dict)


class KubeRayOperator:
    """Runs in threads of the test: `with KubeRayOperator(cluster, folder) as operator`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.faults: dict[str, JobFaults] = {}
        self.jobs: dict[str, Job] = {}
        self.clusters: dict[str, RayClusterState] = {}
        self.history: dict[str, list[str]] = {}
        """The states that each RayJob went through."""
        self._folder = folder
        takers = {RAYJOB: self._take_job, RAYCLUSTER: self._take_cluster, POD: self._take_pod}
        self._loop = OperatorLoop(cluster, folder, takers, self._reconcile)
        self._node = self._loop.node

    def __enter__(self) -> KubeRayOperator:
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop(self._close)

    def _close(self) -> None:
        for state in self.clusters.values():
            state.dashboard.close()

    def get_faults(self, name: str) -> JobFaults:
        """Return the faults of a job or cluster, to be changed; also before it exists."""
        return self.faults.setdefault(name, JobFaults())

    # --- changes ------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        for job in list(self.jobs.values()):
            self._advance(job)
        for state in list(self.clusters.values()):
            self._reconcile_cluster(state)

    def _take_job(self, word: str, live: Object) -> None:
        name = live["metadata"]["name"]
        job = self.jobs.get(name)
        if word == "DELETED":
            self.jobs.pop(name, None)
        elif job is None or job.live["metadata"]["uid"] != live["metadata"]["uid"]:
            self.jobs[name] = Job(live, time.monotonic())
        elif int(live["metadata"]["resourceVersion"]) >= int(
            job.live["metadata"]["resourceVersion"]
        ):
            job.live = live  # not an event older than our own last write

    def _take_cluster(self, word: str, live: Object) -> None:
        name = live["metadata"]["name"]
        state = self.clusters.get(name)
        if word == "DELETED":
            if state is not None:
                del self.clusters[name]
                state.dashboard.close()
        elif state is None:
            dashboard = Dashboard(self._node.address, self._folder / name)
            self.clusters[name] = RayClusterState(live, dashboard)
        else:
            state.live = live

    def _take_pod(self, word: str, live: Object) -> None:
        meta = live["metadata"]
        is_ours = CLUSTER_LABEL in (meta.get("labels") or {})
        if is_ours and word != "DELETED" and meta.get("deletionTimestamp"):
            self._node.remove_pod(meta["name"])

    # --- jobs ---------------------------------------------------------------------------------

    def _advance(self, job: Job) -> None:
        """Move a job on by one state, if it is time."""
        meta, spec = job.live["metadata"], job.live["spec"]
        faults = self.get_faults(meta["name"])
        status = job.live.get("status") or {}
        state = status.get("jobDeploymentStatus") or ""
        if meta.get("deletionTimestamp"):
            self._release(job, faults)
            return
        if time.monotonic() - job.since < faults.step_seconds:
            return
        suspend = bool(spec.get("suspend")) and not faults.never_suspended
        if state == "":
            self._initialize(job, suspend)
        elif state == "Initializing" and suspend:
            self._write(job, {"jobDeploymentStatus": "Suspending"})
        elif state == "Suspending":
            self._delete_cluster(status.get("rayClusterName"))
            cleared = {"rayClusterName": "", "jobId": "", "jobStatus": "", "dashboardURL": ""}
            self._write(job, {**cleared, "jobDeploymentStatus": "Suspended"})
        elif state == "Suspended" and not suspend:
            self._write(job, {"jobDeploymentStatus": ""})
        elif state in ("Initializing", "Running") and not suspend:
            self._run_job(job, status, faults)
        elif state == "Running" and suspend:
            self._write(job, {"jobDeploymentStatus": "Suspending"})
        elif state in ("Complete", "Failed"):
            self._clean_up(job, status)

    def _initialize(self, job: Job, suspend: bool) -> None:
        meta, spec = job.live["metadata"], job.live["spec"]
        faults = self.get_faults(meta["name"])
        wrong = ""
        if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
            wrong = (
                "a RayJob with shutdownAfterJobFinishes set to false is not allowed to be suspended"
            )
        elif spec.get("suspend") and spec.get("clusterSelector"):
            wrong = "the ClusterSelector mode doesn't support the suspend operation"
        elif len(meta["name"]) > 47:
            wrong = "RayJob name should be no more than 47 characters"
        if wrong:
            self._write(
                job,
                {
                    "jobDeploymentStatus": "ValidationFailed",
                    "reason": "ValidationFailed",
                    "message": wrong,
                },
            )
            return
        if FINALIZER not in meta.get("finalizers", []):
            finalizers = [*meta.get("finalizers", []), FINALIZER]
            job.live = self.cluster.patch(
                RAYJOB, meta["name"], {"metadata": {"finalizers": finalizers}}
            )
        if faults.no_cluster_name and not spec.get("suspend"):
            return
        selector = (spec.get("clusterSelector") or {}).get("ray.io/cluster")
        suffix = secrets.token_hex(3)[:5]
        status = {
            "jobDeploymentStatus": "Initializing",
            "jobId": spec.get("jobId") or f"{meta['name']}-{secrets.token_hex(3)[:5]}",
            "rayClusterName": selector or f"{meta['name']}-{suffix}",
            "startTime": now(),
        }
        self._write(job, status)
        if not selector and not suspend and not faults.no_cluster:
            self._make_cluster(job, status["rayClusterName"])

    def _make_cluster(self, job: Job, name: str) -> None:
        body = {
            "apiVersion": RAYCLUSTER.api_version,
            "kind": RAYCLUSTER.kind,
            "metadata": {
                "name": name,
                "labels": {
                    "ray.io/originated-from-crd": "RayJob",
                    "ray.io/originated-from-cr-name": job.live["metadata"]["name"],
                },
                "ownerReferences": [make_reference(job.live)],
            },
            "spec": job.live["spec"]["rayClusterSpec"],
        }
        with contextlib.suppress(Conflict):
            self.cluster.create(RAYCLUSTER, body)

    def _run_job(self, job: Job, status: Object, faults: JobFaults) -> None:
        if faults.failed:
            self._write(
                job,
                {
                    "jobDeploymentStatus": "Failed",
                    "reason": "AppFailed",
                    "message": faults.failed,
                    "endTime": now(),
                },
            )
            return
        state = self.clusters.get(status.get("rayClusterName") or "")
        if state is None or not state.written.get("ready"):
            return
        name, spec = status["jobId"], job.live["spec"]
        dashboard = state.dashboard
        word = dashboard.find_status(name)
        if not word and not faults.no_submission and spec.get("entrypoint"):
            self._submit(dashboard, name, spec)
            word = dashboard.find_status(name)
        if not word and status["jobDeploymentStatus"] == "Running":
            return
        ended = {"SUCCEEDED": "Complete", "FAILED": "Failed"}
        deployment = ended.get(word, "Running")
        wanted: Object = {"jobDeploymentStatus": deployment, "jobStatus": word}
        if deployment in _ENDED:
            wanted |= {"endTime": now()}
            job.finished = time.monotonic()
        if word == "FAILED":
            wanted |= {"reason": "AppFailed", "message": "Job entrypoint command failed"}
        url = f"{status['rayClusterName']}-head-svc.{self.cluster.namespace}.svc.cluster.local:8265"
        wanted |= {"dashboardURL": url}
        if any(status.get(key) != value for key, value in wanted.items()):
            self._write(job, wanted)

    def _submit(self, dashboard: Dashboard, name: str, spec: Object) -> None:
        """Submit the driver over HTTP, as KubeRay does in its HTTPMode."""
        body = {"entrypoint": spec["entrypoint"], "submission_id": name}
        request = urllib.request.Request(
            f"{dashboard.url}/api/jobs/",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            pass

    def _clean_up(self, job: Job, status: Object) -> None:
        spec = job.live["spec"]
        if not spec.get("shutdownAfterJobFinishes") or spec.get("clusterSelector"):
            return
        if time.monotonic() - job.finished >= spec.get("ttlSecondsAfterFinished", 0):
            self._delete_cluster(status.get("rayClusterName"))

    def _delete_cluster(self, name: str | None) -> None:
        if name and name in self.clusters:
            self.cluster.delete(RAYCLUSTER, name)

    def _release(self, job: Job, faults: JobFaults) -> None:
        meta = job.live["metadata"]
        if faults.hanging_finalizer or FINALIZER not in meta.get("finalizers", []):
            return
        rest = [entry for entry in meta["finalizers"] if entry != FINALIZER]
        with contextlib.suppress(RollwayError):
            self.cluster.patch(RAYJOB, meta["name"], {"metadata": {"finalizers": rest}})

    def _write(self, job: Job, status: Object) -> None:
        name = job.live["metadata"]["name"]
        status = {**status, "observedGeneration": job.live["metadata"]["generation"]}
        job.live = self.cluster.patch(RAYJOB, name, {"status": status}, subresource="status")
        job.since = time.monotonic()
        word = (job.live.get("status") or {}).get("jobDeploymentStatus") or "New"
        states = self.history.setdefault(name, [])
        if not states or states[-1] != word:
            states.append(word)

    # --- clusters -----------------------------------------------------------------------------

    def _reconcile_cluster(self, state: RayClusterState) -> None:
        meta, spec = state.live["metadata"], state.live["spec"]
        if meta.get("deletionTimestamp"):
            return
        name = meta["name"]
        owner = next(iter(meta.get("ownerReferences") or []), {}).get("name")
        faults = self.get_faults(owner or name)
        if not state.pods:
            groups = spec.get("workerGroupSpecs") or []
            workers = sum(int(group.get("replicas", 0)) for group in groups)
            head = f"{name}-head"
            state.pods = [head, *(f"{name}-worker-{number}" for number in range(workers))]
            for pod in state.pods:
                role = "head" if pod == head else "worker"
                self._node.make_pod(pod, {CLUSTER_LABEL: name, NODE_LABEL: role}, state.live)
                self._node.logs[pod] = lambda pod=pod: [f"{pod} of a stand-in for Ray"]
            self._node.expose(f"{name}-head-svc", state.live, [head], {8265: state.dashboard.port})
        ready = not faults.not_provisioned
        for pod in state.pods:
            self._node.report(pod, ready=ready, waiting="" if ready else "ContainerCreating")
        if state.written.get("ready") == ready:
            return
        flag = "True" if ready else "False"
        conditions = [
            {
                "type": kind,
                "status": flag,
                "reason": "AllPodRunningAndReadyFirstTime" if ready else "PodsProvisioning",
                "message": "",
                "lastTransitionTime": now(),
            }
            for kind in ("RayClusterProvisioned", "HeadPodReady")
        ]
        status = {
            "conditions": conditions,
            "state": "ready" if ready else "",
            "observedGeneration": meta["generation"],
            "head": {"serviceName": f"{name}-head-svc", "podName": f"{name}-head"},
            "desiredWorkerReplicas": len(state.pods) - 1,
            "readyWorkerReplicas": len(state.pods) - 1 if ready else 0,
        }
        with contextlib.suppress(RollwayError):
            self.cluster.patch(RAYCLUSTER, name, {"status": status}, subresource="status")
            state.written["ready"] = ready
