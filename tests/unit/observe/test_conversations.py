"""Conversations of a gateway on the page, read from its store while it is written."""

from __future__ import annotations

import json
import os
import sqlite3
import tracemalloc
import zlib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollway.errors import RollwayError
from rollway.gateway import store as store_module
from rollway.gateway.store import SessionStore, StoreDamaged
from rollway.gateway.turns import Turn
from rollway.observe.dash import conversations
from rollway.observe.dash.conversations import Conversations
from tests.security.small_disk import mount_small_disk, remount


def make_turn(session: str, number: int, **fields: Any) -> Turn:
    usual: dict[str, Any] = {
        "model": "tiny", "history": f"h{number}", "new_ids": [1, 2, 3], "token_ids": [10, number],
        "logprobs": [-0.5, -0.25], "finish_reason": "stop", "version": number,
        "worker_id": 2**61 + 1, "id": f"{session}-{number}",
    }  # fmt: skip
    return Turn(session=session, **usual | fields)


async def write(path: Path, *turns: Turn) -> SessionStore:
    store = SessionStore(path)
    for turn in turns:
        assert await store.record(await store.open(turn.session), [turn])
    return store


async def test_a_session_is_read_token_by_token_with_its_versions(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sqlite"
    first, second = make_turn("episode", 1), make_turn("episode", 2, parent="episode-1")
    store = await write(path, first, second)
    reader = Conversations(path)
    assert reader.list_sessions() == {
        "sessions": [{"name": "episode", "turns": 2, "tokens": 4, "forks": 0, "versions": [1, 2]}],
        "left_out": 0,
    }
    shown = reader.read_session("episode")
    assert shown is not None
    assert [turn["version"] for turn in shown["turns"]] == [1, 2]
    assert shown["turns"][1]["tokens"] == [("10", -0.5), ("2", -0.25)]
    assert shown["turns"][1]["worker"] == str(2**61 + 1)  # exact, as text
    assert shown["turns"][1]["parent"] == "episode-1"
    # A gateway that runs goes on writing.
    new = make_turn("episode", 3, parent="episode-2", forked="edited", version=None)
    assert await store.record(await store.open("episode"), [new])
    assert (
        reader.list_sessions()["sessions"][0] | {"forks": 1, "turns": 3}
        == (reader.list_sessions()["sessions"][0])
    )
    assert await store.delete("episode")
    assert reader.list_sessions()["sessions"] == [] and reader.read_session("episode") is None
    store.close()


async def test_a_damaged_turn_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1), make_turn("a", 2))).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE turns SET crc = crc + 1 WHERE number = (SELECT min(number) FROM turns)")
    shown = Conversations(path).read_session("a")
    assert shown is not None and [turn["version"] for turn in shown["turns"]] == [2]
    assert shown["left_out"] == 1


async def test_only_the_newest_sessions_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MOST_SESSIONS", 3)
    path = tmp_path / "tiny.sqlite"
    turns = [make_turn(f"s{number}", 1) for number in range(5)]
    (await write(path, *turns, make_turn("s0", 2))).close()
    listed = Conversations(path).list_sessions()
    assert [row["name"] for row in listed["sessions"]] == ["s0", "s4", "s3"]
    assert listed["left_out"] == 2


def check_refused(path: Path, cause: str) -> None:
    """Check that the reader gives the cause and the fix, as a gateway does, and writes nothing."""
    before = path.read_bytes() if path.is_file() else b""
    reader = Conversations(path)
    texts = set()
    for read in (reader.check, reader.list_sessions, lambda: reader.read_session("a")):
        with pytest.raises(RollwayError, match=cause) as caught:
            read()
        texts.add(str(caught.value))
    with pytest.raises(RollwayError, match=cause) as caught:
        SessionStore(path)
    assert texts == {str(caught.value)} and "ass another file to --journal" in caught.value.hint
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("PRAGMA user_version = 2", "is the store of a gateway of another version"),
        ("PRAGMA application_id = 1", "is another database"),
        ("CREATE VIEW v AS SELECT 1", "its tables are not those of a gateway"),
        ("ALTER TABLE turns RENAME TO others", "its tables are not those of a gateway"),
    ],
)
async def test_a_store_of_another_version_or_with_other_tables_is_refused_with_the_fix(
    tmp_path: Path, statement: str, cause: str
) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1))).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)
    check_refused(path, cause)


async def test_another_or_a_damaged_file_is_refused_with_the_fix(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (await write(real, make_turn("a", 1))).close()
    with closing(sqlite3.connect(tmp_path / "other")) as db, db:
        db.execute("CREATE TABLE notes (text TEXT)")
    (tmp_path / "text").write_text("no store" * 100)
    (tmp_path / "torn").write_bytes(real.read_bytes()[:1024] + bytes(4096))
    (tmp_path / "cut").write_bytes(b"S")
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    for name, cause in {
        "other": "is another database",
        "text": "is not the store of a gateway",
        "torn": "is damaged",
        "cut": "is damaged: it is cut off",
        "link": "cannot be used: It is not a regular file",
        "pipe": "cannot be used: It is not a regular file",
    }.items():
        check_refused(tmp_path / name, cause)


async def test_a_store_of_another_user_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1))).close()
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    else:
        path.chmod(0)
    with pytest.raises(RollwayError, match=r"belongs to another user|cannot be read"):
        Conversations(path).list_sessions()


def test_a_gateway_that_has_recorded_nothing_has_no_sessions(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    SessionStore(tmp_path / "new").close()
    for name in ("missing", "empty", "new"):
        assert Conversations(tmp_path / name).list_sessions() == {"sessions": [], "left_out": 0}


async def test_what_is_sent_is_bounded_and_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_MOST_TOKENS", 5)
    path = tmp_path / "tiny.sqlite"
    turns = [make_turn("a", n, token_ids=[2**62] * 4, logprobs=[0.0] * 4) for n in range(3)]
    (await write(path, *turns)).close()
    shown = Conversations(path).read_session("a")
    assert shown is not None
    assert [len(turn["tokens"]) for turn in shown["turns"]] == [4, 1]
    assert shown["left_out"] == 1 and str(2**62) in json.dumps(shown)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sessions SET name = x'ff'",
        "UPDATE sessions SET name = CAST(x'ff' AS TEXT)",
        "UPDATE turns SET version = 'x,y'",
        "UPDATE turns SET crc = 'z'",
        "UPDATE turns SET turn = 'text'",
        "UPDATE turns SET tokens = 'abc', forked = x'00'",
    ],
)
async def test_a_damaged_store_shows_less_or_is_refused(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1))).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)
    reader = Conversations(path)
    for read in (reader.list_sessions, lambda: reader.read_session("a")):
        with suppress(StoreDamaged):
            json.dumps(read())


async def test_a_turn_of_another_session_is_not_shown(tmp_path: Path) -> None:
    """Numbers of sessions are used again."""
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1), make_turn("a", 2))).close()
    raw = msgspec.msgpack.encode(make_turn("b", 3))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE turns SET turn = ?, crc = ? WHERE number = 1", (raw, zlib.crc32(raw)))
    shown = Conversations(path).read_session("a")
    assert shown is not None and [turn["version"] for turn in shown["turns"]] == [2]


async def test_one_state_of_the_store_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sqlite"
    store = await write(path, make_turn("a", 1))

    class SlowReader(Conversations):
        def _list(self, db: sqlite3.Connection) -> list[Any]:
            rows = super()._list(db)
            with closing(sqlite3.connect(path)) as other, other:
                other.execute("DELETE FROM turns")
            return rows

    shown = SlowReader(path).read_session("a")
    assert shown is not None and len(shown["turns"]) == 1
    assert Conversations(path).read_session("a") is None
    store.close()


async def test_large_turns_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, *(make_turn("a", n, model="x" * 1_000_000) for n in range(20)))).close()
    tracemalloc.start()
    try:
        shown = Conversations(path).read_session("a")
        assert shown is not None and len(shown["turns"]) == 20
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


async def test_a_file_whose_pages_repeat_does_not_hang_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten levels of pages, each of whose entries leads to the same next page."""
    monkeypatch.setattr(store_module, "_MOST_STEPS", 10**6)
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1))).close()
    with closing(sqlite3.connect(path)) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'")
    content = bytearray(path.read_bytes())
    place = slice((root - 1) * 1024, root * 1024)

    def make_page(child: int) -> bytes:
        cells = b"".join(child.to_bytes(4, "big") + b"\1" for _ in range(50))
        places = b"".join((1024 - 5 * (n + 1)).to_bytes(2, "big") for n in range(50))
        head = b"\5" + bytes(2) + (50).to_bytes(2, "big") + (774).to_bytes(2, "big") + b"\0"
        page = head + child.to_bytes(4, "big") + places
        return page + bytes(1024 - len(page) - len(cells)) + cells

    content += content[place]
    for _ in range(10):
        content += make_page(len(content) // 1024)
    content[place] = make_page(len(content) // 1024)
    content[28:32] = (len(content) // 1024).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(StoreDamaged):
        SessionStore(path)
    with pytest.raises(RollwayError, match="cannot be read: interrupted"):
        Conversations(path).list_sessions()


async def test_reading_puts_nothing_beside_the_store_of_a_gateway_that_ended(
    tmp_path: Path,
) -> None:
    with mount_small_disk(tmp_path) as disk:
        path = disk / "tiny.sqlite"
        (await write(path, make_turn("a", 1))).close()
        assert len(Conversations(path).list_sessions()["sessions"]) == 1
        assert list(disk.iterdir()) == [path]
        remount(disk, "ro")
        assert len(Conversations(path).list_sessions()["sessions"]) == 1
