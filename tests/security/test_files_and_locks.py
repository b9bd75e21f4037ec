"""Other users of the machine cannot read our files, prepare our directories or hold our locks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollway import cli as rollway_cli
from rollway import private_files
from rollway.errors import PortInUse, StartError
from rollway.stack.locks import Lease, NamedLock, get_lock_directory, hold_machine_lock
from rollway.stack.running import WeightsFile
from rollway.stack.state import StackDir, StackState, make_home, write_secret
from tests.children import start_child
from tests.security.other_user import NOBODY, another_user, needs_root
from tests.waiting import wait_until, wait_until_async


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def loose_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def make_state(name: str, home: Path) -> StackState:
    return StackState(
        name=name,
        run_id="0123456789abcdef",
        supervisor_pid=2**22 + 1,
        supervisor_start=1,
        run_dir=f"/tmp/rollway-{os.getuid()}-01234567",
        log_dir=str(home / "stacks" / name / "logs"),
    )


def test_files_are_private_under_a_loose_umask_and_in_a_loose_home(
    own_home: Path, tmp_path: Path, loose_umask: None
) -> None:
    own_home.mkdir(mode=0o777)
    directory = StackDir("s")
    directory.create()
    directory.begin(make_state("s", own_home))
    WeightsFile("s", "0123456789abcdef", "tiny").claim(1, "weights")
    private_files.make_scratch(tmp_path / "run")
    write_secret(tmp_path / "run")
    for base in (own_home, tmp_path / "run"):
        for path in (base, *base.rglob("*")):
            assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
    assert len(list(own_home.rglob("*"))) == 5


def test_readable_files_of_an_earlier_version_become_private(own_home: Path) -> None:
    directory = StackDir("s")
    directory.path.mkdir(parents=True)
    for path in (own_home, directory.path.parent, directory.path):
        path.chmod(0o755)
    directory.create()
    for path in (own_home, directory.path.parent, directory.path):
        assert mode_of(path) == 0o700


@needs_root
def test_a_home_that_another_user_owns_is_refused(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_home.mkdir()
    os.chown(own_home, NOBODY, NOBODY)
    assert rollway_cli.main(["up", "--model", "org/model"]) == 1
    assert f"{own_home} belongs to another user ({NOBODY})" in capsys.readouterr().err
    os.chown(own_home, 0, 0)


def test_a_home_that_all_users_share_is_refused_and_unchanged(own_home: Path) -> None:
    own_home.mkdir()
    own_home.chmod(0o1777)
    with pytest.raises(StartError, match="all users share"):
        make_home()
    assert mode_of(own_home) == 0o1777
    own_home.chmod(0o700)


def test_a_scratch_directory_that_exists_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    for existing in (target, tmp_path / "link"):
        with pytest.raises(StartError, match="exists already"):
            private_files.make_scratch(existing)


def test_a_log_that_is_a_link_to_another_file_is_not_written(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "frontend.log").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        private_files.open_file(tmp_path / "frontend.log", os.O_WRONLY | os.O_TRUNC)
    assert precious.read_text() == "content"


@needs_root
def test_another_user_cannot_hold_our_locks(own_home: Path) -> None:
    """Neither names seen in /proc/net/unix nor names that can be guessed help."""
    directory = StackDir("s")
    directory.create()
    names = [directory.lock_name, directory.start_lock_name, "refit/0123456789abcdef/tiny"]
    ours = [NamedLock(name) for name in names]
    assert all(lock.acquire() for lock in ours)
    visible = [
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()
        if "@rollway/" in line
    ]
    files = list(get_lock_directory().iterdir())
    for lock in ours:
        lock.release()
    sockets: list[socket.socket] = []

    def attack() -> str:
        for name in (*names, *(name.removeprefix("@rollway/") for name in visible)):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):  # another stack has it
                sockets[-1].bind(f"\0rollway/{name}"[:107])
        for file in files:
            try:
                os.open(file, os.O_RDWR | os.O_CREAT)
            except OSError:
                continue
            return f"opened {file}"
        return "bound"

    with another_user(attack) as report:
        assert report == "bound"
        assert all(lock.acquire() for lock in ours)
    for lock in ours:
        lock.release()


def test_stacks_of_two_homes_do_not_choose_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "first"))
    first, second = Lease(), Lease()
    port = first.reserve_port(0, "127.0.0.1", "x")
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "second"))
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(PortInUse):
        second.reserve_port(port, "127.0.0.1", "x")
    first.release()


def _count_up(file: Path, rounds: int, done: Connection) -> None:
    lock = NamedLock(f"test/{file}")
    for _ in range(rounds):
        wait_until(lock.acquire, every=0.0005)
        file.write_text(str(int(file.read_text()) + 1))  # loses counts if two hold the lock
        lock.release()
    done.send(None)


def test_a_lock_whose_file_is_removed_at_release_has_one_holder_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    workers = [context.Process(target=_count_up, args=(file, 150, theirs)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    ours.close()
    assert file.read_text() == "600"


HOLDER = """
import sys
from rollway.stack.locks import NamedLock
lock = NamedLock(sys.argv[1])
assert lock.acquire()
print("held", flush=True)
"""


def test_a_waiter_for_a_lock_is_shown_its_holder(capfd: pytest.CaptureFixture[str]) -> None:
    name = f"refit/{os.getpid()}"
    holder, line = start_child(HOLDER, name)
    assert line == "held"

    async def wait() -> None:
        async with hold_machine_lock(name, silent_seconds=0.2):
            pass

    async def wait_for_notice() -> str:
        task, parts = asyncio.create_task(wait()), list[str]()

        def is_shown() -> bool:
            parts.append(capfd.readouterr().err)
            return "waiting for" in "".join(parts)

        await wait_until_async(is_shown)
        holder.kill()
        await task
        return "".join(parts)

    notice = asyncio.run(wait_for_notice())
    holder.wait()
    assert f"waiting for process {holder.pid}" in notice
    assert "NamedLock" in notice  # a part of its command
    assert name in notice
