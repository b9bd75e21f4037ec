"""Change the replicas of a component of a graph.

Where the component has a scaling adapter, that adapter owns the replicas, and its `/scale` is what
an HPA, KEDA and Dynamo's planner write; so do we. Otherwise the graph's own field changes, with
its resource version checked: who scales at the same time is not overwritten.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rollway.errors import UsageError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import (
    DGD,
    KEY_LABEL,
    SCALING_ADAPTER,
    Object,
    list_components,
    name_service,
    select_run,
)
from rollway.kubernetes.teardown import list_kind
from rollway.kubernetes.waits import wait_for

_OPERATOR_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """A change of replicas."""

    run: str
    graph: str
    component: str
    before: int
    after: int
    through: str
    """`DynamoGraphDeployment`, or the adapter that owns the replicas."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_change(text: str) -> tuple[str, str, int]:
    """Read `[KEY.]COMPONENT=REPLICAS`; the key is "" without one."""
    left, sign, right = text.partition("=")
    key, _, component = left.rpartition(".")
    if not sign or not component or not right.isascii() or not right.isdigit():
        raise UsageError(f"{text!r} is no change of replicas.", "Write COMPONENT=NUMBER.")
    return key.removeprefix("dynamo."), component, int(right)


def scale(
    cluster: Cluster, run: str, change: str, *, dry_run: bool = False
) -> tuple[Scaling, Object]:
    """Set the replicas of a component; return what changed, and the graph after it.

    Through an adapter it is the operator that changes the graph, a moment later."""
    key, component, replicas = parse_change(change)
    graph = _find_graph(cluster, run, key, component)
    name = graph["metadata"]["name"]
    part = _find_component(graph, component)
    before = 1 if part.get("replicas") is None else int(part["replicas"])
    if part.get("scalingAdapter") is not None:
        adapter = name_service(name, component)
        scaling = Scaling(
            run, name, component, before, replicas, f"{SCALING_ADAPTER.kind} {adapter}"
        )
        if not dry_run:
            change_body = {"spec": {"replicas": replicas}}
            cluster.patch(SCALING_ADAPTER, adapter, change_body, subresource="scale")
            graph = _wait_for_operator(cluster, name, component, replicas)
        return scaling, graph
    scaling = Scaling(run, name, component, before, replicas, DGD.kind)
    if dry_run or before == replicas:
        return scaling, graph
    return scaling, _patch_replicas(cluster, graph, component, replicas)


def _wait_for_operator(cluster: Cluster, name: str, component: str, replicas: int) -> Object:
    return wait_for(
        cluster, DGD, name,
        lambda body: body if _find_component(body, component).get("replicas") == replicas else None,
        timeout=_OPERATOR_SECONDS, what="was not changed by its operator",
    )  # fmt: skip


def _patch_replicas(cluster: Cluster, graph: Object, component: str, replicas: int) -> Object:
    def change(live: Object) -> Object:
        _find_component(live, component)["replicas"] = replicas
        if cluster.has_old_graphs:
            return {"spec": {"services": {component: {"replicas": replicas}}}}
        return {"spec": {"components": live["spec"]["components"]}}

    return cluster.change(DGD, graph, change)


def _find_graph(cluster: Cluster, run: str, key: str, component: str) -> Object:
    graphs = list_kind(cluster, DGD, select_run(run))
    if not graphs:
        raise UsageError(f"Run {run} has no graph in {cluster.namespace}.", "Check the name.")
    keys = [graph["metadata"]["labels"].get(KEY_LABEL, "") for graph in graphs]
    matches = [
        graph
        for graph, own in zip(graphs, keys, strict=True)
        if (own.removeprefix("dynamo.") == key if key else component in list_components(graph))
    ]
    if not matches:
        known = ", ".join(
            f"{own.removeprefix('dynamo.')}.{name}"
            for graph, own in zip(graphs, keys, strict=True)
            for name in list_components(graph)
        )
        raise UsageError(f"Run {run} has no component {key or component}.", f"It has {known}.")
    if len(matches) > 1:
        raise UsageError(
            f"{len(matches)} graphs of run {run} have a component {component}.",
            f"Write KEY.{component}=NUMBER.",
        )
    return matches[0]


def _find_component(graph: Object, component: str) -> Object:
    parts = list_components(graph)
    if component not in parts:
        name = graph["metadata"]["name"]
        raise UsageError(
            f"Graph {name} has no component {component}.", f"It has {', '.join(parts)}."
        )
    return parts[component]
