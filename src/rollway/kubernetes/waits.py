"""Wait for objects of the API server to change or to go: ask, pause, ask again.

The first pauses are short, the later ones longer: what takes an hour is asked for every five
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from rollway.errors import ClusterError
from rollway.kubernetes.client import Cluster, make_deleted_error, name_finalizers
from rollway.kubernetes.objects import DEPLOYMENT, Object, ObjectKind, select_run
from rollway.kubernetes.spec import HealthSpec

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds."""


class Deadline:
    """The moment at which waits give up, None for never, and the pauses until then."""

    def __init__(self, seconds: float | None) -> None:
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self._pause = FIRST_PAUSE

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def pause(self) -> bool:
        """Sleep, each time a little longer; return False if the time is over."""
        if not self.left:
            return False
        time.sleep(min(self._pause, self.left))
        self._pause = min(self._pause * 1.25, LONGEST_PAUSE)
        return True

    def restart(self) -> None:
        """Begin again with short pauses."""
        self._pause = FIRST_PAUSE


def wait_for(
    cluster: Cluster,
    kind: ObjectKind,
    name: str,
    decide: Callable[[Object], T | None],
    *,
    timeout: float | None,
    what: str,
    must_exist: bool = True,
) -> T:
    """Return the first value that `decide` makes of the object, or raise after `timeout`.

    `decide` returns None to go on, and raises when the wait can no longer succeed. `what` completes
    the sentence of the error. An object that is deleted meanwhile ends the wait, unless it need
    not exist yet.
    """
    deadline = Deadline(timeout)
    while True:
        live = cluster.get(kind, name)
        if live is None and must_exist:
            raise make_deleted_error(kind, name)
        if live is not None and (value := decide(live)) is not None:
            return value
        cluster.check_fence()
        if not deadline.pause():
            break
    raise ClusterError(
        f"{kind.kind} {name} {what} within {timeout:.0f} s: {describe_state(live or {})}.",
        "Look at `rollway k8s status`, and at the log of the operator that answers for it.",
    )


def wait_until_gone(
    cluster: Cluster, kind: ObjectKind, names: Collection[str], deadline: Deadline, labels: str = ""
) -> None:
    """Wait until none of these objects is left.

    Raises:
        ClusterError: some are left at the deadline; it names the finalizers that hold them.
    """
    deadline.restart()
    while True:
        bodies = (body["metadata"] for body in cluster.list(kind, labels=labels))
        left = [meta for meta in bodies if meta["name"] in names]
        if not left:
            return
        cluster.check_fence()
        if not deadline.pause():
            break
    shown = ", ".join(f"{meta['name']}{name_finalizers(meta)}" for meta in left)
    raise ClusterError(
        f"{kind.kind}s are not gone in time: {shown}.",
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


def wait_for_deployments(cluster: Cluster, run: str, names: Sequence[str], timeout: float) -> None:
    """Wait until Deployments have the replicas that they ask for."""
    deadline = Deadline(timeout)
    while True:
        bodies = cluster.list(DEPLOYMENT, labels=select_run(run))
        live = {body["metadata"]["name"]: body for body in bodies}
        for name in names:
            if name not in live:
                raise make_deleted_error(DEPLOYMENT, name)
        reasons = {name: reason for name in names if (reason := explain_deployment(live[name]))}
        if not reasons:
            return
        cluster.check_fence()
        if not deadline.pause():
            break
    shown = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ClusterError(
        f"Deployments were not available within {timeout:.0f} s: {shown}.",
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
    deadline = Deadline(health.timeout)
    while True:
        status, _ = cluster.ask_service(service, health.port, health.path)
        if status < 500:
            return
        cluster.check_fence()
        if not deadline.pause():
            break
    raise ClusterError(
        f"Service {service} did not answer at {health.path} within {health.timeout:.0f} s: "
        f"the last answer was {status}.",
        "Look at the log of its pods with `rollway k8s logs`.",
    )
