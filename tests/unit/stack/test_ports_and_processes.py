"""Ports are reserved without races; processes are identified by pid and start time."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollway import processes
from rollway.errors import PortInUse, StartError
from rollway.processes import ProcessId
from rollway.stack.locks import FIRST, LAST, Lease, NamedLock
from tests.children import start_child


def test_a_lock_has_one_holder_and_its_death_releases_it() -> None:
    name = f"test/{os.getpid()}"
    lock = NamedLock(name)
    assert lock.acquire()
    assert not NamedLock(name).acquire()
    lock.release()
    code = (
        "from rollway.stack.locks import NamedLock; "
        f"lock = NamedLock({name!r}); assert lock.acquire(); print('held', flush=True)"
    )
    holder, line = start_child(code)
    assert line == "held"
    assert not lock.acquire()
    holder.kill()
    holder.wait()
    assert lock.acquire()
    lock.release()


def _lease_ports(count: int, pipe: Connection) -> None:
    lease = Lease()
    pipe.send([lease.reserve_port(0, "127.0.0.1", "x") for _ in range(count)])
    pipe.recv()  # hold them until every process has chosen


def test_processes_that_choose_at_the_same_moment_never_share_a_port() -> None:
    context = multiprocessing.get_context("fork")
    pipes, workers = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_lease_ports, args=(200, theirs))
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    chosen = [port for pipe in pipes for port in pipe.recv()]
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    assert len(chosen) == len(set(chosen)) == 800
    assert min(chosen) >= FIRST and max(chosen) < LAST <= 32768


def test_a_requested_port_is_reserved_or_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        lease = Lease()
        with pytest.raises(
            PortInUse, match=f"Port {port} on 127.0.0.1, requested as the test's port"
        ):
            lease.reserve_port(port, "127.0.0.1", "the test's port")
    assert lease.reserve_port(port, "127.0.0.1", "the test's port") == port
    with pytest.raises(PortInUse):
        Lease().reserve_port(port, "127.0.0.1", "the test's port")  # reserved
    lease.release()


def test_a_signal_reaches_only_the_process_with_pid_and_start_time() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = ProcessId.of(child.pid)
    assert identity is not None and identity.alive
    other = ProcessId(child.pid, identity.start - 1)
    assert not other.alive
    other.send(signal.SIGKILL)
    assert child.poll() is None
    identity.send(signal.SIGKILL)
    child.wait()
    assert not identity.alive


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(StartError, match=r"Nothing can listen on 192\.0\.2\.1"):
        Lease().reserve_port(0, "192.0.2.1", "the test's port")


def test_a_process_whose_name_is_not_utf8_is_listed() -> None:
    """The kernel cuts names at 15 bytes, wherever that falls."""
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, bytes([195, 169] * 7 + [195]), 0, 0, 0); "
        "print('up', flush=True)"
    )
    odd, _ = start_child(code)
    try:
        assert ProcessId.of(odd.pid) is not None
    finally:
        odd.kill()
        odd.wait()


ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import setproctitle, sys
setproctitle.setproctitle("VLLM::EngineCore")
print("up", flush=True)
sys.stdin.read()
'''])
"""


def test_an_orphan_that_changed_its_name_is_found() -> None:
    """When vLLM's main process is killed, its renamed child survives under pid 1."""
    pytest.importorskip("setproctitle")
    run_id = f"test{os.getpid()}"
    environment = {**os.environ, **processes.make_run_environment(run_id)}
    parent, line = start_child(ORPHAN, env=environment, start_new_session=True)
    assert line == "up"
    assert len(processes.find_members(run_id)) == 2
    parent.kill()
    parent.wait()
    (orphan,) = processes.find_members(run_id)
    assert b"EngineCore" in Path(f"/proc/{orphan.pid}/cmdline").read_bytes()
    assert processes.end(lambda: processes.find_members(run_id), grace_seconds=0.0) == set()
    assert processes.find_members(run_id) == set()


def test_processes_of_other_runs_are_not_members() -> None:
    other = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, **processes.make_run_environment("other-run")}
    )
    try:
        assert {p.pid for p in processes.find_members("other-run")} == {other.pid}
        assert processes.find_members("other") == set()
    finally:
        other.kill()
        other.wait()


SEGMENT = """
import mmap, os
handle = os.open("/dev/shm/{name}", os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(handle, 4096)
mapping = mmap.mmap(handle, 4096)
print("up", flush=True)
"""


def test_shared_memory_is_removed_only_after_its_owner_is_dead() -> None:
    name = f"rollway-test-{os.getpid()}"
    owner, line = start_child(SEGMENT.format(name=name))
    assert line == "up"
    identity = ProcessId.of(owner.pid)
    assert identity is not None
    assert processes.find_shared_memory([identity]) == {name}
    assert processes.remove_shared_memory([name]) == []  # its owner is alive
    owner.kill()
    owner.wait()
    assert (processes.SHM / name).exists()  # the kernel does not remove it
    assert processes.remove_shared_memory([name, "never-existed"]) == [name]
    assert not (processes.SHM / name).exists()


def test_shared_memory_of_a_process_that_ended_on_its_own_is_known() -> None:
    run_id, name = f"leaver{os.getpid()}", f"rollway-test-leaver-{os.getpid()}"
    environment = {**os.environ, **processes.make_run_environment(run_id)}
    owner, line = start_child(SEGMENT.format(name=name), env=environment)
    assert line == "up"
    looks = itertools.count()

    def find_left() -> set[ProcessId]:
        if next(looks) == 1:  # it was seen once, and ends on its own now
            assert owner.stdin is not None
            owner.stdin.close()
        owner.poll()
        return processes.find_members(run_id)

    assert processes.end(find_left, 20.0) == {name}
    assert owner.wait(10) == 0  # `find_left` may see its end before `poll` does
    assert processes.remove_shared_memory([name]) == [name]


BREEDER = """
import subprocess, sys, time
print("up", flush=True)
while True:
    subprocess.Popen(["sleep", "60"])
    time.sleep(0.002)  # a few hundred children a second
"""


def test_a_process_that_keeps_forking_is_killed_with_all_its_children() -> None:
    run_id = f"breeder{os.getpid()}"
    environment = {**os.environ, **processes.make_run_environment(run_id)}
    parent, line = start_child(BREEDER, env=environment)
    assert line == "up"
    processes.end(lambda: processes.find_members(run_id), grace_seconds=0.1)
    assert processes.find_members(run_id) == set()
    parent.wait()


def test_a_semaphore_is_found_under_its_real_name() -> None:
    """glibc maps a semaphore under a scratch name and links the real one to it afterwards."""
    code = (
        "import multiprocessing as m; s = m.get_context('spawn').Semaphore(); "
        "print(s._semlock.name, flush=True)"
    )
    owner, line = start_child(code)
    try:
        name = "sem." + line.lstrip("/")
        identity = ProcessId.of(owner.pid)
        assert identity is not None
        assert name in processes.find_shared_memory([identity])
    finally:
        owner.terminate()
        owner.wait()


def test_waiting_for_the_dead_takes_no_time() -> None:
    start = time.monotonic()
    assert processes.wait_gone({ProcessId(2**22 + 1, 1)}, 60.0) == set()
    assert time.monotonic() - start < 30.0
