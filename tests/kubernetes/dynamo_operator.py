"""A stand-in for Dynamo's operator. It is ours, small, and in tests only.

It makes the pods and the frontend's Service of every DynamoGraphDeployment in a namespace, backed
by processes of this machine (tests/kubernetes/graphs.py), follows `replicas`, and writes `state`,
`conditions`, `components` and `observedGeneration`: late, out of order or wrongly, if a test asks
for it.

The real one makes pods through component objects and Deployments or Grove, and runs the image's
command; this one makes them itself and ignores images and commands.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollway.errors import Conflict, RollwayError
from rollway.kubernetes.address import COMPONENT_LABEL
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.gates import read_expected
from rollway.kubernetes.objects import (
    DGD,
    DGD_ALPHA,
    DGD_LABEL,
    POD,
    SCALING_ADAPTER,
    TYPE_LABEL,
    Object,
    ObjectKind,
    name_dynamo_namespace,
    name_service,
)
from tests.kubernetes.graphs import MODEL, Backing, LightGraph, StubGraph
from tests.kubernetes.loop import OperatorLoop
from tests.kubernetes.node import make_reference, now

FINALIZER = "nvidia.com/dynamo-finalizer"
_COUNTS = {DGD: "components", DGD_ALPHA: "services"}
"""Where the status of each version has the replicas."""


@dataclass
class Faults:
    """What goes wrong with one graph; change it while the operator runs."""

    ignore: bool = False
    """The operator does not see the graph: no pods, no status."""
    failed: str = ""
    """The state is `failed`, with this message."""
    never_ready: bool = False
    """The pods of workers do not become ready."""
    waiting: str = ""
    """The reason why containers of workers wait, for example CrashLoopBackOff."""
    event: str = ""
    """A warning about the first worker's pod."""
    too_early: bool = False
    """`successful` is said while pods still start."""
    old_generation: bool = False
    """`observedGeneration` stays behind."""
    one_by_one: float = 0.0
    """State, conditions and observedGeneration are written in this order, seconds apart."""
    ready_after: float = 0.0
    """Pods get ready this many seconds after they were made."""
    hanging_finalizer: bool = False
    """The operator's finalizer is set and never removed."""


@dataclass
class Graph:
    """What the operator knows about one graph."""

    live: Object
    backing: Backing
    pods: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The component of each pod, and since when it is there."""
    written: Object = field(default_factory=dict)
    told: bool = False
    stage: tuple[int, float] = (0, 0.0)
    """With `one_by_one`: how much of the status is written, and since when."""


class DynamoOperator:
    """Runs in threads of the test: `with DynamoOperator(cluster, folder) as operator`.

    Args:
        cluster: an administrator in the namespace to work in.
        folder: for logs and files of the processes.
        model: a checkpoint, for a real frontend with light workers; without it a stub answers.
        kind: the version that it serves; an old operator has v1alpha1.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, model: Path | None = None, kind: ObjectKind = DGD
    ) -> None:
        # With connections and counts of its own: tests count the requests of the product.
        self.cluster = cluster
        self.usual = Faults()
        """The faults of graphs that have none of their own."""
        self.faults: dict[str, Faults] = {}
        self.graphs: dict[str, Graph] = {}
        self._folder = folder
        self._model = model
        self._kind = kind
        takers = {kind: self._take_graph, POD: self._take_pod, SCALING_ADAPTER: self._take_adapter}
        self._loop = OperatorLoop(cluster, folder, takers, self._reconcile_all)
        self._node = self._loop.node

    def __enter__(self) -> DynamoOperator:
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop(self._close)

    def _close(self) -> None:
        for graph in self.graphs.values():
            graph.backing.close()

    def get_faults(self, name: str) -> Faults:
        """Return the faults of a graph, to be changed; also before the graph exists."""
        return self.faults.setdefault(name, replace(self.usual))

    # --- changes ------------------------------------------------------------------------------

    def _take_graph(self, word: str, live: Object) -> None:
        name = live["metadata"]["name"]
        # The spec is read as v1beta1's; owner references name the version that is served.
        live = {**live, "spec": convert(live, DGD.version).graph["spec"]}
        graph = self.graphs.get(name)
        if word == "DELETED":
            if graph is not None:
                del self.graphs[name]
                graph.backing.close()
            return
        if graph is not None and graph.live["metadata"]["uid"] == live["metadata"]["uid"]:
            graph.live = live
            return
        if graph is not None:
            graph.backing.close()
        self.graphs[name] = Graph(live, self._make_backing(live))

    def _make_backing(self, live: Object) -> Backing:
        name, [served, *_] = live["metadata"]["name"], [*read_expected(live).models, MODEL]
        namespace = name_dynamo_namespace(self.cluster.namespace, name)
        address = self._node.address
        if self._model is None:
            return StubGraph(namespace, address, served)
        folder = self._folder / f"{name}-{time.monotonic_ns()}"
        return LightGraph(namespace, address, self._model, folder, served)

    def _take_pod(self, word: str, live: Object) -> None:
        meta = live["metadata"]
        if DGD_LABEL not in (meta.get("labels") or {}):
            return  # of another stand-in
        graph = self.graphs.get(meta["labels"][DGD_LABEL])
        if word != "DELETED" and meta.get("deletionTimestamp"):
            if graph is not None:
                graph.backing.stop(meta["name"])
            self._node.remove_pod(meta["name"])
        elif word == "DELETED" and graph is not None:
            graph.backing.stop(meta["name"])
            graph.pods.pop(meta["name"], None)  # made again, if the graph still wants it

    def _take_adapter(self, word: str, live: Object) -> None:
        """Copy the replicas of a scaling adapter, which HPA and KEDA set, into its graph."""
        reference, wanted = live["spec"]["dgdRef"], live["spec"]["replicas"]
        graph = self.graphs.get(reference["name"])
        if word == "DELETED" or graph is None:
            return
        components = [dict(part) for part in graph.live["spec"]["components"]]
        for part in components:
            if part["name"] == reference["componentName"] and part.get("replicas", 1) != wanted:
                part["replicas"] = wanted
                self.cluster.patch(DGD, reference["name"], {"spec": {"components": components}})
        status = {"replicas": wanted, "selector": f"{COMPONENT_LABEL}={reference['componentName']}"}
        if live.get("status", {}).get("replicas") != wanted:
            name = live["metadata"]["name"]
            self.cluster.patch(SCALING_ADAPTER, name, {"status": status}, subresource="status")

    # --- one graph ----------------------------------------------------------------------------

    def _reconcile_all(self) -> None:
        for graph in list(self.graphs.values()):
            self._reconcile(graph)

    def _reconcile(self, graph: Graph) -> None:
        meta = graph.live["metadata"]
        faults = self.get_faults(meta["name"])
        if faults.ignore:
            return
        if meta.get("deletionTimestamp"):
            if not faults.hanging_finalizer and FINALIZER in meta.get("finalizers", []):
                rest = [entry for entry in meta["finalizers"] if entry != FINALIZER]
                self._patch_graph(graph, {"metadata": {"finalizers": rest}})
            return
        if faults.hanging_finalizer and FINALIZER not in meta.get("finalizers", []):
            self._patch_graph(
                graph, {"metadata": {"finalizers": [*meta.get("finalizers", []), FINALIZER]}}
            )
        self._make_pods(graph)
        ready = {pod: self._report_pod(graph, faults, pod) for pod in graph.pods}
        self._write_status(graph, faults, ready)

    def _make_pods(self, graph: Graph) -> None:
        name = graph.live["metadata"]["name"]
        components = {part["name"]: part for part in graph.live["spec"]["components"]}
        wanted: dict[str, str] = {}
        for component, part in components.items():
            nodes = (part.get("multinode") or {}).get("nodeCount", 1)
            base = name_service(name, component)
            count = int(part.get("replicas", 1)) * int(nodes)
            wanted |= {f"{base}-{number}": component for number in range(count)}
        for pod in [pod for pod in graph.pods if pod not in wanted]:
            graph.backing.stop(pod)
            self._node.remove_pod(pod)
            graph.pods.pop(pod, None)
        for pod, component in wanted.items():
            if pod in graph.pods:
                continue
            part = components[component]
            graph.backing.start(pod, part.get("type") or component)
            labels = {DGD_LABEL: name, COMPONENT_LABEL: component, TYPE_LABEL: part.get("type", "")}
            self._node.make_pod(pod, labels, graph.live, graph.backing.get_env(pod))
            self._node.logs[pod] = lambda pod=pod: graph.backing.read_log(pod)
            graph.pods[pod] = component, time.monotonic()
        for component, part in components.items():
            if part.get("type") == "frontend":
                pods = [pod for pod, (owner, _) in graph.pods.items() if owner == component]
                if graph.written.get("exposed") != pods:
                    service = name_service(name, component)
                    self._node.expose(service, graph.live, pods, graph.backing.ports)
                    graph.written["exposed"] = pods
            if part.get("scalingAdapter") is not None:
                self._make_adapter(graph, component, part)

    def _make_adapter(self, graph: Graph, component: str, part: Object) -> None:
        name = name_service(graph.live["metadata"]["name"], component)
        if name in graph.written.setdefault("adapters", set()):
            return
        body = {
            "apiVersion": SCALING_ADAPTER.api_version,
            "kind": SCALING_ADAPTER.kind,
            "metadata": {"name": name, "ownerReferences": [make_reference(graph.live)]},
            "spec": {
                "replicas": part.get("replicas", 1),
                "dgdRef": {"name": graph.live["metadata"]["name"], "componentName": component},
            },
        }
        with contextlib.suppress(Conflict):
            self.cluster.create(SCALING_ADAPTER, body)
        graph.written["adapters"].add(name)

    def _report_pod(self, graph: Graph, faults: Faults, pod: str) -> bool:
        component, since = graph.pods[pod]
        is_worker = graph.live["spec"]["components"] and not self._is_frontend(graph, component)
        held = is_worker and (faults.never_ready or faults.waiting)
        waited = time.monotonic() - since >= faults.ready_after
        ready = bool(waited and not held and graph.backing.is_up(pod))
        self._node.report(pod, ready=ready, waiting=faults.waiting if is_worker else "")
        if is_worker and faults.event and not graph.told:
            graph.told = True
            self._node.tell(pod, "FailedScheduling", faults.event)
        return ready

    def _is_frontend(self, graph: Graph, component: str) -> bool:
        parts = graph.live["spec"]["components"]
        return any(p["name"] == component and p.get("type") == "frontend" for p in parts)

    def _write_status(self, graph: Graph, faults: Faults, ready: dict[str, bool]) -> None:
        generation = graph.live["metadata"]["generation"]
        all_ready = bool(ready) and all(ready.values())
        state = "successful" if all_ready or faults.too_early else "pending"
        state = "failed" if faults.failed else state
        is_ready = state == "successful"
        condition = {
            "type": "Ready",
            "status": "True" if is_ready else "False",
            "reason": "AllReady" if is_ready else "NotReady",
            "message": faults.failed or ("" if is_ready else "some pods are not ready"),
            "lastTransitionTime": now(),
            "observedGeneration": generation,
        }
        observed = generation - 1 if faults.old_generation else generation
        status = {
            "state": state,
            "conditions": [condition],
            "observedGeneration": observed,
            _COUNTS[self._kind]: self._count_replicas(graph, ready),
        }
        key = {**status, "conditions": [{**condition, "lastTransitionTime": ""}]}
        if graph.written.get("status") == key:
            return
        if faults.one_by_one and is_ready:
            step, since = graph.stage
            if time.monotonic() - since < faults.one_by_one:
                return
            graph.stage = step + 1, time.monotonic()
            parts = [{"state": state}, {"conditions": [condition]}]
            if step < len(parts):
                self._patch_graph(graph, {"status": parts[step]}, "status")
                return
        if self._patch_graph(graph, {"status": status}, "status"):
            graph.written["status"] = key

    def _count_replicas(self, graph: Graph, ready: dict[str, bool]) -> Object:
        counts: Object = {}
        base = name_dynamo_namespace(self.cluster.namespace, graph.live["metadata"]["name"])
        for part in graph.live["spec"]["components"]:
            pods = [pod for pod, (component, _) in graph.pods.items() if component == part["name"]]
            count = sum(ready.get(pod, False) for pod in pods)
            is_frontend = part.get("type") == "frontend"
            counts[part["name"]] = {
                "componentKind": "Deployment",
                "componentNames": [name_service(graph.live["metadata"]["name"], part["name"])],
                **({} if self._kind == DGD else {"componentName": part["name"]}),
                "replicas": len(pods),
                "readyReplicas": count,
                "availableReplicas": count,
                "updatedReplicas": len(pods),
                "runtimeNamespace": base if is_frontend else f"{base}-0123abcd",
            }
        return counts

    def _patch_graph(self, graph: Graph, body: Object, subresource: str = "") -> bool:
        name = graph.live["metadata"]["name"]
        try:
            self.cluster.patch(self._kind, name, body, subresource=subresource)
        except Conflict:
            return False
        except RollwayError:  # deleted meanwhile
            if self.cluster.get(self._kind, name) is None:
                return False
            raise
        return True
