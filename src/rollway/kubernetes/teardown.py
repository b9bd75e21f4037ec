"""Find what a run owns, delete it in order, and wait until it is gone.

Objects are found by the label that every object of a run has, so it does not matter which process
made them, or whether that process still lives. Nothing without that label is deleted: a DGD that
its user manages is not ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

from rollway.errors import ClusterError, Conflict, KindMissing
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import (
    DEPLOYMENT,
    DGD,
    KEY_LABEL,
    POD,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    SERVICE,
    Object,
    ObjectKind,
    select_pods,
    select_ray_pods,
    select_run,
)
from rollway.kubernetes.run_mark import take_mark
from rollway.kubernetes.waits import Deadline, wait_until_gone

Report = Callable[[str], None]

ORDER = (RAYJOB, RAYCLUSTER, DGD, DEPLOYMENT, SERVICE)
"""Training ends first, so that nobody asks for tokens of workers that go."""


def list_objects(cluster: Cluster, name: str) -> Iterator[tuple[ObjectKind, Object]]:
    """Yield the objects with the label of a run, in the order in which they are deleted."""
    for kind in ORDER:
        for body in list_kind(cluster, kind, select_run(name)):
            yield kind, body


def list_kind(cluster: Cluster, kind: ObjectKind, labels: str) -> list[Object]:
    """List objects of a kind that the server may not have."""
    try:
        return cluster.list(kind, labels=labels)
    except KindMissing:
        return []


def list_targets(
    cluster: Cluster, name: str, *, keep: Collection[str] = (), keys: Collection[str] = ()
) -> list[tuple[ObjectKind, Object]]:
    """Return what `take_down` would delete."""
    return [
        (kind, body)
        for kind, body in list_objects(cluster, name)
        if body["metadata"]["uid"] not in keep
        and (not keys or body["metadata"]["labels"].get(KEY_LABEL) in keys)
    ]


def take_down(
    cluster: Cluster,
    name: str,
    *,
    timeout: float = 300.0,
    wait: bool = True,
    keys: Collection[str] = (),
    report: Report = lambda _: None,
) -> list[str]:
    """Delete a run, or the parts with `keys`; return `Kind name` of each object, in order.

    The mark of a whole run is taken first, so that a command that is still starting the run stops,
    and goes last."""
    mark = None if keys else take_mark(cluster, name)
    fenced = cluster if mark is None else cluster.add_fence(mark.check)
    deleted = delete_objects(fenced, name, timeout=timeout, wait=wait, keys=keys, report=report)
    if mark is not None:
        mark.discard()
    return deleted


def delete_objects(
    cluster: Cluster,
    name: str,
    *,
    timeout: float,
    wait: bool = True,
    keep: Collection[str] = (),
    keys: Collection[str] = (),
    report: Report,
) -> list[str]:
    """Delete the objects of a run and wait until they, and the pods of graphs and Ray, are gone;
    return `Kind name` of each, in order.

    `keep` has UIDs that stay, `keys` the values of the key label to which the deletion is limited.
    """
    deadline, deleted = Deadline(timeout), list[str]()
    while chosen := list_targets(cluster, name, keep=keep, keys=keys):
        for kind, body in chosen:
            metadata = body["metadata"]
            report(f"delete {kind.kind} {metadata['name']}")
            # The UID: an object that took the name meanwhile is somebody else's.
            with contextlib.suppress(Conflict):
                cluster.delete(kind, metadata["name"], uid=metadata["uid"])
            deleted.append(f"{kind.kind} {metadata['name']}")
        if not wait:
            break
        _wait_until_gone(cluster, chosen, deadline, report)
        # Once more: a request of another command may have been under way.
    return deleted


def _wait_until_gone(
    cluster: Cluster, chosen: list[tuple[ObjectKind, Object]], deadline: Deadline, report: Report
) -> None:
    selectors = []
    for kind in ORDER:
        names = {str(body["metadata"]["name"]) for each, body in chosen if each == kind}
        if kind == RAYCLUSTER:
            # KubeRay names the cluster of a job; the garbage collector deletes it with the job.
            names |= {*_list_clusters(body for each, body in chosen if each == RAYJOB)}
        if not names:
            continue
        report(f"wait until {kind.kind} {', '.join(sorted(names))} is gone")
        wait_until_gone(cluster, kind, names, deadline)
        if kind in (RAYCLUSTER, DGD):
            selectors.append((select_pods if kind == DGD else select_ray_pods)(sorted(names)))
    # GPUs are free when the pods are gone, not when their owners are.
    for labels in selectors:
        pods = [body["metadata"]["name"] for body in cluster.list(POD, labels=labels)]
        if pods:
            report(f"wait until {len(pods)} pods are gone")
            wait_until_gone(cluster, POD, pods, deadline, labels)


def _list_clusters(jobs: Iterable[Object]) -> Iterator[str]:
    """Yield the names of the clusters that KubeRay made for jobs; one that a job selects stays."""
    for job in jobs:
        name = (job.get("status") or {}).get("rayClusterName")
        if name and not job["spec"].get("clusterSelector"):
            yield str(name)


def find_runs(cluster: Cluster) -> list[str]:
    """Return the names of the runs that have an object in the namespace."""
    names = set()
    for kind in ORDER:
        for body in list_kind(cluster, kind, RUN_LABEL):
            names.add(body["metadata"]["labels"][RUN_LABEL])
    return sorted(names)


def resolve_run(cluster: Cluster, name: str | None) -> str:
    """Return `name`, or the only run of the namespace."""
    if name is not None:
        return name
    runs = find_runs(cluster)
    if len(runs) == 1:
        return runs[0]
    listing = f"It has {', '.join(runs)}." if runs else "Start one with `rollway k8s run`."
    count = "several runs" if runs else "no run"
    raise ClusterError(f"Namespace {cluster.namespace} has {count}.", listing)
