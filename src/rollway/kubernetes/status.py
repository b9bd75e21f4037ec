"""Where a run stands, and why it waits: read from the API server alone, so any machine sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rollway.errors import ClusterError, RollwayError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import RlListing
from rollway.http import Http
from rollway.kubernetes import gates
from rollway.kubernetes.address import reach_graph
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.driver import is_provisioned
from rollway.kubernetes.objects import (
    DEPLOYMENT,
    DGD,
    DGD_LABEL,
    KEY_LABEL,
    POD,
    RAY_LABEL,
    RAYCLUSTER,
    RAYJOB,
    SERVICE,
    Object,
    ObjectKind,
    find_frontend,
    select_pods,
    select_ray_pods,
    select_run,
)
from rollway.kubernetes.teardown import list_objects
from rollway.kubernetes.waits import explain_deployment


@dataclass(slots=True)
class RunPart:
    """An object of a run."""

    kind: str
    name: str
    key: str
    state: str
    waits_for: str
    """"" if it waits for nothing."""
    owner: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class PodState:
    """A pod of a run."""

    name: str
    part: str
    """The object that it belongs to."""
    phase: str
    ready: str
    """Containers that are ready, of all: `1/2`."""
    reason: str
    event: str
    """The last event of a pod that is not ready."""


@dataclass(slots=True)
class RunStatus:
    """All that a namespace has of a run."""

    run: str
    namespace: str
    parts: list[RunPart]
    pods: list[PodState]

    @property
    def waits_for(self) -> list[str]:
        """Why the run is not further, one sentence each."""
        return [
            f"{part.kind} {part.name}: {part.waits_for}" for part in self.parts if part.waits_for
        ]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "waits_for": self.waits_for}


def read_status(cluster: Cluster, run: str, targets: tuple[str, ...] = ()) -> RunStatus:
    """Read what a run has; raise ClusterError if there is nothing."""
    objects = [
        (kind, body)
        for kind, body in list_objects(cluster, run)
        if not targets or _get_key(body) in targets
    ]
    if not objects:
        raise ClusterError(
            f"Namespace {cluster.namespace} has nothing of run {run}.",
            "It never started, or it is gone; `rollway k8s run` starts it.",
        )
    clusters = _find_clusters(cluster, objects)
    known = {body["metadata"]["uid"] for _, body in objects}
    objects += [(RAYCLUSTER, body) for body in clusters if body["metadata"]["uid"] not in known]
    states = gates.read_gates(cluster, [body for kind, body in objects if kind == DGD])
    parts = [_describe(kind, body, states) for kind, body in objects]
    return RunStatus(run, cluster.namespace, parts, list(_list_pods(cluster, run, objects)))


def _find_clusters(cluster: Cluster, objects: list[tuple[ObjectKind, Object]]) -> list[Object]:
    """Return the clusters that KubeRay made for RayJobs: their names end in a suffix of its own."""
    names = ((body.get("status") or {}).get("rayClusterName") for kind, body in objects
             if kind == RAYJOB)  # fmt: skip
    bodies = (cluster.get(RAYCLUSTER, name) for name in names if name)
    return [body for body in bodies if body is not None]


def _describe(kind: ObjectKind, body: Object, states: dict[str, gates.GateState]) -> RunPart:
    metadata, status = body["metadata"], body.get("status") or {}
    owners = metadata.get("ownerReferences") or []
    part = RunPart(
        kind.kind,
        metadata["name"],
        _get_key(body),
        "",
        "",
        ", ".join(f"{owner['kind']} {owner['name']}" for owner in owners),
    )
    if kind == DGD:
        _describe_graph(body, part, states[part.name])
    elif kind == RAYJOB:
        _describe_job(body, part)
    elif kind == RAYCLUSTER:
        part.state = status.get("state") or ("ready" if is_provisioned(body) else "pending")
        if not is_provisioned(body):
            part.waits_for = "its pods are not all ready"
    elif kind == DEPLOYMENT:
        part.waits_for = explain_deployment(body)
        part.state = "pending" if part.waits_for else "available"
    elif kind == SERVICE:
        part.state = "there"
    if "deletionTimestamp" in metadata:
        part.state = "going away"
        held = ", ".join(metadata.get("finalizers") or [])
        part.waits_for = f"finalizers: {held}" if held else "its deletion"
    return part


def _describe_job(body: Object, part: RunPart) -> None:
    status = body.get("status") or {}
    part.state = status.get("jobDeploymentStatus") or "not seen by KubeRay"
    part.details = {
        "suspend": bool(body["spec"].get("suspend")),
        "ray_cluster": status.get("rayClusterName") or "",
        "driver": status.get("jobId") or "",
        "driver_state": status.get("jobStatus") or "",
        "message": status.get("message") or "",
    }
    if part.details["suspend"]:
        part.waits_for = "the gates of its graphs; `rollway k8s run --resume` goes on"
    elif not part.details["ray_cluster"] and part.state not in ("Complete", "Failed"):
        part.waits_for = "a RayCluster"
    elif not part.details["driver_state"] and part.state not in ("Complete", "Failed"):
        part.waits_for = "its driver to be submitted"


def _describe_graph(body: Object, part: RunPart, state: gates.GateState) -> None:
    status = body.get("status") or {}
    part.state = status.get("state") or "not seen by the operator"
    part.waits_for = f"gate `{state.gate}`: {state.why}" if state.gate else ""
    part.details = {
        "gates": state.as_json(),
        "frontend": find_frontend(body) or "",
        "components": {
            name: f"{each.get('readyReplicas', 0)}/{each.get('replicas', 0)}"
            for name, each in (status.get("components") or {}).items()
        },
    }


def _list_pods(
    cluster: Cluster, run: str, objects: list[tuple[ObjectKind, Object]]
) -> Iterator[PodState]:
    graphs = [body["metadata"]["name"] for kind, body in objects if kind == DGD]
    rays = [body["metadata"]["name"] for kind, body in objects if kind == RAYCLUSTER]
    selectors = [select_pods(graphs)] if graphs else []
    selectors += [select_ray_pods(rays)] if rays else []
    if any(kind == DEPLOYMENT for kind, _ in objects):
        selectors.append(f"{select_run(run)},!{RAY_LABEL},!{DGD_LABEL}")
    pods: dict[str, Object] = {}
    for selector in selectors:
        pods |= {body["metadata"]["name"]: body for body in cluster.list(POD, labels=selector)}
    for name, body in sorted(pods.items()):
        event = "" if gates.is_ready(body) else gates.find_last_event(cluster, name)
        yield _describe_pod(name, body, event)


def _describe_pod(name: str, body: Object, event: str) -> PodState:
    labels, status = body["metadata"].get("labels") or {}, body.get("status") or {}
    containers = status.get("containerStatuses") or []
    waiting = ((each.get("state") or {}).get("waiting") or {} for each in containers)
    reasons = [each["reason"] for each in waiting if each.get("reason")]
    owner = labels.get(DGD_LABEL) or labels.get(RAY_LABEL) or labels.get(KEY_LABEL) or ""
    ready = sum(bool(each.get("ready")) for each in containers)
    wanted = len((body.get("spec") or {}).get("containers") or [])
    reason = ", ".join(reasons) or str(status.get("reason") or "")
    return PodState(name, owner, status.get("phase", ""), f"{ready}/{wanted}", reason, event)


def _get_key(body: Object) -> str:
    return str((body["metadata"].get("labels") or {}).get(KEY_LABEL, ""))


def read_versions(cluster: Cluster, graph: str) -> dict[str, Any]:
    """Return the weight version of each worker of a graph, or why it is not known."""
    try:
        served = asyncio.run(_ask_fleet(cluster, graph))
    except RollwayError as error:
        return {"unknown": error.message}
    return {str(worker): version for worker, version in served.items()}


async def _ask_fleet(cluster: Cluster, graph: str) -> dict[int, int | None]:
    target = f"dgd://{cluster.namespace}/{graph}"
    async with reach_graph(target, cluster=cluster) as (frontend, listing), Http() as http:
        return await Fleet(http, RlListing(listing, frontend)).read_versions()
