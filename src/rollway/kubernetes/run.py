"""Bring inference and a training job up in order, tie their lifetimes, and undo all on a failure.

    rollway k8s run                       API server                 KubeRay and Dynamo's operator

 0  take the mark of the run ───────────▶ ConfigMap                  (run_mark.py)
 1  create RayJob, suspend: true ───────▶ RayJob ◀─────────────────  New, Initializing, Suspending,
 2  wait for Suspended ◀──────────────────┘                          Suspended (names are cleared)
 3  apply Deployments, wait for them ───▶ owned by the RayJob
 4  apply all DGDs at once ─────────────▶ owned by the RayJob ◀────  pods, Services, state
 5  wait for three gates of every DGD     (gates.py)
 6  patch suspend: false ───────────────▶ RayJob ◀─────────────────  a cluster name that is new
 7  wait for the name, then the UID ◀──── RayCluster
 8  patch ownerReferences ──────────────▶ RayJob out, RayCluster in, in one step
 9  wait for the driver                   (driver.py: submit it if KubeRay forgets)
10  release the mark, wait until the job ends (--wait)

The RayJob owns everything from step 3 on, and asks for no pod before step 6: deleting it is the
whole rollback, also for a CLI that was killed. Training waits for inference, and no GPU of it is
held meanwhile. After step 8 inference goes when training's cluster goes.

`inference-first` is for jobs that KubeRay cannot suspend: 3, 4 and 5 without an owner, then a
RayJob that is not suspended, 7, 8, 9. `long-lived` has no RayJob: a RayCluster is the owner from
the start, then 3, 4, 5, the clusters of other roles with their daemons, and a submission to its
dashboard under the run's name, which Ray accepts once.

Promises, each with its test in tests/kubernetes:
- A failure before the driver is submitted leaves no object of the run, the failing one included.
- A second run of the same name is refused; with --resume it takes up the first where it stands. It
  never doubles.
- One command starts a run at a time (run_mark.py). One that was overtaken undoes nothing.
- An object without the run's label is never changed or deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rollway.errors import ClusterError, RunExists, UsageError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import ClusterRun, Order, RunOptions, RunResult
from rollway.kubernetes.driver import (
    ENDED,
    JOB_ENDED,
    Driver,
    RayDashboard,
    ensure_driver,
    find_dashboard,
    is_provisioned,
    make_ended_error,
    upload,
)
from rollway.kubernetes.manifests import (
    Manifests,
    explain_no_suspend,
    make_entrypoint,
    make_runtime_env,
)
from rollway.kubernetes.objects import RAYCLUSTER, RAYJOB, Object
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.kubernetes.teardown import Report
from rollway.kubernetes.waits import Deadline, describe_state, wait_for

_POLL_SECONDS = 5.0


def start_run(
    cluster: Cluster,
    infra: Infra,
    manifests: Manifests,
    options: RunOptions,
    report: Report = lambda _: None,
) -> RunResult:
    """Run a training job with its inference; return as `options.wait` says."""
    is_job = infra.launch.mode == "rayjob"
    if TRAINING not in (manifests.jobs if is_job else infra.kuberay):
        raise UsageError(
            "The infra file describes no training job.",
            "Add `kuberay.training` and `launch.entrypoint`, or use `rollway k8s up`.",
        )
    order = choose_order(infra, options.order) if is_job else "long-lived"
    run = ClusterRun(cluster, infra, manifests, options, report, order)
    with run.hold():
        wait_for_end = _start_job(run) if is_job else _start_in_cluster(run)
    run.cluster = cluster  # others may have the mark from here on
    if options.wait:
        report(f"wait until {run.name} ends; Ctrl-C leaves it running")
        wait_for_end()
    return run.result


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
    run = ClusterRun(cluster, infra, manifests, options, report, "up")
    with run.hold(), run.undo_on_failure(keep_what_is_there=True):
        owner = None
        if TRAINING in manifests.clusters:
            [owner] = run.apply_all([manifests.clusters[TRAINING]], None)
            run.mark.give_to(owner)
            run.result.ray_cluster = owner["metadata"]["name"]
        run.bring_up_servers(owner)
        if owner is not None and options.wait:
            run.start_daemon(TRAINING, run.result.ray_cluster)
    return run.result


# --- a RayJob ------------------------------------------------------------------------------------


def _start_job(run: ClusterRun) -> Callable[[], None]:
    """Bring all up, until the driver is submitted; return what waits for its end."""
    job = run.manifests.jobs[TRAINING]
    name = run.result.job = str(job["metadata"]["name"])
    if run.options.recreate:
        run.take_down()
    if run.result.order == "suspended":
        live = _start_suspended(run, job)
    else:
        live = _start_inference_first(run, job)
    # A job whose driver runs is taken up as well, and never deleted for it.
    is_submitted = bool((live.get("status") or {}).get("jobStatus"))
    with nullcontext() if is_submitted else run.undo_on_failure():
        cluster = _find_cluster(run, name)
        # KubeRay retries a failed job in a new cluster and deletes the old one. So the job stays
        # the owner if there may be a second cluster.
        is_only = not job["spec"].get("backoffLimit")
        run.give_to(cluster if is_only else live, [live["metadata"]["uid"]] if is_only else [])
        driver = ensure_driver(
            run.cluster, name, cluster["metadata"]["name"],
            grace=run.limits.grace, timeout=run.limits.driver, report=run.report,
        )  # fmt: skip
        run.note_driver(driver)
    return lambda: _wait_for_job(run, name)


def _start_suspended(run: ClusterRun, job: Object) -> Object:
    name = run.result.job
    run.report(f"create RayJob {name}, suspended")
    body = {**job, "spec": {**job["spec"], "suspend": True}}
    live, existed = run.create_or_take_up(RAYJOB, body)
    if existed:
        _check_resumable(run, job, live)
        if not live["spec"].get("suspend"):
            run.report(f"RayJob {name} has been resumed before; going on from there")
            run.mark.give_to(live)
            return live
        run.check_graphs(live)
    with run.undo_on_failure():
        run.mark.give_to(live)
        live = wait_for(
            run.cluster, RAYJOB, name, _decide_suspended,
            timeout=run.limits.suspend, what="was not suspended",
        )  # fmt: skip
        run.report(f"RayJob {name} is suspended")
        run.finish("suspended")
        run.bring_up_servers(live)
        run.report(f"resume RayJob {name}")
        run.cluster.patch(RAYJOB, name, {"spec": {"suspend": False}})
        run.finish("resumed")
    return live


def _start_inference_first(run: ClusterRun, job: Object) -> Object:
    before = run.cluster.get(RAYJOB, run.result.job)
    is_leaving = before is not None and "deletionTimestamp" in before["metadata"]
    if before is not None:
        _check_resumable(run, job, before)
    with run.undo_on_failure():
        if before is None or is_leaving:
            run.bring_up_servers(None)
        run.report(f"create RayJob {run.result.job}")
        live, _ = run.create_or_take_up(RAYJOB, job)
        run.mark.give_to(live)
        run.finish("resumed")
    return live


def _check_resumable(run: ClusterRun, job: Object, live: Object) -> None:
    """Raise unless a RayJob of this run is the one that is asked for, and still to be done."""
    run.check_is_ours(RAYJOB, live)
    if "deletionTimestamp" in live["metadata"]:
        return
    if (live.get("status") or {}).get("jobDeploymentStatus") in ENDED:
        raise RunExists(
            f"Run {run.name} has ended: {describe_state(live)}.",
            f"`rollway k8s down {run.name}` removes it; --recreate starts it anew.",
        )
    if not run.options.resume:
        raise RunExists(
            f"Run {run.name} exists: {describe_state(live)}.",
            "--resume goes on with it; --recreate starts it anew.",
        )
    suspend = bool(live["spec"].get("suspend"))
    run.check_drift(RAYJOB, {**job, "spec": {**job["spec"], "suspend": suspend}})


def _find_cluster(run: ClusterRun, job: str) -> Object:
    """Wait for the RayCluster that KubeRay makes for the resumed job."""
    deadline = Deadline(run.limits.cluster)
    run.report(f"wait for the RayCluster of {job}")
    name = wait_for(
        run.cluster, RAYJOB, job, _decide_cluster_name,
        timeout=deadline.left, what="got no cluster",
    )  # fmt: skip
    cluster = wait_for(
        run.cluster, RAYCLUSTER, name, _decide_uid,
        timeout=deadline.left, what="did not appear", must_exist=False,
    )  # fmt: skip
    run.result.ray_cluster = name
    run.finish("cluster")
    return cluster


def _wait_for_job(run: ClusterRun, name: str) -> None:
    """Wait until KubeRay says that the job ended. Ctrl-C leaves it running."""
    job = wait_for(run.cluster, RAYJOB, name, _decide_ended, timeout=None, what="did not end")
    run.result.state = job["status"]["jobDeploymentStatus"]
    run.finish("ended")
    if run.result.state != "Complete" or job["status"].get("jobStatus") == "FAILED":
        raise make_ended_error(job)


# --- a driver in a long-lived cluster ------------------------------------------------------------


def _start_in_cluster(run: ClusterRun) -> Callable[[], None]:
    """Bring all up, and submit the driver; return what waits for its end."""
    with run.undo_on_failure(keep_what_is_there=True):
        owner = _bring_up_training(run)
        name = run.result.ray_cluster = str(owner["metadata"]["name"])
        if is_provisioned(owner):  # a run that lives is refused before anything of it changes
            _find_driver(run, find_dashboard(run.cluster, owner))
        run.mark.give_to(owner)
        run.bring_up_servers(owner)
        dashboard = find_dashboard(run.cluster, run.start_daemon(TRAINING, name))
        _submit(run, dashboard)
    return lambda: _wait_for_driver(run, dashboard)


def _bring_up_training(run: ClusterRun) -> Object:
    if existing := run.infra.kuberay[TRAINING].existing:
        live = run.cluster.get(RAYCLUSTER, existing)
        if live is None:
            raise UsageError(
                f"There is no RayCluster {existing}.", "Correct `kuberay.training.existing`."
            )
        return live
    body = run.manifests.clusters[TRAINING]
    run.report(f"create RayCluster {body['metadata']['name']}")
    live, existed = run.create_or_take_up(RAYCLUSTER, body)
    if existed:
        run.check_drift(RAYCLUSTER, body)
    run.finish("cluster")
    return live


def _find_driver(run: ClusterRun, dashboard: RayDashboard) -> Object | None:
    """Return what Ray knows of the driver; raise RunExists for one that is not to be started."""
    known = dashboard.find_job(run.name)
    if known is None or run.options.recreate:
        return known
    if known.get("status") in JOB_ENDED:
        raise RunExists(
            f"The driver {run.name} has ended as {known['status']}.", "--recreate submits it again."
        )
    if not run.options.resume:
        raise RunExists(
            f"The driver {run.name} is {known.get('status')}.",
            "--resume waits for it; --recreate submits it again.",
        )
    return known


def _submit(run: ClusterRun, dashboard: RayDashboard) -> None:
    if _find_driver(run, dashboard) is not None and run.options.recreate:
        dashboard.delete_job(run.name)
    environment = make_runtime_env(run.infra)
    if run.infra.launch.code.source == "upload":
        environment["working_dir"] = upload(dashboard, Path(run.infra.launch.code.path))
    entry_point = make_entrypoint(run.infra, run.manifests.names)
    dashboard.submit(run.name, entry_point, runtime_env=environment)
    run.note_driver(Driver(run.name, "rollway"))


def _wait_for_driver(run: ClusterRun, dashboard: RayDashboard) -> None:
    while (job := dashboard.find_job(run.name)) and job.get("status") not in JOB_ENDED:
        time.sleep(_POLL_SECONDS)
    run.result.state = str((job or {}).get("status") or "gone")
    run.finish("ended")
    if run.result.state != "SUCCEEDED":
        raise ClusterError(
            f"The driver {run.name} ended as {run.result.state}: {(job or {}).get('message')}",
            f"`rollway k8s logs {run.name} --role driver` has its output.",
        )


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
