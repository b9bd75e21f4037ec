"""The errors a user can meet. Each says what happened and what to do about it.

`rollway` (the command) prints `message` and `hint` as one paragraph and exits with `exit_code`:
2 when the user's input was wrong, 1 when something failed at run time.
"""

from __future__ import annotations

from typing import Any


class RollwayError(Exception):
    """Base of every error Rollway raises on purpose."""

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
    """The input is wrong; running it again without a change cannot help."""

    exit_code = 2


class SpecError(UsageError):
    """A stack description is wrong; the message holds the path of the field."""


class StartError(RollwayError):
    """A stack did not come up; what had started was stopped again."""

    def __init__(self, message: str, hint: str = "", log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "log_tail": self.log_tail}


class PortInUse(StartError):
    """A port that was asked for is taken."""


class StackNotRunning(RollwayError):
    """There is no such stack to talk to."""


class StateUnreadable(RollwayError):
    """The record of a stack is damaged; other stacks are not concerned."""

    def __init__(self, message: str, hint: str = "", *, reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


class Unreachable(RollwayError):
    """Nothing answered at an address, or it did not answer in time."""


class RequestFailed(RollwayError):
    """A server answered with an error."""

    def __init__(self, message: str, hint: str = "", *, status: int, body: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.body = body


class AdminError(RollwayError):
    """A worker refused an admin call, or said `status: error` under HTTP 200."""


class NoWorkers(AdminError):
    """The RL listing is there and empty."""


class RefitError(RollwayError):
    """A refit did not bring every worker to the new version; `report` has each worker's state."""

    def __init__(self, message: str, hint: str = "", *, report: Any = None) -> None:
        super().__init__(message, hint)
        self.report = report


class RolloutError(RollwayError):
    """A rollout cannot be trusted: ids, log-probs, counts or version do not fit together."""


class WeightsError(RollwayError):
    """Published weights cannot be used: damaged, incomplete, gone, or for another base version."""
