"""What a dashboard shows: the record of a run, and the logs beside it."""

from __future__ import annotations

import time
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

_SETTLE_POLL_SECONDS = 0.2
_LONG_BYTES = 32 << 20
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
    load: Callable[[], Iterable[Entry]] = list
    """Returns what `poll` would return until there is no more, faster; `poll` goes on from there.
    Steps of refits that no page has a bar for are left out."""
    read_end: Callable[[], Iterable[Entry]] = list
    """Returns the newest entries."""
    get_progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns how many bytes of the record `load` has read, and of how many."""
    get_phase: Callable[[], Phase] = lambda: "recorded"
    count_problems: Callable[[], dict[str, int]] = dict
    """Returns how many lines of the record could not be read, by reason."""
    log_dir: Path | None = None
    journal: Path | None = None
    """The journal of the stack's gateway, whether there is one or not."""
    settle_seconds: float = 0.0
    """How long a record that has just begun takes until it tells the present."""

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


class Watch:
    """A run as it is now: its view, and whether it is live. Whoever shows a run polls one.

        look_at_end() ──► a view of the newest minutes, at once
        load()        ──► a view of all of it takes its place
        poll()        ──► what is new is added to that

    Example:
        watch = Watch(source)
        watch.load()
        while watch.poll() or …:
            show(watch.make_model())
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.view = View()
        self.phase: Phase = "live"
        self.trouble = ""
        self.is_stopped = False
        """Set by another thread, it ends `load`."""

    @property
    def is_long(self) -> bool:
        """Whether the record takes seconds to read."""
        done, total = self.source.get_progress()
        return total - done > _LONG_BYTES

    def look_at_end(self) -> None:
        """Show the end of the record, until all of it is loaded."""
        view = View(is_partial=True)
        for entry in self.source.read_end():
            view.add(entry)
        self.view = view
        self.note_phase(self.source.get_phase())

    def load(self) -> None:
        """Take all that is recorded. What is shown meanwhile stays as it is."""
        view = View()
        try:
            for entry in self.source.load():
                view.add(entry)
                if self.is_stopped:
                    return
        except OSError as error:
            self.note_trouble(error)
        self.view = view
        self.poll()

    def poll(self) -> bool:
        """Take all new entries, and return whether anything changed."""
        before, count = (self.phase, self.trouble), 0
        try:
            while entries := self.source.poll():
                count += len(entries)
                for entry in entries:
                    self.view.add(entry)
            self.note_phase(self.source.get_phase())
        except OSError as error:
            self.note_trouble(error)
        return bool(count) or before != (self.phase, self.trouble)

    def settle(self) -> None:
        """Wait until a record that has just begun tells of workers, or for its settling time."""
        until = time.monotonic() + self.source.settle_seconds
        self.load()
        while time.monotonic() < until and not len(self.view.workers):
            time.sleep(_SETTLE_POLL_SECONDS)
            self.poll()

    def note_phase(self, phase: Phase) -> None:
        self.phase, self.trouble = phase, ""

    def note_trouble(self, error: OSError) -> None:
        """Keep what is known: a directory that cannot be read now may be back later."""
        self.trouble = f"The record cannot be read: {error.strerror or error}."

    def make_model(self, view: View | None = None) -> dict[str, Any]:
        """Return what is shown without series, events and bars; of another view, as it was."""
        sections = (view or self.view).get_sections()
        problems = self.source.count_problems()
        unread = ", ".join(f"{count:,} {reason}" for reason, count in problems.items() if count)
        notes = [self.trouble] if self.trouble else []
        if self.view.is_partial:
            done, total = self.source.get_progress()
            notes.append(
                f"Reading the record: {100 * done // max(total, 1)} %. Until all of it is read, "
                "totals, plots and the list of refits begin near its end."
            )
        if unread:
            notes.append(f"Lines of the record that could not be read: {unread}.")
        run = sections["run"]
        ended = self.phase == "ended" or run["ended"] is not None
        sections["run"] = {
            **run,
            "label": self.source.label,
            "phase": "ended" if ended and self.phase != "recorded" else self.phase,
            "notes": notes + run["notes"],
            "has_logs": self.source.log_dir is not None,
        }
        return sections


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
