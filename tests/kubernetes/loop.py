"""What the stand-in operators share: a node, and a thread that lists kinds and reconciles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from rollway.errors import RollwayError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import POD, Object, ObjectKind
from tests.kubernetes.node import STAND_IN, TestNode

TICK_SECONDS = 0.1

Take = Callable[[str, Object], None]
"""Takes a change: ADDED, MODIFIED or DELETED, and the object."""


class OperatorLoop:
    """The thread of an operator: every change goes to the taker of its kind, then `reconcile` runs.

    Pods are only those of stand-ins.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        takers: Mapping[ObjectKind, Take],
        reconcile: Callable[[], None],
    ) -> None:
        self.node = TestNode(cluster, folder / "node")
        self._cluster = cluster
        self._takers = takers
        self._reconcile = reconcile
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._errors: list[Exception] = []

    def start(self) -> None:
        self.node.__enter__()
        self._thread.start()

    def stop(self, close: Callable[[], None]) -> None:
        """End the thread, then `close` what the operator started, then the node; show errors."""
        self._stop.set()
        self._thread.join()
        close()
        self.node.__exit__()
        assert not self._errors, self._errors

    def _run(self) -> None:
        known: dict[ObjectKind, dict[str, Object]] = {kind: {} for kind in self._takers}
        while not self._stop.wait(TICK_SECONDS):
            try:
                for kind, take in self._takers.items():
                    for word, live in self._find_changes(kind, known[kind]):
                        take(word, live)
                self._reconcile()
            except RollwayError:  # an API server that was killed, an object that is gone
                self._stop.wait(1.0)
            except Exception as error:  # noqa: BLE001 - the test shows it at its end
                self._errors.append(error)
                return

    def _find_changes(self, kind: ObjectKind, known: dict[str, Object]) -> list[tuple[str, Object]]:
        """Compare what is there with what was there; an object with another UID is another."""
        ours = ",".join(f"{key}={value}" for key, value in STAND_IN.items())
        listed = self._cluster.list(kind, labels=ours if kind == POD else "")
        what = {"apiVersion": kind.api_version, "kind": kind.kind}
        live = {body["metadata"]["uid"]: {**what, **body} for body in listed}
        gone = [("DELETED", known.pop(uid)) for uid in [*known] if uid not in live]
        changed = []
        for uid, body in live.items():
            version = known.get(uid, {}).get("metadata", {}).get("resourceVersion")
            if version != body["metadata"]["resourceVersion"]:
                changed.append(("MODIFIED" if uid in known else "ADDED", body))
                known[uid] = body
        return gone + changed
