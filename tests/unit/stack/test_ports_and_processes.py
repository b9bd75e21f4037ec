"""Ports without races; processes that are who they say they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollway import processes
from rollway.errors import PortInUse, StartError
from rollway.processes import ProcessId
from rollway.stack.lease import FIRST, LAST, Lease
from rollway.stack.locks import NamedLock


def test_a_lock_is_held_once_and_freed_by_death() -> None:
    name = f"test/{os.getpid()}"
    lock = NamedLock(name)
    assert lock.acquire()
    assert not NamedLock(name).acquire()
    lock.release()
    code = (
        "from rollway.stack.locks import NamedLock; import time; "
        f"lock = NamedLock({name!r}); assert lock.acquire(); print('held', flush=True); "
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert not lock.acquire()
    holder.kill()
    holder.wait()
    assert lock.acquire()
    lock.release()


def _lease_some(count: int, pipe: Connection) -> None:
    lease = Lease()
    pipe.send([lease.port(0, "127.0.0.1", "x") for _ in range(count)])
    pipe.recv()  # hold them until every process has chosen


def test_processes_that_choose_at_one_moment_never_share_a_port() -> None:
    context = multiprocessing.get_context("fork")
    pipes, workers = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_lease_some, args=(200, theirs))
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    chosen = [port for pipe in pipes for port in pipe.recv()]
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    assert len(chosen) == len(set(chosen)) == 800
    assert min(chosen) >= FIRST and max(chosen) < LAST <= 32768


def test_a_wanted_port_is_given_or_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        lease = Lease()
        with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1, asked for as the door"):
            lease.port(port, "127.0.0.1", "the door")
    assert lease.port(port, "127.0.0.1", "the door") == port
    with pytest.raises(PortInUse):
        Lease().port(port, "127.0.0.1", "the door")  # reserved, though nobody listens yet
    lease.release()


def test_identity_is_pid_and_start_time() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = ProcessId.of(child.pid)
    assert identity is not None and identity.alive
    stranger = ProcessId(child.pid, identity.start - 1)
    assert not stranger.alive
    stranger.send(signal.SIGKILL)
    assert child.poll() is None
    identity.send(signal.SIGKILL)
    child.wait()
    assert not identity.alive


def test_an_address_that_is_not_ours_is_explained() -> None:
    with pytest.raises(StartError, match=r"Nothing can listen on 192\.0\.2\.1"):
        Lease().port(0, "192.0.2.1", "the door")


def test_a_process_whose_name_is_half_a_character_does_no_harm() -> None:
    """The kernel cuts names at 15 bytes, wherever that falls."""
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([195, 169] * 7 + [195]), 0, 0, 0); "
        "print('up', flush=True); time.sleep(60)"
    )
    odd = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert odd.stdout is not None and odd.stdout.readline() == "up\n"
        assert ProcessId.of(odd.pid) is not None
        assert ProcessId.of(odd.pid) in processes.descendants(os.getpid())
    finally:
        odd.kill()
        odd.wait()


ORPHAN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import setproctitle, time
setproctitle.setproctitle("VLLM::EngineCore")
print("up", flush=True)
time.sleep(60)
'''])
time.sleep(60)
"""


def test_an_orphan_that_changed_its_name_is_still_found() -> None:
    """What vLLM does: the main process is killed, its renamed child lives on under pid 1."""
    pytest.importorskip("setproctitle")
    run_id = f"test{os.getpid()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        env={**os.environ, **processes.run_environment(run_id)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    assert len(processes.members(run_id)) == 2
    parent.kill()
    parent.wait()
    (orphan,) = processes.members(run_id)
    assert b"EngineCore" in Path(f"/proc/{orphan.pid}/cmdline").read_bytes()
    assert processes.end(lambda: processes.members(run_id), grace_seconds=0.0) == set()
    assert processes.members(run_id) == set()


def test_other_runs_are_not_members() -> None:
    other = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, **processes.run_environment("other-run")}
    )
    try:
        assert {p.pid for p in processes.members("other-run")} == {other.pid}
        assert processes.members("other") == set()
    finally:
        other.kill()
        other.wait()


SEGMENT = """
import mmap, os, time
handle = os.open("/dev/shm/{name}", os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(handle, 4096)
mapping = mmap.mmap(handle, 4096)
print("up", flush=True)
time.sleep(60)
"""


def test_shared_memory_goes_with_its_owner_and_not_before() -> None:
    name = f"rollway-test-{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", SEGMENT.format(name=name)], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    identity = ProcessId.of(owner.pid)
    assert identity is not None
    assert processes.shared_memory([identity]) == {name}
    assert processes.remove_shared_memory([name]) == []  # somebody uses it
    owner.kill()
    owner.wait()
    assert (processes.SHM / name).exists()  # nobody else would remove it
    assert processes.remove_shared_memory([name, "never-existed"]) == [name]
    assert not (processes.SHM / name).exists()


def test_what_a_process_held_is_known_although_it_ended_by_itself() -> None:
    run_id, name = f"leaver{os.getpid()}", f"rollway-test-leaver-{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", SEGMENT.format(name=name).replace("sleep(60)", "sleep(0.5)")],
        env={**os.environ, **processes.run_environment(run_id)},
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"

    def left() -> set[ProcessId]:
        owner.poll()
        return processes.members(run_id)

    assert processes.end(left, 20.0) == {name}
    assert owner.returncode == 0
    assert processes.remove_shared_memory([name]) == [name]


BREEDER = """
import subprocess, sys, time
print("up", flush=True)
while True:
    subprocess.Popen(["sleep", "60"])
    time.sleep(0.002)
"""


def test_a_process_that_keeps_starting_others_is_ended_with_all_of_them() -> None:
    run_id = f"breeder{os.getpid()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", BREEDER],
        env={**os.environ, **processes.run_environment(run_id)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    processes.end(lambda: processes.members(run_id), grace_seconds=0.1)
    assert processes.members(run_id) == set()
    parent.wait()


def test_a_semaphore_is_found_under_its_real_name() -> None:
    """glibc maps a semaphore under a scratch name and links the real one to it afterwards."""
    code = (
        "import multiprocessing as m, time; s = m.get_context('spawn').Semaphore(); "
        "print(s._semlock.name, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        name = "sem." + owner.stdout.readline().strip().lstrip("/")
        identity = ProcessId.of(owner.pid)
        assert identity is not None
        assert name in processes.shared_memory([identity])
    finally:
        owner.terminate()
        owner.wait()


def test_waiting_for_the_dead_takes_no_time() -> None:
    began = time.monotonic()
    assert processes.wait_gone({ProcessId(2**22 + 1, 1)}, 5.0) == set()
    assert time.monotonic() - began < 1.0
