"""What full disks, damaged files, deleted sessions and killed gateways can lose."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollway.errors import RolloutError, RollwayError, UsageError
from rollway.gateway import store as store_module
from rollway.gateway.replies import explain
from rollway.gateway.store import SessionStore, StoreDamaged, StoreFull
from rollway.gateway.turns import Turn
from rollway.observe.dash.conversations import Conversations
from tests.security.small_disk import fill, remount
from tests.security.stores import copy_as_killed, list_ids, make_turn, read_files, record
from tests.waiting import wait_until_async

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "gateway.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SessionStore]:
    store = SessionStore(path)
    yield store
    store.close()


# --- deleted sessions ----------------------------------------------------------------------------


async def test_deleting_a_session_with_a_turn_in_flight_records_nothing(path: Path) -> None:
    store = SessionStore(path)
    session = await store.open("s")
    first = make_turn("s")
    assert await store.record(session, [first])
    assert await store.delete("s") and session.gone
    assert not await store.record(session, [make_turn("s", first.id)])
    assert store.sessions == {}
    assert await store.open("s") is not session
    # A parent in the deleted session is no parent in the new one.
    assert await record(store, make_turn("s", first.id))
    new = await store.open("s")
    assert new.turns[0].parent is None and "not recorded" in new.turns[0].forked
    store.close()
    again = SessionStore(path)
    assert (await again.open("s")).count_trajectories() == 1
    again.close()


async def test_deleting_a_session_before_its_first_turn_ends_it(store: SessionStore) -> None:
    session = await store.open("s")
    assert await store.open("s") is session and store.sessions == {}
    assert await store.delete("s") and session.gone
    assert not await store.record(session, [make_turn("s")]) and store.sessions == {}
    assert not await store.delete("s")


async def test_a_session_that_is_deleted_before_it_is_read_is_gone(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    again = SessionStore(path)
    is_deleted, session = await asyncio.gather(again.delete("s"), again.find("s"))
    assert is_deleted and session is None
    again.close()


async def test_failed_requests_leave_no_session(store: SessionStore) -> None:
    for number in range(100):
        await store.open(f"failed {number}")
    assert store.sessions == {} and not await store.delete("failed 7")


async def test_deleted_sessions_are_in_no_file_soon(path: Path) -> None:
    """Rows of all sizes, so that SQLite moves them between pages."""
    store = SessionStore(path, erase_within=0.2)
    names = [f"secret-{number}-" for number in range(40)]
    for size in (1, 3, 30, 400, 1, 2):
        for name in names:
            await record(store, make_turn(name, model=f"<{name}>" * size))
    deleted, kept = names[::2] + names[1::4], names[3::4]
    for name in deleted:
        assert await store.delete(name)
    await wait_until_async(lambda: not any(n.encode() in read_files(path) for n in deleted))
    assert all(name.encode() in read_files(path) for name in kept)
    assert store.sessions == dict.fromkeys(kept, 6)
    store.close()


async def test_deleted_sessions_are_in_no_file_after_an_end_or_a_kill(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("secret"))
    await store.delete("secret")
    killed = copy_as_killed(path)
    store.close()
    assert b"secret" not in read_files(path)
    assert b"secret" in read_files(killed)
    again = SessionStore(killed)
    assert again.sessions == {} and b"secret" not in read_files(killed)
    again.close()


async def test_a_reader_only_delays_the_erasure(path: Path) -> None:
    store = SessionStore(path, erase_within=0.1)
    await record(store, make_turn("secret"))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    await store.delete("secret")
    await asyncio.sleep(0.3)  # the time in which an erasure would have come without the reader
    assert await record(store, make_turn("kept")) and b"secret" in read_files(path)
    reader.close()
    await wait_until_async(lambda: b"secret" not in read_files(path))
    store.close()


async def test_a_closing_store_waits_for_a_reader_and_leaves_no_timer(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("secret"))
    reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    await store.delete("secret")
    threading.Timer(0.3, reader.close).start()
    store.close()
    assert b"secret" not in read_files(path)
    assert store._eraser is None or store._eraser.finished.is_set()


async def test_a_second_close_closes_nothing_else(path: Path) -> None:
    store = SessionStore(path)
    store.close()
    other = os.open(path, os.O_RDONLY)  # it has the number that the store's file had
    store.close()
    os.fstat(other)
    os.close(other)


async def test_the_log_of_a_busy_gateway_stays_small(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOG_BYTES", 50_000)
    store, wal = SessionStore(path), path.with_name(f"{path.name}-wal")
    for _ in range(200):
        await record(store, make_turn("s"))
    await wait_until_async(lambda: wal.stat().st_size < 100_000)
    assert path.stat().st_size > 50_000 and len(await list_ids(store, "s")) == 200
    store.close()


# --- full disks ----------------------------------------------------------------------------------


async def test_a_full_disk_loses_no_turn(small_disk: Path) -> None:
    path = small_disk / "gateway.sqlite"
    store = SessionStore(path)
    session, refused, known = await store.open("s"), 0, list[str]()
    while refused < 3:
        turns = [make_turn("s", known[-1] if known else None, model="x" * 1000) for _ in range(2)]
        try:
            assert await store.record(session, turns)
            known += [turn.id for turn in turns]
        except StoreFull as error:
            assert error.http_status == 507 and "disk is full" in error.message
            refused += 1
    assert known and store.sessions == {"s": len(known)}
    with pytest.raises(StoreFull):
        await store.delete("s")
    assert not session.gone
    killed = copy_as_killed(path)
    store.close()

    for file in (killed, path):
        again = SessionStore(file)
        assert await list_ids(again, "s") == known
        again.close()

    remount(small_disk, "size=1m")
    roomy = SessionStore(path)
    assert await record(roomy, make_turn("s", known[-1])) and await roomy.delete("s")
    roomy.close()
    assert SessionStore(path).sessions == {}


async def test_a_gateway_starts_on_a_full_disk_and_records_when_there_is_room(
    small_disk: Path,
) -> None:
    path = small_disk / "gateway.sqlite"
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()  # a gateway that ends leaves nothing but the file itself
    filler = fill(small_disk)
    store = SessionStore(path)
    assert len(await list_ids(store, "s")) == 1
    with pytest.raises(StoreFull):
        for _ in range(100):
            await record(store, make_turn("s"))
    count = store.sessions["s"]
    filler.unlink()
    assert await record(store, make_turn("s"))
    known = await list_ids(store, "s")
    assert len(known) == count + 1
    store.close()
    again = SessionStore(path)
    assert await list_ids(again, "s") == known
    again.close()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_read_only_disk_serves_recorded_turns(small_disk: Path, ended: bool) -> None:
    path = small_disk / "store" / "gateway.sqlite"
    store = SessionStore(path)
    await record(store, make_turn("s"))
    known = await list_ids(store, "s")
    killed = copy_as_killed(path)
    store.close()
    path = path if ended else killed
    remount(small_disk, "ro")
    try:
        reader = SessionStore(path)
        assert await list_ids(reader, "s") == known
        for write in (record(reader, make_turn("s")), reader.delete("s")):
            with pytest.raises(StoreFull, match="readonly"):
                await write
        with pytest.raises(UsageError, match="Another gateway"):
            SessionStore(path)
        with pytest.raises(UsageError, match="Read-only"):
            SessionStore(path.with_name("other.sqlite"))
        reader.close()
    finally:
        remount(small_disk, "rw")
    again = SessionStore(path)
    assert await record(again, make_turn("s")) and again.sessions == {"s": 2}
    again.close()


async def test_a_gateway_that_started_on_a_full_disk_restarts_on_one_after_a_kill(
    small_disk: Path,
) -> None:
    path = small_disk / "gateway.sqlite"
    store = SessionStore(path)
    await record(store, make_turn("s", model="a first turn"))
    store.close()
    filler = fill(small_disk)
    store = SessionStore(path)
    filler.unlink()
    assert await record(store, make_turn("s"))
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # and it disturbs nothing
        reader.execute("SELECT * FROM turns")
    reader.close()
    assert await record(store, make_turn("s"))
    known, killed = await list_ids(store, "s"), copy_as_killed(path)
    store.close()
    for file in killed.parent.iterdir():
        shutil.copy(file, small_disk)
    filler = fill(small_disk)
    # One that is refused stays as it is there, too.
    whole = path.read_bytes()
    with path.open("r+b") as opened:
        opened.write(whole.replace(b"a first turn", b"another turn"))
    log = path.with_name(f"{path.name}-wal")
    before = path.read_bytes(), log.read_bytes()
    with pytest.raises(StoreDamaged):
        SessionStore(path)
    assert (path.read_bytes(), log.read_bytes()) == before
    with path.open("r+b") as opened:
        opened.write(whole)
    store = SessionStore(path)
    assert await list_ids(store, "s") == known and len(known) == 3
    with pytest.raises(StoreFull, match="disk is full"):
        for _ in range(100):
            await record(store, make_turn("s"))
    filler.unlink()
    assert await record(store, make_turn("s"))
    store.close()


async def test_a_log_that_cannot_be_emptied_is_reported_only_after_a_delete(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "gateway.sqlite"
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    remount(small_disk, "ro")
    try:
        store = SessionStore(path)
        store._empty_log()
        store.close()
        assert not caplog.records
    finally:
        remount(small_disk, "rw")
    store = SessionStore(path, erase_within=0.02)
    await store.delete("s")
    path.rename(path.with_name("moved"))
    await wait_until_async(lambda: "is not erased yet" in caplog.text)
    store.close()


async def test_a_full_disk_keeps_only_acknowledged_turns_of_those_waiting(small_disk: Path) -> None:
    """Turns that wait for the disk share a commit: all of them count, or none."""
    path = small_disk / "gateway.sqlite"
    store, acknowledged, refused = SessionStore(path, sync=True), list[str](), 0
    while not refused:
        turns = [make_turn(f"s{number}", model="x" * 500) for number in range(20)]
        writes = [record(store, turn) for turn in turns]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        acknowledged += [t.id for t, answer in zip(turns, answers, strict=True) if answer is True]
        refused = sum(isinstance(answer, StoreFull) for answer in answers)
        assert answers.count(True) + refused == len(turns)
    again = SessionStore(copy_as_killed(path))
    assert acknowledged and again.sessions == store.sessions
    known = [turn for name in again.sessions for turn in await list_ids(again, name)]
    assert sorted(known) == sorted(acknowledged)
    again.close()
    store.close()


async def test_removing_the_file_is_detected_before_a_turn_is_acknowledged(
    store: SessionStore, path: Path
) -> None:
    await record(store, make_turn("s"))
    path.unlink()
    with pytest.raises(StoreFull, match="removed it"):
        await record(store, make_turn("s"))


@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_moving_a_file_is_detected_before_a_turn_is_acknowledged(
    store: SessionStore, path: Path, suffix: str
) -> None:
    await record(store, make_turn("s"))
    file, elsewhere = path.with_name(path.name + suffix), path.with_name("elsewhere")
    file.rename(elsewhere)
    for write in (record(store, make_turn("s")), store.delete("s")):
        with pytest.raises(StoreFull, match="moved or removed it"):
            await write
    elsewhere.rename(file)
    assert await record(store, make_turn("s")) and store.sessions == {"s": 2}


async def test_a_removed_log_costs_no_turn_when_the_gateway_ends(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    path.with_name(f"{path.name}-wal").unlink()
    with pytest.raises(StoreFull, match="moved or removed it"):
        await record(store, make_turn("s"))
    store.close()
    store = SessionStore(path)
    assert store.sessions == {"s": 1}
    store.close()


async def test_a_gateway_whose_file_was_moved_takes_nothing_from_the_next_one(path: Path) -> None:
    """SQLite finds the log by its path: both would write to one."""
    first = SessionStore(path, erase_within=0.02)
    await record(first, make_turn("a"))
    await first.delete("a")
    await record(first, make_turn("b"))
    first._submit(first._empty_log).result()
    path.rename(path.with_name("moved"))
    second = SessionStore(path)
    await record(second, make_turn("c"))
    first._submit(first._empty_log).result()
    with pytest.raises(StoreFull, match="moved or removed it"):
        await record(first, make_turn("b"))
    await record(second, make_turn("c"))
    first.close()
    await record(second, make_turn("c"))
    killed = copy_as_killed(path)
    second.close()
    for file, sessions in (path, {"c": 3}), (killed, {"c": 3}), (path.with_name("moved"), {"b": 1}):
        store = SessionStore(file)
        assert store.sessions == sessions
        store.close()


class FailingDatabase:
    """A database whose disk fails at a commit."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self.database.execute(statement, *values)


@pytest.mark.parametrize("sync", [True, False])
async def test_a_turn_that_cannot_be_synced_is_refused(
    path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(path, sync=sync)
    await record(store, make_turn("known"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "_db", FailingDatabase(store._db))
        for write in (record(store, make_turn("s")), store.delete("known")):
            with pytest.raises(StoreFull, match="disk I/O error"):
                await write
    assert store.sessions == {"known": 1} and not (await store.open("s")).turns
    assert await record(store, make_turn("s"))
    again = SessionStore(copy_as_killed(path))
    assert again.sessions == store.sessions == {"known": 1, "s": 1}
    again.close()
    store.close()


# --- damaged and foreign files -------------------------------------------------------------------


async def test_a_changed_turn_is_refused_and_stays_as_it_is(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s", model="a model of many letters"))
    store.close()
    changed = path.read_bytes().replace(b"many letters", b"many lettuce")
    path.write_bytes(changed)
    with pytest.raises(StoreDamaged, match="a turn of `s` has the wrong checksum") as error:
        SessionStore(path)
    assert "--journal" in error.value.hint and path.read_bytes() == changed


def encode(session: str = "s", **fields: object) -> bytes:
    return msgspec.msgpack.encode(make_turn(session, **fields))  # type: ignore[arg-type]


def insert(path: Path, *turns: bytes) -> None:
    """Add turns to the only session of a store, with the right checksums."""
    with sqlite3.connect(path) as db:
        for turn in turns:
            fields = "(session, tokens, forked, version, crc, filler, turn)"
            values = (zlib.crc32(turn), turn)
            db.execute(f"INSERT INTO turns {fields} VALUES (1, 1, 0, 0, ?, zeroblob(9), ?)", values)
    db.close()


@pytest.mark.parametrize(
    "turn",
    [b"\xff\xfe", b"\x91" * 100_000, b"\x81\xa1a\x01", encode("other")],
    ids=["no data", "deep lists", "other fields", "another session"],
)
async def test_a_turn_that_no_gateway_wrote_is_refused_at_the_start(
    path: Path, turn: bytes
) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    insert(path, turn)
    with pytest.raises(StoreDamaged) as error:
        SessionStore(path)
    assert "--journal" in error.value.hint


@pytest.mark.parametrize(
    "turns",
    [[encode(token_ids=["x"])], [encode(id="a"), encode(id="a")]],
    ids=["other types", "an id twice"],
)
async def test_a_session_that_no_gateway_wrote_is_refused_and_hides_no_other(
    path: Path, turns: list[bytes]
) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    await record(store, make_turn("whole"))
    store.close()
    insert(path, *turns)
    store = SessionStore(path)
    for _ in range(2):
        with pytest.raises(StoreDamaged) as error:
            await store.find("s")
        assert "--journal" in error.value.hint
        assert len(await list_ids(store, "whole")) == 1
    store.close()


@pytest.mark.parametrize(
    "turns",
    [
        [("a", "a")], [("a", "b"), ("b", "a")], [("a", "c"), ("b", "a"), ("c", None)],
    ],
    ids=["its own parent", "a ring", "a parent that comes later"],
)  # fmt: skip
async def test_a_cycle_in_the_file_does_not_hang_the_reader(
    path: Path, turns: list[tuple[str, str | None]]
) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    insert(path, *(encode(id=turn, parent=parent) for turn, parent in turns))
    store = SessionStore(path)
    session = await store.open("s")
    assert len(session.turns) == 1 + len(turns)
    for turn in session.turns:
        assert session.ids(turn.id)
    assert session.count_trajectories() == len(list(session.trajectories()))
    store.close()


@pytest.mark.parametrize("name", [b"session 2", b"session 9"])
async def test_a_changed_name_of_a_session_is_refused(path: Path, name: bytes) -> None:
    """The name of another session would hide one, and a new name would show turns of none."""
    store = SessionStore(path)
    for number in range(4):
        await record(store, make_turn(f"session {number}"))
    store.close()
    # In a turn, a byte with its length is before the name.
    changed = re.sub(rb"(?<!\xa9)session 1", name, path.read_bytes())
    path.write_bytes(changed)
    with pytest.raises(StoreDamaged, match=f"a turn of `{name.decode()}` has the wrong"):
        SessionStore(path)
    assert path.read_bytes() == changed


async def test_turns_that_wait_while_the_store_closes_are_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the log is so long that it must be emptied meanwhile."""
    monkeypatch.setattr(store_module, "_LOG_BYTES", 0)
    store, may_begin = SessionStore(path), threading.Event()
    await record(store, make_turn("s"))
    store._thread.submit(may_begin.wait)
    turns = [make_turn("s", token_ids=[1] * 30_000, logprobs=[-0.5] * 30_000) for _ in range(3)]
    waiting = asyncio.gather(*(record(store, turn) for turn in turns))

    async def do_all_wait() -> bool:
        return len(store._pending) == 3

    await wait_until_async(do_all_wait)
    threading.Timer(0.2, may_begin.set).start()
    store.close()
    assert await waiting == [True] * 3
    store = SessionStore(path)
    assert len(await list_ids(store, "s")) == 4
    store.close()


@pytest.mark.parametrize("size", [1, 99, 1024, 7000])
async def test_a_cut_file_is_refused_and_nothing_is_put_beside_it(path: Path, size: int) -> None:
    store = SessionStore(path)
    for _ in range(20):
        await record(store, make_turn("s"))
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    path.chmod(0o640)
    with pytest.raises(StoreDamaged):
        SessionStore(path)
    assert path.read_bytes() == whole[:size] and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", [b"", None])
async def test_a_log_without_its_file_is_refused_and_stays(
    store: SessionStore, path: Path, content: bytes | None
) -> None:
    """SQLite removes the log of an empty file, and with it turns that were acknowledged."""
    await record(store, make_turn("s"))
    killed = copy_as_killed(path)
    killed.unlink()
    if content is not None:
        killed.write_bytes(content)
    log = killed.with_name(f"{path.name}-wal")
    before = log.read_bytes()
    with pytest.raises(StoreDamaged, match="removed without gateway"):
        SessionStore(killed)
    assert log.read_bytes() == before
    log.unlink()
    SessionStore(killed).close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [("PRAGMA user_version = 2", "another version"), ("PRAGMA application_id = 7", "another data")],
)
def test_a_store_of_another_version_or_program_is_refused(
    path: Path, statement: str, reason: str
) -> None:
    SessionStore(path).close()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (a)")
        other.execute(statement)
    other.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match=reason) as error:
        SessionStore(path)
    assert "--journal" in error.value.hint and path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


_ENDLESS = """
DROP TABLE turns;
CREATE VIEW turns AS WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c)
SELECT n AS number, 1 AS session, 1 AS tokens, 0 AS forked, 0 AS version, 0 AS crc, x'' AS turn
FROM c
"""


@pytest.mark.parametrize(
    "statements",
    [
        _ENDLESS,
        "CREATE TRIGGER t AFTER INSERT ON turns BEGIN DELETE FROM turns; END",
        "CREATE TABLE more (a)",
        "DROP INDEX by_session",
        "ALTER TABLE sessions ADD COLUMN a",
    ],
)
async def test_tables_of_another_program_are_refused(path: Path, statements: str) -> None:
    """A view may never end, and a trigger may delete what was acknowledged."""
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    other = sqlite3.connect(path)
    other.executescript(statements)
    other.close()
    before = path.read_bytes()
    for read in (SessionStore, lambda path: Conversations(path).list_sessions()):
        with pytest.raises(StoreDamaged, match="tables are not those of a gateway"):
            read(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


async def test_a_file_that_is_damaged_meanwhile_is_not_called_a_full_disk(path: Path) -> None:
    store = SessionStore(path)
    for _ in range(50):
        await record(store, make_turn("s", model="x" * 3000))
    store.close()
    store = SessionStore(path)
    os.truncate(path, 20_000)
    for work in (store.find("s"), record(store, make_turn("new"))):
        with pytest.raises(StoreDamaged, match="malformed") as error:
            await work
    assert "remove its -wal" in error.value.hint
    store.close()


async def test_a_store_that_cannot_be_read_is_no_fault_of_the_request(path: Path) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    store.close()
    store = SessionStore(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("ALTER TABLE turns RENAME TO others")
    with pytest.raises(RollwayError, match=r"cannot be read: no such table") as error:
        await store.find("s")
    assert explain(error.value)[0] == 502
    store.close()


async def test_a_copy_in_another_mode_is_written_ahead_again(path: Path) -> None:
    """Without the log, a reader would refuse the turns that arrive while it reads."""
    store, copy = SessionStore(path), path.with_name("copy.sqlite")
    await record(store, make_turn("s"))
    store._db.execute("VACUUM INTO ?", (str(copy),))
    store.close()
    store = SessionStore(copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM turns").fetchall()
        assert await record(store, make_turn("s"))
    assert copy.with_name("copy.sqlite-wal").stat().st_size
    store.close()


def test_an_old_journal_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "stack.jsonl"
    entry = b'{"sum":"5f1c9a0e","entry":{"type":"turn"}}\n'
    old.write_bytes(entry)
    with pytest.raises(UsageError, match="not the store of a gateway"):
        SessionStore(old)
    assert [each.name for each in tmp_path.iterdir()] == ["stack.jsonl"]
    assert old.read_bytes() == entry


# --- permissions ---------------------------------------------------------------------------------


async def test_other_users_cannot_read_the_store(tmp_path: Path) -> None:
    path = tmp_path / "new" / "newer" / "gateway.sqlite"
    mask = os.umask(0)
    try:
        store = SessionStore(path)
        await record(store, make_turn("s"))
        names = {each.name for each in path.parent.iterdir()}
        assert names == {path.name, f"{path.name}-wal", f"{path.name}-shm"}
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o777 == 0o600
        store.close()
    finally:
        os.umask(mask)
    for directory in (path.parent, path.parent.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    SessionStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    # One that a user has copied after a kill has a log, too.
    store = SessionStore(path)
    await record(store, make_turn("s"))
    killed = copy_as_killed(path)
    store.close()
    for file in killed.parent.iterdir():
        file.chmod(0o644)
    store = SessionStore(killed)
    assert {file.stat().st_mode & 0o777 for file in killed.parent.iterdir()} == {0o600}
    store.close()


def test_pipes_links_files_of_others_and_shared_directories_are_refused(tmp_path: Path) -> None:
    names = ("pipe", "link", "planted", "rolled")
    pipe, link, planted, rolled = (tmp_path / f"{name}.sqlite" for name in names)
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    planted.with_name("planted.sqlite-wal").touch()
    os.chown(planted.with_name("planted.sqlite-wal"), 4321, 4321)
    # SQLite would write the content of a rollback journal into the file.
    rolled.with_name("rolled.sqlite-journal").symlink_to(tmp_path / "elsewhere")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for path, reason in (
        (pipe, "not a regular file"), (link, "not a regular file"),
        (planted, "another user"), (shared / "a.sqlite", "All users"),
        (rolled, "not a regular file"), (Path("/"), "not a regular file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            SessionStore(path)
    assert not (tmp_path / "elsewhere").exists()


# --- threads, memory and kills -------------------------------------------------------------------


async def test_turns_at_the_same_time_share_a_commit_and_keep_their_order(path: Path) -> None:
    store = SessionStore(path, sync=True)

    async def talk(name: str) -> list[str]:
        session, known = await store.open(name), list[str]()
        for _ in range(20):
            new = make_turn(name, known[-1] if known else None)
            assert await store.record(session, [new]) and new.id in session
            known.append(new.id)
        return known

    names = [f"s{number}" for number in range(16)]
    known = dict(zip(names, await asyncio.gather(*map(talk, names)), strict=True))
    assert await store.delete("s0") and not await store.delete("s0")
    again = SessionStore(copy_as_killed(path))
    store.close()
    assert {name: await list_ids(again, name) for name in again.sessions} == {
        name: known[name] for name in names[1:]
    }
    for name in names[1:]:
        assert (await again.open(name)).count_trajectories() == 1
    again.close()


@pytest.mark.parametrize("sync", [True, False])
async def test_a_delete_between_turns_that_wait_ends_their_session(path: Path, sync: bool) -> None:
    store, may_begin = SessionStore(path, sync=sync), threading.Event()
    await record(store, make_turn("s"))
    store._thread.submit(may_begin.wait)
    session = await store.open("s")
    long = {"token_ids": [1] * 30_000, "logprobs": [-0.5] * 30_000}
    answers = asyncio.gather(
        store.record(session, [make_turn("s", **long)]),
        store.delete("s"),
        store.record(session, [make_turn("s", **long)]),
    )
    await asyncio.sleep(0)  # all three begin
    may_begin.set()
    assert (await answers)[:2] == [True, True] and session.gone and store.sessions == {}
    assert not await store.record(session, [make_turn("s")])
    again = SessionStore(copy_as_killed(path))
    assert again.sessions == {}
    again.close()
    store.close()


async def test_another_program_that_writes_does_not_stop_the_event_loop(
    store: SessionStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_MS", 60_000)
    await record(store, make_turn("s"))
    await wait_until_async(lambda: not store._jobs)
    timeouts: list[int] = []

    class Watched(FailingDatabase):
        close = store._db.close

        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if threading.current_thread() is threading.main_thread():
                timeouts.extend(*self.database.execute("PRAGMA busy_timeout"))
            return self.database.execute(statement, *values)

    monkeypatch.setattr(store, "_db", Watched(store._db))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        turn = asyncio.create_task(record(store, make_turn("s")))
        await wait_until_async(lambda: bool(timeouts))
        other.execute("ROLLBACK")
        assert await turn
    assert set(timeouts) == {0}


async def test_a_machine_without_a_free_thread_records_and_deletes(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert await record(store, make_turn("s", token_ids=[1] * 30_000, logprobs=[-0.5] * 30_000))
    assert await store.delete("s") and store.sessions == {}
    assert await record(store, make_turn("s")) and not await store.delete("other")


async def test_only_recent_sessions_are_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_RECENT", 3)
    store = SessionStore(path)
    for number in range(10):
        await record(store, make_turn(f"s{number}", id=f"first {number}"))
    assert len(store._opened) == 3 and len(store.sessions) == 10
    held = await store.open("s0")
    for number in range(10):
        await record(store, make_turn(f"s{number}", f"first {number}"))
    assert await store.open("s0") is held and len(held.turns) == 2
    for number in range(10):
        assert (await store.open(f"s{number}")).count_trajectories() == 1
    store.close()


_WRITER = """
import asyncio, os, sys
from pathlib import Path
from rollway.gateway.store import SessionStore
from tests.security.stores import make_turn, record

async def write(store, name):
    session, parent = await store.open(name), None
    while True:
        new = make_turn(name, parent, model="x" * 300)
        assert await store.record(session, [new])
        os.write(1, f"{name} {new.id}\\n".encode())
        parent = new.id

async def churn(store):
    while True:
        await record(store, make_turn("churned"))
        await store.delete("churned")

async def main():
    store = SessionStore(Path(sys.argv[1]), sync=sys.argv[2] == "sync", erase_within=0.01)
    await asyncio.gather(churn(store), *(write(store, f"s{n}") for n in range(8)))

asyncio.run(main())
"""


def kill_while_writing(path: Path, sync: str, answers: int) -> list[tuple[str, str]]:
    """Run the writer and kill it; return the sessions and turns that it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), sync], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(answers)]
    process.kill()
    lines += process.stdout.readlines()
    process.wait()
    pairs = [line.decode().split() for line in lines if line.endswith(b"\n")]
    return [(name, turn) for name, turn in pairs]


@pytest.mark.parametrize("sync", ["sync", "plain"])
async def test_killing_the_gateway_under_eight_writers_loses_no_turn(path: Path, sync: str) -> None:
    acknowledged: dict[str, list[str]] = {}
    for rounds in range(1, 5):
        for name, turn in kill_while_writing(path, sync, 97 * rounds):
            acknowledged.setdefault(name, []).append(turn)
        store = SessionStore(path)
        for name, known in acknowledged.items():
            recorded = await list_ids(store, name)
            assert len(set(recorded)) == len(recorded)
            assert [identity for identity in recorded if identity in set(known)] == known
        store.close()
    assert sum(map(len, acknowledged.values())) >= 97 * 4


async def test_a_turn_that_cannot_be_served_is_not_acknowledged(store: SessionStore) -> None:
    infinite = make_turn("s", logprobs=[float("-inf")])  # JSON has no infinity
    wrong: list[Turn] = [make_turn("s", logprobs=[]), make_turn("s", token_ids=[-1]), infinite]
    for new in wrong:
        with pytest.raises(RolloutError):
            await record(store, new)
    assert store.sessions == {}
    # Turns that share a commit with it are recorded.
    turns = [make_turn("a"), make_turn("b", logprobs=[]), make_turn("c")]
    answers = await asyncio.gather(*(record(store, t) for t in turns), return_exceptions=True)
    assert answers[::2] == [True, True] and isinstance(answers[1], RolloutError)


async def test_an_unexpected_failure_hangs_no_request(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread records. Every exception in it must reach the waiting requests."""

    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_encode", fail)
        with pytest.raises(MemoryError):
            async with asyncio.timeout(30):
                await record(store, make_turn("s"))
    assert await record(store, make_turn("s"))


async def test_what_a_failed_commit_left_in_the_log_is_no_damage(path: Path) -> None:
    """The next commit is written over its beginning; its end, with right checksums, stays."""
    store = SessionStore(path)
    await record(store, make_turn("s"))
    failed, log = copy_as_killed(path), path.with_name(f"{path.name}-wal")
    await record(store, make_turn("s", token_ids=[7] * 4000, logprobs=[-0.5] * 4000))
    rest = log.read_bytes()
    with closing(sqlite3.connect(failed, isolation_level=None)) as other:
        other.execute("UPDATE sessions SET filler = zeroblob(5)")
        written = failed.with_name(log.name).read_bytes()
        assert len(written) < len(rest) and written != rest[: len(written)]
        failed.with_name(log.name).write_bytes(written + rest[len(written) :])
        again = SessionStore(copy_as_killed(failed))
    assert again.sessions == {"s": 1}
    again.close()
    store.close()


@pytest.mark.parametrize("length", [32, 4096])
async def test_a_log_without_its_beginning_is_refused(path: Path, length: int) -> None:
    store = SessionStore(path)
    await record(store, make_turn("s"))
    copy = copy_as_killed(path)
    log = copy.with_name(f"{copy.name}-wal")
    log.write_bytes(bytes(length) + log.read_bytes()[length:])
    with pytest.raises(StoreDamaged, match="beginning"):
        SessionStore(copy)
    store.close()


async def test_turns_after_damage_in_the_log_are_not_dropped_in_silence(path: Path) -> None:
    """SQLite takes the log until the first wrong checksum, as if a kill had cut it off there."""
    store = SessionStore(path)
    for _ in range(4):
        await record(store, make_turn("s"))
    copy = copy_as_killed(path)
    log = copy.with_name(f"{copy.name}-wal")
    content = bytearray(log.read_bytes())
    for place in (20, len(content) // 2):
        damaged = bytearray(content)
        damaged[place] ^= 1
        log.write_bytes(damaged)
        before = read_files(copy)
        with pytest.raises(StoreDamaged, match="is damaged"):
            SessionStore(copy)
        assert read_files(copy) == before
    log.write_bytes(content[:-500])  # the last commit was cut off
    cut = SessionStore(copy)
    assert cut.sessions == {"s": 3}
    cut.close()
    store.close()
