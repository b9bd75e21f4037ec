"""The errors that Rollway raises. Each says what happened and what to do about it.

The `rollway` command prints `message` and `hint` as one paragraph and exits with `exit_code`: 2 for
wrong input, 1 for a failure at run time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any


class RollwayError(Exception):
    """Base of every error that Rollway raises on purpose.

    Attributes:
        message: the cause.
        hint: the fix.

    Example:
        try:
            stack.refit(step, offer)
        except rollway.RefitError as error:
            print(error.report.as_json())
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def as_json(self) -> dict[str, Any]:
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}


class UsageError(RollwayError):
    """The input is wrong; a retry without a change cannot help."""

    exit_code = 2


class SpecError(UsageError):
    """The description of a stack is wrong; the message names the field by its path."""


class PlacementError(SpecError):
    """The replicas of a stack do not fit on a cluster; `tried` has one line per attempt."""

    def __init__(self, message: str, hint: str = "", *, tried: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.tried = list(tried)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.tried])

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "tried": self.tried}


class StartError(RollwayError):
    """A stack did not start; the processes that had started were stopped."""

    def __init__(self, message: str, hint: str = "", log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (super().__str__(), self.log_tail)))

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "log_tail": self.log_tail}


class PortInUse(StartError):
    """Another program has a requested port."""


def restore_error(error: Mapping[str, Any]) -> RollwayError:
    """Make the error of a start that another process wrote with `as_json`."""
    if error["error"] == SpecError.__name__:
        return SpecError(error["message"], error["hint"])
    # A caller with a choice takes another port.
    kind = PortInUse if error["error"] == PortInUse.__name__ else StartError
    return kind(error["message"], error["hint"], error.get("log_tail", ""))


class StackNotRunning(RollwayError):
    """The named stack does not run."""


class StateUnreadable(RollwayError):
    """The state file of one stack is damaged; other stacks are not affected."""

    def __init__(self, message: str, hint: str = "", *, reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


class Unreachable(RollwayError):
    """A server did not answer, or not in time."""


class RequestFailed(RollwayError):
    """A server answered with an error."""

    def __init__(self, message: str, hint: str = "", *, status: int, body: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.body = body


class AdminError(RollwayError):
    """A worker refused an admin call, or answered `status: error` with HTTP 200."""


class NoWorkers(AdminError):
    """The RL listing exists and is empty."""


class RefitError(RollwayError):
    """Not every worker serves the new version; `report` has the state of each worker."""

    def __init__(self, message: str, hint: str = "", *, report: Any = None) -> None:
        super().__init__(message, hint)
        self.report = report


class RolloutError(RollwayError):
    """A rollout cannot be trusted: its ids, log-probs, counts or version do not match."""


class WeightsError(RollwayError):
    """Published weights are damaged, incomplete, gone, or for another base version."""


class ClusterError(RollwayError):
    """A Kubernetes cluster did not do what was asked; the message has its own words."""


class Forbidden(ClusterError):
    """A permission is missing; `rule` is the RBAC rule that grants it."""

    def __init__(self, message: str, hint: str = "", *, rule: Mapping[str, Any]) -> None:
        super().__init__(message, hint)
        self.rule = dict(rule)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "rule": self.rule}


class Conflict(ClusterError):
    """Somebody else has the object, a field of it, or a newer version of it.

    Attributes:
        fields: the fields in conflict, each with the field manager that holds it.
    """

    def __init__(
        self, message: str, hint: str = "", *, fields: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message, hint)
        self.fields = list(fields)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "fields": self.fields}


class RunExists(ClusterError):
    """A run of this name is there and cannot be taken up; it was not touched."""


class LeaseLost(ClusterError):
    """Another command has taken over the run that this one was starting; it was not undone."""


class Gone(ClusterError):
    """An object does not exist any more."""


class KindMissing(ClusterError):
    """The cluster does not serve a kind of object, or not in this version."""


class NamespaceMissing(ClusterError):
    """The namespace does not exist, or it is being deleted."""


class NotReady(ClusterError):
    """A graph of Dynamo failed, or did not get ready in time.

    Attributes:
        graph, gate: which graph, and which gate it did not pass: operator, pods or frontend.
        pod, event, log: the pod that holds it up, its last event and last log lines; may be empty.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        graph: str,
        gate: str,
        pod: str = "",
        event: str = "",
        log: Sequence[str] = (),
    ) -> None:
        super().__init__(message, hint)
        self.graph, self.gate, self.pod, self.event = graph, gate, pod, event
        self.log = list(log)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.log])

    def as_json(self) -> dict[str, Any]:
        rest = {"graph": self.graph, "gate": self.gate, "pod": self.pod, "event": self.event}
        return {**super().as_json(), **rest, "log": self.log}


class InvalidObject(UsageError):
    """The API server refused an object: its schema, a CEL rule or a webhook.

    Attributes:
        causes: (path, the server's words) per violation.
        manifest: the object as YAML, with its secrets blanked.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        causes: Sequence[tuple[str, str]] = (),
        manifest: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.causes = list(causes)
        self.manifest = manifest

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "causes": self.causes, "manifest": self.manifest}


def require(*modules: str) -> None:
    """Raise UsageError unless these modules are installed. Call it before a command starts work."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"This command needs packages that are not installed: {', '.join(missing)}.",
            "pip install 'rollway[cpu,demo]', see docs/install.md.",
        )
