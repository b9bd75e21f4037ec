"""Record sampled turns by session, in one SQLite file.

    request ─► open(name) ─► … sample … ─► record(session, turns): commit, then memory ─► answer

A turn is committed before the client receives its answer, so a gateway that is killed and restarted
has everything that a client received. If a session is deleted meanwhile, its turns in flight are
answered but not recorded.

A commit is some writes to the kernel, so short turns are committed at once. What takes longer runs
in a thread: long turns, waits for the disk, deletes, reading. Turns that arrive meanwhile share the
thread's next commit. Recent sessions are also in memory; of the others only their names and numbers
of turns are.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
import stat
import struct
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec

from rollway.errors import RollwayError, UsageError
from rollway.gateway.turns import PARENT_MISSING, Session, Turn

log = logging.getLogger(__name__)

T = TypeVar("T")

_APPLICATION = 0x526F6C77  # "Rolw"
VERSION = 1
# SQLite erases pages that it frees, but not the old places of rows that it moves between pages.
# The filler takes all that a row has in such a page, so names and turns are in pages of their own
# (overflow pages), which are freed with them. The other columns are for who lists sessions.
_PAGE = 1024
_TABLES = """\
CREATE TABLE sessions (id INTEGER PRIMARY KEY, filler BLOB NOT NULL, name TEXT NOT NULL);
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, tokens INTEGER NOT NULL,
    forked INTEGER NOT NULL, version INTEGER, crc INTEGER NOT NULL, filler BLOB NOT NULL,
    turn BLOB NOT NULL
);
CREATE INDEX by_session ON turns (session)"""
_NAMES = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {VERSION}"
_INSERT_SESSION = f"INSERT INTO sessions (filler, name) VALUES (zeroblob({_PAGE}), ?)"
_INSERT_TURN = f"""
INSERT INTO turns (session, tokens, forked, version, crc, filler, turn)
VALUES (?, ?, ?, ?, ?, zeroblob({_PAGE}), ?)
"""
_ERASE_SECONDS = 60.0
_LOG_MAGIC, _LOG_HEADER, _LOG_BYTES = 0x377F0683, 32, 2**22
"""The size at which the write-ahead log is emptied. That waits for the disk twice."""
_MANY_IDS, _IDS_PER_ROW = 20_000, 100
"""Turns with more token ids are written in the thread: that takes milliseconds. Each turn costs as
much as some ids do."""
_BUSY_MS, _LAST_BUSY_MS = 100, 5_000
"""How long the thread, and the end of the gateway, wait for programs that use the file. The event
loop waits for nobody."""
_LARGE = 2**28
"""The size from which a start says that it checks the file: a slow disk takes a minute."""
_MOST_STEPS = 10**9
"""Of a query: ten seconds or so. Millions of sessions need less; a crafted file may never end."""
_RECENT = 1024
"""How many sessions stay in memory."""
_MOST_REASONS = 32

DAMAGE = (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError)
"""What reading a damaged file may raise."""
_FIX = "Pass another file to --journal; this one stays as it is."
_HINTS = {
    0: "Put it back, or restart the gateway.",
    sqlite3.SQLITE_BUSY: "Another program writes to it: try again.",
    sqlite3.SQLITE_READONLY: "Restart the gateway when its disk can be written.",
}

_decoder = msgspec.msgpack.Decoder(Turn)

_Row = tuple[int, bool, int | None, int, bytes]
_Batch = list[tuple[Session, Sequence[Turn], list[_Row]]]


class StoreFull(RollwayError):
    """The store could not be written, so nothing was recorded."""

    http_status = 507


class StoreDamaged(RollwayError):
    """The file is not as a gateway wrote it. It stays as it is."""

    def __init__(self, path: Path | None, reason: str) -> None:
        super().__init__(
            f"The store {path} is damaged: {reason}.",
            f"Restore a copy of it and remove its -wal, or {_FIX.lower()}",
        )


class SessionStore:
    """All sessions. Its coroutines may be called from any event loop."""

    def __init__(
        self, path: Path | None, *, sync: bool = False, erase_within: float = _ERASE_SECONDS
    ) -> None:
        """Open the file of an earlier gateway, or create one; without a path, record in memory.

        With `sync`, a turn counts only when it is on the disk, not just in the kernel. The text of
        a deleted session leaves the files within `erase_within` seconds."""
        self._name = None if path is None else Path(path.name)
        """For errors that clients see."""
        self.sessions: dict[str, int] = {}
        """The number of turns of each session."""
        self._ids: dict[str, int] = {}
        """The number of each session in the file."""
        self.turns = 0
        """How many turns this process has recorded."""
        self.forks: Counter[str] = Counter()
        """How many of them do not extend the turn before, by reason."""
        self._opened: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """The sessions in memory, and those that only a request in flight refers to so far."""
        self._recent: OrderedDict[str, Session] = OrderedDict()
        self._names = threading.Lock()  # guards these tables; held only briefly
        self._writing = threading.Lock()  # guards the database
        self._sync = sync
        whole = path and path.absolute()  # the process may go to another directory
        self._paths = [str(whole), f"{whole}-wal"] if whole else []
        self._log_size = 1
        """Of the second, as it was last seen."""
        self._is_emptying = False
        self._has_deleted = False
        """Whether the log still has the text of sessions that this process has deleted."""
        self._pending: list[tuple[Session, Sequence[Turn], Future[bool]]] = []
        """Turns that wait for the thread."""
        self._jobs: set[Future[Any]] = set()
        """What the thread has to do. Turns queue behind it, so that their order stays."""
        self._erase_within = erase_within
        self._eraser: threading.Timer | None = None
        self._file = None if path is None else _claim(path)
        try:
            with explain(path):
                if path is not None and has_content(path):
                    _check_log(path)
                    # Apart, and only to read: closing a connection that may write changes the file.
                    with closing(connect(path, "ro", is_claimed=True)) as db:
                        self._ids, self.sessions = _check(db, path)
                # Only now: a file that is refused keeps its mode.
                for file in [*self._paths, f"{whole}-shm"] if whole else []:
                    with suppress(OSError):  # it is missing, or its disk is read-only
                        Path(file).chmod(0o600)
                self._db = connect(path, "rw", is_claimed=True)
                self._db.set_progress_handler(None, 0)  # SQLite counts all uses of a statement
                self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
                self._db.execute("PRAGMA secure_delete = ON")
                self._db.execute("PRAGMA wal_autocheckpoint = 0")
                _create(self._db)
        except BaseException:
            if self._file is not None:
                os.close(self._file)
            raise
        self._files = [_stat(each)[:2] for each in self._paths]
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        # It may have sessions that a killed gateway had deleted. The thread is started here, too.
        self._submit(self._empty_log).result()

    async def open(self, name: str) -> Session:
        """Return the session to record into. It is listed once it has a turn."""
        with self._names:
            session = self._opened.get(name)
            if session is None and name not in self.sessions:
                session = Session(name)
            if session is not None:
                self._opened[name] = session
                return session
        return await asyncio.wrap_future(self._submit(self._load, name))

    async def find(self, name: str) -> Session | None:
        """Return a session that has turns."""
        session = await self.open(name) if name in self.sessions else None
        return session if session is not None and session.turns else None  # deleted meanwhile

    async def record(self, session: Session, turns: Sequence[Turn]) -> bool:
        """Record turns of one session: all of them, or none. If the session was deleted, record
        nothing and return False."""
        if self._lock_now(turns):
            try:
                if session.gone:
                    return False
                self._commit([(session, turns, [_encode(session, turn) for turn in turns])])
                return True
            except StoreFull:  # the thread tries again, and waits for other programs
                pass
            finally:
                self._writing.release()
        future: Future[bool] = Future()
        with self._names:
            self._pending.append((session, turns, future))
            is_first = len(self._pending) == 1
        if is_first:
            self._submit(self._drain)
        return await asyncio.wrap_future(future)

    async def delete(self, name: str) -> bool:
        """Delete a session; return False if there is none. Its text leaves the files soon."""
        return await asyncio.wrap_future(self._submit(self._delete, name))

    def close(self) -> None:
        """Finish what was requested, erase deleted sessions, and release the file."""
        self._thread.shutdown()
        with suppress(sqlite3.ProgrammingError):  # it is closed
            self._db.execute(f"PRAGMA busy_timeout = {_LAST_BUSY_MS}")
            self._empty_log()
        if self._eraser is not None:
            self._eraser.cancel()
        self._db.close()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _lock_now(self, turns: Sequence[Turn]) -> bool:
        """Lock the database, if it is free and writing these turns takes little time. The first
        commit after the log was emptied waits for the disk."""
        has_experts = any(turn.routed_experts is not None for turn in turns)
        if self._sync or self._jobs or has_experts or not self._log_size:
            return False
        ids = sum(_IDS_PER_ROW + len(turn.new_ids) + len(turn.token_ids) for turn in turns)
        return ids <= _MANY_IDS and self._writing.acquire(blocking=False)

    def _submit(self, work: Callable[..., T], *arguments: str) -> Future[T]:
        """Run `work` in the thread, with the database locked."""

        def run() -> T:
            with self._writing:
                self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
                try:
                    return work(*arguments)
                finally:  # the event loop waits for no other program
                    self._db.execute("PRAGMA busy_timeout = 0")

        job = self._thread.submit(run)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    # --- with the database locked ----------------------------------------------------------------

    def _keep(self, session: Session) -> Session:
        """Keep a session in memory, and let go of the one that was used least recently."""
        self._opened[session.name] = self._recent[session.name] = session
        self._recent.move_to_end(session.name)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return session

    def _load(self, name: str) -> Session:
        session = self._opened.get(name)  # another request may have loaded it
        if session is not None:
            return session
        session = Session(name)
        query = "SELECT turn, crc FROM turns WHERE session = ? ORDER BY number"
        with explain(self._name):
            for raw, crc in self._db.execute(query, (self._ids.get(name),)):
                turn = decode(raw, crc, self._name)
                if turn.session != name:
                    raise ValueError("a turn is in another session")
                session.add(turn)
        with self._names:
            # If it was deleted meanwhile, a new session may have its name.
            session = self._opened.setdefault(name, session)
            return self._keep(session) if session.turns else session

    def _drain(self) -> None:
        """Record all waiting turns in one transaction. A turn that is refused fails alone."""
        batch: _Batch = []
        futures: list[tuple[Session, Future[bool]]] = []
        with self._names:
            waiting, self._pending = self._pending, []
        for session, turns, future in waiting:
            if not future.set_running_or_notify_cancel():  # its client is gone
                continue
            try:
                rows = [_encode(session, turn) for turn in turns]
            except Exception as error:  # noqa: BLE001 - the requests must not wait for ever
                future.set_exception(error)
                continue
            futures.append((session, future))
            if not session.gone:
                batch.append((session, turns, rows))
        try:
            self._commit(batch)
        except Exception as error:  # noqa: BLE001 - as above
            for _, future in futures:
                future.set_exception(error)
            return
        for session, future in futures:
            future.set_result(not session.gone)

    def _commit(self, batch: _Batch) -> None:
        """Write turns to the file, then to memory: all of them count, or none."""
        if not batch:
            return
        ids: dict[str, int] = {}
        with self._transaction():
            for session, _, rows in batch:
                number = self._ids.get(session.name) or ids.get(session.name)
                if number is None:
                    number = self._db.execute(_INSERT_SESSION, (session.name,)).lastrowid
                    assert number is not None
                    ids[session.name] = number
                for row in rows:
                    self._db.execute(_INSERT_TURN, (number, *row))
        self._ids |= ids
        with self._names:
            for session, turns, _ in batch:
                for turn in turns:
                    session.add(turn)
                    self._count(turn)
                self.sessions[session.name] = len(session.turns)
                self._keep(session)

    def _count(self, turn: Turn) -> None:
        self.turns += 1
        if turn.forked:
            # A reason may quote the request: the number of different ones is bounded.
            is_known = turn.forked in self.forks or len(self.forks) < _MOST_REASONS
            self.forks[turn.forked if is_known else "other"] += 1

    def _delete(self, name: str) -> bool:
        is_recorded = name in self.sessions
        if is_recorded:
            with self._transaction():
                for query in (
                    "DELETE FROM turns WHERE session = ?",
                    "DELETE FROM sessions WHERE id = ?",
                ):
                    self._db.execute(query, (self._ids[name],))
            del self._ids[name]
        with self._names:
            session = self._opened.pop(name, None)
            if session is not None:
                session.gone = True
            self._recent.pop(name, None)
            self.sessions.pop(name, None)
        if is_recorded:
            self._has_deleted = True
            self._schedule_erasure()
        return is_recorded or session is not None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._check_files()
            if not self._is_emptying and self._log_size > _LOG_BYTES:
                self._is_emptying = True
                self._submit_erasure()
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
            self._log_size = self._log_size or 1
        except BaseException as error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_CORRUPT:
                raise StoreDamaged(self._name, str(error)) from error
            raise StoreFull(
                f"Nothing was recorded: the store {self._name} cannot be written ({error}).",
                _HINTS.get(code, "Free space on its disk."),
            ) from error

    def _check_files(self) -> None:
        """Raise if SQLite would write to files that are no longer at their paths: a restart would
        not find the turns, or another gateway has the log, too."""
        if not self._paths:
            return
        files = [_stat(path) for path in self._paths]
        if [file[:2] for file in files] != self._files:
            raise sqlite3.OperationalError("another program moved or removed it, or its -wal")
        self._log_size = files[-1][-1]

    def _schedule_erasure(self) -> None:
        if self._eraser is None:
            eraser = threading.Timer(self._erase_within / 2, self._submit_erasure)
            eraser.daemon = True
            with suppress(RuntimeError):  # no thread can be started: the next delete tries again
                eraser.start()
                self._eraser = eraser

    def _submit_erasure(self) -> None:
        self._eraser = None
        with suppress(RuntimeError):  # the gateway ends, and erases itself
            self._submit(self._empty_log)

    def _empty_log(self) -> None:
        """Move the write-ahead log into the file. It still has the text of deleted sessions, which
        `secure_delete` overwrites in the file."""
        try:
            self._check_files()
            is_busy = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error as error:
            if self._has_deleted:
                log.warning("The text of deleted sessions is not erased yet: %s", error)
            is_busy = True
        if self._paths and not is_busy:
            self._log_size = 0
        self._is_emptying = bool(is_busy)
        self._has_deleted &= self._is_emptying
        if is_busy:  # a reader is at work, or the disk is full
            self._schedule_erasure()


def decode(raw: bytes, crc: int, path: Path | None) -> Turn:
    """Return the turn of a row; raise if it is not what was recorded."""
    if zlib.crc32(raw) != crc:
        raise StoreDamaged(path, "a checksum is wrong")
    return _decoder.decode(raw)


def _encode(session: Session, turn: Turn) -> _Row:
    """Return a turn as a row; raise if it could be written but not served."""
    turn.check()
    if turn.session != session.name or turn.id in session:
        raise ValueError(f"The turn {turn.id} does not belong to `{session.name}`.")
    if turn.parent is not None and turn.parent not in session:
        turn.parent, turn.forked = None, PARENT_MISSING
    raw = msgspec.msgpack.encode(turn)
    is_forked = bool(turn.forked)
    return len(turn.token_ids), is_forked, turn.version, zlib.crc32(raw), raw


# --- opening -------------------------------------------------------------------------------------


def _claim(path: Path) -> int:
    """Create the file if it is missing, and lock it; return its descriptor. Nobody else may read
    the files, nor put others in their place, unless the directory is theirs, or is their group's
    and lets it write."""
    with explain(path):
        for directory in [each for each in reversed(path.parents) if not each.exists()]:
            directory.mkdir(mode=0o700)
        if path.parent.stat().st_mode & stat.S_IWOTH:
            raise OSError(errno.EPERM, "All users can write to its directory")
        for suffix in ("", "-wal", "-shm", "-journal"):
            check_owner(Path(f"{path}{suffix}"))
        is_read_only = path.exists() and not os.access(path, os.W_OK)
        access = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
        file = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # SQLite's own locks are of another kind
    except OSError as error:
        os.close(file)
        raise UsageError(f"Another gateway uses the store {path}.", _FIX) from error
    return file


def check_owner(path: Path) -> None:
    """Raise OSError unless a file is missing, or is one of this user."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file")
        if status.st_uid != os.getuid():
            raise OSError(errno.EPERM, "It belongs to another user")


def has_content(path: Path) -> bool:
    """Return whether the file is not new. SQLite takes a file of one byte for a new one, too, and
    removes the log of an empty file with all turns in it: refuse both."""
    size, log = path.stat().st_size, Path(f"{path}-wal")
    if size == 1 or (not size and log.exists() and log.stat().st_size):
        raise StoreDamaged(path, f"it is cut off, or was removed without {log.name}")
    return size > 0


def _check_log(path: Path) -> None:
    """Raise if the log is damaged before its last turns. SQLite ends at the first wrong checksum,
    and would drop the turns after damage without a word. Every checksum continues the one before
    it, from the header's on (SQLite's file format, 4.1).

    A commit that failed or was cut off leaves wrong checksums, too, and ends with its own last
    frame. Two commits in a row were both acknowledged."""
    log_file = Path(f"{path}-wal")
    if not log_file.exists() or log_file.stat().st_size <= _LOG_HEADER:
        return
    with log_file.open("rb") as file:
        header = file.read(_LOG_HEADER)
        magic, _, page = struct.unpack_from(">3I", header)
        order, seed = ">" if magic & 1 else "<", struct.unpack_from(">2I", header, 24)
        is_ours = magic | 1 == _LOG_MAGIC and page == _PAGE
        if not is_ours or _sum(header[:24], (0, 0), order) != seed:
            raise StoreDamaged(path, f"the beginning of {log_file.name} is not what was written")
        is_cut, commits = False, 0
        while len(frame := file.read(24 + _PAGE)) == 24 + _PAGE:
            checksum = _sum(frame[:8] + frame[24:], seed, order)
            seed = struct.unpack_from(">2I", frame, 16)
            if checksum != seed or frame[8:16] != header[16:24]:
                is_cut, commits = True, 0
            elif is_cut and any(frame[4:8]):
                commits += 1
                if commits == 2:
                    raise StoreDamaged(path, f"turns in {log_file.name} follow a wrong checksum")


def _sum(data: bytes, seed: tuple[int, ...], order: str) -> tuple[int, int]:
    """Return SQLite's checksum of a part of the log, whose words have this byte order."""
    first, second = seed
    for word, next_word in struct.iter_unpack(f"{order}2I", data):
        first = first + word + second & 0xFFFFFFFF
        second = second + next_word + first & 0xFFFFFFFF
    return first, second


def connect(path: Path | None, access: str, *, is_claimed: bool = False) -> sqlite3.Connection:
    """Open the database, on a full or read-only disk for those who fetch what is recorded."""
    file = "file:" if path is None else f"file:{quote(os.fsencode(path.absolute()))}"
    attempts = [(f"mode={access if path else 'memory'}", "NORMAL")]
    if is_claimed:
        # Without room for the index that readers share (`-shm`), do without readers. Who only reads
        # cannot lock the file so, and need not.
        attempts.append(("mode=rw" if access == "rw" else "mode=ro&vfs=unix-none", "EXCLUSIVE"))
    if path is not None and not Path(f"{path}-wal").exists():
        # There is nothing but this file. Who only reads it should not put others beside it.
        attempts.insert(0 if access == "ro" else 2, ("immutable=1", "NORMAL"))
    for options, mode in attempts:
        uri = f"{file}?{options}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        db.set_progress_handler(lambda: 1, _MOST_STEPS)  # which ends the query
        try:
            db.execute(f"PRAGMA locking_mode = {mode}")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except sqlite3.Error as error:
            db.close()
            is_last = (options, mode) == attempts[-1]
            is_locked = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            if is_last or is_locked or not isinstance(error, sqlite3.OperationalError):
                raise
    raise AssertionError


@contextmanager
def explain(path: Path | None) -> Iterator[None]:
    """Raise errors of the system and of SQLite with their cause and a fix."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"The store {path} cannot be used: {error.strerror}.", _FIX) from error
    except sqlite3.OperationalError as error:
        raise RollwayError(f"The store {path} cannot be read: {error}.", _FIX) from error
    except DAMAGE as error:
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_NOTADB:
            raise StoreDamaged(path, str(error)) from error
        raise UsageError(f"{path} is not the store of a gateway: {error}.", _FIX) from error


def _create(db: sqlite3.Connection) -> None:
    """Create the tables if there are none, and see to the log."""
    db.execute(f"PRAGMA page_size = {_PAGE}")  # of a new file
    with suppress(sqlite3.OperationalError):  # a copy without a log, on a read-only disk
        db.execute("PRAGMA journal_mode = WAL")
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        db.executescript(f"BEGIN; {_TABLES}; {_NAMES}; COMMIT;")


def has_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether there are tables yet. Raise unless they are those of this version and nothing
    else: a view may never end, and a trigger may delete turns. Ask before any other query."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")]
    if not application and not tables:  # a gateway was killed while it created the tables
        return False
    if application != _APPLICATION:
        raise UsageError(f"{path} is another database.", _FIX)
    if version != VERSION:
        raise UsageError(f"{path} is the store of a gateway of another version.", _FIX)
    if tables != _TABLES.split(";\n"):
        raise StoreDamaged(path, "its tables are not those of a gateway")
    return True


def _stat(path: str) -> tuple[int, int, int]:
    """Return which file is at a path, and its size; zeros if there is none."""
    with suppress(OSError):
        status = os.stat(path)  # noqa: PTH116 - at every turn
        return status.st_dev, status.st_ino, status.st_size
    return 0, 0, 0


def _check(db: sqlite3.Connection, path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Check every row. Return the id of each session, and its number of turns."""
    if not has_tables(db, path):
        return {}, {}
    if (size := path.stat().st_size) > _LARGE:
        log.warning("Checking the store before the gateway listens: %d MiB.", size // 2**20)
    (result,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if result != "ok":
        raise StoreDamaged(path, result.splitlines()[-1])
    names = dict(db.execute("SELECT id, name FROM sessions"))
    counts = dict.fromkeys(names.values(), 0)
    # After one byte, a turn begins with the name of its session. Names alone have no checksum.
    starts = {key: msgspec.msgpack.encode({"session": name})[1:] for key, name in names.items()}
    for key, raw, crc in db.execute("SELECT session, turn, crc FROM turns"):
        if zlib.crc32(raw) != crc or not raw.startswith(starts.get(key, b"?"), 1):
            raise StoreDamaged(path, f"a turn of `{names.get(key)}` has the wrong checksum or name")
        counts[names[key]] += 1
    return {name: number for number, name in names.items()}, counts
