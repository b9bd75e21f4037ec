"""What the stand-in operators share: a node, and a thread that follows kinds and reconciles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from rollway.errors import RollwayError
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import POD, Kind, Object
from rollway.kubernetes.watches import Follower, Selection
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
        takers: Mapping[Kind, Take],
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
        ours = ",".join(f"{key}={value}" for key, value in STAND_IN.items())
        selections = [Selection(kind, ours if kind == POD else "") for kind in self._takers]
        while not self._stop.is_set():
            try:
                with Follower(self._cluster, selections) as follower:
                    while not self._stop.is_set():
                        item = follower.take(TICK_SECONDS)
                        while item is not None:
                            selection, change = item
                            self._takers[selection.kind](change.type, change.object)
                            item = follower.take(0.0)
                        self._reconcile()
            except RollwayError:  # an API server that was killed, an object that is gone
                self._stop.wait(1.0)
            except Exception as error:  # noqa: BLE001 - the test shows it at its end
                self._errors.append(error)
                return
