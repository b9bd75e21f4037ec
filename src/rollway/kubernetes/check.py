"""What `rollway k8s check` finds out about a run on its cluster, without changing anything.

Each probe gives a `Problem`. The probes ask only what a run would ask as well, so a check that
passes is no proof, but every refusal that it reports is one that the run would meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rollway.errors import (
    REPOSITORY,
    ClusterError,
    Forbidden,
    KindMissing,
    NamespaceMissing,
    Problem,
    RollwayError,
)
from rollway.kubernetes.api_server import make_rule
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.manifests import Manifests
from rollway.kubernetes.objects import (
    CONFIG_MAP,
    DEPLOYMENT,
    DGD,
    DGD_ALPHA,
    EVENT,
    NAMESPACE,
    POD,
    QUOTA,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    SCALING_ADAPTER,
    SERVICE,
    ObjectKind,
    find_kind,
)
from rollway.kubernetes.pods import GPU

_AT_ONCE = 8
_LWS = {"leaderworkerset.x-k8s.io", "scheduling.volcano.sh"}
_NOTHING = f"{RUN_LABEL}=none.of-these"  # a list of nothing still says whether a kind is served


def check_cluster(cluster: Cluster, manifests: Manifests) -> Iterator[Problem]:
    """Probe the API, the namespace, the CRDs, the permissions, the quota, and every object."""
    try:
        yield _check_namespace(cluster)
    except Forbidden:
        yield Problem("namespace", "ok", f"{cluster.namespace} (you may not read namespaces)")
    except ClusterError as error:
        yield Problem("API server", "error", error.message, error.hint)
        return
    served = list(_check_kinds(cluster, manifests))
    yield from served
    yield from _check_multinode(cluster, manifests)
    yield from _check_permissions(cluster)
    yield from _check_quota(cluster, manifests)
    if all(finding.level == "ok" for finding in served):
        yield from check_objects(cluster, manifests)


def _check_namespace(cluster: Cluster) -> Problem:
    body = cluster.get(NAMESPACE, cluster.namespace)
    if body is None:
        fix = f"Create it with `kubectl create namespace {cluster.namespace}`."
        return Problem("namespace", "error", f"{cluster.namespace} does not exist.", fix)
    if body.get("status", {}).get("phase") == "Terminating":
        return Problem("namespace", "error", f"{cluster.namespace} is being deleted.", "Wait.")
    return Problem("namespace", "ok", cluster.namespace)


def _check_kinds(cluster: Cluster, manifests: Manifests) -> Iterator[Problem]:
    kinds: list[ObjectKind] = []
    if manifests.graphs:
        kinds.append(DGD)
    if manifests.jobs:
        kinds.append(RAYJOB)
    if manifests.jobs or manifests.clusters:
        kinds.append(RAYCLUSTER)
    for kind in kinds:
        what = f"CRD {kind.resource}"
        try:
            cluster.list(kind, labels=_NOTHING)
        except KindMissing as error:
            yield Problem(what, "error", error.message, error.hint)
            continue
        except Forbidden:
            yield Problem(what, "ok", "you may not list it")
            continue
        is_old = kind == DGD and cluster.has_old_graphs
        yield Problem(what, "ok", f"served: {DGD_ALPHA.version if is_old else kind.version}")


def _check_multinode(cluster: Cluster, manifests: Manifests) -> Iterator[Problem]:
    """Ask for what runs workers over several nodes. Without it the operator makes no pods, and says
    so in the status of the graph alone."""
    parts = (part for graph in manifests.graphs.values() for part in graph["spec"]["components"])
    if any(part.get("multinode") for part in parts):
        has_any = "grove.io" in (groups := cluster.list_groups()) or groups >= _LWS
        text = "Workers over several nodes need Grove, or LeaderWorkerSet and Volcano."
        fix = f"Apply deploy/helm of {REPOSITORY} with `global.grove.install: true` in its values."
        yield Problem("multinode", "ok" if has_any else "error", text, "" if has_any else fix)


def _check_permissions(cluster: Cluster) -> Iterator[Problem]:
    """Ask for every permission in the table."""

    def find_missing(permission: Permission) -> list[str]:
        kind, part = permission.kind, permission.subresource
        return [verb for verb in permission.verbs if not cluster.may(verb, kind, part)]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(find_missing, USER))
    for permission, missing in zip(USER, answers, strict=True):
        what = f"may {permission.resource}"
        if not missing:
            yield Problem(what, "ok", ", ".join(permission.verbs))
            continue
        rule = {**make_rule("", permission.kind, permission.subresource), "verbs": missing}
        text = f"missing: {', '.join(missing)} (for {permission.purpose})"
        yield Problem(what, "error", text, f"Add to your Role: {rule}")


def _check_quota(cluster: Cluster, manifests: Manifests) -> Iterator[Problem]:
    from kubernetes.utils import parse_quantity

    try:
        quotas = cluster.list(QUOTA)
    except Forbidden:
        yield Problem("quota", "ok", "you may not read quotas")
        return
    wanted = count_gpus(manifests.objects)
    for quota in quotas:
        status = quota.get("status") or {}
        for key in ("requests.nvidia.com/gpu", "nvidia.com/gpu", "limits.nvidia.com/gpu"):
            hard = (status.get("hard") or quota["spec"].get("hard") or {}).get(key)
            if hard is None:
                continue
            left = parse_quantity(hard) - parse_quantity((status.get("used") or {}).get(key, "0"))
            name = quota["metadata"]["name"]
            text = f"{name}: {wanted} GPUs are asked for, {float(left):g} are left"
            fix = "" if wanted <= left else "Ask for less, or have the quota raised."
            yield Problem("quota", "ok" if wanted <= left else "error", text, fix)
    if not quotas:
        yield Problem("quota", "ok", "none")


def check_objects(cluster: Cluster, manifests: Manifests) -> Iterator[Problem]:
    """Have the API server validate every object, as a dry run; show drift of our own fields."""
    for body in manifests.objects:
        kind, name = find_kind(body), body["metadata"]["name"]
        what = f"{kind.kind} {name}"
        try:
            live = cluster.get(kind, name)
            if live is None:
                cluster.create(kind, body, dry_run=True)
                yield Problem(what, "ok", "the cluster accepts it")
                continue
            cluster.check_owner(kind, body, live)
            drift = cluster.find_drift(kind, body)
        except (KindMissing, NamespaceMissing):
            continue  # said above
        except RollwayError as error:
            yield Problem(what, "error", error.message, error.hint)
            continue
        how = f"with other fields: {', '.join(drift)}" if drift else "as described"
        yield Problem(what, "ok", f"it is there, {how}")


def count_gpus(node: Any) -> int:
    """Return the GPUs that all replicas of an object, or of a part of it, ask for."""
    if isinstance(node, list):
        return sum(map(count_gpus, node))
    if not isinstance(node, dict):
        return 0
    resources = node.get("resources") or {}
    own = int((resources.get("limits") or resources.get("requests") or {}).get(GPU) or 0)
    replicas = node.get("replicas", node.get("minReplicas"))
    nodes = (node.get("multinode") or {}).get("nodeCount") or node.get("numOfHosts") or 1
    factor = (1 if replicas is None else int(replicas)) * int(nodes)
    return factor * (own + sum(map(count_gpus, node.values())))


# --- permissions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on one kind or on a part of it, and what for."""

    kind: ObjectKind
    verbs: tuple[str, ...]
    purpose: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


_READ = ("get", "list")
_WRITE = ("create", "patch", "delete")
_ASK = ("get", "create", "update", "delete")
"""The verb of a request through the proxy follows its method."""

VIEWER = (
    Permission(DGD, _READ, "gates, status"),
    Permission(RAYJOB, _READ, "state of the job"),
    Permission(RAYCLUSTER, _READ, "name and UID of the job's cluster"),
    Permission(DEPLOYMENT, _READ, "servers beside the training"),
    Permission(SERVICE, _READ, "Services of deployments"),
    Permission(POD, _READ, "second gate, status"),
    Permission(EVENT, ("list",), "why a pod waits"),
    Permission(POD, ("get",), "logs", "log"),
)
"""`status` and `logs`. Through the proxies one may also send orders, so a viewer has none, and sees
neither the third gate nor the versions of workers."""
USER = (
    *VIEWER,
    Permission(SERVICE, _ASK, "third gate, Ray's dashboard, from outside", "proxy"),
    Permission(POD, ("get", "create"), "versions of workers, from outside", "proxy"),
    Permission(DGD, _WRITE, "inference, and its owner"),
    Permission(RAYJOB, _WRITE, "the training job"),
    Permission(RAYCLUSTER, _WRITE, "long-lived clusters"),
    Permission(DEPLOYMENT, _WRITE, "servers beside the training"),
    Permission(SERVICE, _WRITE, "their Services"),
    Permission(CONFIG_MAP, ("get", *_WRITE), "one command at a time starts a run"),
    Permission(SCALING_ADAPTER, ("get", "patch"), "scale", "scale"),
    Permission(QUOTA, ("list",), "check"),
)
"""All commands."""
