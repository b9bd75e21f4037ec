"""Read recorded runs: all entries in the order of time, or those that are new.

    run = Run(directory)
    for entry in run.read(): …            # what is there now
    for entry in run.follow(): …          # that, and what comes, also of files that appear later
    for entry in run.read_end(): …        # the newest of it, at once, however long it is

A run directory comes from anywhere: a colleague, a crashed disk, a newer Rollway. So every line is
checked against the shape of its kind (rollway.observe.shapes), and a line that does not fit is
counted in `Run.problems` and left out. The last line of a file may be half written; it counts once
it ends. Memory is bounded: one line of each file, and a few hundred entries that are put in order.

Each entry also gets `process`, from the header of its file, and `source`, the name of its file up
to the first dot. Times are on the clock of the node of the stack's services.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollway.observe.record import SCHEMA, Entry
from rollway.observe.shapes import SHAPES
from rollway.observe.thinning import SEGMENT

LARGEST_LINE = 32 << 20
"""A refit's report of 4,096 workers has 8 MB."""
MOST_ENTRIES = 5_000
"""How many entries one `Follower.poll` returns."""
_CHUNK = 1 << 18
_WINDOW = 256
"""How many lines of a file may be out of order."""
_END_BYTES = 4 << 20
_LATEST = 1e11
_REFIT = re.compile(rb'\{"kind":"refit","t":(\d{1,11}(?:\.\d{1,9})?),')
"""How a line of a refit begins, as a recorder writes it."""


class _Kind(msgspec.Struct):
    kind: str
    t: float = math.inf


_KIND = msgspec.json.Decoder(_Kind)
_DECODERS = {kind: msgspec.json.Decoder(shape) for kind, shape in SHAPES.items()}


def decode(
    line: bytes, without: Collection[str] = (), until: float = math.inf
) -> Entry | str | None:
    """Return the entry of a line, or why it is none: `unknown kind` or `damaged`; None for a kind
    that is not wanted until some time."""
    try:
        head = _KIND.decode(line)
        kind = head.kind
        if kind in without and head.t <= until:
            return None
        decoder = _DECODERS.get(kind)
        if decoder is None:
            return "unknown kind"
        entry: Entry = decoder.decode(line)
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return "damaged"
    if not (math.isfinite(entry["t"]) and 0 <= entry["t"] < _LATEST):
        return "damaged"
    return {"kind": kind, **entry}


class Run:
    """One run directory.

    Example:
        for entry in Run(directory).read():
            print(entry["t"], entry["kind"])
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: Counter[str] = Counter()
        """How many lines were left out, by reason: `damaged`, `unknown kind` (of a newer schema),
        `too long`."""
        self.newest_schema = 0
        """The highest schema that a header names; above `SCHEMA`, a newer Rollway wrote it."""

    @property
    def is_newer(self) -> bool:
        """Whether a newer Rollway wrote a part of this run."""
        return self.newest_schema > SCHEMA

    def read(self, *, without: Collection[str] = (), until: float = math.inf) -> Iterator[Entry]:
        """Yield all entries that are there now, in the order of time; `without` names kinds that
        are passed over, up to a time, which is faster than to leave them out later."""
        return self.follower().read(without=without, until=until)

    def read_end(self, most_bytes: int = _END_BYTES) -> Iterator[Entry]:
        """Yield the newest entries, in the order of time: so many bytes of events and of samples of
        each process, with the headers of their files."""
        ends = []
        for files in _list_chains(self.directory):
            rest, tails = most_bytes, []
            for path in reversed(files):
                with contextlib.suppress(OSError):
                    size = path.stat().st_size
                    tails.append(Tail(path, self, begin=max(0, size - rest)))
                    rest -= size
                if rest <= 0:
                    break
            ends.append(_put_in_order(reversed(tails)))
        fill = _Roster()
        for entry in heapq.merge(*ends, key=_get_time):
            yield fill(entry)

    def find_end_of_refit(self, number: int) -> float:
        """Return when the last refit but `number` ended, by the clock of its process; -inf if there
        were fewer. Only the beginnings of lines are read."""
        times: list[float] = []
        for path in _list_files(self.directory):
            if SEGMENT.search(path.name):
                continue
            with contextlib.suppress(OSError), _open_regular(path) as file:
                lines = iter(lambda file=file: file.readline(LARGEST_LINE), b"")  # type: ignore[misc]
                times += [float(match[1]) for line in lines if (match := _REFIT.match(line))]
        largest = heapq.nlargest(number + 1, times)
        return largest[number] if len(largest) > number else -math.inf

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        total = 0
        for path in _list_files(self.directory):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def follow(
        self,
        *,
        seconds: float = 0.5,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Entry]:
        """Yield all entries, then new ones as they come, until `stop` returns True.

        Those that are there at the start come in the order of time; later ones as they are found.
        Use `follower` in an event loop."""
        follower = self.follower()
        while True:
            is_last = stop()  # before the poll, so that what was written until then is read
            entries = follower.poll()
            yield from entries
            if len(entries) < MOST_ENTRIES:
                if is_last:
                    return
                time.sleep(seconds)

    def follower(self) -> Follower:
        """Return a reader of this run that can be asked for new entries again and again."""
        return Follower(self)


class Follower:
    """Reads what is new in a run.

    Example:
        follower = Run(directory).follower()
        while True:
            entries = await asyncio.to_thread(follower.poll)
            …
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tails: dict[Path, Tail] = {}
        self._fill = _Roster()

    def read(self, *, without: Collection[str] = (), until: float = math.inf) -> Iterator[Entry]:
        """Yield what is there now, in the order of time, in a third of the time that `poll` takes,
        which goes on from there. `without` names kinds that are passed over, up to a time."""
        chains = []
        for files in _list_chains(self._run.directory):
            tails = [Tail(path, self._run, without, until) for path in files]
            self._tails |= dict(zip(files, tails, strict=True))
            chains.append(_put_in_order(tails))
        for entry in heapq.merge(*chains, key=_get_time):
            yield self._fill(entry)
        for tail in self._tails.values():
            tail.without = ()

    @property
    def bytes_read(self) -> int:
        return sum(tail.place for tail in list(self._tails.values()))

    def poll(self, most: int = MOST_ENTRIES) -> list[Entry]:
        """Return up to `most` entries that were not returned before, in the order of time.

        A file that is far ahead in time does not overtake the others: each poll returns nothing
        later than what a file with more lines to read has reached."""
        for path in _list_files(self._run.directory):
            if path not in self._tails:
                self._tails[path] = Tail(path, self._run)
        share = max(1, most // max(1, len(self._tails)))
        reached = math.inf
        for tail in self._tails.values():
            tail.fill(share)
            if len(tail.waiting) >= share:
                reached = min(reached, tail.waiting[-1]["t"])
        entries: list[Entry] = []
        for tail in self._tails.values():
            entries += tail.take(reached)
        entries.sort(key=_get_time)
        return [self._fill(entry) for entry in entries]


class Tail:
    """One file, read from its beginning to where it ends now; later calls read on."""

    def __init__(
        self,
        path: Path,
        run: Run,
        without: Collection[str] = (),
        until: float = math.inf,
        *,
        begin: int = 0,
    ) -> None:
        """`begin`: lines before this byte are passed over, but for the first, the header."""
        self.waiting: list[Entry] = []
        """Entries that were read and not taken yet."""
        self.without = without
        self.place = 0
        """How many bytes were read."""
        self._until = until
        self._begin = begin
        self._path = path
        self._run = run
        self._inode = 0
        self._rest = b""
        self._lines: list[bytes] = []
        self._skips = False
        self._process = ""
        self._source = SEGMENT.sub("", path.name).removesuffix(".jsonl")
        self._offset = 0.0
        self._has_ended = False
        """A file of samples that was thinned had been read to its end: it is an old one."""

    def fill(self, most: int) -> None:
        """Read until `most` entries wait, or until the file ends."""
        while len(self.waiting) < most:
            entries = self.read_entries(most - len(self.waiting))
            if not entries:
                return
            self.waiting += entries

    def take(self, until: float) -> list[Entry]:
        """Return the waiting entries that are not later than `until`."""
        taken = [entry for entry in self.waiting if entry["t"] <= until]
        self.waiting = [entry for entry in self.waiting if entry["t"] > until]
        return taken

    def read_entries(self, most: int) -> list[Entry]:
        """Return up to `most` entries; none at the present end of the file."""
        entries: list[Entry] = []
        while len(entries) < most:
            if not self._lines and not self._read_chunk():
                break
            while self._lines and len(entries) < most:
                entry = self._read_line(self._lines.pop())
                if entry is not None:
                    entries.append(entry)
        return entries

    def _read_chunk(self) -> bool:
        """Read a piece of the file and cut it into lines; return False at its end."""
        if self._has_ended:
            return False
        try:
            handle = _open(self._path)
        except OSError:  # it was removed, or may not be read
            return False
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return False
            if self._inode not in (0, status.st_ino) and SEGMENT.search(self._path.name):
                self._has_ended = True
                return False
            if status.st_ino != self._inode or status.st_size < self.place:
                self._inode, self.place, self._rest = status.st_ino, 0, b""
            chunk = os.pread(handle, _CHUNK, self.place)
        except OSError:  # a damaged disk
            return False
        finally:
            os.close(handle)
        self.place += len(chunk)
        self._cut(chunk)
        if self._begin > self.place and self._lines:
            self.place, self._begin = self._begin, 0
            self._lines, self._rest, self._skips = self._lines[-1:], b"", True
        return bool(chunk)

    def _cut(self, chunk: bytes) -> None:
        first, *others = chunk.split(b"\n")
        if others:
            *whole, rest = others
            self._lines = [*reversed(whole), self._rest + first]
            if self._skips:  # the end of a line that was too long
                self._lines.pop()
                self._skips = False
            self._rest = rest
        elif not self._skips:
            self._rest += first
        if len(self._rest) > LARGEST_LINE:
            self._run.problems["too long"] += 1
            self._rest, self._skips = b"", True

    def _read_line(self, line: bytes) -> Entry | None:
        if not line.strip():
            return None
        entry = decode(line, self.without, self._until)
        if entry is None:
            return None
        if isinstance(entry, str):
            self._run.problems[entry] += 1
            return None
        if entry["kind"] == "header":
            self._run.newest_schema = max(self._run.newest_schema, entry["schema"])
            offset = entry.get("clock", {}).get("offset", 0.0)
            self._offset = float(offset) if abs(offset) < _LATEST else 0.0
            self._process = entry["process"]
        entry["process"], entry["source"] = self._process, self._source
        entry["t"] += self._offset
        if "began" in entry:
            entry["began"] += self._offset
        return entry


def _put_in_order(tails: Iterable[Tail]) -> Iterator[Entry]:
    """Yield the entries of the files of one process, nearly in order of time, put in order."""
    window: list[tuple[float, int, Entry]] = []
    number = 0
    for tail in tails:
        while lines := tail.read_entries(_WINDOW):
            for entry in lines:
                number += 1
                heapq.heappush(window, (entry["t"], number, entry))
                if len(window) > _WINDOW:
                    yield heapq.heappop(window)[2]
    while window:
        yield heapq.heappop(window)[2]


class _Roster:
    """Makes every entry `workers` one of the whole stack.

    Each supervisor records the workers that it started, by name, with the versions that they
    declared some seconds ago. A driver knows the versions at once, by instance, and no names; but
    it may be killed before it records them. A worker's version never goes down."""

    def __init__(self) -> None:
        self._started: dict[str, list[Entry]] = {}
        """The workers of each supervisor."""
        self._listed: list[Entry] = []
        """The workers as a driver listed them."""
        self._named: set[str | None] = set()
        """Every instance that a supervisor ever named."""

    def __call__(self, entry: Entry) -> Entry:
        if entry["kind"] != "workers":
            return entry
        if entry["process"] == "supervisor":
            self._started[entry["source"]] = entry["workers"]
            self._named.update(worker["instance"] for worker in entry["workers"])
        else:
            self._listed = entry["workers"]
        versions = {worker["instance"]: worker.get("version") for worker in self._listed}
        started = [
            {**worker, "version": _find_newest(worker, versions.get(worker["instance"]))}
            for workers in self._started.values()
            for worker in workers
        ]
        # Workers of another stack, which has joined this one, or of one that Rollway did not start.
        others = [
            {**worker, "name": worker["name"] or f"worker {worker['instance']}"}
            for worker in self._listed
            if worker["instance"] not in self._named
        ]
        return {**entry, "workers": started + others}


def _find_newest(worker: Entry, version: int | None) -> int | None:
    own = worker.get("version")
    return max((each for each in (own, version) if each is not None), default=None)


def _get_time(entry: Entry) -> float:
    time_of_entry: float = entry["t"]
    return time_of_entry


def _open(path: Path) -> int:
    # Without O_NONBLOCK, opening a named pipe waits for a writer. A link could lead out.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def _open_regular(path: Path) -> BinaryIO:
    """Open a file to be read; raise OSError if it is none."""
    file = open(_open(path), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no file")
    return file


def _list_files(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if path.name.endswith(".jsonl"))
    return []


def _list_chains(directory: Path) -> list[list[Path]]:
    """Return the files by what can be read one after the other: each main file alone, and the
    files of samples of each process."""
    chains: dict[str, list[Path]] = {}
    for path in _list_files(directory):
        match = SEGMENT.search(path.name)
        chains.setdefault(f"{path.name[: match.start()]}.s" if match else path.name, []).append(
            path
        )
    return list(chains.values())
