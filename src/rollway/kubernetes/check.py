"""What `rollway k8s check` finds out about a run on its cluster, without changing anything.

Each probe gives a `Finding`. The probes ask only what a run would ask as well, so a check that
passes is no proof, but every refusal that it reports is one that the run would meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rollway.errors import ClusterError, Forbidden, KindMissing, NamespaceMissing, RollwayError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.drift import find_drift
from rollway.kubernetes.kinds import (
    DGD,
    DGD_ALPHA,
    NAMESPACE,
    QUOTA,
    RAYCLUSTER,
    RAYJOB,
    Kind,
    Object,
    find_kind,
)
from rollway.kubernetes.manifests import Manifests
from rollway.kubernetes.names import RUN_LABEL
from rollway.kubernetes.permissions import USER, list_verbs
from rollway.kubernetes.refusals import INSTALL_COMMANDS, make_rule

_AT_ONCE = 8
_LWS = {"leaderworkerset.x-k8s.io", "scheduling.volcano.sh"}
_NOTHING = f"{RUN_LABEL}=none.of-these"  # a list of nothing still says whether a kind is served


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    text: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "ok": self.ok, "text": self.text, "fix": self.fix}


def check_cluster(cluster: Cluster, manifests: Manifests) -> Iterator[Finding]:
    """Probe the API, the namespace, the CRDs, the permissions, the quota, and every object."""
    try:
        yield _check_namespace(cluster)
    except Forbidden:
        yield Finding("namespace", True, f"{cluster.namespace} (you may not read namespaces)")
    except ClusterError as error:
        yield Finding("API server", False, error.message, error.hint)
        return
    served = list(_check_kinds(cluster, manifests))
    yield from served
    yield from _check_multinode(cluster, manifests)
    yield from _check_permissions(cluster)
    yield from _check_quota(cluster, manifests)
    if all(finding.ok for finding in served):
        yield from check_objects(cluster, manifests)


def _check_namespace(cluster: Cluster) -> Finding:
    body = cluster.get(NAMESPACE, cluster.namespace)
    if body is None:
        fix = f"Create it with `kubectl create namespace {cluster.namespace}`."
        return Finding("namespace", False, f"{cluster.namespace} does not exist.", fix)
    if body.get("status", {}).get("phase") == "Terminating":
        return Finding("namespace", False, f"{cluster.namespace} is being deleted.", "Wait.")
    return Finding("namespace", True, cluster.namespace)


def _check_kinds(cluster: Cluster, manifests: Manifests) -> Iterator[Finding]:
    kinds: list[Kind] = []
    if manifests.graphs:
        kinds.append(DGD)
    if manifests.jobs:
        kinds.append(RAYJOB)
    if manifests.jobs or manifests.clusters:
        kinds.append(RAYCLUSTER)
    for kind in kinds:
        what = f"CRD {kind.resource}"
        versions = [kind] if kind != DGD else [DGD, DGD_ALPHA]
        served, refusal = [], None
        for version in versions:
            try:
                cluster.list(version, labels=_NOTHING, metadata_only=True)
                served.append(version.version)
                break  # the newest that is served is written; older ones need not be
            except KindMissing as error:
                refusal = refusal or error
            except Forbidden:
                served.append(f"{version.version} (installed, you may not list it)")
        if served:
            yield Finding(what, True, f"served: {', '.join(served)}")
        else:
            command = INSTALL_COMMANDS.get(kind.group, "")
            text = refusal.message if refusal else "It is not installed."
            yield Finding(what, False, text, f"Install its operator: {command}")


def _check_multinode(cluster: Cluster, manifests: Manifests) -> Iterator[Finding]:
    """Ask for what runs workers over several nodes. Without it the operator makes no pods, and says
    so in the status of the graph alone."""
    specs = (graph["spec"] for graph in manifests.graphs.values())
    parts = (p for s in specs for p in s.get("components") or s["services"].values())
    if any(part.get("multinode") for part in parts):
        groups = cluster.list_groups()
        has_any = "grove.io" in groups or groups >= _LWS
        text = "Workers over several nodes need Grove, or LeaderWorkerSet and Volcano."
        fix = "Set `global.grove.install: true` in the values of deploy/helm, and apply them."
        yield Finding("multinode", has_any, text, "" if has_any else fix)


def _check_permissions(cluster: Cluster) -> Iterator[Finding]:
    """Ask for every permission in the table; one row for each resource."""
    pairs = list(list_verbs(USER))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(
            pool.map(lambda pair: cluster.may(pair[0], pair[1].kind, pair[1].subresource), pairs)
        )
    rows: dict[str, list[str]] = {}
    refused: dict[str, list[tuple[str, Object]]] = {}
    for (verb, permission), allowed in zip(pairs, answers, strict=True):
        resource = permission.resource
        rows.setdefault(resource, [])
        if allowed:
            rows[resource].append(verb)
        else:
            rule = make_rule(verb, permission.kind, permission.subresource)
            refused.setdefault(resource, []).append((permission.purpose, rule))
    for resource, verbs in rows.items():
        missing = refused.get(resource, [])
        if not missing:
            yield Finding(f"may {resource}", True, ", ".join(dict.fromkeys(verbs)))
            continue
        rule = missing[0][1]
        rule["verbs"] = list(dict.fromkeys(verb for _, each in missing for verb in each["verbs"]))
        purposes = ", ".join(dict.fromkeys(purpose for purpose, _ in missing))
        text = f"missing: {', '.join(rule['verbs'])} (for {purposes})"
        yield Finding(f"may {resource}", False, text, f"Add to your Role: {rule}")


def _check_quota(cluster: Cluster, manifests: Manifests) -> Iterator[Finding]:
    try:
        quotas, _ = cluster.list(QUOTA)
    except Forbidden:
        yield Finding("quota", True, "you may not read quotas")
        return
    wanted = sum(count_gpus(body) for body in manifests.objects)
    for quota in quotas:
        status = quota.get("status") or {}
        for key in ("requests.nvidia.com/gpu", "nvidia.com/gpu", "limits.nvidia.com/gpu"):
            hard = (status.get("hard") or quota["spec"].get("hard") or {}).get(key)
            if hard is None:
                continue
            left = read_quantity(hard) - read_quantity((status.get("used") or {}).get(key, "0"))
            name = quota["metadata"]["name"]
            text = f"{name}: {wanted} GPUs are asked for, {float(left):g} are left"
            fix = "" if wanted <= left else "Ask for less, or have the quota raised."
            yield Finding("quota", wanted <= left, text, fix)
    if not quotas:
        yield Finding("quota", True, "none")


def check_objects(cluster: Cluster, manifests: Manifests) -> Iterator[Finding]:
    """Have the API server validate every object, as a dry run; show drift of our own fields."""
    for body in manifests.objects:
        kind, name = find_kind(body), body["metadata"]["name"]
        what = f"{kind.kind} {name}"
        try:
            try:
                live = cluster.get(kind, name)
            except KindMissing:
                if kind != DGD:
                    raise
                kind, body = DGD_ALPHA, convert(body, DGD_ALPHA.version).graph
                live = cluster.get(kind, name)
            if live is None:
                cluster.create(kind, body, dry_run=True)
                yield Finding(what, True, "the cluster accepts it")
                continue
            cluster.check_owner(kind, body, live)
            drift = find_drift(cluster, kind, body)
        except (KindMissing, NamespaceMissing):
            continue  # said above
        except RollwayError as error:
            yield Finding(what, False, error.message, error.hint)
            continue
        paths = ", ".join(field.path for field in drift)
        text = f"it is there, with other fields: {paths}" if drift else "it is there, as described"
        yield Finding(what, True, text)


def count_gpus(body: Object) -> int:
    """Return the GPUs that all replicas of an object ask for."""
    spec = body.get("spec") or {}
    if "components" in spec:
        return sum(
            _get_factor(part) * _count_in(part.get("podTemplate") or {})
            for part in spec["components"]
        )
    if "services" in spec:
        return sum(
            _get_factor(part)
            * int(((part.get("resources") or {}).get("limits") or {}).get("gpu") or 0)
            for part in spec["services"].values()
        )
    ray = spec.get("rayClusterSpec") or (spec if "headGroupSpec" in spec else None)
    if ray:
        workers = ray.get("workerGroupSpecs") or []
        total = _count_in((ray.get("headGroupSpec") or {}).get("template") or {})
        return total + sum(
            int(group.get("replicas") or group.get("minReplicas") or 0)
            * int(group.get("numOfHosts") or 1)
            * _count_in(group.get("template") or {})
            for group in workers
        )
    return int(spec.get("replicas") or 1) * _count_in(spec.get("template") or {})


def _get_factor(part: Object) -> int:
    replicas = part.get("replicas")
    nodes = (part.get("multinode") or {}).get("nodeCount") or 1
    return (1 if replicas is None else int(replicas)) * int(nodes)


def _count_in(template: Object) -> int:
    containers = (template.get("spec") or {}).get("containers") or []
    resources = (container.get("resources") or {} for container in containers)
    return sum(
        int(((each.get("limits") or each.get("requests")) or {}).get("nvidia.com/gpu") or 0)
        for each in resources
    )


_UNITS = {"m": Fraction(1, 1000), **{unit: Fraction(1000**power) for power, unit in
          enumerate("kMGT", 1)}, **{unit: Fraction(1024**power) for power, unit in
          enumerate(("Ki", "Mi", "Gi", "Ti"), 1)}}  # fmt: skip


def read_quantity(text: str) -> Fraction:
    """Return the number that a quantity such as `500m` or `2Gi` stands for."""
    for unit in sorted(_UNITS, key=len, reverse=True):
        if str(text).endswith(unit):
            return Fraction(str(text)[: -len(unit)]) * _UNITS[unit]
    return Fraction(str(text))
