"""Watches that do not end: what there is of a kind, and then every change.

     watch ──► ADDED for each that is there, then ADDED, MODIFIED, DELETED
       │ ▲
       │ └─ closed or broken (an API server that restarts): again from the last version, which
       │    bookmarks keep fresh
       └─ 410, the version is too old: list. What vanished meanwhile is DELETED

A request follows another after a second at the earliest. An API server that stays away for longer
than `PATIENCE_SECONDS` ends the watch with an error.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollway.errors import RollwayError
from rollway.kubernetes.connection import Connection, Pauses, Unavailable
from rollway.kubernetes.kinds import Kind, Object
from rollway.kubernetes.refusals import Refusal, explain

if TYPE_CHECKING:
    from rollway.kubernetes.cluster import Cluster

ROUND_SECONDS = 240
"""After this the server ends a watch, and the next goes on from its last version."""
MIN_SECONDS = 1.0
FENCE_SECONDS = 1.0
_GONE = 410


@dataclass(frozen=True, slots=True)
class Change:
    """ADDED, MODIFIED or DELETED, with the object as it is now or was last.

    An object that was deleted while no watch was connected has only its names and labels.
    """

    type: str
    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Selection:
    """What to watch: objects of one kind, by labels and fields."""

    kind: Kind
    labels: str = ""
    fields: str = ""
    metadata_only: bool = False
    since: str = ""
    """The version to watch from, if the caller knows one: saves the list."""

    @property
    def query(self) -> dict[str, str]:
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {key: value for key, value in selectors.items() if value}

    @property
    def accept(self) -> str:
        return METADATA if self.metadata_only else "application/json"

    @property
    def accept_list(self) -> str:
        return METADATA_LIST if self.metadata_only else "application/json"


METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class Watch:
    """One list-and-watch; iterate over it. `stop` ends it from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        selection: Selection,
        stop: threading.Event,
        start: tuple[Sequence[Object], str] | None = None,
    ) -> None:
        """`start`: a list that the caller has made, which is then not yielded."""
        self._connection: Connection = cluster.connection
        self._namespace = cluster.namespace
        self._cluster = cluster
        self._selection = selection
        self._stop = stop
        self._response: Any = None
        self._is_connected = False
        self._known: dict[str, Object] = {}
        """What was yielded and not deleted, by name: only what a DELETED needs."""
        objects, self._version = start or ((), selection.since)
        self._is_complete = bool(self._version)
        """Whether all up to the version was yielded. A watch that begins without a version yields
        what is there in any order, and the first bookmark says that this is done."""
        for entry in objects:
            self._remember(entry)

    def __iter__(self) -> Iterator[Change]:
        threading.Thread(target=self._hang_up, daemon=True).start()
        pauses, must_list = Pauses(self._connection), False
        while not self._stop.is_set():
            begun, self._is_connected = time.monotonic(), False
            if must_list:
                yield from self._list()  # repeats its request itself
                must_list = False
            try:
                yield from self._follow()
                pauses = Pauses(self._connection)
            except _Expired:
                must_list = True
            except Unavailable:
                if self._stop.is_set():
                    return
                if self._is_connected:
                    pauses = Pauses(self._connection)
                pause = pauses.take_next(None)
                if pause is None:
                    raise
                self._stop.wait(pause)
            must_list |= self._is_connected and not self._is_complete
            self._stop.wait(max(0.0, MIN_SECONDS - (time.monotonic() - begun)))

    def _list(self) -> Iterator[Change]:
        """Yield what changed since the last list, and remember the list's version."""
        objects, version = self._cluster.list_selection(self._selection, wait=self._stop.wait)
        names = {entry["metadata"]["name"]: entry for entry in objects}
        for name, old in list(self._known.items()):
            if name not in names or names[name]["metadata"]["uid"] != old["metadata"]["uid"]:
                del self._known[name]
                yield Change("DELETED", old)
        for name, entry in names.items():
            old_version = self._known.get(name, {}).get("metadata", {}).get("resourceVersion")
            if old_version == entry["metadata"]["resourceVersion"]:
                continue
            word = "MODIFIED" if name in self._known else "ADDED"
            self._remember(entry)
            yield Change(word, entry)
        self._version, self._is_complete = version, True

    def _follow(self) -> Iterator[Change]:
        """Yield changes from the last version on, until the server ends the round; without one
        also what is there."""
        selection = self._selection
        query: dict[str, Any] = {
            **selection.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": ROUND_SECONDS,
        }
        query |= {"resourceVersion": self._version} if self._is_complete else {}
        self._connection.count("watch", selection.kind)
        response = self._connection.send(
            "GET",
            selection.kind.make_path(self._namespace),
            query=query,
            headers={"Accept": selection.accept},
            read_seconds=ROUND_SECONDS + 10,
        )
        if response.status != 200:
            self._refuse(response.status, self._connection.read(response))
        self._response, self._is_connected = response, True
        self._connection.served.add(selection.kind)
        if not self._stop.is_set():
            for line in self._connection.read_lines(response):
                if self._stop.is_set():
                    return
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    self._refuse(int(status.get("code") or 500), json.dumps(status).encode())
                self._version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    self._is_complete = True
                    continue
                if event["type"] == "DELETED":
                    self._known.pop(event["object"]["metadata"]["name"], None)
                else:
                    self._remember(event["object"])
                yield Change(event["type"], event["object"])

    def _hang_up(self) -> None:
        """Shut the socket down when the watch is to stop: its reader blocks in `recv`."""
        self._stop.wait()
        with contextlib.suppress(OSError, AttributeError):
            self._response.connection.sock.shutdown(socket.SHUT_RDWR)

    def _remember(self, entry: Object) -> None:
        meta = entry["metadata"]
        kept = ("name", "namespace", "uid", "labels", "resourceVersion")
        self._known[meta["name"]] = {
            "apiVersion": self._selection.kind.api_version,
            "kind": self._selection.kind.kind,
            "metadata": {key: meta[key] for key in kept if key in meta},
        }

    def _refuse(self, status: int, body: bytes) -> None:
        if status == _GONE:
            raise _Expired
        error = explain(Refusal(status, body, "watch", self._selection.kind, self._namespace))
        if self._connection.may_answer_later(status, error, self._selection.kind):
            raise Unavailable(error.message, error.hint)
        raise error


class Follower:
    """Several watches at once, each in a thread, whose changes come out of one queue.

    Example:
        with Follower(cluster, [Selection(DGD, labels), Selection(POD, labels)]) as follower:
            selection, change = follower.take(timeout=5.0)
    """

    def __init__(self, cluster: Cluster, selections: Sequence[Selection]) -> None:
        self._queue: queue.SimpleQueue[tuple[Selection, Change] | RollwayError] = (
            queue.SimpleQueue()
        )
        self._stop = threading.Event()
        self._fence = cluster.fence
        self._threads = [
            threading.Thread(target=self._run, args=(cluster, selection), daemon=True)
            for selection in selections
        ]

    def __enter__(self) -> Follower:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)  # one that waits for a server that hangs ends with the process

    def take(self, timeout: float) -> tuple[Selection, Change] | None:
        """Return the next change, or None after `timeout` seconds; raise what ended a watch, or
        what the cluster's fence says: who may not act any more need not wait."""
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                item = self._queue.get(timeout=min(left, FENCE_SECONDS))
                break
            except queue.Empty:
                if left <= FENCE_SECONDS:
                    return None
                self._fence()
        if isinstance(item, RollwayError):
            raise item
        return item

    def _run(self, cluster: Cluster, selection: Selection) -> None:
        try:
            for change in Watch(cluster, selection, self._stop):
                self._queue.put((selection, change))
        except RollwayError as error:
            self._queue.put(error)


class _Expired(Exception):
    """The version that a watch asked for is too old."""
