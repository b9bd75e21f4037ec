"""Owner references: what makes the garbage collector delete an object with another one.

An object of a run has one reference of ours, to the RayJob at first and to its RayCluster later.
References that others put there stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollway.errors import ClusterError, Conflict
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import Kind, Object
from rollway.kubernetes.waits import make_deleted_error

_ATTEMPTS = 8
"""Operators write an object's status at any time, and each write costs one attempt."""


def make_reference(owner: Object) -> Object:
    """Refer to an owner: it does not control, and does not block, so both operators may go on."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }


def add_owner(body: Object, owner: Object | None) -> Object:
    """Return a copy of an object to apply that `owner` owns."""
    if owner is None:
        return body
    metadata = {**body["metadata"], "ownerReferences": [make_reference(owner)]}
    return {**body, "metadata": metadata}


def move_owner(
    cluster: Cluster, kind: Kind, body: Object, new: Object, old: Iterable[str] = ()
) -> Object:
    """Make `new` own a live object instead of the owners with the UIDs `old`, in one patch.

    The patch carries the resource version that the references were read from: who changes them at
    the same time is not overwritten.
    """
    name, reference = body["metadata"]["name"], make_reference(new)
    uid, dropped = body["metadata"]["uid"], set(old)
    for _ in range(_ATTEMPTS):
        references = body["metadata"].get("ownerReferences") or []
        kept = [each for each in references if each["uid"] not in {*dropped, reference["uid"]}]
        if references == [*kept, reference]:
            return body
        change = {"metadata": {"ownerReferences": [*kept, reference]}}
        version = body["metadata"]["resourceVersion"]
        try:
            return cluster.patch(kind, name, change, resource_version=version)
        except Conflict:
            current = cluster.get(kind, name)
        if current is None or current["metadata"]["uid"] != uid:
            raise make_deleted_error(kind, name)
        body = current
    raise ClusterError(
        f"The owner of {kind.kind} {name} could not be changed: it was changed by others "
        f"{_ATTEMPTS} times in between.",
        "Find out who writes to it all the time (metadata.managedFields), then run again.",
    )
