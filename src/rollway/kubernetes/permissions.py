"""The permissions that the commands need: one table for `check`, the shipped Roles and the docs.

A server-side apply of an object that is not there needs `create` and `patch`. Owner references that
do not block a deletion need no permission on the owner's finalizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollway.kubernetes.kinds import (
    DEPLOYMENT,
    DGD,
    EVENT,
    LEASE,
    POD,
    QUOTA,
    RAYCLUSTER,
    RAYJOB,
    SCALING_ADAPTER,
    SERVICE,
    Kind,
)


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on one kind or on a part of it, and what for."""

    kind: Kind
    verbs: tuple[str, ...]
    purpose: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


_READ = ("get", "list", "watch")
_WRITE = ("create", "patch", "delete")
_ASK = ("get", "create", "update", "delete")
"""The verb of a request through the proxy follows its method."""

VIEWER = (
    Permission(DGD, _READ, "gates, status"),
    Permission(RAYJOB, _READ, "state of the job"),
    Permission(RAYCLUSTER, _READ, "name and UID of the job's cluster"),
    Permission(DEPLOYMENT, _READ, "servers beside the training"),
    Permission(SERVICE, _READ, "Services of deployments"),
    Permission(POD, _READ, "second gate, status"),
    Permission(EVENT, ("list",), "why a pod waits"),
    Permission(POD, ("get",), "logs", "log"),
)
"""`status` and `logs`. Through the proxies one may also send orders, so a viewer has none, and sees
neither the third gate nor the versions of workers."""
USER = (
    *VIEWER,
    Permission(SERVICE, _ASK, "third gate, Ray's dashboard, from outside", "proxy"),
    Permission(POD, ("get", "create"), "versions of workers, from outside", "proxy"),
    Permission(DGD, _WRITE, "inference, and its owner"),
    Permission(RAYJOB, _WRITE, "the training job"),
    Permission(RAYCLUSTER, _WRITE, "long-lived clusters"),
    Permission(DEPLOYMENT, _WRITE, "servers beside the training"),
    Permission(SERVICE, _WRITE, "their Services"),
    Permission(LEASE, ("get", *_WRITE), "one command at a time acts on a run"),
    Permission(SCALING_ADAPTER, ("get", "patch"), "scale", "scale"),
    Permission(QUOTA, ("list",), "check"),
)
"""All commands."""


def list_verbs(permissions: tuple[Permission, ...] = USER) -> Iterator[tuple[str, Permission]]:
    """Yield each verb with its row of the table."""
    for permission in permissions:
        for verb in permission.verbs:
            yield verb, permission
