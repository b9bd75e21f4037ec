"""Record sampled turns by session, in memory and in a journal.

    request ─► open(name) ─► … sample … ─► add(session, turn): journal, then memory ─► answer

The journal is written before the client receives its answer, so a gateway that is killed and
restarted knows everything that a client received. If a session is deleted meanwhile, its turns in
flight are answered but not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from rollway.errors import RollwayError, UsageError
from rollway.gateway.entries import Loaded, encode, guess_session, load
from rollway.gateway.journal import Disk, Journal, JournalFull
from rollway.gateway.turns import PARENT_MISSING, Forgotten, Lost, Session, Turn

__all__ = ["JournalFull", "Recorder", "Session", "Turn"]

log = logging.getLogger(__name__)

_ERASE_SECONDS = 60.0
_MANY_IDS = 50_000
"""Turns with more token ids are recorded in the writer thread: that takes about 10 ms."""
_MOST_REASONS = 32
_URGENT_BYTES = 2**20  # with fewer deleted bytes, a compaction is never urgent

_Batch = list[tuple[Session, Sequence[Turn]]]


class Recorder:
    """All sessions, and their journal. Any thread may call it."""

    def __init__(
        self,
        journal: Path | None,
        *,
        sync: bool = False,
        erase_within: float = _ERASE_SECONDS,
        disk: Disk | None = None,
    ) -> None:
        """Read the journal of an earlier gateway. With `sync`, a turn counts only when it is on the
        disk, not just in the kernel. The text of a deleted session leaves the journal within
        `erase_within` seconds."""
        self.sessions: dict[str, Session] = {}
        self.lost = 0
        """How many lines of the journal could not be used."""
        self.turns = 0
        """How many turns this process has recorded."""
        self.forks: Counter[str] = Counter()
        """How many of them do not extend the turn before, by reason."""
        self._opened: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """Recorded sessions, and those that only a request in flight refers to so far."""
        self._lock = threading.Lock()  # guards the journal and the order of turns; held for writes
        self._names = threading.Lock()  # guards the tables of sessions; held only briefly
        self._compacting = threading.Lock()  # lets one compaction run at a time
        self._journal: Journal | None = None
        self._live = 0
        """The bytes of the journal that belong to sessions which are not deleted."""
        self._unreadable: list[tuple[int, int]] = []
        """Where the journal has unreadable lines; a compaction moves them to another file."""
        self._erased: set[str] = set()
        """Deleted sessions whose text is still in the journal."""
        self._erase_within = erase_within
        self._background = _Background(self.compact, retry=erase_within / 2)
        self._pending: deque[tuple[Session, Sequence[Turn], Future[bool]]] = deque()
        """With `sync`: turns that wait for the writer thread."""
        self._sync = sync
        self._writer = ThreadPoolExecutor(1, "journal-writer")
        self._in_writer: set[Future[bool]] = set()
        """Work in the writer that must finish before anything else is recorded."""
        if journal is not None:
            self._journal = Journal(journal, self._lock, sync=sync, disk=disk or Disk())
            self._load(self._journal)

    def open(self, name: str) -> Session:
        """Return the session to record into. It is listed once it has a turn."""
        if not name.isascii() and name.encode(errors="ignore").decode() != name:
            raise UsageError("The name of a session must be text.")
        with self._names:
            session = self._opened.get(name)
            if session is None:
                session = self._opened[name] = Session(name)
            return session

    def __contains__(self, name: object) -> bool:
        """Return whether there is something to delete: a recorded session, or one in flight."""
        return name in self._opened

    def add(self, session: Session, turn: Turn) -> bool:
        """Record a turn; if the session was deleted, record nothing and return False."""
        return self.add_all(session, [turn])

    def add_all(self, session: Session, turns: Sequence[Turn]) -> bool:
        """Record turns of one session: all of them, or none."""
        _check_turns(session, turns)
        return self._commit([(session, turns)])[0]

    async def add_async(self, session: Session, turns: Sequence[Turn]) -> bool:
        """Record turns without blocking the event loop.

        With `sync` the writer thread records them, and turns that arrive while it waits for the
        disk share its next wait. It also records turns with many ids; turns that arrive meanwhile
        queue behind them, so that the order stays."""
        is_long = sum(len(turn.new_ids) + len(turn.token_ids) for turn in turns) > _MANY_IDS
        if is_long or self._in_writer:
            return await self._run_in_order(self.add_all, session, turns)
        if not self._sync:
            return self.add_all(session, turns)
        _check_turns(session, turns)
        future: Future[bool] = Future()
        self._pending.append((session, turns, future))
        self._writer.submit(self._drain)
        return await asyncio.wrap_future(future)

    def forget(self, name: str) -> bool:
        """Delete a session; return False if there is none. Its text leaves the journal soon."""
        with self._lock:
            with self._names:
                session, listed = self._opened.get(name), name in self.sessions
            if session is None:
                return False
            if listed and self._journal is not None:
                self._journal.append(encode(Forgotten(name)))
            with self._names:
                session.gone = True
                self.sessions.pop(name, None)
                self._opened.pop(name, None)
            if listed:
                self._live -= session.size
                self._erased.add(name)
                self._schedule()
        return True

    async def forget_async(self, name: str) -> bool:
        """Delete a session, in the order in which `add_async` was called."""
        if not self._sync and not self._in_writer:
            return self.forget(name)
        return await self._run_in_order(self.forget, name)

    def compact(self) -> None:
        """Rewrite the journal without deleted sessions and unreadable lines.

        A crash at any moment leaves either the old file or the new one, complete.
        """
        if self._journal is None:
            return
        with self._compacting:
            with self._lock:
                erased, unreadable = set(self._erased), list(self._unreadable)
            self._journal.save_aside(unreadable)
            self._unreadable.clear()
            if erased:
                self._journal.erase_unreadable(lambda line: guess_session(line) not in erased)
            self._journal.compact(self._snapshot)
            with self._lock:
                self._erased -= erased

    def close(self) -> None:
        """End the threads, erase deleted sessions, and release the journal."""
        if self._writer is not None:
            self._writer.shutdown()
        self._background.close()
        if self._journal is not None:
            if self._erased:
                with contextlib.suppress(OSError, RollwayError):  # then the next start compacts
                    self.compact()
            self._journal.close()

    async def _run_in_order(self, work: Callable[..., bool], *arguments: object) -> bool:
        """Run `work` in the writer thread, before anything that is recorded later."""
        future = self._writer.submit(work, *arguments)
        self._in_writer.add(future)
        future.add_done_callback(self._in_writer.discard)
        return await asyncio.wrap_future(future)

    def _load(self, journal: Journal) -> None:
        try:
            loaded = load(journal)
        except OSError as error:
            journal.close()
            raise UsageError(
                f"The journal {journal.path} cannot be read: {error.strerror}.",
                "Pass another file with --journal.",
            ) from error
        self.sessions = loaded.sessions
        self._opened.update(loaded.sessions)
        self.lost = loaded.lost
        self._live = sum(session.size for session in self.sessions.values())
        self._unreadable = loaded.places
        self._erased = loaded.forgotten
        if loaded.lost:
            _warn_of_lost_lines(journal.path, loaded)
        if loaded.forgotten or loaded.places or loaded.old:
            self._background.schedule(0)

    def _commit(self, batch: _Batch) -> list[bool]:
        """Write turns to the journal in one write, then to memory: all of them count, or none."""
        with self._lock:
            live = [(session, turns) for session, turns in batch if not session.gone]
            lines = _encode_batch(live)
            if self._journal is not None and live:
                self._journal.append(b"".join(line for part in lines for line in part))
            with self._names:
                for (session, turns), part in zip(live, lines, strict=True):
                    for turn in turns:
                        session.add(turn)
                        self._count(turn)
                    self.sessions[session.name] = session
                    size = sum(map(len, part))
                    session.size += size
                    self._live += size
            return [not session.gone for session, _ in batch]

    def _count(self, turn: Turn) -> None:
        self.turns += 1
        if turn.forked:
            # A reason may quote the request: the number of different ones is bounded.
            is_known = turn.forked in self.forks or len(self.forks) < _MOST_REASONS
            self.forks[turn.forked if is_known else "other"] += 1

    def _drain(self) -> None:
        """Record all waiting turns with one wait for the disk."""
        batch = []
        while self._pending:
            session, turns, future = self._pending.popleft()
            if future.set_running_or_notify_cancel():  # False if its client is gone
                batch.append((session, turns, future))
        try:
            results = self._commit([(session, turns) for session, turns, _ in batch])
        except Exception as error:  # noqa: BLE001 - the requests must not wait for ever
            for _, _, future in batch:
                future.set_exception(error)
            return
        for (_, _, future), is_recorded in zip(batch, results, strict=True):
            future.set_result(is_recorded)

    def _schedule(self) -> None:
        """Schedule a compaction: now if most of the journal is deleted text, otherwise soon."""
        if self._journal is None:
            return
        size = self._journal.size
        deleted = size - self._live
        is_urgent = deleted > size / 2 and deleted >= _URGENT_BYTES
        self._background.schedule(0 if is_urgent else self._erase_within / 2)

    def _snapshot(self) -> tuple[int, Iterator[bytes]]:
        """Return the size and the lines of all sessions as they are now; lines are encoded
        lazily."""
        parts = [(session, session.lost, len(session.turns)) for session in self.sessions.values()]
        return self._live, _encode_all(parts)


class _Background:
    """A thread that runs a function when it is due, and retries it later if it fails."""

    def __init__(self, work: Callable[[], None], retry: float) -> None:
        self._work = work
        self._retry = retry
        self._wake = threading.Condition()
        self._due: float | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def schedule(self, delay: float) -> None:
        """Run the function after `delay` seconds, or earlier if it is already due earlier."""
        with self._wake:
            due = time.monotonic() + delay
            if self._due is None or due < self._due:
                self._due = due
            if self._thread is None and not self._ended:
                thread = threading.Thread(target=self._run, name="journal", daemon=True)
                thread.start()
                self._thread = thread
            self._wake.notify()

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - the thread must survive to retry
                log.warning("The journal was not compacted yet: %s", error)
                self.schedule(self._retry)

    def _wait(self) -> bool:
        """Wait until a run is due; return False when the thread must end."""
        with self._wake:
            while not self._ended:
                seconds = None if self._due is None else self._due - time.monotonic()
                if seconds is not None and seconds <= 0:
                    self._due = None
                    return True
                self._wake.wait(seconds)
        return False


def _encode_all(parts: Iterable[tuple[Session, int, int]]) -> Iterator[bytes]:
    for session, lost, count in parts:
        if lost:
            yield encode(Lost(session.name, lost))
        for position in range(count):
            yield encode(session.turns[position])


def _encode_batch(batch: _Batch) -> list[list[bytes]]:
    """Encode turns, by session. A turn whose parent is not recorded becomes a root."""
    batch_ids: dict[str, set[str]] = {}
    lines = []
    for session, turns in batch:
        ids = batch_ids.setdefault(session.name, set())
        part = []
        for turn in turns:
            if turn.id in session or turn.id in ids:
                raise ValueError(f"The turn {turn.id} is already recorded.")
            if turn.parent is not None and turn.parent not in session and turn.parent not in ids:
                turn.parent, turn.forked = None, PARENT_MISSING
            ids.add(turn.id)
            part.append(encode(turn))
        lines.append(part)
    return lines


def _check_turns(session: Session, turns: Iterable[Turn]) -> None:
    """Raise for turns that could be written to the journal but not read back."""
    for turn in turns:
        turn.check()
        if turn.session != session.name:
            raise ValueError(f"The turn belongs to `{turn.session}`, not to `{session.name}`.")


def _warn_of_lost_lines(path: Path, loaded: Loaded) -> None:
    names = ", ".join(sorted(loaded.damaged)[:20]) or "unknown sessions"
    log.warning(
        "The journal %s has %d unusable lines; they are kept in %s.unreadable. "
        "Turns are missing in %s.",
        path,
        loaded.lost,
        path.name,
        names,
    )
