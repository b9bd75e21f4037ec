"""Wait for objects of the API server to change or to go, with one watch and a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollway.errors import ClusterError
from rollway.kubernetes.cluster import Cluster, name_finalizers
from rollway.kubernetes.kinds import DEPLOYMENT, Kind, Object
from rollway.kubernetes.names import select_run
from rollway.kubernetes.spec import HealthSpec
from rollway.kubernetes.watches import Follower, Selection, Watch

T = TypeVar("T")

_ASK_SECONDS = 2.0
_LOOK_SECONDS = 5.0
"""A watch yields nothing for an object that is gone, so after this it is asked for."""


class Deadline:
    """The moment at which a sequence of waits gives up; None for never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left == 0.0


def wait_for(
    cluster: Cluster,
    kind: Kind,
    name: str,
    decide: Callable[[Object], T | None],
    *,
    timeout: float | None,
    what: str,
    must_exist: bool = True,
    known: Object | None = None,
) -> T:
    """Return the first value that `decide` makes of the object, or raise after `timeout`.

    `decide` returns None to go on, and raises when the wait can no longer succeed. `what` completes
    the sentence of the error. An object that is deleted meanwhile ends the wait, unless it need
    not exist yet. `known` is the object as the caller has just read it; the watch goes on from it.
    """
    last: Object = known or {}
    deadline = Deadline(timeout)
    if known is not None and (value := decide(known)) is not None:
        return value
    since = known["metadata"]["resourceVersion"] if known else ""
    selection = Selection(kind, fields=f"metadata.name={name}", since=since)
    with Follower(cluster, [selection]) as follower:
        while not deadline.is_over:
            pair = follower.take(min(deadline.left, _LOOK_SECONDS))
            if pair is None:
                if must_exist and not last and cluster.get(kind, name) is None:
                    raise make_deleted_error(kind, name)
                continue
            change = pair[1]
            if change.type == "DELETED":
                if must_exist:
                    raise make_deleted_error(kind, name)
                continue
            last = change.object
            if (value := decide(last)) is not None:
                return value
    raise ClusterError(
        f"{kind.kind} {name} {what} within {timeout:.0f} s: {describe_state(last)}.",
        "Look at `rollway k8s status`, and at the log of the operator that answers for it.",
    )


def wait_until_gone(
    cluster: Cluster, kind: Kind, names: Sequence[str], timeout: float, *, labels: str = ""
) -> None:
    """Wait until none of these objects is left.

    Raises:
        ClusterError: some are left after `timeout` seconds; it names the finalizers that hold
            them.
    """
    fields = f"metadata.name={names[0]}" if len(names) == 1 else ""
    selection = Selection(kind, labels, fields, metadata_only=True)
    objects, version = cluster.list_selection(selection)
    left = {e["metadata"]["name"]: e for e in objects if e["metadata"]["name"] in names}
    if not left:
        return
    stop = threading.Event()
    timer = threading.Timer(timeout, stop.set)
    timer.daemon = True
    timer.start()
    try:
        for change in Watch(cluster, selection, stop, start=(objects, version)):
            if change.type == "DELETED":
                left.pop(change.name, None)
            elif change.name in names:
                left[change.name] = change.object
            if not left:
                return
    finally:
        timer.cancel()
        stop.set()
    shown = ", ".join(f"{name}{name_finalizers(entry['metadata'])}" for name, entry in left.items())
    raise ClusterError(
        f"{kind.kind}s are not gone after {timeout:.0f} s: {shown}.",
        "The controller that set the finalizer must remove it: look at its log.",
    )


def describe_state(body: Object) -> str:
    """Say in a few words what an operator has made of an object."""
    if not body:
        return "it is not there"
    status = body.get("status") or {}
    state = status.get("jobDeploymentStatus") or status.get("state")
    message = status.get("message") or status.get("reason") or ""
    if not state:
        return "its operator has not answered"
    return f"it is {state}" + (f" ({message})" if message else "")


def make_deleted_error(kind: Kind, name: str) -> ClusterError:
    return ClusterError(
        f"{kind.kind} {name} was deleted by somebody else.",
        "Find out who deletes it, then run again.",
    )


def wait_for_deployments(cluster: Cluster, run: str, names: Sequence[str], timeout: float) -> None:
    """Wait until Deployments have the replicas that they ask for."""
    missing, deadline = dict.fromkeys(names, "it is not there"), Deadline(timeout)
    with Follower(cluster, [Selection(DEPLOYMENT, select_run(run))]) as follower:
        while missing and not deadline.is_over:
            pair = follower.take(deadline.left)
            if pair is None or pair[1].name not in names:
                continue
            if pair[1].type == "DELETED":
                raise make_deleted_error(DEPLOYMENT, pair[1].name)
            missing.pop(pair[1].name, None)
            if reason := explain_deployment(pair[1].object):
                missing[pair[1].name] = reason
    if not missing:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    raise ClusterError(
        f"Deployments were not available within {timeout:.0f} s: {reasons}.",
        f"Look at `rollway k8s status {run}`.",
    )


def explain_deployment(deployment: Object) -> str:
    """Say what a Deployment waits for; "" if for nothing."""
    status = deployment.get("status") or {}
    wanted = deployment["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return "its change is not seen yet"
    ready = min(status.get("availableReplicas", 0), status.get("updatedReplicas", 0))
    return "" if ready >= wanted else f"{ready} of {wanted} pods are available"


def wait_for_answer(cluster: Cluster, service: str, health: HealthSpec) -> None:
    """Wait until a server behind a Service answers with less than 500."""
    deadline, status = Deadline(health.timeout), 0
    while not deadline.is_over:
        status, _ = cluster.ask_service(service, health.port, health.path)
        if 0 < status < 500:
            return
        time.sleep(min(_ASK_SECONDS, deadline.left))
    raise ClusterError(
        f"Service {service} did not answer at {health.path} within {health.timeout:.0f} s: "
        f"the last answer was {status}.",
        "Look at the log of its pods with `rollway k8s logs`.",
    )
