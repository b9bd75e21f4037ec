"""What full disks, damaged files, deleted sessions and killed gateways can lose."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollway.errors import RolloutError, UsageError
from rollway.gateway import store as store_module
from rollway.gateway.store import Store, StoreDamaged, StoreFull
from rollway.gateway.turns import Turn
from tests.security.small_disk import fill, remount
from tests.security.stores import copy_as_killed, list_ids, make_turn, read_files, record
from tests.waiting import wait_until_async

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "gateway.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


# --- deleted sessions ----------------------------------------------------------------------------


async def test_deleting_a_session_with_a_turn_in_flight_records_nothing(path: Path) -> None:
    store = Store(path)
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
    again = Store(path)
    assert (await again.open("s")).count_trajectories() == 1
    again.close()


async def test_deleting_a_session_before_its_first_turn_ends_it(store: Store) -> None:
    session = await store.open("s")
    assert await store.open("s") is session and store.sessions == {}
    assert await store.delete("s") and session.gone
    assert not await store.record(session, [make_turn("s")]) and store.sessions == {}
    assert not await store.delete("s")


async def test_a_session_that_is_deleted_before_it_is_read_is_gone(path: Path) -> None:
    store = Store(path)
    await record(store, make_turn("s"))
    store.close()
    again = Store(path)
    is_deleted, session = await asyncio.gather(again.delete("s"), again.find("s"))
    assert is_deleted and session is None
    again.close()


async def test_failed_requests_leave_no_session(store: Store) -> None:
    for number in range(100):
        await store.open(f"failed {number}")
    assert store.sessions == {} and not await store.delete("failed 7")


async def test_deleted_sessions_are_in_no_file_soon(path: Path) -> None:
    """Rows of all sizes, so that SQLite moves them between pages."""
    store = Store(path, erase_within=0.2)
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
    store = Store(path)
    await record(store, make_turn("secret"))
    await store.delete("secret")
    killed = copy_as_killed(path)
    store.close()
    assert b"secret" not in read_files(path)
    assert b"secret" in read_files(killed)
    again = Store(killed)
    assert again.sessions == {} and b"secret" not in read_files(killed)
    again.close()


async def test_a_reader_only_delays_the_erasure(path: Path) -> None:
    store = Store(path, erase_within=0.1)
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


async def test_the_log_of_a_busy_gateway_stays_small(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOG_BYTES", 50_000)
    store, wal = Store(path), path.with_name(f"{path.name}-wal")
    for _ in range(200):
        await record(store, make_turn("s"))
    await wait_until_async(lambda: wal.stat().st_size < 100_000)
    assert path.stat().st_size > 50_000 and len(await list_ids(store, "s")) == 200
    store.close()


# --- full disks ----------------------------------------------------------------------------------


async def test_a_full_disk_loses_no_turn(small_disk: Path) -> None:
    path = small_disk / "gateway.sqlite"
    store = Store(path)
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
        again = Store(file)
        assert await list_ids(again, "s") == known
        again.close()

    remount(small_disk, "size=1m")
    roomy = Store(path)
    assert await record(roomy, make_turn("s", known[-1])) and await roomy.delete("s")
    roomy.close()
    assert Store(path).sessions == {}


async def test_a_gateway_starts_on_a_full_disk_and_records_when_there_is_room(
    small_disk: Path,
) -> None:
    path = small_disk / "gateway.sqlite"
    store = Store(path)
    await record(store, make_turn("s"))
    store.close()  # a gateway that ends leaves nothing but the file itself
    filler = fill(small_disk)
    store = Store(path)
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
    again = Store(path)
    assert await list_ids(again, "s") == known
    again.close()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_read_only_disk_serves_recorded_turns(small_disk: Path, ended: bool) -> None:
    path = small_disk / "store" / "gateway.sqlite"
    store = Store(path)
    await record(store, make_turn("s"))
    known = await list_ids(store, "s")
    killed = copy_as_killed(path)
    store.close()
    path = path if ended else killed
    remount(small_disk, "ro")
    try:
        reader = Store(path)
        assert await list_ids(reader, "s") == known
        for write in (record(reader, make_turn("s")), reader.delete("s")):
            with pytest.raises(StoreFull, match="readonly"):
                await write
        with pytest.raises(UsageError, match="Another gateway"):
            Store(path)
        with pytest.raises(UsageError, match="Read-only"):
            Store(path.with_name("other.sqlite"))
        reader.close()
    finally:
        remount(small_disk, "rw")
    again = Store(path)
    assert await record(again, make_turn("s")) and again.sessions == {"s": 2}
    again.close()


async def test_a_full_disk_keeps_only_acknowledged_turns_of_those_waiting(small_disk: Path) -> None:
    """Turns that wait for the disk share a commit: all of them count, or none."""
    path = small_disk / "gateway.sqlite"
    store, acknowledged, refused = Store(path, sync=True), list[str](), 0
    while not refused:
        turns = [make_turn(f"s{number}", model="x" * 500) for number in range(20)]
        writes = [record(store, turn) for turn in turns]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        acknowledged += [t.id for t, answer in zip(turns, answers, strict=True) if answer is True]
        refused = sum(isinstance(answer, StoreFull) for answer in answers)
        assert answers.count(True) + refused == len(turns)
    again = Store(copy_as_killed(path))
    assert acknowledged and again.sessions == store.sessions
    known = [turn for name in again.sessions for turn in await list_ids(again, name)]
    assert sorted(known) == sorted(acknowledged)
    again.close()
    store.close()


async def test_removing_the_file_is_detected_before_a_turn_is_acknowledged(
    store: Store, path: Path
) -> None:
    await record(store, make_turn("s"))
    path.unlink()
    with pytest.raises(StoreFull, match="removed it"):
        await record(store, make_turn("s"))


# --- damaged and foreign files -------------------------------------------------------------------


async def test_a_changed_turn_is_refused_and_stays_as_it_is(path: Path) -> None:
    store = Store(path)
    await record(store, make_turn("s", model="a model of many letters"))
    store.close()
    changed = path.read_bytes().replace(b"many letters", b"many lettuce")
    path.write_bytes(changed)
    with pytest.raises(StoreDamaged, match="a turn of `s` has the wrong checksum") as error:
        Store(path)
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
    store = Store(path)
    await record(store, make_turn("s"))
    store.close()
    insert(path, turn)
    with pytest.raises(StoreDamaged) as error:
        Store(path)
    assert "--journal" in error.value.hint


@pytest.mark.parametrize(
    "turns",
    [[encode(token_ids=["x"])], [encode(id="a"), encode(id="a")]],
    ids=["other types", "an id twice"],
)
async def test_a_session_that_no_gateway_wrote_is_refused_and_hides_no_other(
    path: Path, turns: list[bytes]
) -> None:
    store = Store(path)
    await record(store, make_turn("s"))
    await record(store, make_turn("whole"))
    store.close()
    insert(path, *turns)
    store = Store(path)
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
    store = Store(path)
    await record(store, make_turn("s"))
    store.close()
    insert(path, *(encode(id=turn, parent=parent) for turn, parent in turns))
    store = Store(path)
    session = await store.open("s")
    assert len(session.turns) == 1 + len(turns)
    for turn in session.turns:
        assert session.ids(turn.id)
    assert session.count_trajectories() == len(list(session.trajectories()))
    store.close()


@pytest.mark.parametrize("name", [b"session 2", b"session 9"])
async def test_a_changed_name_of_a_session_is_refused(path: Path, name: bytes) -> None:
    """The name of another session would hide one, and a new name would show turns of none."""
    store = Store(path)
    for number in range(4):
        await record(store, make_turn(f"session {number}"))
    store.close()
    # In a turn, a byte with its length is before the name.
    changed = re.sub(rb"(?<!\xa9)session 1", name, path.read_bytes())
    path.write_bytes(changed)
    with pytest.raises(StoreDamaged, match=f"a turn of `{name.decode()}` has the wrong"):
        Store(path)
    assert path.read_bytes() == changed


async def test_turns_that_wait_while_the_store_closes_are_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the log is so long that it must be emptied meanwhile."""
    monkeypatch.setattr(store_module, "_LOG_BYTES", 0)
    store, may_begin = Store(path), threading.Event()
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
    store = Store(path)
    assert len(await list_ids(store, "s")) == 4
    store.close()


@pytest.mark.parametrize("size", [1, 99, 1024, 7000])
async def test_a_cut_file_is_refused_and_nothing_is_put_beside_it(path: Path, size: int) -> None:
    store = Store(path)
    for _ in range(20):
        await record(store, make_turn("s"))
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    path.chmod(0o640)
    with pytest.raises(StoreDamaged):
        Store(path)
    assert path.read_bytes() == whole[:size] and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", [b"", None])
async def test_a_log_without_its_file_is_refused_and_stays(
    store: Store, path: Path, content: bytes | None
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
        Store(killed)
    assert log.read_bytes() == before
    log.unlink()
    Store(killed).close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [("PRAGMA user_version = 2", "another version"), ("PRAGMA application_id = 7", "another data")],
)
def test_a_store_of_another_version_or_program_is_refused(
    path: Path, statement: str, reason: str
) -> None:
    Store(path).close()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (a)")
        other.execute(statement)
    other.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match=reason) as error:
        Store(path)
    assert "--journal" in error.value.hint and path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_old_journal_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "stack.jsonl"
    entry = b'{"sum":"5f1c9a0e","entry":{"type":"turn"}}\n'
    old.write_bytes(entry)
    with pytest.raises(UsageError, match="not the store of a gateway"):
        Store(old)
    assert [each.name for each in tmp_path.iterdir()] == ["stack.jsonl"]
    assert old.read_bytes() == entry


# --- permissions ---------------------------------------------------------------------------------


async def test_other_users_cannot_read_the_store(tmp_path: Path) -> None:
    path = tmp_path / "new" / "newer" / "gateway.sqlite"
    mask = os.umask(0)
    try:
        store = Store(path)
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
    Store(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


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
            Store(path)
    assert not (tmp_path / "elsewhere").exists()


# --- threads, memory and kills -------------------------------------------------------------------


async def test_turns_at_the_same_time_share_a_commit_and_keep_their_order(path: Path) -> None:
    store = Store(path, sync=True)

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
    again = Store(copy_as_killed(path))
    store.close()
    assert {name: await list_ids(again, name) for name in again.sessions} == {
        name: known[name] for name in names[1:]
    }
    for name in names[1:]:
        assert (await again.open(name)).count_trajectories() == 1
    again.close()


async def test_only_recent_sessions_are_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_RECENT", 3)
    store = Store(path)
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
from rollway.gateway.store import Store
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
    store = Store(Path(sys.argv[1]), sync=sys.argv[2] == "sync", erase_within=0.01)
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
        store = Store(path)
        for name, known in acknowledged.items():
            recorded = await list_ids(store, name)
            assert len(set(recorded)) == len(recorded)
            assert [identity for identity in recorded if identity in set(known)] == known
        store.close()
    assert sum(map(len, acknowledged.values())) >= 97 * 4


async def test_a_turn_that_cannot_be_served_is_not_acknowledged(store: Store) -> None:
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
    store: Store, monkeypatch: pytest.MonkeyPatch
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
