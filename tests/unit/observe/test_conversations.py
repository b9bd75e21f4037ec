"""Conversations of a gateway on the page, read from its store while it is written."""

from __future__ import annotations

import json
import os
import sqlite3
import tracemalloc
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

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


async def test_a_link_a_pipe_or_another_file_shows_nothing(tmp_path: Path) -> None:
    (await write(tmp_path / "real", make_turn("a", 1))).close()
    assert Conversations(tmp_path / "real").list_sessions()["sessions"]
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no store")
    for name in ("link", "pipe", "text", "missing"):
        assert Conversations(tmp_path / name).list_sessions()["sessions"] == []


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
        "ALTER TABLE turns RENAME TO others",
        "CREATE VIEW v AS SELECT 1",
    ],
)
async def test_a_damaged_store_shows_less_and_fails_no_request(
    tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "tiny.sqlite"
    (await write(path, make_turn("a", 1))).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)
    reader = Conversations(path)
    json.dumps([reader.list_sessions(), reader.read_session("a")])


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
    assert Conversations(path).list_sessions()["sessions"] == []


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
