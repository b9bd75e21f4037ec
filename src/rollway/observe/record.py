"""Write what happens in a run: one append-only file per process, a JSON object per line.

    write() ──► a bounded queue ──► a thread ──► <what>-<pid>-<hex>.jsonl          events, reports
    never waits, never raises          │    └──► <what>-<pid>-<hex>.s000001.jsonl  samples, steps
                                       └── a full disk: keeps what it can, counts what it drops

Each file begins with a header, which names its schema and process. A line is handed to the
kernel as soon as its thread has it: a killed process loses the line that it was writing. A disk
that was full gets the rest of a torn line first, so that line is whole again.

Samples have files of their own, because they are many: rollway.observe.thinning bounds their size.
Events are never left out. Times `t` are seconds since 1970, of the node that records.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from rollway import private_files, processes
from rollway.errors import RollwayError
from rollway.observe.thinning import Segments

log = logging.getLogger(__name__)

SCHEMA = 2
"""Files of another one are not read."""
THINNED = frozenset({"sample", "rollouts", "step"})
"""Kinds of entries that are in the files of samples."""
LARGEST_QUEUE = 10_000
LARGEST_BYTES = 256 << 20
RETRY_SECONDS = 1.0
_PENDING_BYTES = 1 << 20

Entry = dict[str, Any]


# --- the lines of a record -----------------------------------------------------------------------
#
#    header    the first line of each file        event    joins, deaths, faults, versions, ends
#    workers   all workers, after every change    step     a worker begins a step of a refit
#    refit     a refit has ended                  rollouts what was returned since the entry before
#    sample    scraped metrics                    mismatch trainer against engine, of one version
#    trainer   a step of the trainer has ended    forks, gateway    counts of a gateway
#    adapters  one was loaded or unloaded
#
# Instance ids are text: they exceed what a double holds, and so do numbers of 2**53.

Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
Bits = Annotated[int, msgspec.Meta(ge=0, le=64)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Number = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]
"""A page may have nanoseconds since 1970; sums of these are still finite."""
Time = Annotated[float, msgspec.Meta(ge=946_684_800, lt=4_102_444_800)]
"""Of this century: one other time, of a clock that was wrong, would stretch every plot."""
Version = Annotated[int, msgspec.Meta(gt=-(2**53), lt=2**53)]
VersionText = Annotated[str, msgspec.Meta(pattern=r"^(None|-?[0-9]{1,16})\Z")]


class Timed(TypedDict):
    t: Time


class RunHeader(Timed):
    schema: Count
    process: str
    pid: NotRequired[Count]
    start: NotRequired[Count]
    host: NotRequired[str]
    stack: NotRequired[str]
    run: NotRequired[str]
    rollway: NotRequired[str]


class Event(Timed):
    event: str
    detail: NotRequired[str]
    worker: NotRequired[str | None]
    instance: NotRequired[str | None]


class RefitStep(Timed):
    refit: Count
    worker: str
    step: str


class RefittedWorker(TypedDict):
    instance_id: str
    state: str
    version: NotRequired[Version | None]
    proof: NotRequired[str]
    strategy: NotRequired[str]
    preflight_seconds: NotRequired[Amount]
    pause_seconds: NotRequired[Amount]
    update_seconds: NotRequired[Amount]
    resume_seconds: NotRequired[Amount]
    waited_seconds: NotRequired[Amount]
    paused_seconds: NotRequired[Amount]
    calls: NotRequired[Count]
    steps: NotRequired[dict[str, Amount]]
    memory: NotRequired[dict[str, list[dict[str, Any]]]]
    error: NotRequired[str | None]


class RefitSummary(TypedDict):
    version: Count
    mode: NotRequired[str]
    seconds: NotRequired[Amount]
    paused_seconds: NotRequired[Amount]
    waited_seconds: NotRequired[Amount]
    passes: NotRequired[Count]
    workers: list[RefittedWorker]


class RefitEnd(Timed):
    began: Time
    report: RefitSummary
    outcome: str
    transport: NotRequired[str | None]
    bytes: NotRequired[Count | None]
    error: NotRequired[str | None]


class Sample(Timed):
    values: dict[str, dict[str, Number]]


class RolloutCounts(Timed):
    seconds: Amount
    count: Count
    tokens: Count
    prompt_tokens: NotRequired[Count]
    cached_tokens: NotRequired[Count]
    latency: NotRequired[dict[str, Amount] | None]
    first_token: NotRequired[dict[str, Amount] | None]
    lengths: NotRequired[dict[str, Amount] | None]
    retries: NotRequired[dict[str, Count]]
    cut: NotRequired[Count]
    continued: NotRequired[Count]
    not_believed: NotRequired[Count]
    versions: NotRequired[dict[VersionText, Count]]
    histograms: NotRequired[dict[str, dict[Bits, Count]]]
    """Counts of lengths by their number of bits: `prompt` and `sampled`."""


class Mismatch(Timed):
    version: Count | None
    k1: NotRequired[Number | None]
    k3: Amount
    max: NotRequired[Amount | None]
    tokens: NotRequired[Count | None]


class AdapterLoads(Timed):
    versions: dict[str, Count]
    """How many versions of each LoRA adapter the workers hold."""


class Forks(Timed):
    reason: str
    count: Count


class GatewayCounts(Timed):
    sessions: Count
    turns: Count


class TrainerStep(Timed):
    step: Count
    seconds: Amount
    parts: dict[str, Amount]


class ListedWorker(TypedDict):
    name: str
    instance: str | None
    state: str
    node: NotRequired[str]
    role: NotRequired[str]
    version: NotRequired[Version | None]
    restarts: NotRequired[Count]
    pid: NotRequired[Count | None]
    model: NotRequired[str | None]


class WorkerList(Timed):
    workers: list[ListedWorker]


SHAPES: dict[str, Any] = {
    "header": RunHeader,
    "event": Event,
    "step": RefitStep,
    "refit": RefitEnd,
    "sample": Sample,
    "rollouts": RolloutCounts,
    "mismatch": Mismatch,
    "adapters": AdapterLoads,
    "forks": Forks,
    "gateway": GatewayCounts,
    "trainer": TrainerStep,
    "workers": WorkerList,
}
"""The fields of each kind of entry; a reader leaves out lines without them."""


# --- writing it -----------------------------------------------------------------------------------


class Recorder:
    """Writes the entries of one process. Its file appears with its first entry.

    Example:
        recorder = Recorder(directory, "driver", stack="policy", run=run_id)
        recorder.write("event", event="start", detail="")
        recorder.close()
    """

    def __init__(
        self,
        directory: Path,
        process: str,
        *,
        stack: str = "",
        run: str = "",
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        self.directory = directory
        self.process = process
        self.stack = stack
        self.run = run
        self.dropped = 0
        """How many entries were not recorded."""
        self._largest_bytes = largest_bytes
        self._starting = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Begin with an empty queue and no file: at first, and in a child after a fork."""
        self._pid = os.getpid()
        self._began = time.time()
        self._queue: deque[Entry] = deque()
        self._queued = 0
        self._taken = 0
        self._written = 0
        self._is_closed = False
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None
        self._writer: _Writer | None = None

    def write(self, kind: str, *, t: float | None = None, **fields: Any) -> None:
        """Queue an entry. It neither waits nor raises; the caller must not change `fields` later.

        An entry is dropped, and counted, while the queue is full."""
        if os.getpid() != self._pid:  # a trainer forks; its child has no thread
            self._starting = threading.Lock()
            self._begin()
        if self._is_closed or len(self._queue) >= LARGEST_QUEUE:
            self.dropped += 1
            return
        self._queued += 1
        self._queue.append({"kind": kind, "t": time.time() if t is None else t, **fields})
        if self._thread is None:
            self._start()
        self._wake.set()

    def event(self, event: str, detail: str = "", **fields: Any) -> None:
        """Queue an event."""
        self.write("event", event=event, detail=detail, **fields)

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until all entries so far are written; return False if that takes too long."""
        goal = self._queued
        self._wake.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._written >= goal, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what is queued, and end. Later entries are dropped."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)
        atexit.unregister(self.close)

    def _start(self) -> None:
        with self._starting:  # two threads may write the first entry
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rollway-recorder", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)

    def _run(self) -> None:
        """Write until closed. Nothing that goes wrong here may reach the process."""
        self._writer = _Writer(self, self._largest_bytes)
        told = 0
        while True:
            self._wake.wait(
                RETRY_SECONDS if self._writer.is_behind or told < self.dropped else None
            )
            self._wake.clear()
            is_last = self._is_closed  # read before the queue: nothing is queued after it
            if self.dropped > told and not self._writer.is_behind:
                told = self.dropped
                self._writer.add(_make_drop_event(told))
            self._drain(is_last)
            if is_last:
                self._writer.close()
                return

    def _drain(self, is_last: bool) -> None:
        assert self._writer is not None
        writer = self._writer
        while self._queue and (is_last or not writer.is_full):
            self._taken += 1
            if not writer.add(self._queue.popleft()):
                self.dropped += 1
            if not self._queue or writer.is_full:
                writer.write()
        writer.write()
        with self._progress:
            if not writer.is_behind:
                self._written = self._taken
            self._progress.notify_all()

    def make_header(self) -> Entry:
        return {
            "kind": "header",
            "schema": SCHEMA,
            "t": self._began,  # not after the first entry
            "process": self.process,
            "pid": self._pid,
            "start": processes.this_process().start,
            "host": socket.gethostname(),
            "stack": self.stack,
            "run": self.run,
            "rollway": _read_version(),
        }


def _read_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("rollway")
    return ""


def _make_drop_event(dropped: int) -> Entry:
    detail = f"{dropped} entries so far were not recorded: the disk was full or slow"
    return {"kind": "event", "t": time.time(), "event": "record dropped", "detail": detail}


class _Writer:
    """The files of one process: lines that are not written yet, and the size of what is."""

    def __init__(self, recorder: Recorder, largest_bytes: int) -> None:
        self._recorder = recorder
        self._path: Path | None = None
        self._main = _File()
        self._samples = _File()
        self._segments = Segments(largest_bytes)
        self._has_told = False

    @property
    def is_behind(self) -> bool:
        return bool(self._main.pending or self._samples.pending)

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the disk that no more entries are taken from the queue."""
        return len(self._main.pending) + len(self._samples.pending) > _PENDING_BYTES

    def add(self, entry: Entry) -> bool:
        """Encode an entry; return False for one that no JSON can hold."""
        try:
            line = msgspec.json.encode(entry, enc_hook=str)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            return False
        file = self._samples if entry["kind"] in THINNED else self._main
        file.pending += line + b"\n"
        return True

    def write(self) -> None:
        """Write as much as the disk takes; the rest stays for the next time."""
        try:
            if self._path is None and self.is_behind:
                recorder = self._recorder
                private_files.make_directory(recorder.directory)
                name = f"{recorder.process}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
                self._path = recorder.directory / name
            if self._path is not None:
                self._write_files(self._path)
            self._has_told = False
        except (OSError, RollwayError) as error:
            if not self._has_told:  # once per outage
                log.warning("the run cannot be recorded at the moment: %s", error)
            self._has_told = True

    def _write_files(self, path: Path) -> None:
        if not self._main.is_open:  # also for samples alone: its header names the process
            self._main.open(path, self._recorder.make_header())
        self._main.write()
        if self._samples.pending:
            if not self._samples.is_open:
                self._samples.open(self._segments.add(path), self._recorder.make_header())
            self._samples.write()
            if self._samples.size > self._segments.segment_bytes:
                self._samples.close()
                self._segments.bound()

    def close(self) -> None:
        self.write()
        self._main.close()
        self._samples.close()


class _File:
    """A file that is appended to, and the bytes that it does not have yet."""

    def __init__(self) -> None:
        self.pending = bytearray()
        self.size = 0
        self._handle: int | None = None

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def open(self, path: Path, header: Entry) -> None:
        self._handle = private_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_EXCL)
        self.size = 0
        self.pending[:0] = msgspec.json.encode(header) + b"\n"

    def write(self) -> None:
        """Write what is pending. After an error the rest is still pending, to the byte."""
        assert self._handle is not None
        while self.pending:
            # A slice: `os.write` of the bytearray itself would forbid that it shrinks.
            written = os.write(self._handle, bytes(self.pending[: 1 << 20]))
            del self.pending[:written]
            self.size += written

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
