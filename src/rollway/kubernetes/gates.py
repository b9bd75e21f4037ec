"""When a DynamoGraphDeployment is ready: three gates, in this order.

    operator   the operator says `successful`, with the condition Ready, for this generation
       │       (`failed` ends the wait at once)
    pods       as many pods as the spec asks for, all containers ready
       │       (an operator may say `successful` too early)
    frontend   it answers HTTP, and lists every model and as many workers as the spec asks for
               (a pod may be ready while its frontend answers 503)

One list of graphs and one of pods a second serve any number of graphs. A frontend is asked only
behind the first two gates.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rollway.errors import Forbidden, NotReady, RollwayError
from rollway.kubernetes.client import Cluster, make_deleted_error
from rollway.kubernetes.objects import (
    DGD,
    DGD_LABEL,
    EVENT,
    HTTP_PORT,
    MAIN,
    POD,
    Object,
    find_frontend,
    is_worker_namespace,
    select_pods,
)

ASK_SECONDS = 1.0
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
    why: str = ""
    pod: str = ""
    """The pod that holds it up, if it is one."""
    failed: bool = False
    """Whether the operator says that it will never be ready."""

    @property
    def gate(self) -> str:
        """The first gate that is not passed; empty if the graph is ready."""
        gates = {"operator": self.operator, "pods": self.pods, "frontend": self.frontend}
        return next((name for name, passed in gates.items() if not passed), "")

    def as_json(self) -> dict[str, Any]:
        names = ("name", "operator", "pods", "frontend", "why")
        return {name: getattr(self, name) for name in names}


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
    begun, gates = time.monotonic(), Gates(cluster)
    wanted = {g["metadata"]["name"]: int(g["metadata"].get("generation") or 0) for g in graphs}
    shown: dict[str, GateState] = {}
    while wanted:
        live = {body["metadata"]["name"]: body for body in cluster.list(DGD)}
        for name in wanted:
            if name not in live:
                raise make_deleted_error(DGD, name)
        states = gates.read([live[name] for name in wanted], wanted)
        if states != shown:
            shown = states
            on_change(states)
        waiting = [state for state in states.values() if state.gate]
        if not waiting:
            return
        for state in waiting:
            limit = timeout if isinstance(timeout, (int, float)) else timeout[state.name]
            if state.failed:
                raise gates.explain(state, "failed")
            if time.monotonic() - begun > limit:
                raise gates.explain(state, f"is not ready after {limit:.0f} s")
        cluster.check_fence()
        time.sleep(ASK_SECONDS)


def read_gates(cluster: Cluster, graphs: Sequence[Object]) -> dict[str, GateState]:
    """Return where graphs stand now; `graphs` are as the API server has them."""
    return Gates(cluster, shows_only=True).read(graphs, {})


@dataclass
class Gates:
    """Reads the gates of graphs; a frontend that has served is not asked again."""

    cluster: Cluster
    shows_only: bool = False
    """Whether who may look at objects only still sees the other gates."""
    pods: dict[str, dict[str, Object]] = field(default_factory=dict)
    """The pods of each graph, by name."""
    serving: set[str] = field(default_factory=set)

    def read(
        self, graphs: Sequence[Object], generations: Mapping[str, int]
    ) -> dict[str, GateState]:
        if not graphs:
            return {}
        names = [graph["metadata"]["name"] for graph in graphs]
        self.pods = {name: {} for name in names}
        for pod in self.cluster.list(POD, labels=select_pods(names)):
            self.pods[pod["metadata"]["labels"][DGD_LABEL]][pod["metadata"]["name"]] = pod
        with ThreadPoolExecutor(min(len(graphs), _ASKERS)) as pool:
            states = list(pool.map(lambda graph: self._judge(graph, generations), graphs))
        self.serving = {state.name for state in states if state.frontend}
        return dict(zip(names, states, strict=True))

    def _judge(self, graph: Object, generations: Mapping[str, int]) -> GateState:
        name = str(graph["metadata"]["name"])
        pod, pods_why = _judge_pods(self.pods[name], read_expected(graph).pods)
        if why := _judge_operator(graph, generations.get(name, 0)):
            return GateState(name, why=why, pod=pod, failed=why.startswith("failed"))
        if pods_why:
            return GateState(name, operator=True, why=pods_why, pod=pod)
        try:
            why = "" if name in self.serving else self._ask_frontend(graph)
        except Forbidden:
            if not self.shows_only:
                raise
            why = "you may not ask its frontend"
        return GateState(name, operator=True, pods=True, frontend=not why, why=why)

    def _ask_frontend(self, live: Object) -> str:
        """Return why a frontend does not serve yet, or nothing."""
        expected = read_expected(live)
        if expected.frontend is None:  # a pool of workers for other graphs' frontends
            return ""
        status, body = self.cluster.ask_service(expected.frontend, HTTP_PORT, "/health")
        if status in _DOWN:
            return f"its frontend answers {status}"
        if status == 404:  # it serves HTTP, and has no listing
            return ""
        workers = count_workers(body, self.cluster.namespace, live)
        if workers is not None and workers < expected.workers:
            return f"its frontend lists {workers} of {expected.workers} workers"
        status, body = self.cluster.ask_service(expected.frontend, HTTP_PORT, "/v1/models")
        if status in _DOWN:
            return f"its frontend answers {status}"
        listed = read_models(body) if status < 300 else None
        if listed is None:
            return ""
        missing = [model for model in expected.models if model not in listed]
        if missing or (expected.workers and not listed):
            return f"its frontend does not list {', '.join(missing) or 'any model'}"
        return ""

    def explain(self, state: GateState, what: str) -> NotReady:
        """Make the error: the gate, the pod that holds it up, its last event and log lines."""
        pods = self.pods[state.name]
        pod = state.pod or _judge_pods(pods, 0)[0]
        event = find_last_event(self.cluster, pod or state.name)
        parts = [f"DynamoGraphDeployment {state.name} {what}: {state.why}"]
        parts += [f"pod {pod}: {_describe_pod(pods[pod])}"] if pod else []
        parts += [f"last event: {event}"] if event else []
        return NotReady(
            f"{'; '.join(parts)}.",
            f"It waits at the gate `{state.gate}` (docs/kubernetes.md says what to look at).",
            graph=state.name,
            gate=state.gate,
            pod=pod,
            event=event,
            log=self._read_log(pod) if pod else [],
        )

    def _read_log(self, pod: str) -> list[str]:
        try:
            return list(self.cluster.read_log(pod, tail=LOG_LINES))
        except RollwayError:  # a container that never started has none
            return []


def find_last_event(cluster: Cluster, name: str) -> str:
    """Return the newest event of an object as `reason: message`; "" without one."""
    try:
        events = cluster.list(EVENT, fields=f"involvedObject.name={name}")
    except RollwayError:
        return ""
    if not events:
        return ""
    newest = max(events, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime")))
    return f"{newest.get('reason', '')}: {newest.get('message', '')}"


# --- what objects say ----------------------------------------------------------------------------


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
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    ]
    waiting = [pod for pod in counted if not is_ready(pod)]
    if waiting:
        pod = max(waiting, key=lambda pod: ("waiting" in _find_wait(pod), _find_wait(pod)))
        name = str(pod["metadata"]["name"])
        ready = len(counted) - len(waiting)
        return name, f"{ready} of {max(expected, len(counted))} pods are ready, {name} is not"
    if len(counted) < expected:
        return "", f"{len(counted)} of {expected} pods exist"
    return "", ""


def is_ready(pod: Object) -> bool:
    """Return whether all containers of a pod are ready."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    return bool(containers) and all(container.get("ready") for container in containers)


def _find_wait(pod: Object) -> str:
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"waiting ({waiting.get('reason') or 'no reason'})"
    return ""


def _describe_pod(pod: Object) -> str:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"not scheduled ({condition.get('message') or condition.get('reason')})"
    return _find_wait(pod) or f"phase {status.get('phase')}, not ready"


# --- what a spec asks for ------------------------------------------------------------------------

_WORKER_TYPES = frozenset({"worker", "prefill", "decode"})
_MODEL_FLAGS = ("--served-model-name", "--model-name")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the spec of a graph asks for."""

    pods: int
    workers: int
    models: tuple[str, ...]
    frontend: str | None
    """The Service of its frontend."""


def read_expected(graph: Object) -> Expected:
    """Return what a graph's spec asks for."""
    pods = workers = 0
    models: list[str] = []
    for part in graph["spec"].get("components") or []:
        replicas = 1 if part.get("replicas") is None else int(part["replicas"])
        pods += replicas * int((part.get("multinode") or {}).get("nodeCount") or 1)
        if part.get("type") in _WORKER_TYPES and replicas:
            workers += replicas
            models += _find_models(_find_arguments(part))
    return Expected(pods, workers, tuple(dict.fromkeys(models)), find_frontend(graph))


def _find_arguments(part: Mapping[str, Any]) -> list[str]:
    """Return the words of a component's command, also those inside of `sh -c`."""
    containers = ((part.get("podTemplate") or {}).get("spec") or {}).get("containers") or []
    container: Mapping[str, Any] = next((c for c in containers if c.get("name") == MAIN), {})
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    split: list[str] = []
    for word in map(str, words):
        try:
            split += shlex.split(word) if " " in word else [word]
        except ValueError:
            split += word.split()
    return split


def _find_models(words: Sequence[str]) -> Iterable[str]:
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, given, value = word.partition("=")
        name = value if given else following
        # A variable is known in the pod only.
        if flag in _MODEL_FLAGS and name and "$" not in name:
            yield name


def count_workers(body: bytes, namespace: str, graph: Object) -> int | None:
    """Return how many workers of a graph a frontend's `/health` lists; None without a listing."""
    name = graph["metadata"]["name"]
    status = graph.get("status") or {}
    components = status.get("components") or {}
    reported = {part.get("runtimeNamespace") for part in components.values()}

    def is_ours(entry: Mapping[str, Any]) -> bool:
        where = str(entry.get("namespace"))
        return where in reported or is_worker_namespace(where, namespace, name)

    try:
        workers = [e for e in json.loads(body)["instances"] if e.get("endpoint") == "generate"]
        return len({entry["instance_id"] for entry in workers if is_ours(entry)})
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def read_models(body: bytes) -> list[str] | None:
    """Return the models that a frontend's `/v1/models` lists; None without a listing."""
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        return None
