"""Conversations of a gateway on the page, read from its store while it is written."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollway.gateway.store import Store
from rollway.gateway.turns import Turn
from rollway.observe.dash import conversations
from rollway.observe.dash.conversations import Conversations


def make_turn(session: str, number: int, **fields: Any) -> Turn:
    usual: dict[str, Any] = {
        "model": "tiny", "history": f"h{number}", "new_ids": [1, 2, 3], "token_ids": [10, number],
        "logprobs": [-0.5, -0.25], "finish_reason": "stop", "version": number,
        "worker_id": 2**61 + 1, "id": f"{session}-{number}",
    }  # fmt: skip
    return Turn(session=session, **usual | fields)


async def write(path: Path, *turns: Turn) -> Store:
    store = Store(path)
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
