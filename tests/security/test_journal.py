"""What a full disk, a damaged file, a deleted session or a killed gateway may cost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import RolloutError, UsageError
from rollway.gateway.entries import encode
from rollway.gateway.journal import JournalFull
from rollway.gateway.recorder import Recorder, Turn
from tests.security.disks import FaultyDisk, kill, record, turn
from tests.security.small_disk import fill, mounted

pytestmark = pytest.mark.timeout(120)


def ids(recorder: Recorder, session: str) -> list[str]:
    return [each.id for each in recorder.sessions[session].turns]


def reopened(path: Path) -> Recorder:
    """What the next gateway knows; it is closed at once, so that the file is free again."""
    recorder = Recorder(path)
    recorder.close()
    return recorder


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


# --- sessions that are deleted -------------------------------------------------------------------


def test_deleting_a_session_with_a_turn_in_flight_records_nothing(path: Path) -> None:
    recorder = Recorder(path)
    session = recorder.open("s")
    first = turn("s")
    assert recorder.add(session, first)
    assert recorder.forget("s") and session.gone
    assert not recorder.add(session, turn("s", first.id))
    assert recorder.sessions == {}
    assert recorder.open("s") is not session
    assert record(recorder, turn("s", first.id))  # a parent of the old session is none of the new
    root = recorder.sessions["s"].turns[0]
    assert root.parent is None and "not recorded" in root.forked
    recorder.close()
    again = reopened(path)
    assert len(again.sessions["s"].trajectories()) == 1 and again.lost == 0


def test_deleting_a_session_before_its_first_turn_ends_it(path: Path) -> None:
    recorder = Recorder(path)
    session = recorder.open("s")
    assert recorder.open("s") is session and recorder.sessions == {} and "s" in recorder
    assert recorder.forget("s") and session.gone
    assert not recorder.add(session, turn("s")) and recorder.sessions == {}
    assert not recorder.forget("s") and "s" not in recorder
    recorder.close()


def test_requests_that_fail_leave_no_session_behind(path: Path) -> None:
    recorder = Recorder(path)
    for number in range(100):
        recorder.open(f"failed {number}")
    assert recorder.sessions == {} and len(recorder._opened) == 0
    recorder.close()


def test_deleted_text_leaves_the_file_in_a_bounded_time(path: Path) -> None:
    recorder = Recorder(path, erase_within=0.2)
    record(recorder, turn("secret", model="the secret"))
    for _ in range(50):
        record(recorder, turn("kept"))
    kept = ids(recorder, "kept")
    recorder.forget("secret")
    wait_for(lambda: b"secret" not in path.read_bytes())
    recorder.close()
    assert ids(reopened(path), "kept") == kept


def test_deleted_text_leaves_the_file_when_the_gateway_ends_first(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, turn("secret"))
    recorder.forget("secret")
    recorder.close()
    assert path.read_bytes() == b""


def test_deleted_text_leaves_the_file_after_a_kill(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, turn("secret"))
    recorder.forget("secret")
    kill(recorder)
    again = Recorder(path)
    assert again.sessions == {}
    wait_for(lambda: path.read_bytes() == b"")
    again.close()


def test_a_file_that_is_half_forgotten_is_compacted_at_once(path: Path) -> None:
    recorder = Recorder(path, erase_within=1e6)
    record(recorder, turn("kept"))
    record(recorder, turn("large", model="x" * 2**21))
    recorder.forget("large")
    wait_for(lambda: path.stat().st_size < 2**20)
    record(recorder, turn("kept"))
    kept = ids(recorder, "kept")
    kill(recorder)
    assert ids(reopened(path), "kept") == kept


def test_turns_added_during_compaction_are_kept(path: Path) -> None:
    recorder = Recorder(path)
    ended = threading.Event()

    def compact() -> None:
        while not ended.is_set():
            recorder.compact()

    thread = threading.Thread(target=compact)
    thread.start()
    for number in range(2000):
        record(recorder, turn(f"s{number % 7}"))
    ended.set()
    thread.join()
    known = {name: ids(recorder, name) for name in recorder.sessions}
    kill(recorder)
    again = reopened(path)
    assert {name: ids(again, name) for name in again.sessions} == known


# --- disks that are full -------------------------------------------------------------------------


def test_a_short_write_is_refused_and_glues_nothing(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, turn("s"))
    length = path.stat().st_size
    for room in (0, 1, 50):
        faults.room = room
        with pytest.raises(JournalFull, match="No space left on device") as error:
            record(recorder, turn("s"))
        assert error.value.http_status == 507
        assert path.stat().st_size == length and len(recorder.sessions["s"].turns) == 1
    faults.room = None
    record(recorder, turn("s"))
    known = ids(recorder, "s")
    kill(recorder)
    again = reopened(path)
    assert ids(again, "s") == known and again.lost == 0


def test_a_disk_that_cannot_even_be_cut_back_is_repaired_first(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, turn("s"))
    faults.room, faults.failing = 20, {"truncate"}
    with pytest.raises(JournalFull):
        record(recorder, turn("s"))
    faults.room = None
    with pytest.raises(JournalFull, match="Input/output error"):
        record(recorder, turn("s"))
    faults.failing = set()
    record(recorder, turn("s"))
    known = ids(recorder, "s")
    kill(recorder)
    again = reopened(path)
    assert len(known) == 2 and ids(again, "s") == known and again.lost == 0


def test_a_disk_that_does_not_sync_is_refused(path: Path) -> None:
    faults = FaultyDisk(failing={"sync"})
    recorder = Recorder(path, sync=True, disk=faults.as_disk())
    with pytest.raises(JournalFull, match="Input/output error"):
        record(recorder, turn("s"))
    assert recorder.sessions == {} and path.stat().st_size == 0
    recorder.close()


def test_a_torn_line_that_cannot_be_put_aside_waits_for_room(path: Path) -> None:
    path.write_bytes(encode(turn("s")) + b'{"torn')
    faults = FaultyDisk(room=0)
    recorder = Recorder(path, disk=faults.as_disk())
    for _ in range(2):
        with pytest.raises(JournalFull, match="No space left"):
            record(recorder, turn("s"))
        assert path.read_bytes().endswith(b'{"torn')
    faults.room = None
    assert record(recorder, turn("s"))
    assert path.with_name("journal.jsonl.unreadable").read_bytes() == b'{"torn\n'
    kill(recorder)
    assert len(reopened(path).sessions["s"].turns) == 2


def test_removing_the_file_is_noticed_before_a_turn_is_acknowledged(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, turn("s"))
    path.unlink()
    with pytest.raises(JournalFull, match="removed it"):
        record(recorder, turn("s"))
    recorder.close()


def test_a_delete_on_a_full_disk_is_refused_not_forgotten(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, turn("s"))
    faults.room = 0
    with pytest.raises(JournalFull):
        recorder.forget("s")
    assert not recorder.sessions["s"].gone
    faults.room = None
    assert recorder.forget("s")
    recorder.close()


def test_compaction_without_room_is_retried(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, erase_within=0.1, disk=faults.as_disk())
    record(recorder, turn("kept"))
    record(recorder, turn("secret"))
    faults.failing = {"replace"}
    recorder.forget("secret")
    with pytest.raises(OSError, match="quota"):
        recorder.compact()
    record(recorder, turn("kept"))
    assert b"secret" in path.read_bytes() and not path.with_name("journal.jsonl.new").exists()
    faults.failing = set()
    wait_for(lambda: b"secret" not in path.read_bytes())
    known = ids(recorder, "kept")
    recorder.close()
    assert ids(reopened(path), "kept") == known


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path) as disk:
        yield disk


def test_a_really_full_disk_loses_no_turn(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    session, refused = recorder.open("s"), 0
    parent = None
    while refused < 3:
        new = turn("s", parent, model="x" * 1000)
        try:
            assert recorder.add(session, new)
            parent = new.id
        except JournalFull as error:
            assert os.strerror(errno.ENOSPC) in error.message
            refused += 1
    known = ids(recorder, "s")
    kill(recorder)
    (small_disk / "journal.lock").unlink()

    full = Recorder(path)
    assert ids(full, "s") == known and full.lost == 0
    assert len(full.sessions["s"].trajectories()) == 1
    with pytest.raises(JournalFull):
        record(full, turn("s", parent, model="x" * 5000))
    full.close()

    subprocess.run(["mount", "-o", "remount,size=256k", str(small_disk)], check=True)
    roomy = Recorder(path)
    assert record(roomy, turn("s", parent))
    roomy.forget("s")
    roomy.close()
    assert reopened(path).sessions == {}


def test_a_full_disk_goes_on_without_a_restart_when_there_is_room(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    record(recorder, turn("s"))
    filler = fill(small_disk)
    accepted = 0
    with pytest.raises(JournalFull):
        for _ in range(100):
            record(recorder, turn("s"))
            accepted += 1
    filler.unlink()
    assert record(recorder, turn("s"))
    known = ids(recorder, "s")
    assert len(known) == accepted + 2
    kill(recorder)
    assert ids(reopened(path), "s") == known


def test_a_read_only_disk_serves_what_is_there(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    record(recorder, turn("s"))
    known = ids(recorder, "s")
    kill(recorder)
    with path.open("ab") as file:
        file.write(b'{"torn')
    (small_disk / "journal.lock").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reader = Recorder(path)
    assert ids(reader, "s") == known and len(reader.sessions["s"].trajectories()) == 1
    with pytest.raises(JournalFull, match="Read-only file system"):
        record(reader, turn("s"))
    with pytest.raises(JournalFull, match="Read-only file system"):
        reader.forget("s")
    with pytest.raises(UsageError, match="Another gateway"):
        Recorder(path)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert record(reader, turn("s"))
    known = ids(reader, "s")
    reader.close()
    assert ids(reopened(path), "s") == known and len(known) == 2


def test_a_file_that_another_gateway_wrote_meanwhile_is_not_overwritten(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    first = Recorder(path)
    record(first, turn("s"))
    kill(first)
    (small_disk / "journal.lock").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reader = Recorder(path)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with path.open("ab") as file:
        file.write(encode(turn("other")))
    with pytest.raises(JournalFull, match="Another program changed it"):
        record(reader, turn("s"))
    reader.close()
    assert set(reopened(path).sessions) == {"s", "other"}


# --- files that are damaged ----------------------------------------------------------------------


def test_a_damaged_line_costs_its_turn_and_descendants_only(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(path)
    chain = [turn("s", id="a"), turn("s", "a", id="b"), turn("s", "b", id="c")]
    other = [turn("s", id="x"), turn("s", "x", id="y"), turn("t", id="z")]
    for new in (*chain, *other):
        record(recorder, new)
    whole = recorder.sessions["s"].trajectories()
    recorder.close()
    lines = path.read_bytes().splitlines(keepends=True)
    token = chain[1].token_ids[0]
    damaged = lines[1].replace(b"[%d]" % token, b"[%d]" % (token + 1))  # still JSON
    assert damaged != lines[1]
    path.write_bytes(lines[0] + damaged + b"".join(lines[2:]))

    again = Recorder(path)
    assert ids(again, "s") == ["a", "x", "y"] and ids(again, "t") == ["z"]
    assert again.sessions["s"].trajectories()[1] == whole[1]
    assert again.sessions["s"].lost == 2 and again.sessions["t"].lost == 0 and again.lost == 2
    assert "has 2 unusable lines" in caplog.text and "missing in s" in caplog.text
    kept = path.with_name("journal.jsonl.unreadable")
    wait_for(lambda: path.stat().st_size < sum(map(len, lines)) - len(lines[2]))
    again.close()
    assert kept.read_bytes() == damaged + lines[2]
    assert kept.stat().st_mode & 0o777 == 0o600
    last = Recorder(path)
    assert ids(last, "s") == ["a", "x", "y"]
    assert last.sessions["s"].lost == 2  # a later start still reports it
    last.forget("s")
    last.close()
    assert kept.read_bytes() == b""  # deleted there as well


def test_a_session_whose_first_turn_is_damaged_is_still_reported(path: Path) -> None:
    lines = [encode(turn("s", id="a")), encode(turn("s", "a"))]
    path.write_bytes(lines[0][:30] + b"?" + lines[0][31:] + lines[1])
    recorder = reopened(path)
    session = recorder.sessions["s"]
    assert session.turns == [] and session.lost == 2 and session.trajectories() == []


def test_a_torn_last_line_is_never_glued_to_the_next(path: Path) -> None:
    first, second = encode(turn("s")), encode(turn("s"))
    for cut in (1, 20, len(second) - 2, len(second) - 1):
        path.write_bytes(first + second[:cut])
        recorder = Recorder(path)
        record(recorder, turn("s", id=f"after {cut}"))
        known = ids(recorder, "s")
        kill(recorder)
        again = reopened(path)
        assert ids(again, "s") == known and f"after {cut}" in known and again.lost == 0
    kept = path.with_name("journal.jsonl.unreadable").read_bytes().splitlines()
    assert kept[-1] == second[:-1] and len(kept) == 4


def hostile(*entries: dict[str, Any]) -> bytes:
    return b"".join(encode(turn("s", **entry)) for entry in entries)


@pytest.mark.parametrize(
    "content",
    [
        hostile({"id": "a", "parent": "a"}),
        hostile({"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}),
        hostile({"id": "a", "parent": "c"}, {"id": "b", "parent": "a"}, {"id": "c"}),
        hostile({"id": "a"}, {"id": "b", "parent": "a"}, {"id": "a", "parent": "b"}),
    ],
    ids=["its own parent", "a ring", "a parent that comes later", "an id twice"],
)
def test_a_cycle_in_the_file_hangs_nobody(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    recorder = reopened(path)
    session = recorder.sessions["s"]
    for each in session.turns:
        session.ids(each.id)
    session.trajectories()
    assert session.lost >= 1


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"session":' + b"[" * 100_000,
        b'{"sum":"0","entry":' + b'{"a":' * 50_000,
        b'{"session":"s","parent":1e400}',
        b'{"session":"\\ud800"}',
        b"\xff\xfe\x00",
        b"null",
        b'{"forgotten":7}',
    ],
)
def test_a_hostile_line_is_only_that_line(path: Path, line: bytes) -> None:
    path.write_bytes(encode(turn("s")) + line + b"\n" + encode(turn("s")))
    recorder = reopened(path)
    assert len(recorder.sessions["s"].turns) == 2 and recorder.lost == 1


def test_impossible_values_do_not_break_the_session(path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"token_ids": [-1]},
        {"new_ids": [2**70]},
        {"logprobs": []},
        {"id": ""},
        {"routed_experts": {"data": "AA==", "shape": [10**9, 10**9, 1], "start": 0}},
        {"routed_experts": {"data": "AA==", "shape": [1, 1, 1], "start": -1}},
    ]
    path.write_bytes(hostile({"id": "a"}, *wrong))
    session = reopened(path).sessions["s"]
    assert [each.id for each in session.turns] == ["a"] and session.lost == len(wrong)
    assert len(session.trajectories()) == 1


# --- journals of the version before --------------------------------------------------------------


def old(session: str, parent: int | None = None) -> bytes:
    fields = json.loads(encode(turn(session)))["entry"]
    del fields["id"], fields["type"]
    return json.dumps({**fields, "parent": parent}, separators=(",", ":")).encode() + b"\n"


def test_a_journal_of_the_version_before_is_read(path: Path) -> None:
    path.write_bytes(
        old("s") + old("t") + old("s", 0) + old("s") + old("s", 2)
        + b'{"forgotten":"t"}\n' + old("t") + old("t", 0)
    )  # fmt: skip
    recorder = Recorder(path)
    shape = {name: len(each.trajectories()) for name, each in recorder.sessions.items()}
    assert shape == {"s": 2, "t": 1} and recorder.lost == 0
    parent = recorder.sessions["t"].turns[-1].id
    record(recorder, turn("t", parent))
    before = {name: each.trajectories() for name, each in recorder.sessions.items()}
    kill(recorder)
    again = reopened(path)
    assert {name: each.trajectories() for name, each in again.sessions.items()} == before


def test_turns_that_go_on_from_an_old_journal_find_it_before_compaction(path: Path) -> None:
    content = old("s") + old("s", 0)
    path.write_bytes(content)
    faults = FaultyDisk(failing={"replace"})
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, turn("s", recorder.sessions["s"].turns[-1].id))
    before = recorder.sessions["s"].trajectories()
    kill(recorder)
    assert path.read_bytes().startswith(content)
    again = Recorder(path, disk=faults.as_disk())
    assert again.sessions["s"].trajectories() == before and len(before) == 1
    kill(again)


def test_a_damaged_line_of_the_version_before_joins_no_two_conversations(path: Path) -> None:
    lines = [old("s"), old("s"), old("s", 0), old("s", 1), old("s", 3), old("s"), old("s", 5)]
    path.write_bytes(b"".join(lines))
    whole = reopened(path).sessions["s"].trajectories()
    for position in range(len(lines)):
        path.write_bytes(b"".join([*lines[:position], b"?\n", *lines[position + 1 :]]))
        recorder = reopened(path)
        session = recorder.sessions["s"]
        for sequence in session.trajectories():
            joined = [each.token_ids[: len(sequence.token_ids)] for each in whole]
            assert sequence.token_ids in joined
        assert len(session.turns) + recorder.lost == len(lines)


def test_a_turn_of_a_deleted_session_in_an_old_journal_hangs_nobody(path: Path) -> None:
    """The version before recorded such a turn as its own parent."""
    path.write_bytes(old("s") + b'{"forgotten":"s"}\n' + old("s", 0) + old("s", 0))
    recorder = reopened(path)
    session = recorder.sessions["s"]
    assert session.trajectories() == [] and session.lost == 2


# --- who may read it -----------------------------------------------------------------------------


def test_nobody_else_can_read_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "newer" / "journal.jsonl"
    mask = os.umask(0)
    try:
        recorder = Recorder(path)
        record(recorder, turn("s"))
        recorder.compact()
        recorder.close()
    finally:
        os.umask(mask)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    for directory in (path.parent, path.parent.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)  # as the version before left it
    reopened(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_journal_that_is_a_pipe_hangs_nobody(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        Recorder(path)


# --- threads and kills ---------------------------------------------------------------------------


async def test_syncing_turns_share_a_wait_and_keep_their_order(path: Path) -> None:
    recorder = Recorder(path, sync=True)

    async def agent(name: str) -> list[str]:
        session, parent, known = recorder.open(name), None, []
        for _ in range(20):
            new = turn(name, parent)
            assert await recorder.add_async(session, [new])
            assert new.id in session
            parent = new.id
            known.append(parent)
        return known

    names = [f"s{number}" for number in range(16)]
    known = dict(zip(names, await asyncio.gather(*map(agent, names)), strict=True))
    assert await recorder.forget_async("s0") and not await recorder.forget_async("s0")
    kill(recorder)
    again = reopened(path)
    assert {name: ids(again, name) for name in again.sessions} == {
        name: known[name] for name in names[1:]
    }
    assert all(len(each.trajectories()) == 1 for each in again.sessions.values())


async def test_a_full_disk_refuses_all_that_wait_for_it(path: Path) -> None:
    faults = FaultyDisk(room=500)
    recorder = Recorder(path, sync=True, disk=faults.as_disk())
    adds = [recorder.add_async(recorder.open(f"s{n}"), [turn(f"s{n}")]) for n in range(20)]
    answers = await asyncio.gather(*adds, return_exceptions=True)
    assert any(isinstance(answer, JournalFull) for answer in answers)
    acknowledged = {f"s{n}" for n, answer in enumerate(answers) if answer is True}
    assert set(recorder.sessions) == acknowledged
    kill(recorder)
    assert set(reopened(path).sessions) == acknowledged


_WRITER = """
import os, sys, threading
from pathlib import Path
from rollway.gateway.recorder import Recorder
from tests.security.disks import turn

recorder = Recorder(Path(sys.argv[1]), sync=sys.argv[2] == "sync")

def write(name):
    session, parent = recorder.open(name), None
    while True:
        new = turn(name, parent, model="x" * 300)
        assert recorder.add(session, new)
        os.write(1, f"{name} {new.id}\\n".encode())
        parent = new.id

def churn():
    while True:
        name = "churned"
        recorder.add(recorder.open(name), turn(name))
        recorder.forget(name)
        recorder.compact()

threads = [threading.Thread(target=write, args=(f"s{n}",), daemon=True) for n in range(8)]
threads.append(threading.Thread(target=churn, daemon=True))
for thread in threads:
    thread.start()
threads[0].join()
"""


@pytest.mark.parametrize("sync", ["sync", "plain"])
def test_killing_the_gateway_under_eight_writers_loses_no_turn(path: Path, sync: str) -> None:
    acknowledged: dict[str, list[str]] = {}
    for rounds in range(1, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), sync], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(97 * rounds)]
        process.kill()
        lines += process.stdout.readlines()
        process.wait()
        for line in lines:
            if line.endswith(b"\n"):
                name, identity = line.decode().split()
                acknowledged.setdefault(name, []).append(identity)
        recorder = reopened(path)
        assert recorder.lost == 0
        for name, known in acknowledged.items():
            recorded = ids(recorder, name)
            assert len(set(recorded)) == len(recorded)
            assert [each for each in recorded if each in set(known)] == known
    assert sum(map(len, acknowledged.values())) >= 97 * 4


def test_a_turn_that_could_not_be_read_back_is_not_acknowledged(path: Path) -> None:
    recorder = Recorder(path)
    endless = turn("s", logprobs=[float("-inf")])  # JSON has no such number
    wrong: list[Turn] = [turn("s", logprobs=[]), turn("s", token_ids=[-1]), endless]
    for new in wrong:
        with pytest.raises(RolloutError):
            record(recorder, new)
    assert recorder.sessions == {} and path.stat().st_size == 0
    with pytest.raises(UsageError):
        recorder.open("\udcff")
    recorder.close()


async def test_a_failure_that_nobody_foresaw_hangs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `sync` a thread records: whatever it raises must reach the requests that wait."""
    recorder = Recorder(tmp_path / "journal.jsonl", sync=True)

    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rollway.gateway.recorder.encode", fail)
        with pytest.raises(MemoryError):
            async with asyncio.timeout(30):
                await recorder.add_async(recorder.open("s"), [turn("s")])
    assert await recorder.add_async(recorder.open("s"), [turn("s")])
    recorder.close()


def test_compaction_takes_no_room_that_turns_need(small_disk: Path) -> None:
    """It used to fill the disk before it failed, and turns in between were refused."""
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    while shutil.disk_usage(small_disk).free > 24_000:
        record(recorder, turn("s"))
    with pytest.raises(OSError, match="No space"):
        recorder.compact()
    assert not path.with_name("journal.jsonl.new").exists()
    assert record(recorder, turn("s"))
    recorder.close()
