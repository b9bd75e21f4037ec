"""What dead runs leave on a machine, told from what living ones have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollway import processes
from rollway.processes import ProcessId
from rollway.stack import machine_check
from rollway.stack.state import make_run_dir_name
from rollway.weights import adapter, leftovers
from tests.waiting import wait_until

RUN = "0123456789abcdef"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Places of this test alone; others use the real ones at the same time."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(machine_check, "SHM", shm)
    monkeypatch.setattr(adapter, "HOME", shm)
    monkeypatch.setattr(machine_check, "list_bases", lambda: {tmp_path})
    find_runs = processes.find_runs
    monkeypatch.setattr(
        processes, "find_runs", lambda: {r: m for r, m in find_runs().items() if r == RUN}
    )
    return tmp_path


@contextmanager
def run_member(code: str = SLEEP) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with a run's mark."""
    env = {**os.environ, **processes.make_run_environment(RUN)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        wait_until(lambda: processes.read_run_id(process.pid) == RUN)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def dead_mark() -> str:
    """The mark of a writer that has ended."""
    code = "from rollway.weights.leftovers import writer_mark; print(writer_mark())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def list_checks() -> list[str]:
    return [finding.what for finding in machine_check.check_leftovers()]


def test_processes_without_a_supervisor_are_found_with_their_pids() -> None:
    assert machine_check.find_orphans() == {}
    with run_member() as process:
        assert machine_check.find_orphans() == {RUN: [ProcessId.of(process.pid)]}
        (finding,) = machine_check.check_leftovers()
        assert finding.what == "processes" and finding.fix == f"End them: kill {process.pid}"
    assert list_checks() == []


def test_a_supervised_run_of_another_home_is_no_orphan() -> None:
    """A stand-in for a supervisor, told by its command: it starts a member, whose child has no
    supervisor as its parent but one above it."""
    member = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    code = (
        "# rollway.stack.supervisor\n"
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {processes.MARK!r}: {RUN!r}}}\n"
        f"subprocess.run([sys.executable, '-c', {member!r}], env=env)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: len(processes.find_runs().get(RUN, ())) == 2)
        assert machine_check.find_orphans() == {}
    finally:
        supervisor.kill()
        supervisor.wait()
        orphans = machine_check.find_orphans()[RUN]
        for orphan in orphans:
            os.kill(orphan.pid, 9)
    assert len(orphans) == 2
    wait_until(lambda: not processes.find_runs())


def test_an_old_directory_of_a_run_without_processes_is_found(own_machine: Path) -> None:
    directory = own_machine / make_run_dir_name(RUN, os.getuid())
    directory.mkdir()
    assert list_checks() == []  # its run may be starting
    os.utime(directory, (0, 0))
    assert machine_check.list_dead_run_dirs() == [directory] and list_checks() == [
        "run directories"
    ]
    with run_member():
        assert machine_check.list_dead_run_dirs() == []
    directory.rmdir()
    (own_machine / f"rollway-{os.getuid()}-not-ours").mkdir()
    directory.symlink_to(own_machine)
    assert list_checks() == []


def test_weights_and_adapters_of_dead_writers_are_found(own_machine: Path, dead_mark: str) -> None:
    shm = own_machine / "shm"
    (shm / f"{leftovers.WEIGHTS}{leftovers.writer_mark()}-aa").write_bytes(b"alive")
    (shm / f"{leftovers.WEIGHTS}000000000000-1-1-aa").write_bytes(b"of another container")
    living = shm / "rollway-adapters-1"
    living.mkdir()
    (living / f"{leftovers.writer_mark()}.owner").touch()
    assert list_checks() == []
    dead = [shm / f"{leftovers.WEIGHTS}{dead_mark}-bb", shm / f"{leftovers.IPC}{dead_mark}-cc"]
    dead[0].write_bytes(b"x" * 100)
    dead[1].mkdir()
    (dead[1] / "slot.json").write_bytes(b"y" * 50)
    home = shm / "rollway-adapters-2"
    home.mkdir()
    (home / f"{dead_mark}.owner").touch()
    assert machine_check.list_shared_memory() == sorted([*dead, home])
    assert machine_check.count_bytes([*dead, home]) == 150
    (finding,) = machine_check.check_leftovers()
    assert finding.what == "shared memory" and str(dead[0]) in finding.fix


def test_the_command_that_removes_them_names_each_of_many(own_machine: Path) -> None:
    directories = [own_machine / make_run_dir_name(f"{n}" * 8, os.getuid()) for n in range(6)]
    for directory in directories:
        directory.mkdir()
        os.utime(directory, (0, 0))
    (finding,) = machine_check.check_leftovers()
    assert finding.fix == f"Remove: rm -r {' '.join(map(str, directories))}"
