"""Watches that outlive what happens to an API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rollway.errors import ClusterError
from rollway.kubernetes import connection
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import CONFIG_MAP, DGD, Kind
from rollway.kubernetes.waits import wait_until_gone
from rollway.kubernetes.watches import Follower, Selection, Watch
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.manifests import make_graph
from tests.waiting import stays, wait_until

LABELS = "app.kubernetes.io/managed-by=rollway"


class Recorder:
    """What a watch yields, in a thread."""

    def __init__(self, watch: Iterator[object]) -> None:
        self.changes: list[tuple[str, str]] = []
        self.error: ClusterError | None = None
        self._watch = watch
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for change in self._watch:
                self.changes.append((change.type, change.name))  # type: ignore[attr-defined]
        except ClusterError as error:
            self.error = error

    def wait_for(self, *expected: tuple[str, str]) -> None:
        wait_until(lambda: set(expected) <= set(self.changes), 60, what=f"{expected}")

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_watch_yields_what_is_there_and_what_changes(
    admin: Cluster, stop: threading.Event
) -> None:
    admin.apply(DGD, make_graph("first"))
    recorder = Recorder(admin.watch(DGD, labels=LABELS, stop=stop))
    recorder.wait_for(("ADDED", "first"))
    admin.apply(DGD, make_graph("second"))
    admin.apply(DGD, make_graph("second", workers=3))
    admin.delete(DGD, "first")
    recorder.wait_for(("ADDED", "second"), ("MODIFIED", "second"), ("DELETED", "first"))
    assert admin.requests["watch", DGD.plural] == 1
    stop.set()
    recorder.join()
    assert recorder.error is None


def test_a_watch_survives_an_api_server_that_is_killed(
    admin: Cluster, control_plane: ControlPlane, stop: threading.Event
) -> None:
    admin.apply(DGD, make_graph("before"))
    recorder = Recorder(admin.watch(DGD, labels=LABELS, stop=stop))
    recorder.wait_for(("ADDED", "before"))
    control_plane.kill()
    asked = threading.Thread(target=lambda: admin.apply(DGD, make_graph("meanwhile")))
    asked.start()  # begun while nothing answers, and repeated until something does
    control_plane.revive()
    asked.join(60)
    admin.apply(DGD, make_graph("after"))
    recorder.wait_for(("ADDED", "meanwhile"), ("ADDED", "after"))
    assert recorder.changes.count(("ADDED", "before")) == 1
    assert recorder.error is None


def test_a_watch_that_is_too_old_lists_again(admin: Cluster, stop: threading.Event) -> None:
    """What vanished in between is deleted, what came is added, what stayed is not repeated."""
    stayed = admin.apply(DGD, make_graph("stayed"))
    gone = admin.apply(DGD, make_graph("gone"))
    admin.delete(DGD, "gone")
    wait_until_gone(admin, DGD, ["gone"], 20)
    admin.apply(DGD, make_graph("came"))
    # Version 1 is older than any that the server keeps: it answers 410.
    watch = Watch(admin, Selection(DGD, LABELS), stop, start=([stayed, gone], "1"))
    admin.requests.clear()
    recorder = Recorder(iter(watch))
    recorder.wait_for(("DELETED", "gone"), ("ADDED", "came"))
    admin.apply(DGD, make_graph("later"))
    recorder.wait_for(("ADDED", "later"))
    assert ("ADDED", "stayed") not in recorder.changes
    assert admin.requests["list", DGD.plural] == 1


def test_a_watch_ends_when_nothing_answers_for_too_long(
    admin: Cluster,
    control_plane: ControlPlane,
    stop: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 3.0)
    recorder = Recorder(admin.watch(CONFIG_MAP, stop=stop))
    wait_until(lambda: admin.requests["watch", "configmaps"] == 1, 20)
    control_plane.kill()
    try:
        recorder.join()
    finally:
        control_plane.revive()
    assert recorder.error is not None and "does not answer" in recorder.error.message


def test_a_watch_never_asks_faster_than_once_a_second(
    admin: Cluster, stop: threading.Event
) -> None:
    recorder = Recorder(admin.watch(CONFIG_MAP, stop=stop))
    wait_until(lambda: admin.requests["watch", "configmaps"] == 1, 20)
    before = sum(admin.requests.values())
    assert stays(lambda: sum(admin.requests.values()) == before, 2.0)
    stop.set()
    recorder.join()


def test_what_ends_a_watch_reaches_the_follower(admin: Cluster) -> None:
    missing = Kind("ray.io", "v1", "rayservices", "RayService")
    selections = [Selection(DGD, LABELS), Selection(missing)]
    expected = pytest.raises(ClusterError, match="does not serve RayService")
    with Follower(admin, selections) as follower, expected:
        while True:
            follower.take(20)
