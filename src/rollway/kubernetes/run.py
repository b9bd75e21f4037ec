"""Bring inference and a training job up in order, tie their lifetimes, and undo all on a failure.

    rollway k8s run                       API server                 KubeRay and Dynamo's operator

 0  take the Lease of the run ──────────▶ Lease                      (lease.py)
 1  create RayJob, suspend: true ───────▶ RayJob ◀─────────────────  New, Initializing, Suspending,
 2  wait for Suspended ◀──────────────────┘                          Suspended (names are cleared)
 3  apply Deployments, wait for them ───▶ owned by the RayJob
 4  apply all DGDs at once ─────────────▶ owned by the RayJob ◀────  pods, Services, state
 5  wait for three gates of every DGD     (gates.py)
 6  patch suspend: false ───────────────▶ RayJob ◀─────────────────  a cluster name that is new
 7  wait for the name, then the UID ◀──── RayCluster
 8  patch ownerReferences ──────────────▶ RayJob out, RayCluster in, in one step
 9  wait for the driver                   (driver.py: submit it if KubeRay forgets)
10  release the Lease, wait until the job ends (--wait)

The RayJob owns everything from step 3 on, and asks for no pod before step 6: deleting it is the
whole rollback, also for a CLI that was killed. Training waits for inference, and no GPU of it is
held meanwhile. After step 8 inference goes when training's cluster goes.

`inference-first` is for jobs that KubeRay cannot suspend: 3, 4 and 5 without an owner, then a
RayJob that is not suspended, 7, 8, 9. `long-lived` has no RayJob: a RayCluster is the owner from
the start, then 3, 4, 5, the clusters of other roles with their daemons, and a submission.

Promises, each with its test in tests/kubernetes:
- A failure before the driver is submitted leaves no object of the run, the failing one included.
- A second run of the same name takes up the first where it stands, or is refused. It never doubles.
- One command acts on a run at a time (lease.py). One that was overtaken undoes nothing.
- An object without the run's label is never changed or deleted.
"""

from __future__ import annotations

from contextlib import nullcontext

from rollway.errors import ClusterError, RunExists, UsageError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.drift import find_drift
from rollway.kubernetes.driver import ENDED, ensure_driver, make_ended_error
from rollway.kubernetes.jobs import explain_no_suspend
from rollway.kubernetes.kinds import RAYCLUSTER, RAYJOB, Object
from rollway.kubernetes.long_lived import (
    ClusterRun,
    bring_up_roles,
    start_daemon,
    wait_until_provisioned,
)
from rollway.kubernetes.manifests import Manifests
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.kubernetes.steps import Order, Run, RunOptions, RunResult
from rollway.kubernetes.teardown import Report
from rollway.kubernetes.waits import Deadline, describe_state, wait_for


def start_run(
    cluster: Cluster,
    infra: Infra,
    manifests: Manifests,
    options: RunOptions,
    report: Report = lambda _: None,
) -> RunResult:
    """Run a training job with its inference; return as `options.wait` says."""
    if infra.launch.mode == "raycluster":
        run = Run(cluster, infra, manifests, options, report, "long-lived")
        return ClusterRun(run).start()
    if TRAINING not in manifests.jobs:
        raise UsageError(
            "The infra file describes no training job.",
            "Add `kuberay.training` and `launch.entrypoint`, or use `rollway k8s up`.",
        )
    order = choose_order(infra, options.order)
    return JobRun(Run(cluster, infra, manifests, options, report, order)).start()


def choose_order(infra: Infra, order: Order) -> Order:
    """Return the order of a RayJob; raise UsageError for one that KubeRay would refuse."""
    reason = explain_no_suspend(infra)
    if order == "suspended" and reason:
        raise UsageError(reason, "Use --order inference-first.")
    return ("inference-first" if reason else "suspended") if order == "auto" else order


def bring_up(
    cluster: Cluster,
    infra: Infra,
    manifests: Manifests,
    options: RunOptions,
    report: Report = lambda _: None,
) -> RunResult:
    """Bring up the servers of a run without its job; a failure takes back what this call made."""
    run = Run(cluster, infra, manifests, options, report, "up")
    with run.lease:
        _bring_up(run)
    return run.result


def _bring_up(run: Run) -> None:
    clusters = run.manifests.clusters
    run.keep_what_is_there()
    with run.undo_on_failure():
        owner = None
        if TRAINING in clusters:
            [owner] = run.apply_all([clusters[TRAINING]], None)
            run.lease.give_to(owner)
            run.result.ray_cluster = owner["metadata"]["name"]
        run.bring_up_deployments(owner)
        run.bring_up_graphs(owner)
        bring_up_roles(run, owner)
        if owner is not None and run.options.wait:
            name = owner["metadata"]["name"]
            ready = wait_until_provisioned(run.cluster, name, run.limits.driver)
            start_daemon(run, TRAINING, ready)


class JobRun:
    """A RayJob with its inference: `suspended` or `inference-first`."""

    def __init__(self, run: Run) -> None:
        self._run, self._cluster, self._limits = run, run.cluster, run.limits
        self._job = run.manifests.jobs[TRAINING]
        self._name: str = self._job["metadata"]["name"]

    def start(self) -> RunResult:
        with self._run.lease:
            self._start()
        if self._run.options.wait:
            self._wait_for_end()
        return self._run.result

    def _start(self) -> None:
        """Bring all up, until the driver is submitted."""
        run = self._run
        if run.options.recreate:
            run.lease.regain()
            run.take_down()
        if run.result.order == "suspended":
            live = self._start_suspended()
        else:
            live = self._start_inference_first()
        # A job whose driver runs is taken up as well, and never deleted for it.
        is_submitted = bool((live.get("status") or {}).get("jobStatus"))
        with nullcontext() if is_submitted else run.undo_on_failure():
            cluster = self._find_cluster()
            # KubeRay retries a failed job in a new cluster and deletes the old one. So the job
            # stays the owner if there may be a second cluster.
            is_only = not self._job["spec"].get("backoffLimit")
            run.give_to(cluster if is_only else live, [live["metadata"]["uid"]] if is_only else [])
            self._ensure_driver(cluster["metadata"]["name"])

    def _start_suspended(self) -> Object:
        run = self._run
        body = {**self._job, "spec": {**self._job["spec"], "suspend": True}}
        run.report(f"create RayJob {self._name}, suspended")
        live, existed = run.create_or_take_up(RAYJOB, body)
        if existed:
            self._check_resumable(live)
            if not live["spec"].get("suspend"):
                run.report(f"RayJob {self._name} has been resumed before; going on from there")
                run.lease.give_to(live)
                return live
            run.check_graphs(live)
        with run.undo_on_failure():
            run.lease.give_to(live)
            live = wait_for(
                self._cluster, RAYJOB, self._name, _decide_suspended,
                timeout=self._limits.suspend, what="was not suspended", known=live,
            )  # fmt: skip
            run.report(f"RayJob {self._name} is suspended")
            run.finish("suspended")
            run.bring_up_deployments(live)
            run.bring_up_graphs(live)
            bring_up_roles(run, live)
            run.report(f"resume RayJob {self._name}")
            self._cluster.patch(RAYJOB, self._name, {"spec": {"suspend": False}})
            run.finish("resumed")
        return live

    def _start_inference_first(self) -> Object:
        run = self._run
        before = self._cluster.get(RAYJOB, self._name)
        if before is not None:
            self._check_resumable(before)
        with run.undo_on_failure():
            if before is None or "deletionTimestamp" in before["metadata"]:
                run.bring_up_deployments(None)
                run.bring_up_graphs(None)
                bring_up_roles(run, None)
            run.report(f"create RayJob {self._name}")
            live, _ = run.create_or_take_up(RAYJOB, self._job)
            run.lease.give_to(live)
            run.finish("resumed")
        return live

    def _check_resumable(self, live: Object) -> None:
        """Raise unless a RayJob of this run is the one that is asked for, and still to be done."""
        run = self._run
        run.check_is_ours(RAYJOB, live)
        state = (live.get("status") or {}).get("jobDeploymentStatus")
        if "deletionTimestamp" in live["metadata"]:
            return
        if state in ENDED:
            raise RunExists(
                f"Run {run.name} has ended: {describe_state(live)}.",
                f"`rollway k8s down {run.name}` removes it; --recreate starts it anew.",
            )
        suspend = bool(live["spec"].get("suspend"))
        asked = {**self._job, "spec": {**self._job["spec"], "suspend": suspend}}
        drift = find_drift(self._cluster, RAYJOB, asked)
        if drift:
            paths = ", ".join(field.path for field in drift)
            raise RunExists(
                f"Run {run.name} exists with other fields: {paths}.",
                "Use another name, or --recreate to replace it.",
            )

    def _find_cluster(self) -> Object:
        """Wait for the RayCluster that KubeRay makes for the resumed job."""
        run, waits = self._run, Deadline(self._limits.cluster)
        run.report(f"wait for the RayCluster of {self._name}")
        name = wait_for(
            self._cluster, RAYJOB, self._name, _decide_cluster_name,
            timeout=waits.left, what="got no cluster",
        )  # fmt: skip
        cluster = wait_for(
            self._cluster, RAYCLUSTER, name, _decide_uid,
            timeout=waits.left, what="did not appear", must_exist=False,
        )  # fmt: skip
        run.result.job, run.result.ray_cluster = self._name, name
        run.finish("cluster")
        return {"apiVersion": RAYCLUSTER.api_version, "kind": RAYCLUSTER.kind, **cluster}

    def _ensure_driver(self, cluster_name: str) -> None:
        run = self._run
        run.result.driver = ensure_driver(
            self._cluster, self._name, cluster_name,
            grace=self._limits.grace, timeout=self._limits.driver, report=run.report,
        )  # fmt: skip
        run.result.state = "submitted"
        run.report(f"driver {run.result.driver.id} was submitted by {run.result.driver.by}")
        run.finish("driver")

    def _wait_for_end(self) -> None:
        """Wait until KubeRay says that the job ended. Ctrl-C leaves it running."""
        run = self._run
        run.report(f"wait until {self._name} ends; Ctrl-C leaves it running")
        job = wait_for(
            self._cluster, RAYJOB, self._name, _decide_ended,
            timeout=None, what="did not end",
        )  # fmt: skip
        run.result.state = job["status"]["jobDeploymentStatus"]
        run.finish("ended")
        if run.result.state != "Complete" or job["status"].get("jobStatus") == "FAILED":
            raise make_ended_error(job)


# --- what an operator's answer means -------------------------------------------------------------


def _decide_suspended(job: Object) -> Object | None:
    status = job.get("status") or {}
    state = status.get("jobDeploymentStatus")
    if state == "Suspended":
        return job
    if state in ENDED:
        error = make_ended_error(job)
        error.hint = "If this job cannot be suspended, use --order inference-first."
        raise error
    if state == "Running":
        raise ClusterError(
            f"RayJob {job['metadata']['name']} runs although it was created suspended.",
            "This KubeRay cannot suspend jobs: update it, or use --order inference-first.",
        )
    return None


def _decide_cluster_name(job: Object) -> str | None:
    status = job.get("status") or {}
    state = status.get("jobDeploymentStatus")
    if state in ENDED and not status.get("rayClusterName"):
        raise make_ended_error(job)
    # A job that is being suspended still has the name of a cluster that never comes.
    if job["spec"].get("suspend") or state in ("Suspending", "Suspended"):
        return None
    return status.get("rayClusterName") or None


def _decide_uid(cluster: Object) -> Object | None:
    metadata = cluster["metadata"]
    return cluster if metadata.get("uid") and "deletionTimestamp" not in metadata else None


def _decide_ended(job: Object) -> Object | None:
    return job if (job.get("status") or {}).get("jobDeploymentStatus") in ENDED else None
