"""What a dashboard shows of a run: its source, and a view of its state as JSON has it.

RunSource: the record, and the logs beside it ──► Watch: polls it ──► View: sections, events, plots
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollway.observe.dash import verdicts
from rollway.observe.read import Run
from rollway.observe.record import Entry
from rollway.observe.refits import KEPT
from rollway.observe.run_state import RunState
from rollway.private_files import is_plain_name

Phase = Literal["live", "ended", "recorded"]

_SETTLE_POLL_SECONDS = 0.2
_LONG_BYTES = 32 << 20
_MOST_ENTRIES = 400_000
_MOST_SAMPLES = 2_000
_RATE_SECONDS = 15.0


@dataclass
class RunSource:
    """One run. All functions may block: they are called in threads."""

    label: str
    """What was asked for: a stack, an address or a directory."""
    run: Run
    get_phase: Callable[[], Phase] = lambda: "recorded"
    log_dir: Path | None = None
    store: Path | None = None
    """Where the stack's gateway records, whether there is one or not."""
    settle_seconds: float = 0.0
    """How long a record that has just begun takes until it tells the present."""

    def __post_init__(self) -> None:
        self._follower = self.run.follower()

    def poll(self) -> list[Entry]:
        """Return the entries that were not returned before."""
        return self._follower.poll()

    def load(self) -> Iterable[Entry]:
        """Return what `poll` would return until there is no more, faster; `poll` goes on from
        there. A day has a million steps of refits, and there are bars of a few: others are left
        out."""
        return self._follower.read(without={"step"}, until=self.run.find_end_of_refit(KEPT))

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes of the record were read, and of how many."""
        return self._follower.bytes_read, self.run.nbytes

    def find_log(self, name: str) -> Path | None:
        """Return the log of a process, never a file outside the log directory."""
        if self.log_dir is None or not is_plain_name(name):
            return None
        path = self.log_dir / f"{name}.log"
        return path if path.is_file() and not path.is_symlink() else None


class View:
    """What is shown of a run after some entries."""

    def __init__(self, *, is_partial: bool = False) -> None:
        self.state = RunState(is_partial=is_partial)

    def add(self, entry: Entry) -> None:
        """Take one entry."""
        self.state.add(entry)

    def get_sections(self) -> dict[str, Any]:
        """Return everything but series, events and the bars of refits."""
        state = self.state
        return {
            "run": {
                "stack": state.stack,
                "run": state.run,
                "began": state.first,
                "now": state.now if state.first is not None else None,
                "ended": state.ended,
                "processes": len(state.processes),
                "rollway": state.rollway,
            },
            "top": [asdict(verdict) for verdict in verdicts.judge(state)],
            "findings": [finding.as_json() for finding in verdicts.find_all(state)],
            "fleet": state.workers.as_json(),
            "refits": [refit.summarize() for refit in reversed(state.timeline.refits)],
            "rollouts": self._make_rollouts(),
            "exactness": self._make_exactness(),
            "trainer": list(state.steps)[-60:],
        }

    def get_events(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the events after one, oldest first."""
        return [event for event in self.state.events if event["id"] > after]

    def get_series(self) -> dict[str, dict[str, list[float]]]:
        """Return the points of every plot that has one."""
        return {name: plot.as_json() for name, plot in self.state.plots.items() if plot.times}

    def get_refit(self, key: str) -> dict[str, Any] | None:
        """Return a refit with its bars; the newest without a key."""
        refit, state = self.state.timeline.get(key), self.state
        return None if refit is None else refit.as_json(state.now, state.workers.names)

    def _make_rollouts(self) -> dict[str, Any]:
        state = self.state
        recent = [each for each in state.recent if each["t"] > state.now - _RATE_SECONDS]
        span = state.now - min((e["t"] - e["seconds"] for e in recent), default=state.now)
        tokens, rollouts = (sum(each[name] for each in recent) for name in ("tokens", "count"))
        return {
            "tokens_per_second": tokens / span if span > 0 else None,
            "rollouts_per_second": rollouts / span if span > 0 else None,
            "totals": state.list_totals(),
            "retries": state.list_by_label("retries_total"),
            **{name: state.percentiles.get(name) for name in ("latency", "first_token", "lengths")},
        }

    def _make_exactness(self) -> dict[str, Any]:
        state = self.state
        return {
            "mismatch": [state.mismatch[version] for version in sorted(state.mismatch)[-60:]],
            "bounds": [verdicts.EXACT_GOOD, verdicts.EXACT_WARN],
            "not_believed": state.get("answers_not_believed_total"),
            "forks": state.list_by_label("forks_total"),
            "gateway": {"sessions": state.get("gateway_sessions"),
                        "turns": state.get("gateway_turns_total")},
            "spread": state.workers.get_spread(),
        }  # fmt: skip


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

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.view = View()
        self.phase: Phase = "live"
        self.trouble = ""
        self.is_stopped = False
        """Set by another thread, it ends `load`."""

    @property
    def is_long(self) -> bool:
        """Whether the record takes seconds to read."""
        done, total = self.source.progress
        return total - done > _LONG_BYTES

    def look_at_end(self) -> None:
        """Show the end of the record, until all of it is loaded."""
        view = View(is_partial=True)
        for entry in self.source.run.read_end():
            view.add(entry)
        self.view = view
        self.note_phase(self.source.get_phase())

    def load(self) -> None:
        """Take all that is recorded. What is shown meanwhile stays as it is."""
        view = View()
        self.source.run.problems.clear()  # those of the end, which is read again
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
        while time.monotonic() < until and not len(self.view.state.workers):
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
        problems = self.source.run.problems
        unread = ", ".join(f"{count:,} {reason}" for reason, count in problems.items() if count)
        notes = [self.trouble] if self.trouble else []
        if self.view.state.is_partial:
            done, total = self.source.progress
            notes.append(
                f"Reading the record: {100 * done // max(total, 1)} %. Until all of it is read, "
                "totals, plots and the list of refits begin near its end."
            )
        if unread:
            notes.append(f"What of the record could not be read: {unread}.")
        run = sections["run"]
        ended = self.phase == "ended" or run["ended"] is not None
        sections["run"] = {
            **run,
            "label": self.source.label,
            "phase": "ended" if ended and self.phase != "recorded" else self.phase,
            "notes": notes,
            "has_logs": self.source.log_dir is not None,
        }
        return sections

    def make_page(self, view: View | None = None) -> dict[str, Any]:
        """Return all that a page shows at first; of another view, as it was."""
        shown = view or self.view
        return {
            "sections": self.make_model(view),
            "series": shown.get_series(),
            "events": shown.get_events(),
            "refit": shown.get_refit(""),
        }


class PastEntries:
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
