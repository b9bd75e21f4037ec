"""What full disks, damaged files, deleted sessions and killed gateways can lose."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import RolloutError, UsageError
from rollway.gateway.entries import encode
from rollway.gateway.journal import JournalFull
from rollway.gateway.recorder import Recorder, Turn
from tests.security.disks import FaultyDisk, kill, make_turn, record
from tests.security.small_disk import fill
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


def list_ids(recorder: Recorder, session: str) -> list[str]:
    return [turn.id for turn in recorder.sessions[session].turns]


def reopen(path: Path) -> Recorder:
    """Read the journal as the next gateway does, and close it so that the file is unlocked."""
    recorder = Recorder(path)
    recorder.close()
    return recorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


# --- deleted sessions ----------------------------------------------------------------------------


def test_deleting_a_session_with_a_turn_in_flight_records_nothing(path: Path) -> None:
    recorder = Recorder(path)
    session = recorder.open("s")
    first = make_turn("s")
    assert recorder.add(session, first)
    assert recorder.forget("s") and session.gone
    assert not recorder.add(session, make_turn("s", first.id))
    assert recorder.sessions == {}
    assert recorder.open("s") is not session
    # A parent in the deleted session is no parent in the new one.
    assert record(recorder, make_turn("s", first.id))
    root = recorder.sessions["s"].turns[0]
    assert root.parent is None and "not recorded" in root.forked
    recorder.close()
    again = reopen(path)
    assert len(again.sessions["s"].trajectories()) == 1 and again.lost == 0


def test_deleting_a_session_before_its_first_turn_ends_it(path: Path) -> None:
    recorder = Recorder(path)
    session = recorder.open("s")
    assert recorder.open("s") is session and recorder.sessions == {} and "s" in recorder
    assert recorder.forget("s") and session.gone
    assert not recorder.add(session, make_turn("s")) and recorder.sessions == {}
    assert not recorder.forget("s") and "s" not in recorder
    recorder.close()


def test_failed_requests_leave_no_session(path: Path) -> None:
    recorder = Recorder(path)
    for number in range(100):
        recorder.open(f"failed {number}")
    assert recorder.sessions == {}
    assert not any(f"failed {number}" in recorder for number in range(100))
    recorder.close()


def test_deleted_text_is_erased_in_bounded_time(path: Path) -> None:
    recorder = Recorder(path, erase_within=0.2)
    record(recorder, make_turn("secret", model="the secret"))
    for _ in range(50):
        record(recorder, make_turn("kept"))
    expected = list_ids(recorder, "kept")
    recorder.forget("secret")
    wait_until(lambda: b"secret" not in path.read_bytes())
    recorder.close()
    assert list_ids(reopen(path), "kept") == expected


def test_deleted_text_is_erased_when_the_gateway_ends_first(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, make_turn("secret"))
    recorder.forget("secret")
    recorder.close()
    assert path.read_bytes() == b""


def test_deleted_text_is_erased_after_a_kill(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, make_turn("secret"))
    recorder.forget("secret")
    kill(recorder)
    again = Recorder(path)
    assert again.sessions == {}
    wait_until(lambda: path.read_bytes() == b"")
    again.close()


def test_a_file_of_mostly_deleted_turns_is_compacted_at_once(path: Path) -> None:
    recorder = Recorder(path, erase_within=1e6)
    record(recorder, make_turn("kept"))
    record(recorder, make_turn("large", model="x" * 2**21))
    recorder.forget("large")
    wait_until(lambda: path.stat().st_size < 2**20)
    record(recorder, make_turn("kept"))
    expected = list_ids(recorder, "kept")
    kill(recorder)
    assert list_ids(reopen(path), "kept") == expected


def test_turns_added_during_compaction_are_kept(path: Path) -> None:
    recorder = Recorder(path)
    ended = threading.Event()

    def compact() -> None:
        while not ended.is_set():
            recorder.compact()

    thread = threading.Thread(target=compact)
    thread.start()
    for number in range(2000):
        record(recorder, make_turn(f"s{number % 7}"))
    ended.set()
    thread.join()
    known = {name: list_ids(recorder, name) for name in recorder.sessions}
    kill(recorder)
    again = reopen(path)
    assert {name: list_ids(again, name) for name in again.sessions} == known


# --- full disks ----------------------------------------------------------------------------------


def test_a_short_write_is_refused_and_joins_no_lines(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, make_turn("s"))
    length = path.stat().st_size
    for free_bytes in (0, 1, 50):
        faults.free_bytes = free_bytes
        with pytest.raises(JournalFull, match="No space left on device") as error:
            record(recorder, make_turn("s"))
        assert error.value.http_status == 507
        assert path.stat().st_size == length and len(recorder.sessions["s"].turns) == 1
    faults.free_bytes = None
    record(recorder, make_turn("s"))
    known = list_ids(recorder, "s")
    kill(recorder)
    again = reopen(path)
    assert list_ids(again, "s") == known and again.lost == 0


def test_a_failed_truncation_is_repaired_before_the_next_turn(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, make_turn("s"))
    faults.free_bytes, faults.failing = 20, {"truncate"}
    with pytest.raises(JournalFull):
        record(recorder, make_turn("s"))
    faults.free_bytes = None
    with pytest.raises(JournalFull, match="Input/output error"):
        record(recorder, make_turn("s"))
    faults.failing = set()
    record(recorder, make_turn("s"))
    known = list_ids(recorder, "s")
    kill(recorder)
    again = reopen(path)
    assert len(known) == 2 and list_ids(again, "s") == known and again.lost == 0


def test_a_turn_that_cannot_be_synced_is_refused(path: Path) -> None:
    faults = FaultyDisk(failing={"sync"})
    recorder = Recorder(path, sync=True, disk=faults.as_disk())
    with pytest.raises(JournalFull, match="Input/output error"):
        record(recorder, make_turn("s"))
    assert recorder.sessions == {} and path.stat().st_size == 0
    recorder.close()


def test_a_torn_line_blocks_new_turns_until_it_can_be_moved_aside(path: Path) -> None:
    path.write_bytes(encode(make_turn("s")) + b'{"torn')
    faults = FaultyDisk(free_bytes=0)
    recorder = Recorder(path, disk=faults.as_disk())
    for _ in range(2):
        with pytest.raises(JournalFull, match="No space left"):
            record(recorder, make_turn("s"))
        assert path.read_bytes().endswith(b'{"torn')
    faults.free_bytes = None
    assert record(recorder, make_turn("s"))
    assert path.with_name("journal.jsonl.unreadable").read_bytes() == b'{"torn\n'
    kill(recorder)
    assert len(reopen(path).sessions["s"].turns) == 2


def test_removing_the_file_is_detected_before_a_turn_is_acknowledged(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, make_turn("s"))
    path.unlink()
    with pytest.raises(JournalFull, match="removed it"):
        record(recorder, make_turn("s"))
    recorder.close()


def test_a_delete_on_a_full_disk_is_refused(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, make_turn("s"))
    faults.free_bytes = 0
    with pytest.raises(JournalFull):
        recorder.forget("s")
    assert not recorder.sessions["s"].gone
    faults.free_bytes = None
    assert recorder.forget("s")
    recorder.close()


def test_failed_compaction_is_retried(path: Path) -> None:
    faults = FaultyDisk()
    recorder = Recorder(path, erase_within=0.1, disk=faults.as_disk())
    record(recorder, make_turn("kept"))
    record(recorder, make_turn("secret"))
    faults.failing = {"replace"}
    recorder.forget("secret")
    with pytest.raises(OSError, match="quota"):
        recorder.compact()
    record(recorder, make_turn("kept"))
    assert b"secret" in path.read_bytes() and not path.with_name("journal.jsonl.new").exists()
    faults.failing = set()
    wait_until(lambda: b"secret" not in path.read_bytes())
    known = list_ids(recorder, "kept")
    recorder.close()
    assert list_ids(reopen(path), "kept") == known


def test_a_full_disk_loses_no_turn(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    session, refused = recorder.open("s"), 0
    parent = None
    while refused < 3:
        new = make_turn("s", parent, model="x" * 1000)
        try:
            assert recorder.add(session, new)
            parent = new.id
        except JournalFull as error:
            assert os.strerror(errno.ENOSPC) in error.message
            refused += 1
    known = list_ids(recorder, "s")
    kill(recorder)
    (small_disk / "journal.lock").unlink()

    full = Recorder(path)
    assert list_ids(full, "s") == known and full.lost == 0
    assert len(full.sessions["s"].trajectories()) == 1
    with pytest.raises(JournalFull):
        record(full, make_turn("s", parent, model="x" * 5000))
    full.close()

    subprocess.run(["mount", "-o", "remount,size=256k", str(small_disk)], check=True)
    roomy = Recorder(path)
    assert record(roomy, make_turn("s", parent))
    roomy.forget("s")
    roomy.close()
    assert reopen(path).sessions == {}


def test_recording_resumes_without_a_restart_when_space_is_freed(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    record(recorder, make_turn("s"))
    filler = fill(small_disk)
    accepted = 0
    with pytest.raises(JournalFull):
        for _ in range(100):
            record(recorder, make_turn("s"))
            accepted += 1
    filler.unlink()
    assert record(recorder, make_turn("s"))
    known = list_ids(recorder, "s")
    assert len(known) == accepted + 2
    kill(recorder)
    assert list_ids(reopen(path), "s") == known


def test_a_read_only_disk_serves_recorded_turns(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    record(recorder, make_turn("s"))
    known = list_ids(recorder, "s")
    kill(recorder)
    with path.open("ab") as file:
        file.write(b'{"torn')
    (small_disk / "journal.lock").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reader = Recorder(path)
    assert list_ids(reader, "s") == known and len(reader.sessions["s"].trajectories()) == 1
    with pytest.raises(JournalFull, match="Read-only file system"):
        record(reader, make_turn("s"))
    with pytest.raises(JournalFull, match="Read-only file system"):
        reader.forget("s")
    with pytest.raises(UsageError, match="Another gateway"):
        Recorder(path)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert record(reader, make_turn("s"))
    known = list_ids(reader, "s")
    reader.close()
    assert list_ids(reopen(path), "s") == known and len(known) == 2


def test_turns_of_another_gateway_are_not_overwritten(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    first = Recorder(path)
    record(first, make_turn("s"))
    kill(first)
    (small_disk / "journal.lock").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reader = Recorder(path)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with path.open("ab") as file:
        file.write(encode(make_turn("other")))
    with pytest.raises(JournalFull, match="Another program changed it"):
        record(reader, make_turn("s"))
    reader.close()
    assert set(reopen(path).sessions) == {"s", "other"}


# --- damaged files -------------------------------------------------------------------------------


def test_a_damaged_line_loses_only_its_turn_and_descendants(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(path)
    chain = [make_turn("s", id="a"), make_turn("s", "a", id="b"), make_turn("s", "b", id="c")]
    other = [make_turn("s", id="x"), make_turn("s", "x", id="y"), make_turn("t", id="z")]
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
    assert list_ids(again, "s") == ["a", "x", "y"] and list_ids(again, "t") == ["z"]
    assert again.sessions["s"].trajectories()[1] == whole[1]
    assert again.sessions["s"].lost == 2 and again.sessions["t"].lost == 0 and again.lost == 2
    assert "has 2 unusable lines" in caplog.text and "missing in s" in caplog.text
    unreadable = path.with_name("journal.jsonl.unreadable")
    wait_until(lambda: path.stat().st_size < sum(map(len, lines)) - len(lines[2]))
    again.close()
    assert unreadable.read_bytes() == damaged + lines[2]
    assert unreadable.stat().st_mode & 0o777 == 0o600
    last = Recorder(path)
    assert list_ids(last, "s") == ["a", "x", "y"]
    assert last.sessions["s"].lost == 2  # a later start still reports it
    last.forget("s")
    last.close()
    assert unreadable.read_bytes() == b""  # deleted here as well


def test_a_session_whose_first_turn_is_damaged_is_still_reported(path: Path) -> None:
    lines = [encode(make_turn("s", id="a")), encode(make_turn("s", "a"))]
    path.write_bytes(lines[0][:30] + b"?" + lines[0][31:] + lines[1])
    recorder = reopen(path)
    session = recorder.sessions["s"]
    assert session.turns == [] and session.lost == 2 and session.trajectories() == []


def test_a_torn_last_line_is_never_joined_to_the_next(path: Path) -> None:
    first, second = encode(make_turn("s")), encode(make_turn("s"))
    for cut in (1, 20, len(second) - 2, len(second) - 1):
        path.write_bytes(first + second[:cut])
        recorder = Recorder(path)
        record(recorder, make_turn("s", id=f"after {cut}"))
        known = list_ids(recorder, "s")
        kill(recorder)
        again = reopen(path)
        assert list_ids(again, "s") == known and f"after {cut}" in known and again.lost == 0
    unreadable = path.with_name("journal.jsonl.unreadable").read_bytes().splitlines()
    assert unreadable[-1] == second[:-1] and len(unreadable) == 4


def encode_turns(*entries: dict[str, Any]) -> bytes:
    return b"".join(encode(make_turn("s", **entry)) for entry in entries)


@pytest.mark.parametrize(
    "content",
    [
        encode_turns({"id": "a", "parent": "a"}),
        encode_turns({"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}),
        encode_turns({"id": "a", "parent": "c"}, {"id": "b", "parent": "a"}, {"id": "c"}),
        encode_turns({"id": "a"}, {"id": "b", "parent": "a"}, {"id": "a", "parent": "b"}),
    ],
    ids=["its own parent", "a ring", "a parent that comes later", "an id twice"],
)
def test_a_cycle_in_the_file_does_not_hang_the_reader(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    recorder = reopen(path)
    session = recorder.sessions["s"]
    for turn in session.turns:
        session.ids(turn.id)
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
def test_a_hostile_line_loses_only_itself(path: Path, line: bytes) -> None:
    path.write_bytes(encode(make_turn("s")) + line + b"\n" + encode(make_turn("s")))
    recorder = reopen(path)
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
    path.write_bytes(encode_turns({"id": "a"}, *wrong))
    session = reopen(path).sessions["s"]
    assert [turn.id for turn in session.turns] == ["a"] and session.lost == len(wrong)
    assert len(session.trajectories()) == 1


# --- journals of the previous format -------------------------------------------------------------


def encode_old_turn(session: str, parent: int | None = None) -> bytes:
    fields = json.loads(encode(make_turn(session)))["entry"]
    del fields["id"], fields["type"]
    return json.dumps({**fields, "parent": parent}, separators=(",", ":")).encode() + b"\n"


def test_a_journal_of_the_previous_format_is_read(path: Path) -> None:
    path.write_bytes(
        encode_old_turn("s") + encode_old_turn("t")
        + encode_old_turn("s", 0) + encode_old_turn("s") + encode_old_turn("s", 2)
        + b'{"forgotten":"t"}\n' + encode_old_turn("t") + encode_old_turn("t", 0)
    )  # fmt: skip
    recorder = Recorder(path)
    shape = {name: len(session.trajectories()) for name, session in recorder.sessions.items()}
    assert shape == {"s": 2, "t": 1} and recorder.lost == 0
    parent = recorder.sessions["t"].turns[-1].id
    record(recorder, make_turn("t", parent))
    before = {name: session.trajectories() for name, session in recorder.sessions.items()}
    kill(recorder)
    again = reopen(path)
    assert {name: session.trajectories() for name, session in again.sessions.items()} == before


def test_turns_that_continue_an_old_journal_keep_their_parents_before_compaction(
    path: Path,
) -> None:
    content = encode_old_turn("s") + encode_old_turn("s", 0)
    path.write_bytes(content)
    faults = FaultyDisk(failing={"replace"})
    recorder = Recorder(path, disk=faults.as_disk())
    record(recorder, make_turn("s", recorder.sessions["s"].turns[-1].id))
    before = recorder.sessions["s"].trajectories()
    kill(recorder)
    assert path.read_bytes().startswith(content)
    again = Recorder(path, disk=faults.as_disk())
    assert again.sessions["s"].trajectories() == before and len(before) == 1
    kill(again)


def test_a_damaged_line_of_the_previous_format_joins_no_two_conversations(path: Path) -> None:
    lines = [
        encode_old_turn("s"),
        encode_old_turn("s"),
        encode_old_turn("s", 0),
        encode_old_turn("s", 1),
        encode_old_turn("s", 3),
        encode_old_turn("s"),
        encode_old_turn("s", 5),
    ]
    path.write_bytes(b"".join(lines))
    whole = reopen(path).sessions["s"].trajectories()
    for position in range(len(lines)):
        path.write_bytes(b"".join([*lines[:position], b"?\n", *lines[position + 1 :]]))
        recorder = reopen(path)
        session = recorder.sessions["s"]
        for sequence in session.trajectories():
            joined = [other.token_ids[: len(sequence.token_ids)] for other in whole]
            assert sequence.token_ids in joined
        assert len(session.turns) + recorder.lost == len(lines)


def test_a_turn_of_a_deleted_session_in_an_old_journal_does_not_hang_the_reader(path: Path) -> None:
    """The previous version recorded such a turn as its own parent."""
    path.write_bytes(
        encode_old_turn("s")
        + b'{"forgotten":"s"}\n'
        + encode_old_turn("s", 0)
        + encode_old_turn("s", 0)
    )
    recorder = reopen(path)
    session = recorder.sessions["s"]
    assert session.trajectories() == [] and session.lost == 2


# --- permissions ---------------------------------------------------------------------------------


def test_other_users_cannot_read_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "newer" / "journal.jsonl"
    mask = os.umask(0)
    try:
        recorder = Recorder(path)
        record(recorder, make_turn("s"))
        recorder.compact()
        recorder.close()
    finally:
        os.umask(mask)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    for directory in (path.parent, path.parent.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)  # as the previous version left it
    reopen(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_journal_that_is_a_pipe_is_refused(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        Recorder(path)


# --- threads and kills ---------------------------------------------------------------------------


async def test_synced_turns_share_a_wait_and_keep_their_order(path: Path) -> None:
    recorder = Recorder(path, sync=True)

    async def agent(name: str) -> list[str]:
        session, parent, known = recorder.open(name), None, []
        for _ in range(20):
            new = make_turn(name, parent)
            assert await recorder.add_async(session, [new])
            assert new.id in session
            parent = new.id
            known.append(parent)
        return known

    names = [f"s{number}" for number in range(16)]
    known = dict(zip(names, await asyncio.gather(*map(agent, names)), strict=True))
    assert await recorder.forget_async("s0") and not await recorder.forget_async("s0")
    kill(recorder)
    again = reopen(path)
    assert {name: list_ids(again, name) for name in again.sessions} == {
        name: known[name] for name in names[1:]
    }
    assert all(len(session.trajectories()) == 1 for session in again.sessions.values())


async def test_a_full_disk_keeps_only_acknowledged_turns_of_those_waiting(path: Path) -> None:
    faults = FaultyDisk(free_bytes=500)
    recorder = Recorder(path, sync=True, disk=faults.as_disk())
    adds = [recorder.add_async(recorder.open(f"s{n}"), [make_turn(f"s{n}")]) for n in range(20)]
    answers = await asyncio.gather(*adds, return_exceptions=True)
    assert any(isinstance(answer, JournalFull) for answer in answers)
    acknowledged = {f"s{n}" for n, answer in enumerate(answers) if answer is True}
    assert set(recorder.sessions) == acknowledged
    kill(recorder)
    assert set(reopen(path).sessions) == acknowledged


_WRITER = """
import os, sys, threading
from pathlib import Path
from rollway.gateway.recorder import Recorder
from tests.security.disks import make_turn

recorder = Recorder(Path(sys.argv[1]), sync=sys.argv[2] == "sync")

def write(name):
    session, parent = recorder.open(name), None
    while True:
        new = make_turn(name, parent, model="x" * 300)
        assert recorder.add(session, new)
        os.write(1, f"{name} {new.id}\\n".encode())
        parent = new.id

def churn():
    while True:
        name = "churned"
        recorder.add(recorder.open(name), make_turn(name))
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
        recorder = reopen(path)
        assert recorder.lost == 0
        for name, known in acknowledged.items():
            recorded = list_ids(recorder, name)
            assert len(set(recorded)) == len(recorded)
            assert [identity for identity in recorded if identity in set(known)] == known
    assert sum(map(len, acknowledged.values())) >= 97 * 4


def test_a_turn_that_cannot_be_read_back_is_not_acknowledged(path: Path) -> None:
    recorder = Recorder(path)
    infinite = make_turn("s", logprobs=[float("-inf")])  # JSON has no infinity
    wrong: list[Turn] = [make_turn("s", logprobs=[]), make_turn("s", token_ids=[-1]), infinite]
    for new in wrong:
        with pytest.raises(RolloutError):
            record(recorder, new)
    assert recorder.sessions == {} and path.stat().st_size == 0
    with pytest.raises(UsageError):
        recorder.open("\udcff")
    recorder.close()


async def test_an_unexpected_failure_hangs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `sync` a thread records. Every exception in it must reach the waiting requests."""
    recorder = Recorder(tmp_path / "journal.jsonl", sync=True)

    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rollway.gateway.recorder.encode", fail)
        with pytest.raises(MemoryError):
            async with asyncio.timeout(30):
                await recorder.add_async(recorder.open("s"), [make_turn("s")])
    assert await recorder.add_async(recorder.open("s"), [make_turn("s")])
    recorder.close()


def test_compaction_uses_no_space_that_turns_need(small_disk: Path) -> None:
    """Compaction once filled the disk before it failed, and turns were refused meanwhile."""
    path = small_disk / "journal.jsonl"
    recorder = Recorder(path)
    while shutil.disk_usage(small_disk).free > 24_000:
        record(recorder, make_turn("s"))
    with pytest.raises(OSError, match="No space"):
        recorder.compact()
    assert not path.with_name("journal.jsonl.new").exists()
    assert record(recorder, make_turn("s"))
    recorder.close()
