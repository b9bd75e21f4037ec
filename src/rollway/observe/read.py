"""Read recorded runs: all entries in the order of time, or those that are new.

    run = Run(directory)
    for entry in run.read(): …            # what is there now
    entries = run.follower().poll()       # what is new since the last poll, again and again
    for entry in run.read_end(): …        # the newest of it, at once, however long it is

A run directory comes from anywhere: a colleague, a crashed disk, another Rollway. So every line is
checked here, once, against the shape of its kind (`SHAPES`): who reads on has numbers that are
numbers, and text without signs that a terminal or a page obeys. A line that does not fit, and each
file of another schema, is counted in `Run.problems` and left out. The last line of a file may be
half written; it counts once it ends. Memory is bounded: one line of each file, and a few hundred
entries that are put in order.

Each entry also gets `process`, from the header of its file, and `source`, the name of its file up
to the first dot. Times are those of the node that recorded them.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import re
import socket
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollway import processes
from rollway.errors import UsageError
from rollway.observe.record import SCHEMA, SHAPES, Entry
from rollway.observe.thinning import SEGMENT

MOST_ENTRIES = 5_000
"""How many entries one `RunFollower.poll` returns."""
LARGEST_LINE = 32 << 20
"""A refit's report of 4,096 workers has 8 MB. A longer line is read as several, all damaged."""
_LINES = 4_096
"""How many lines of a file are read at once."""
_BUFFER_BYTES = 1 << 18
_WINDOW = 256
"""How many lines of a file may be out of order."""
_END_BYTES = 4 << 20
_REFIT = re.compile(rb'\{"kind":"refit","t":(\d{1,11}(?:\.\d{1,9})?),')
"""How a line of a refit begins, as a recorder writes it."""
_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, and those that reorder the text around them."""
_SUSPECT = re.compile(
    rb"\\[ubfr]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]"
)
"""A line that may have one of them."""


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
    if _SUSPECT.search(line):
        entry = _clean(entry)
    return {"kind": kind, **entry}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {_clean(k): _clean(v) for k, v in value.items()} if isinstance(value, dict) else value


def clean_text(text: str) -> str:
    """Return text without characters that change how other text is shown."""
    return _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text)


class Run:
    """One run directory.

    Example:
        for entry in Run(directory).read():
            print(entry["t"], entry["kind"])
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: Counter[str] = Counter()
        """How many lines were left out, by reason: `damaged`, `unknown kind`; and how many
        files, as `files of schema 1`."""

    def check(self) -> None:
        """Raise if there is no record, or only that of another Rollway."""
        fix = "Give the directory of a run."
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is not a directory.", fix)
        paths = [self.directory, *_list_files(self.directory)]
        if not all(path.is_symlink() or os.access(path, os.R_OK) for path in paths):
            raise UsageError(f"You may not read all of {self.directory}.", "Ask its owner.")
        if not any(self.directory.glob("*.jsonl")):
            raise UsageError(f"{self.directory} has no record of a run.", fix)
        self.check_schema()

    def check_schema(self) -> None:
        """Raise if another Rollway recorded all that is there."""
        schemas = {header["schema"] for header in read_headers(self.directory)}
        if schemas and SCHEMA not in schemas:
            raise UsageError(
                f"Another version of Rollway recorded {self.directory}: its schema is "
                f"{', '.join(map(str, schemas))}, and this version reads {SCHEMA}.",
                "Read it with the version that recorded it.",
            )

    def read(self) -> Iterator[Entry]:
        """Yield all entries that are there now, in the order of time. Raise if another Rollway
        recorded all of them."""
        self.check_schema()
        return self.follower().read()

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
                lines = iter(partial(file.readline, LARGEST_LINE), b"")
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

    def follower(self) -> RunFollower:
        """Return a reader of this run that can be asked for new entries again and again."""
        return RunFollower(self)


class RunFollower:
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
        which goes on from there. `without` names kinds that are passed over, up to a time, which
        is faster than to leave them out later."""
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
        self._process = ""
        self._source = SEGMENT.sub("", path.name).removesuffix(".jsonl")
        self._has_ended = False
        """There is nothing more to read: it has another schema, or it was thinned after it had been
        read to its end, as old samples are."""

    def fill(self, most: int) -> None:
        """Read until `most` entries wait, or until the file ends."""
        if len(self.waiting) < most:
            self.waiting += self.read_entries(most - len(self.waiting))

    def take(self, until: float) -> list[Entry]:
        """Return the waiting entries that are not later than `until`."""
        taken = [entry for entry in self.waiting if entry["t"] <= until]
        self.waiting = [entry for entry in self.waiting if entry["t"] > until]
        return taken

    def read_entries(self, most: int) -> list[Entry]:
        """Return up to `most` entries; none at the present end of the file."""
        entries: list[Entry] = []
        # It may have been removed, may be no file, or its disk may be damaged.
        with contextlib.suppress(OSError), _open_regular(self._path) as file:
            self._find_place(file)
            while len(entries) < most and not self._has_ended:
                line = file.readline(LARGEST_LINE)
                if len(line) < LARGEST_LINE and not line.endswith(b"\n"):  # its writer goes on
                    break
                self.place += len(line)
                entry = self._read_line(line)
                if entry is not None:
                    entries.append(entry)
                if self._begin > self.place:
                    file.seek(self._begin - 1)
                    self.place = self._begin - 1 + len(file.readline(LARGEST_LINE))
        return entries

    def _find_place(self, file: BinaryIO) -> None:
        """Go to where the last call ended; in another file of this name, to its beginning."""
        status = os.fstat(file.fileno())
        is_other = self._inode not in (0, status.st_ino)
        if is_other and SEGMENT.search(self._path.name):
            self._has_ended = True
        elif is_other or status.st_size < self.place:
            self.place = 0
        self._inode = status.st_ino
        file.seek(self.place)

    def _read_line(self, line: bytes) -> Entry | None:
        entry = decode(line, self.without, self._until) if line.strip() else None
        if isinstance(entry, str):
            self._run.problems[entry] += 1
            return None
        if entry is None:
            return None
        if entry["kind"] == "header":
            if entry["schema"] != SCHEMA:
                self._run.problems[f"files of schema {entry['schema']}"] += 1
                self._has_ended = True
                return None
            self._process = entry["process"]
        entry["process"], entry["source"] = self._process, self._source
        return entry


def _put_in_order(tails: Iterable[Tail]) -> Iterator[Entry]:
    """Yield the entries of the files of one process, nearly in order of time, put in order."""
    window: list[tuple[float, int, Entry]] = []
    number = 0
    for tail in tails:
        while lines := tail.read_entries(_LINES):
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


def _open_regular(path: Path) -> BinaryIO:
    """Open a file to be read; raise OSError if it is none."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer. A link could lead out.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no file")
    return os.fdopen(handle, "rb", _BUFFER_BYTES)


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


# --- directories of runs --------------------------------------------------------------------------

_FRESH_SECONDS = 60.0
"""A run of another node whose files changed this recently may still be recorded."""


def list_runs(directory: Path) -> list[Path]:
    """List the recorded runs below a directory, the one that was written to last first."""
    with contextlib.suppress(OSError):
        runs = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
        return sorted(runs, key=get_last_write, reverse=True)
    return []


def get_last_write(run: Path) -> float:
    """Return when a run was last written to; 0 if it has no file."""
    return max((_get_mtime(path) for path in run.glob("*.jsonl")), default=0.0)


def _get_mtime(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_headers(run: Path) -> Iterator[Entry]:
    """Yield the headers of a run's files, but for those of samples."""
    for path in sorted(run.glob("*.jsonl")):
        if SEGMENT.search(path.name):
            continue
        with contextlib.suppress(OSError), _open_regular(path) as file:
            header = decode(file.readline(LARGEST_LINE))
            if isinstance(header, dict) and header["kind"] == "header":
                yield header


def prune_runs(directory: Path, stack: str, keep: int, *, but: str = "") -> None:
    """Remove all but the newest `keep` ended runs of a stack; `but` names a run that stays."""
    runs = [run for run in list_runs(directory) if run.name != but and _has_ended(run, stack)]
    for run in runs[keep:]:
        remove_run(run)


def _has_ended(run: Path, stack: str) -> bool:
    """Return whether a run is one of this stack, and nobody records it any more."""
    headers = list(read_headers(run))
    is_own = bool(headers) and all(header.get("stack") == stack for header in headers)
    return is_own and not any(is_alive(header, run) for header in headers)


def is_alive(header: Entry, run: Path) -> bool:
    """Return whether the process that wrote a header still records."""
    if header.get("host") != socket.gethostname():
        return time.time() - get_last_write(run) < _FRESH_SECONDS
    pid, start = header.get("pid"), header.get("start")
    if pid is None or start is None:
        return False
    return processes.ProcessId(pid, start).alive


def remove_run(run: Path) -> None:
    """Remove the files of a run, and its directory if nothing else is in it."""
    with contextlib.suppress(OSError):
        if run.is_symlink() or run.lstat().st_uid != os.getuid():
            return
        for path in run.glob("*.jsonl*"):
            path.unlink(missing_ok=True)
        run.rmdir()
