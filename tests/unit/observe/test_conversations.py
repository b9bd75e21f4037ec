"""Conversations of a gateway on the page, read from its journal while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.gateway import entries
from rollway.gateway.recorder import Recorder
from rollway.gateway.turns import Forgotten, Turn
from rollway.observe.dash import conversations
from rollway.observe.dash.conversations import Conversations


def make_turn(session: str, number: int, **fields: Any) -> Turn:
    usual: dict[str, Any] = {
        "model": "tiny", "history": f"h{number}", "new_ids": [1, 2, 3], "token_ids": [10, number],
        "logprobs": [-0.5, -0.25], "finish_reason": "stop", "version": number,
        "worker_id": 2**61 + 1, "id": f"{session}-{number}",
    }  # fmt: skip
    return Turn(session=session, **usual | fields)


def append(path: Path, *turns: Turn | Forgotten) -> None:
    with path.open("ab") as file:
        file.write(b"".join(map(entries.encode, turns)))


def test_a_session_is_read_token_by_token_with_its_versions(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    recorder = Recorder(path)
    session = recorder.open("episode")
    recorder.add(session, make_turn("episode", 1))
    recorder.add(session, make_turn("episode", 2, parent="episode-1"))
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
    recorder.add(session, make_turn("episode", 3, parent="episode-2", forked="edited"))
    assert reader.list_sessions()["sessions"][0]["turns"] == 3
    recorder.close()


def test_forgotten_damaged_and_torn_lines_show_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    append(path, make_turn("a", 1), make_turn("b", 1), Forgotten("a"))
    whole = entries.encode(make_turn("c", 1))
    with path.open("ab") as file:
        file.write(whole.replace(b"tiny", b"TINY") + b"nonsense\n" + whole[:-20])
    reader = Conversations(path)
    assert [row["name"] for row in reader.list_sessions()["sessions"]] == ["b"]
    assert reader.read_session("a") is None
    with path.open("ab") as file:
        file.write(whole[-20:])  # the rest of the torn line
    assert [row["name"] for row in reader.list_sessions()["sessions"]] == ["c", "b"]


def test_a_compacted_journal_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    append(path, make_turn("a", 1), make_turn("b", 1))
    reader = Conversations(path)
    assert len(reader.list_sessions()["sessions"]) == 2
    append(tmp_path / "new", make_turn("b", 1))
    (tmp_path / "new").replace(path)
    assert [row["name"] for row in reader.list_sessions()["sessions"]] == ["b"]
    shown = reader.read_session("b")
    assert shown is not None and len(shown["turns"]) == 1
    path.unlink()
    assert reader.list_sessions()["sessions"] == []


def test_only_the_newest_sessions_are_kept_and_long_lines_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MOST_SESSIONS", 3)
    monkeypatch.setattr(conversations, "_LARGEST_LINE", 2_000)
    path = tmp_path / "tiny.jsonl"
    append(path, *(make_turn(f"s{number}", 1) for number in range(5)))
    append(path, make_turn("long", 1, new_ids=list(range(5_000))), make_turn("s0", 2))
    listed = Conversations(path).list_sessions()
    assert [row["name"] for row in listed["sessions"]] == ["s0", "s4", "s3"]
    assert listed["left_out"] == 3


def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path) -> None:
    append(tmp_path / "real", make_turn("a", 1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Conversations(tmp_path / "link").list_sessions()["sessions"] == []
    import os

    os.mkfifo(tmp_path / "pipe")
    assert Conversations(tmp_path / "pipe").list_sessions()["sessions"] == []


def test_what_is_sent_is_bounded_and_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_MOST_TOKENS", 5)
    path = tmp_path / "tiny.jsonl"
    append(path, *(make_turn("a", n, token_ids=[2**62] * 4, logprobs=[0.0] * 4) for n in range(3)))
    shown = Conversations(path).read_session("a")
    assert shown is not None
    assert [len(turn["tokens"]) for turn in shown["turns"]] == [4, 1]
    assert shown["left_out"] == 1 and str(2**62) in json.dumps(shown)
