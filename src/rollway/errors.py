"""The errors that Rollway raises. Each says what happened and what to do about it.

The `rollway` command prints `message` and `hint` as one paragraph and exits with `exit_code`: 2 for
wrong input, 1 for a failure at run time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Literal

REPOSITORY = "https://github.com/rollway/rollway"
"""Has deploy/ and examples/, which an installed package has not."""
Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a check has found about one thing: `ok`, or how bad it is, the cause and the fix."""

    what: str
    level: Level
    cause: str
    fix: str = ""

    def as_json(self, *names: str) -> dict[str, str]:
        """Return the fields in their order, under the names that a command has for them."""
        return dict(zip(names or self.__slots__, astuple(self), strict=True))

    def __str__(self) -> str:
        return f"{self.what}: {self.cause} {self.fix}".strip()


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
    json_fields: ClassVar[tuple[str, ...]] = ()
    """The further attributes of a class that its JSON has."""

    def __init__(self, message: str, hint: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        vars(self).update(attributes)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def as_json(self) -> dict[str, Any]:
        more = {name: getattr(self, name) for name in self.json_fields}
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint, **more}


class UsageError(RollwayError):
    """The input is wrong; a retry without a change cannot help."""

    exit_code = 2


class SpecError(UsageError):
    """The description of a stack is wrong; the message names the field by its path."""


class PlacementError(SpecError):
    """The replicas of a stack do not fit on a cluster; `tried` has one line per attempt."""

    tried: Sequence[str] = ()
    json_fields = ("tried",)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.tried])


class StartError(RollwayError):
    """A stack did not start; the processes that had started were stopped."""

    log_tail: str = ""
    json_fields = ("log_tail",)

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (super().__str__(), self.log_tail)))


class PortInUse(StartError):
    """Another program has a requested port."""


def restore_error(error: Mapping[str, Any]) -> RollwayError:
    """Make the error of a start that another process wrote with `as_json`."""
    if error["error"] == SpecError.__name__:
        return SpecError(error["message"], error["hint"])
    # A caller with a choice takes another port.
    kind = PortInUse if error["error"] == PortInUse.__name__ else StartError
    return kind(error["message"], error["hint"], log_tail=error.get("log_tail", ""))


class StackNotRunning(RollwayError):
    """The named stack does not run."""


class StateUnreadable(RollwayError):
    """The state file of one stack is damaged; other stacks are not affected."""

    reason: str = ""


class Unreachable(RollwayError):
    """A server did not answer, or not in time."""


class RequestFailed(RollwayError):
    """A server answered with an error."""

    status: int
    body: str = ""


class AdminError(RollwayError):
    """A worker refused an admin call, or answered `status: error` with HTTP 200."""


class NoWorkers(AdminError):
    """The RL listing exists and is empty."""


class RefitError(RollwayError):
    """Not every worker serves the new version; `report` has the state of each worker."""

    report: Any = None


class RolloutError(RollwayError):
    """A rollout cannot be trusted: its ids, log-probs, counts or version do not match."""


class WeightsError(RollwayError):
    """Published weights are damaged, incomplete, gone, or for another base version."""


class ClusterError(RollwayError):
    """A Kubernetes cluster did not do what was asked; the message has its own words."""


class Forbidden(ClusterError):
    """A permission is missing; `rule` is the RBAC rule that grants it."""

    rule: Mapping[str, Any]
    json_fields = ("rule",)


class Conflict(ClusterError):
    """Somebody else has the object or one of its fields, or has changed it meanwhile."""


class RunExists(ClusterError):
    """A run of this name is there and cannot be taken up; it was not touched."""


class RunTaken(ClusterError):
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

    graph: str
    gate: str
    pod: str = ""
    event: str = ""
    log: Sequence[str] = ()
    json_fields = ("graph", "gate", "pod", "event", "log")

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.log])


class InvalidObject(UsageError):
    """The API server refused an object: its schema, a CEL rule or a webhook."""


def require(extra: str, *modules: str) -> None:
    """Raise UsageError unless these modules, which an extra brings, are installed. Call it before
    work begins."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"This needs packages that are not installed: {', '.join(missing)}.",
            f"pip install 'rollway[{extra}]', see docs/install.md.",
        )
