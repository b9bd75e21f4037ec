"""What differs between an object as it is and as an apply would leave it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import Kind, Object

_VOLATILE = frozenset(
    {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink"}
)


@dataclass(frozen=True, slots=True)
class FieldDrift:
    """A field of ours that is not as we would apply it; None means absent."""

    path: str
    live: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.path}: {json.dumps(self.live)} -> {json.dumps(self.wanted)}"


def find_drift(cluster: Cluster, kind: Kind, body: Object) -> list[FieldDrift]:
    """Return the fields that applying `body` would change: our own ones, no defaults.

    The API server applies it as a dry run, so defaults and fields of others are never drift.
    """
    live = cluster.get(kind, body["metadata"]["name"])
    if live is None:
        return [FieldDrift("", None, body)]
    # Whose object it is does not matter here: nothing is changed.
    return compare_objects(live, cluster.apply(kind, body, dry_run=True, force=True, live=None))


def compare_objects(live: Object, wanted: Object) -> list[FieldDrift]:
    """Return the fields that differ, without status and what the API server keeps itself."""
    return list(_compare(_select_fields(live), _select_fields(wanted), ""))


def _select_fields(entry: Object) -> Object:
    meta = {key: value for key, value in entry["metadata"].items() if key not in _VOLATILE}
    rest = {key: value for key, value in entry.items() if key not in ("status", "metadata")}
    return {"metadata": meta, **rest}


def _compare(live: Any, wanted: Any, path: str) -> Iterator[FieldDrift]:
    if isinstance(live, dict) and isinstance(wanted, dict):
        for key in sorted({*live, *wanted}):
            where = f"{path}.{key}" if path else key
            yield from _compare(live.get(key), wanted.get(key), where)
    elif isinstance(live, list) and isinstance(wanted, list):
        yield from _compare_lists(live, wanted, path)
    elif live != wanted:
        yield FieldDrift(path, live, wanted)


def _compare_lists(live: list[Any], wanted: list[Any], path: str) -> Iterator[FieldDrift]:
    """Compare lists of named parts by name, as a server-side apply merges them, others whole."""
    if all(isinstance(part, dict) and "name" in part for part in [*live, *wanted]):
        old, new = ({part["name"]: part for part in parts} for parts in (live, wanted))
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _compare(old.get(name), new.get(name), f"{path}[{name}]")
    elif live != wanted:
        yield FieldDrift(path, live, wanted)
