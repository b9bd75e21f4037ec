"""Logs and the directories of ended runs stay within bounds."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway import private_files, processes
from rollway.errors import SpecError
from rollway.processes import ProcessId
from rollway.spec import load_spec
from rollway.stack import logs
from rollway.stack.children import find_hint
from rollway.stack.locks import NamedLock
from rollway.stack.state import StackDir, StackState, choose_run_dir
from tests.stack.mocker import mocker_spec
from tests.waiting import wait_until

WRITER = """
import sys
for command in sys.stdin:
    first, last = map(int, command.split())
    for number in range(first, last): print("line", number, flush=True)
    print("done", file=sys.stderr, flush=True)
"""


class Writer:
    """A process that writes lines to its log on request, as a worker writes them."""

    def __init__(self, log: Path) -> None:
        with os.fdopen(private_files.open_file(log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def write(self, first: int, last: int) -> None:
        assert self.process.stdin is not None and self.process.stderr is not None
        self.process.stdin.write(f"{first} {last}\n")
        self.process.stdin.flush()
        assert self.process.stderr.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_the_log_of_a_chatty_process_is_bounded_and_loses_no_line(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    writer = Writer(log)
    try:
        for start in range(0, 5000, 100):
            writer.write(start, start + 100)
            logs.rotate(log, 4000, 3)
            files = [log, *logs.list_rotated(log)]
            assert len(files) <= 4
            assert sum(file.stat().st_size for file in files) < 4 * 6000
    finally:
        writer.close()
    files = [*reversed(logs.list_rotated(log)), log]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    lines = b"".join(file.read_bytes() for file in files).decode().splitlines()
    first = int(lines[0].split()[1])
    assert lines == [f"line {number}" for number in range(first, 5000)]  # no hole, none lost
    assert len(lines) > 600


def test_the_end_of_a_log_includes_rotated_lines(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("begin\nRuntimeError: out of memory\n")
    assert logs.rotate(log, 1, 3)
    assert log.read_text() == ""
    assert logs.tail(log) == ["begin", "RuntimeError: out of memory"]
    assert "Not enough memory" in find_hint(log)
    log.write_text("ended\n")
    assert logs.tail(log, 2) == ["RuntimeError: out of memory", "ended"]
    assert logs.read_error_tail(log)[1] == "RuntimeError: out of memory"


def test_following_a_log_survives_rotations_and_a_new_run(tmp_path: Path) -> None:
    """Also with two rotations between two reads, and with half lines."""
    log = tmp_path / "w.log"
    log.write_text("zero\nhal")

    def append(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    def rotate(text: str) -> None:
        append(text)
        assert logs.rotate(log, 1, 5)

    def twice() -> None:
        rotate("two\n")
        rotate("three\n")
        append("four\nfi")

    def next_run() -> None:
        log.rename(tmp_path / "old.log")
        append("new\nlast")

    steps = iter([lambda: append("f\n"), lambda: rotate("one\n"), twice,
                  lambda: append("ve\n"), next_run])  # fmt: skip

    def ended() -> bool:
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

    shown = list(logs.follow(log, poll_seconds=0.001, ended=ended))
    assert shown == ["zero", "half", "one", "two", "three", "four", "five", "new", "last"]


def test_a_follower_reads_all_files_while_a_rotation_renames_them(tmp_path: Path) -> None:
    """Two rotations since the last read, and a third that has moved `.2` and `.3`, not yet `.1`."""
    log = tmp_path / "w.log"
    log.write_text("first\n")
    assert logs.rotate(log, 1, 5)
    follower = logs.LogFollower(log, 5)
    assert follower.read() == ["first"]
    for text in ("second\n", "third\n"):
        with log.open("a") as file:
            file.write(text)
        assert logs.rotate(log, 1, 5)
    for number in (3, 2):
        (tmp_path / f"w.log.{number}").rename(tmp_path / f"w.log.{number + 1}")
    try:
        assert follower.read() == ["second", "third"]
        assert logs.tail(log) == ["first", "second", "third"]
    finally:
        follower.close()


def test_following_a_log_loses_no_line_while_it_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.touch()
    written = threading.Event()
    followed: list[str] = []

    def follow() -> None:
        followed.extend(logs.follow(log, poll_seconds=0.001, ended=written.is_set))

    writer = Writer(log)
    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        for start in range(0, 3000, 50):
            writer.write(start, start + 50)
            logs.rotate(log, 2000, 50)
    finally:
        writer.close()
        written.set()
        reader.join(30)
    assert followed == [f"line {number}" for number in range(3000)]


@pytest.mark.parametrize("fields", [
    {"logs": {"max_mb": 0}}, {"logs": {"max_mb": float("inf")}}, {"logs": {"keep": 0}},
    {"keep_runs": -1},
])  # fmt: skip
def test_a_spec_cannot_remove_the_bounds_of_logs(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        load_spec({"models": [{"path": "org/model"}], **fields})


# --- ended runs -----------------------------------------------------------------------------


def run_once(log_dir: Path, text: str, keep: int) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    logs.set_aside(log_dir, "t")
    logs.prune("t", log_dir, keep)
    logs.record_names(log_dir, ["w-0"])
    (log_dir / "w-0.log").write_text(text)
    (log_dir / "w-0.log.1").write_text(f"older {text}")


def test_only_the_newest_runs_keep_their_logs(tmp_path: Path, own_home: Path) -> None:
    for number in range(6):
        run_once(tmp_path, f"run {number}", 2)
        (tmp_path / "training.log").write_text("the user's own")
    runs = sorted((tmp_path / "earlier").iterdir())
    assert [(run / "w-0.log").read_text() for run in runs] == ["run 3", "run 4"]
    assert (runs[0] / "w-0.log.1").read_text() == "older run 3"
    assert (tmp_path / "w-0.log").read_text() == "run 5"
    assert (tmp_path / "training.log").exists()  # a user's file stays
    logs.prune("t", tmp_path, 0)
    logs.remove_run("t", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["training.log"]


def test_pruning_does_not_follow_links(tmp_path: Path, own_home: Path) -> None:
    outside = tmp_path / "outside"
    victim = outside / "20200101-000000"
    victim.mkdir(parents=True)
    (victim / "precious").touch()
    first_logs = tmp_path / "one"
    first_logs.mkdir()
    (first_logs / "earlier").symlink_to(outside)
    logs.prune("t", first_logs, 0)
    second_logs = tmp_path / "two" / "earlier"
    second_logs.mkdir(parents=True)
    (second_logs / "20200101-000000").symlink_to(victim)
    logs.prune("t", second_logs.parent, 0)
    (tmp_path / "three").symlink_to(first_logs)
    logs.prune("t", tmp_path / "three", 0)
    stacks = own_home / "stacks"
    stacks.mkdir(parents=True)
    (stacks / "verl-x-00000000").symlink_to(victim)
    logs.prune("verl-x-ffffffff", tmp_path / "none", 0)
    (stacks / "t").symlink_to(victim)
    logs.remove_run("t", tmp_path / "none")
    assert (victim / "precious").exists()


def test_a_forged_list_of_names_does_not_lead_out_of_the_log_directory(
    tmp_path: Path, own_home: Path
) -> None:
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    (tmp_path / "other.log").touch()
    (log_dir / "linked.log").symlink_to(tmp_path / "other.log")
    (log_dir / ".processes").write_text("../other\n/etc/x\nlinked\n\n")
    logs.set_aside(log_dir, "t")
    logs.remove_run("t", log_dir)
    assert (tmp_path / "other.log").exists()
    assert (log_dir / "linked.log").is_symlink()


def state_of(name: str, supervisor: ProcessId, log_dir: Path) -> StackState:
    run_id = secrets.token_hex(8)
    return StackState(
        name, run_id, supervisor.pid, supervisor.start, str(choose_run_dir(run_id)), str(log_dir)
    )


def ended_stack(home: Path, name: str, age: float) -> Path:
    path = home / "stacks" / name
    path.mkdir(parents=True)
    (path / "supervisor.log").touch()
    long_ago = time.time() - age
    for item in (path / "supervisor.log", path):
        os.utime(item, (long_ago, long_ago))
    return path


OTHERS = ("mine", "mine-20250101", "verl-else-00000000", "verl-pool-else-0000000b")


def test_only_the_newest_stacks_that_were_named_for_one_run_stay(
    tmp_path: Path, own_home: Path
) -> None:
    names = [f"verl-pool-0000000{number}" for number in range(6)]
    paths = [ended_stack(own_home, name, 1000.0 * (1 + n)) for n, name in enumerate(names)]
    other = [ended_stack(own_home, name, 10**6) for name in OTHERS]
    starting = ended_stack(own_home, "verl-pool-0000000a", 1.0)
    os.utime(starting, (0, 0))
    lock = NamedLock(StackDir(names[4]).lock_name)
    assert lock.acquire()
    # A killed supervisor left it behind; `rollway down` clears it.
    StackDir(names[5]).write(state_of(names[5], ProcessId(2**22, 1), tmp_path))
    os.utime(paths[5], (0, 0))
    try:
        logs.prune("verl-pool-ffffffff", tmp_path, 2)
    finally:
        lock.release()
    assert [path.exists() for path in paths] == [True, True, False, False, True, True]
    assert starting.exists() and all(path.exists() for path in other)


def test_the_logs_of_a_running_stack_are_not_moved_by_another(
    tmp_path: Path, own_home: Path
) -> None:
    run_once(tmp_path, "running", 5)
    me = ProcessId.of(os.getpid())
    assert me is not None
    StackDir("t").write(state_of("t", me, tmp_path))
    logs.set_aside(tmp_path, "second")
    assert (tmp_path / "w-0.log").read_text() == "running"
    StackDir("t").forget()


# --- a real stack --------------------------------------------------------------------------


def send_requests(url: str, count: int) -> None:
    def send(number: int) -> None:
        prompt = [10 + (number * 7 + i) % 180 for i in range(60)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(count)))


def log_bytes() -> int:
    return sum(file.stat().st_size for file in StackDir("t").logs.glob("*.log*"))


@pytest.mark.stack
def test_a_request_costs_less_than_a_kilobyte_of_log(base_model: Path) -> None:
    with rollway.up(mocker_spec(base_model)) as stack:
        before = log_bytes()
        send_requests(stack.frontend_url, 200)
        assert (log_bytes() - before) / 200 < 800
        text = "".join(file.read_text() for file in StackDir("t").logs.glob("*.log"))
        assert " INFO " in text  # some of it stays


@pytest.mark.stack
def test_the_logs_of_a_long_run_are_bounded(base_model: Path) -> None:
    """Dynamo's own level logs 2 KB per request; after five rounds at most three remain."""
    fields = {"env": {"DYN_LOG": "info"}, "logs": {"max_mb": 0.02, "keep": 2}, "keep_runs": 0}
    with rollway.up(mocker_spec(base_model, **fields)) as stack:
        log_dir = StackDir("t").logs
        for _ in range(5):
            send_requests(stack.frontend_url, 100)
            wait_until(
                lambda: max(file.stat().st_size for file in log_dir.glob("*.log")) < 20_000,
                30,
                what="the logs are rotated",
            )
        assert len(logs.list_rotated(log_dir / "frontend.log")) == 2
        assert log_bytes() < 4 * 100 * 2000
    assert not StackDir("t").path.exists()  # keep_runs: 0


@pytest.mark.stack
def test_a_stack_that_is_started_often_keeps_the_logs_of_few_runs(base_model: Path) -> None:
    spec = mocker_spec(base_model, keep_runs=2)
    for _ in range(3):
        with rollway.up(spec):
            assert processes.find_members(StackDir("t").read().run_id)  # type: ignore[union-attr]
    logs_dir = StackDir("t").logs
    assert len(list((logs_dir / "earlier").iterdir())) == 1  # and the last one in its place
    assert (logs_dir / "frontend.log").stat().st_size > 0
