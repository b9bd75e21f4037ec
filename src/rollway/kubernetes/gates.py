"""When a DynamoGraphDeployment is ready: three gates, in this order.

    operator   the operator says `successful`, with the condition Ready, for this generation
       │       (`failed` ends the wait at once)
    pods       as many pods as the spec asks for, all containers ready
       │       (an operator may say `successful` too early)
    frontend   it answers HTTP, and lists every model and as many workers as the spec asks for
               (a pod may be ready while its frontend answers 503)

One watch of graphs and one of pods serve any number of graphs. A frontend is asked only behind the
first two gates, and once a second at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rollway.errors import ClusterError, Forbidden, NotReady, RollwayError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.connection import Unavailable
from rollway.kubernetes.expected import count_workers, read_expected, read_models
from rollway.kubernetes.kinds import EVENT, POD, Kind, Object, find_kind
from rollway.kubernetes.names import (
    DGD_LABEL,
    HTTP_PORT,
    RUN_LABEL,
    select_pods,
    select_run,
)
from rollway.kubernetes.watches import Change, Follower, Selection

ASK_SECONDS = 1.0
"""Between two questions to one frontend."""
LOG_LINES = 10
_DOWN = frozenset({500, 502, 503, 504})
_ASKERS = 8


@dataclass(frozen=True, slots=True)
class GateState:
    """Which gates a graph has passed, and what it waits for at the next."""

    name: str
    operator: bool = False
    pods: bool = False
    frontend: bool = False
    why: str = "the operator has not said anything yet"
    pod: str = ""
    """The pod that holds it up, if it is one."""

    @property
    def gate(self) -> str:
        """The first gate that is not passed; empty if the graph is ready."""
        gates = {"operator": self.operator, "pods": self.pods, "frontend": self.frontend}
        return next((name for name, passed in gates.items() if not passed), "")

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operator": self.operator,
            "pods": self.pods,
            "frontend": self.frontend,
            "why": self.why,
        }


def wait_until_ready(
    cluster: Cluster,
    graphs: Sequence[Object],
    *,
    timeout: float | Mapping[str, float],
    on_change: Callable[[Mapping[str, GateState]], None] = lambda states: None,
) -> None:
    """Wait until all graphs have passed the three gates.

    Args:
        graphs: as `Cluster.apply` returned them: their generation is the one to wait for.
        timeout: seconds, also per graph by name.
        on_change: called with the states of all graphs whenever one of them changes.

    Raises:
        NotReady: a graph failed, or is not ready in time. It names the gate and what holds it up.
        ClusterError: a graph was deleted meanwhile.
    """
    if not graphs:
        return
    Gates(cluster, graphs).wait(timeout, on_change)


def read_gates(cluster: Cluster, graphs: Sequence[Object]) -> dict[str, GateState]:
    """Return where graphs stand now; `graphs` are as the API server has them."""
    if not graphs:
        return {}
    gates = Gates(cluster, graphs)
    for entry in graphs:
        gates.take(Change("ADDED", entry))
    for pod in cluster.list(POD, labels=select_pods(list(gates.states)))[0]:
        gates.take_pod(Change("ADDED", pod))
    for name, state in list(gates.states.items()):
        try:
            gates.judge(name)
        except NotReady as error:  # shown beside the others
            gates.states[name] = replace(state, why=error.message, pod=error.pod)
    try:
        gates.ask_frontends()
    except Forbidden:  # who may look at objects only still sees the other gates
        for name, state in gates.states.items():
            if state.gate == "frontend":
                gates.states[name] = replace(state, why="you may not ask its frontend")
    return gates.states


@dataclass
class _Graph:
    generation: int
    live: Object | None = None
    pods: dict[str, Object] = field(default_factory=dict)
    asked: float = 0.0


class Gates:
    """The gates of several graphs, from what watches and frontends say."""

    def __init__(self, cluster: Cluster, graphs: Sequence[Object]) -> None:
        self._cluster = cluster
        self._kind: Kind = find_kind(graphs[0])
        self._graphs = {
            graph["metadata"]["name"]: _Graph(int(graph["metadata"].get("generation") or 0))
            for graph in graphs
        }
        self.states = {name: GateState(name) for name in self._graphs}
        runs = {(graph["metadata"].get("labels") or {}).get(RUN_LABEL) for graph in graphs}
        run = runs.pop() if len(runs) == 1 else None
        self._labels = select_run(run) if run else ""

    def wait(
        self,
        timeout: float | Mapping[str, float],
        on_change: Callable[[Mapping[str, GateState]], None],
    ) -> None:
        begun = time.monotonic()
        limits = {
            name: timeout if isinstance(timeout, (int, float)) else timeout[name]
            for name in self._graphs
        }
        pods = Selection(POD, select_pods(list(self._graphs)))
        with Follower(self._cluster, [Selection(self._kind, self._labels), pods]) as follower:
            shown: dict[str, GateState] = {}
            while any(state.gate for state in self.states.values()):
                for name, state in self.states.items():
                    if state.gate and time.monotonic() - begun > limits[name]:
                        raise self._explain(state, f"is not ready after {limits[name]:.0f} s")
                touched = set()
                item = follower.take(self._find_pause(begun, limits))
                while item is not None:  # all that is there, so that a burst is judged once
                    selection, change = item
                    touched.add(self.take_pod(change) if selection is pods else self.take(change))
                    item = follower.take(0.0)
                for name in touched & set(self._graphs):
                    self.judge(name)
                self.ask_frontends()
                if self.states != shown:
                    shown = dict(self.states)
                    on_change(shown)

    def take(self, change: Change) -> str:
        """Remember a graph; return its name. Raise if it was deleted."""
        graph = self._graphs.get(change.name)
        if graph is None:
            return ""
        if change.type == "DELETED":
            raise ClusterError(
                f"{self._kind.kind} {change.name} was deleted while its readiness was awaited.",
                "Somebody else removed it; run the command again to create it.",
            )
        graph.live = change.object
        return change.name

    def take_pod(self, change: Change) -> str:
        """Remember what is needed of a pod; return its graph's name."""
        labels = change.object["metadata"].get("labels") or {}
        name = str(labels.get(DGD_LABEL) or "")
        graph = self._graphs.get(name)
        if graph is None:
            return ""
        if change.type == "DELETED":
            graph.pods.pop(change.name, None)
        else:
            meta, status = change.object["metadata"], change.object.get("status") or {}
            kept = ("name", "deletionTimestamp")
            graph.pods[change.name] = {
                "metadata": {key: meta[key] for key in kept if key in meta},
                "status": {
                    "phase": status.get("phase"),
                    "containerStatuses": status.get("containerStatuses") or [],
                    "conditions": status.get("conditions") or [],
                },
            }
        return name

    def judge(self, name: str) -> None:
        """Set the state of a graph by what its objects say.

        Raises:
            NotReady: the operator says that it failed.
        """
        graph = self._graphs[name]
        if graph.live is None:
            return
        state = GateState(name, frontend=self.states[name].frontend)
        why = _judge_operator(graph.live, graph.generation)
        if why.startswith("failed"):
            raise self._explain(replace(state, why=why), "failed")
        pod, pods_why = _judge_pods(graph.pods, read_expected(graph.live).pods)
        if why:
            self.states[name] = replace(state, frontend=False, why=why, pod=pod)
        elif pods_why:
            self.states[name] = replace(state, operator=True, frontend=False, why=pods_why, pod=pod)
        else:
            why = "" if state.frontend else "its frontend was not asked yet"
            self.states[name] = replace(state, operator=True, pods=True, why=why)

    def ask_frontends(self) -> None:
        """Ask the frontends of all graphs behind the first two gates, several at once."""
        now = time.monotonic()
        due = [
            name
            for name, state in self.states.items()
            if state.gate == "frontend" and now - self._graphs[name].asked >= ASK_SECONDS
        ]
        if not due:
            return
        for name in due:
            self._graphs[name].asked = now
        with ThreadPoolExecutor(min(len(due), _ASKERS)) as pool:
            for name, why in zip(due, pool.map(self._ask_frontend, due), strict=True):
                self.states[name] = replace(self.states[name], frontend=not why, why=why)

    def _ask_frontend(self, name: str) -> str:
        """Return why a frontend does not serve yet, or nothing."""
        live = self._graphs[name].live
        assert live is not None
        expected = read_expected(live)
        if expected.frontend is None:  # a pool of workers for other graphs' frontends
            return ""
        status, body = self._ask(expected.frontend, "/health")
        if status in _DOWN:
            return f"its frontend answers {status}"
        if status == 404:  # it serves HTTP, and has no listing
            return ""
        workers = count_workers(body, self._cluster.namespace, live)
        if workers is not None and workers < expected.workers:
            return f"its frontend lists {workers} of {expected.workers} workers"
        status, body = self._ask(expected.frontend, "/v1/models")
        if status in _DOWN:
            return f"its frontend answers {status}"
        listed = read_models(body) if status < 300 else None
        if listed is None:
            return ""
        missing = [model for model in expected.models if model not in listed]
        if missing or (expected.workers and not listed):
            return f"its frontend does not list {', '.join(missing) or 'any model'}"
        return ""

    def _ask(self, service: str, path: str) -> tuple[int, bytes]:
        try:
            return self._cluster.ask_service(service, HTTP_PORT, path)
        except Unavailable:  # an API server that restarts; the watches end if it stays away
            return 503, b""

    def _find_pause(self, begun: float, limits: Mapping[str, float]) -> float:
        """Return how long nothing is due, if no change comes."""
        now = time.monotonic()
        waiting = [name for name, state in self.states.items() if state.gate]
        due = [begun + limits[name] - now for name in waiting]
        due += [
            self._graphs[name].asked + ASK_SECONDS - now
            for name in waiting
            if self.states[name].gate == "frontend"
        ]
        return max(0.01, min(due, default=ASK_SECONDS))

    def _explain(self, state: GateState, what: str) -> NotReady:
        """Make the error: the gate, the pod that holds it up, its last event and log lines."""
        graph = self._graphs[state.name]
        pod = state.pod or _judge_pods(graph.pods, 0)[0]
        event = self._read_event(pod or state.name)
        log = self._read_log(pod) if pod else []
        parts = [f"DynamoGraphDeployment {state.name} {what}: {state.why}"]
        parts += [f"pod {pod}: {_describe_pod(graph.pods[pod])}"] if pod in graph.pods else []
        parts += [f"last event: {event}"] if event else []
        return NotReady(
            f"{'; '.join(parts)}.",
            f"It waits at the gate `{state.gate}` (docs/kubernetes.md says what to look at).",
            graph=state.name,
            gate=state.gate,
            pod=pod,
            event=event,
            log=log,
        )

    def _read_event(self, name: str) -> str:
        try:
            events, _ = self._cluster.list(EVENT, fields=f"involvedObject.name={name}")
        except RollwayError:
            return ""
        events.sort(key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))
        last = events[-1] if events else None
        return f"{last.get('reason')}: {last.get('message')}" if last else ""

    def _read_log(self, pod: str) -> list[str]:
        try:
            return list(self._cluster.read_log(pod, tail=LOG_LINES))
        except RollwayError:  # a container that never started has none
            return []


def _judge_operator(live: Object, generation: int) -> str:
    """Return why the operator does not call this generation of a graph ready, or nothing."""
    status = live.get("status") or {}
    wanted = max(generation, int(live["metadata"].get("generation") or 0))
    observed = status.get("observedGeneration")
    state = str(status.get("state") or "nothing yet")
    ready: Object = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {}
    )
    reported = ready.get("observedGeneration") if observed is None else observed
    if reported is not None and int(reported) < wanted:
        return f"the operator has seen generation {reported} of {wanted}"
    words = f": {ready['message']}" if ready.get("message") else ""
    if state == "failed":
        return f"failed{words}"
    if state != "successful":
        return f"the operator says {state}{words}"
    if ready.get("status") != "True":
        return f"its condition Ready is {ready.get('status') or 'not set'}{words}"
    return ""


def _judge_pods(pods: Mapping[str, Object], expected: int) -> tuple[str, str]:
    """Return the pod that is not ready and why; empty if all are and there are enough."""
    counted = [
        pod
        for pod in pods.values()
        if not pod["metadata"].get("deletionTimestamp")
        and pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    waiting = [pod for pod in counted if not _is_ready(pod)]
    if waiting:
        pod = max(waiting, key=lambda pod: ("waiting" in _find_wait(pod), _find_wait(pod)))
        name = str(pod["metadata"]["name"])
        ready = len(counted) - len(waiting)
        return name, f"{ready} of {max(expected, len(counted))} pods are ready, {name} is not"
    if len(counted) < expected:
        return "", f"{len(counted)} of {expected} pods exist"
    return "", ""


def _is_ready(pod: Object) -> bool:
    containers = pod["status"]["containerStatuses"]
    return bool(containers) and all(container.get("ready") for container in containers)


def _find_wait(pod: Object) -> str:
    for container in pod["status"]["containerStatuses"]:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"waiting ({waiting.get('reason') or 'no reason'})"
    return ""


def _describe_pod(pod: Object) -> str:
    for condition in pod["status"]["conditions"]:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"not scheduled ({condition.get('message') or condition.get('reason')})"
    return _find_wait(pod) or f"phase {pod['status'].get('phase')}, not ready"
