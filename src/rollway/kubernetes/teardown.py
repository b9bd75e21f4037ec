"""Find what a run owns, delete it in order, and wait until it is gone.

Objects are found by the label that every object of a run has, so it does not matter which process
made them, or whether that process still lives. Nothing without that label is deleted: a DGD that
its user manages is not ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import ClusterError, Conflict, KindMissing
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import (
    DEPLOYMENT,
    DGD,
    DGD_ALPHA,
    LEASE,
    POD,
    RAYCLUSTER,
    RAYJOB,
    SERVICE,
    Kind,
    Object,
    find_kind,
)
from rollway.kubernetes.lease import Observation, wait_until_released
from rollway.kubernetes.names import (
    KEY_LABEL,
    RUN_LABEL,
    name_lease,
    select_pods,
    select_ray_pods,
    select_run,
)
from rollway.kubernetes.waits import Deadline, wait_until_gone

Report = Callable[[str], None]

ORDER = (RAYJOB, RAYCLUSTER, DGD, DEPLOYMENT, SERVICE)
"""Training ends first, so that nobody asks for tokens of workers that go."""


@dataclass(slots=True)
class Removal:
    """What `take_down` did."""

    run: str
    deleted: list[str] = field(default_factory=list)
    """`Kind name` of each object, in order."""

    def as_json(self) -> dict[str, Any]:
        return {"run": self.run, "deleted": self.deleted}


def list_objects(cluster: Cluster, name: str) -> Iterator[tuple[Kind, Object]]:
    """Yield the objects with the label of a run, in the order in which they are deleted, each with
    its kind in the version that the server serves."""
    for kind in ORDER:
        for body in list_kind(cluster, kind, select_run(name)):
            yield (find_kind(body) if kind == DGD else kind), body


def list_kind(cluster: Cluster, kind: Kind, labels: str) -> list[Object]:
    """List objects of a kind that the server may not have; DGDs in the version that it serves."""
    try:
        return cluster.list(kind, labels=labels)[0]
    except KindMissing:
        return list_kind(cluster, DGD_ALPHA, labels) if kind == DGD else []


def list_targets(
    cluster: Cluster, name: str, *, keep: Collection[str] = (), keys: Collection[str] = ()
) -> list[tuple[Kind, Object]]:
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
    keep: Collection[str] = (),
    keys: Collection[str] = (),
    keep_lease: bool = False,
    report: Report = lambda _: None,
) -> Removal:
    """Delete the objects of a run and wait until they, and the pods of graphs and Ray, are gone.

    `keep` has UIDs that stay, `keys` the values of the key label to which the deletion is limited.
    A command that is still starting the run finds its objects gone, and ends: this is waited for,
    and what it made meanwhile is deleted too. The Lease goes last, unless parts of the run stay or
    `keep_lease` says that the caller holds it.
    """
    deadline, removal = Deadline(timeout), Removal(name)
    goes_whole = not (keep or keys or keep_lease)
    lease = cluster.get(LEASE, name_lease(name)) if goes_whole else None
    while True:
        chosen = list_targets(cluster, name, keep=keep, keys=keys)
        for kind, body in chosen:
            metadata = body["metadata"]
            report(f"delete {kind.kind} {metadata['name']}")
            # The UID: an object that took the name meanwhile is somebody else's.
            with contextlib.suppress(Conflict):
                cluster.delete(kind, metadata["name"], uid=metadata["uid"])
            removal.deleted.append(f"{kind.kind} {metadata['name']}")
        if wait:
            _wait_until_gone(cluster, chosen, deadline, report)
        if lease is None or not (wait or Observation().judge(lease) == "free"):
            return removal
        left = wait_until_released(cluster, name, deadline.left, report)
        if left is None or _delete_lease(cluster, left, lease):
            return removal
        lease = left  # its holder may have made objects in between


def _delete_lease(cluster: Cluster, lease: Object, before: Object) -> bool:
    """Delete a Lease that nobody holds, and return True, unless somebody has held it since."""
    version = before["metadata"]["resourceVersion"]
    if lease["metadata"]["resourceVersion"] != version:
        return False
    try:
        name, uid = lease["metadata"]["name"], lease["metadata"]["uid"]
        cluster.delete(LEASE, name, uid=uid, resource_version=version)
    except Conflict:
        return False
    return True


def _wait_until_gone(
    cluster: Cluster, chosen: list[tuple[Kind, Object]], deadline: Deadline, report: Report
) -> None:
    selectors = []
    for kind in ORDER:
        same = [(each, body) for each, body in chosen if each.kind == kind.kind]
        names = {str(body["metadata"]["name"]) for _, body in same}
        if kind == RAYCLUSTER:
            # KubeRay names the cluster of a job; the garbage collector deletes it with the job.
            names |= {*_list_clusters(body for each, body in chosen if each == RAYJOB)}
        if not names:
            continue
        report(f"wait until {kind.kind} {', '.join(sorted(names))} is gone")
        wait_until_gone(cluster, same[0][0] if same else kind, sorted(names), deadline.left)
        if kind in (RAYCLUSTER, DGD):
            selectors.append((select_pods if kind == DGD else select_ray_pods)(sorted(names)))
    # GPUs are free when the pods are gone, not when their owners are.
    for labels in selectors:
        bodies, _ = cluster.list(POD, labels=labels, metadata_only=True)
        pods = [body["metadata"]["name"] for body in bodies]
        if pods:
            report(f"wait until {len(pods)} pods are gone")
            wait_until_gone(cluster, POD, pods, deadline.left, labels=labels)


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
