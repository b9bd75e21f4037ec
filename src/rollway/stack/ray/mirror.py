"""Collect the record of a run from all of its nodes, on the node of the reader.

    node A   runs/<run>/supervisor-….jsonl ── Keeper ──┐
    node B   runs/<run>/supervisor-….jsonl ── Keeper ──┴─► Head ─► runs/<run>/node-<node>-….jsonl

Each node records into its own home. A file that is in the directory already, because homes are
shared or because it is this node's, is not copied. Bytes are written where they belong, so two
readers that copy at once write the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollway import private
from rollway.errors import RollwayError

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LARGEST_BYTES = 4 << 20
"""Of one node and one call."""
_PREFIX = "node-"

Known = Mapping[str, int]
"""How many bytes of each file are there already."""
Pieces = dict[str, bytes]
"""What files have beyond that."""


def read_record(directory: Path, known: Known, own: frozenset[str]) -> Pieces:
    """Return what files of a record have beyond the `known` bytes, except the reader's `own`."""
    parts: Pieces = {}
    room = LARGEST_BYTES
    for path in sorted(directory.glob("*.jsonl")):
        if path.name in own or path.name.startswith(_PREFIX) or path.is_symlink():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(known.get(path.name, 0))
            if data := file.read(room):
                parts[path.name] = data
                room -= len(data)
        if not room:
            break
    return parts


class Mirror:
    """Copies what other nodes record into a directory; `fetch` asks the Head."""

    def __init__(
        self,
        directory: Path,
        fetch: Callable[[dict[str, dict[str, int]], frozenset[str]], dict[str, Pieces]],
    ) -> None:
        self._directory = directory
        self._fetch = fetch
        self._stop = threading.Event()

    def copy(self) -> int:
        """Copy what is new; return how many bytes that was."""
        private.make_directory(self._directory)
        known: dict[str, dict[str, int]] = {}
        own = set()
        for path in self._directory.glob("*.jsonl"):
            if path.name.startswith(_PREFIX):
                node, _, name = path.name.removeprefix(_PREFIX).partition("-")
                known.setdefault(node, {})[name] = path.stat().st_size
            else:
                own.add(path.name)
        count = 0
        for node, parts in self._fetch(known, frozenset(own)).items():
            for name, data in parts.items():
                if private.is_plain_name(name):
                    self._write(f"{_PREFIX}{node}-{name}", data, known.get(node, {}).get(name, 0))
                    count += len(data)
        return count

    def _write(self, name: str, data: bytes, place: int) -> None:
        handle = private.open_file(self._directory / name, os.O_WRONLY)
        try:
            os.pwrite(handle, data, place)
        finally:
            os.close(handle)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Copy what is there, and then what comes, until the block ends."""
        with contextlib.suppress(RollwayError):
            while self.copy() >= LARGEST_BYTES:
                pass
        thread = threading.Thread(target=self._run, name="rollway-mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(POLL_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.copy()
            except RollwayError:  # the stack has ended
                return
            except OSError as error:
                log.warning("the record of other nodes is not copied: %s", error)
