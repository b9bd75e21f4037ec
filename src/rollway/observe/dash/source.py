"""What a dashboard shows: the record of a run, and the logs beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollway.observe.dash.view import View
from rollway.private import is_plain_name

Entry = dict[str, Any]
Phase = Literal["live", "ended", "recorded"]

_MOST_ENTRIES = 400_000
_MOST_SAMPLES = 2_000


@dataclass(slots=True)
class Source:
    """One run. All functions may block: they are called in threads."""

    label: str
    """What was asked for: a stack, an address or a directory."""
    poll: Callable[[], list[Entry]]
    """Returns the entries that it has not returned before."""
    read: Callable[[], Iterable[Entry]]
    """Returns all entries, in the order of time."""
    get_phase: Callable[[], Phase] = lambda: "recorded"
    count_problems: Callable[[], dict[str, int]] = dict
    """Returns how many lines of the record could not be read, by reason."""
    log_dir: Path | None = None

    def list_logs(self) -> list[str]:
        """List the processes that have a log."""
        if self.log_dir is None or not self.log_dir.is_dir():
            return []
        return sorted(path.stem for path in self.log_dir.glob("*.log") if self.find_log(path.stem))

    def find_log(self, name: str) -> Path | None:
        """Return the log of a process, never a file outside the log directory."""
        if self.log_dir is None or not is_plain_name(name):
            return None
        path = self.log_dir / f"{name}.log"
        return path if path.is_file() and not path.is_symlink() else None


class History:
    """The entries of a run up to a moment, for a page that looks back.

    Entries are kept encoded, and samples are thinned: a day of a large fleet has gigabytes of them
    as objects."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: deque[tuple[float, bytes]] = deque(maxlen=_MOST_ENTRIES)
        self._samples: list[tuple[float, bytes]] = []
        self.until = float("-inf")
        for entry in entries:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        packed = (float(entry["t"]), msgspec.msgpack.encode(entry))
        self.until = max(self.until, packed[0])
        if entry.get("kind") != "sample":
            self._entries.append(packed)
            return
        self._samples.append(packed)
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[::2]

    def view_at(self, t: float) -> View:
        """Return the page as it was at a time."""
        view = View()
        packed = [pair for pair in (*self._entries, *self._samples) if pair[0] <= t]
        for _, entry in sorted(packed, key=lambda pair: pair[0]):
            view.add(msgspec.msgpack.decode(entry))
        return view
