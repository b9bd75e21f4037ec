"""The group's NCCL without a GPU: a library in C takes the calls, and streams are nothing. What a
group over gloo does is in `test_collective.py`, `test_prime_rl_broadcast.py`, `test_vllm_group.py`.
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rollway.errors import WeightsError
from rollway.weights.transports import group
from rollway.weights.transports.group import BrokenOff, Group, Nccl, send
from tests.waiting import wait_until

COMM, STREAM = 0x123456789A, 0x98765432
LIBRARY = """
#include <string.h>
#include <unistd.h>
typedef struct { char internal[128]; } Id;
#define COMM ((void *)0x123456789A)
#define STREAM ((void *)0x98765432)
int broken = 0, deaf = 0, stuck = 0, aborted = 0;
int ncclGetUniqueId(Id *id) { memset(id->internal, 7, 128); return 0; }
int ncclCommInitRank(void **comm, int ranks, Id id, int rank) {
  if (rank == 9) sleep(2);                /* waits for a rank that does not come */
  for (int at = 0; at < 128; at++) if (id.internal[at] != 7) return 4;
  *comm = COMM;
  return ranks == 3 && rank < 3 ? 0 : 5;
}
int ncclAllReduce(void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
  return !(in == out && n == 1 && type == 7 && op == 0 && comm == COMM && stream == STREAM);
}
int ncclBroadcast(void *in, void *out, size_t n, int type, int root, void *comm, void *stream) {
  memset(out, 42, n);                     /* what rank 0 sent */
  return !(in == out && type == 1 && root == 0 && comm == COMM && stream == STREAM);
}
int ncclCommGetAsyncError(void *comm, int *status) { *status = broken; return deaf; }
const char *ncclGetErrorString(int status) { return status == 6 ? "remote error" : "other"; }
int ncclCommAbort(void *comm) {
  while (stuck) usleep(1000);             /* waits for a rank that is lost */
  aborted += comm == COMM;
  return 0;
}
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("nccl")
    (directory / "nccl.c").write_text(LIBRARY)
    built = directory / "libnccl.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, directory / "nccl.c"], check=True)
    return built


@pytest.fixture(autouse=True)
def nccl(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    nothing = lambda *_: None  # noqa: E731
    stream = SimpleNamespace(cuda_stream=STREAM, wait_stream=nothing)
    monkeypatch.setattr(group, "_NCCL", str(library))
    monkeypatch.delenv("VLLM_NCCL_SO_PATH", raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    event = SimpleNamespace(record=nothing, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    loaded = ctypes.CDLL(str(library))
    yield loaded
    set_number(loaded, "stuck", 0)
    wait_until(lambda: not any(t.name.startswith("rollway-group") for t in threading.enumerate()))
    for name in ("broken", "deaf", "aborted"):
        set_number(loaded, name, 0)


def set_number(nccl: ctypes.CDLL, name: str, value: int) -> None:
    ctypes.c_int.in_dll(nccl, name).value = value


def count_aborted(nccl: ctypes.CDLL) -> int:
    return ctypes.c_int.in_dll(nccl, "aborted").value


def test_nccl_is_called_as_it_is_declared(nccl: ctypes.CDLL) -> None:
    formed = Group(Nccl(Nccl.make_id(), 1, 3, CPU), 5.0)
    flat = torch.zeros(1000, dtype=torch.uint8)
    formed.broadcast(flat)
    assert bool((flat == 42).all())
    assert send(formed, [flat, flat[:0], flat[:7]]) == 1007
    formed.close()
    assert count_aborted(nccl) == 1
    with pytest.raises(BrokenOff, match="has left"):
        formed.broadcast(flat)


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(nccl: ctypes.CDLL) -> None:
    began = time.monotonic()
    with pytest.raises(BrokenOff, match=r"did not form within 0\.3 s"):
        Nccl(Nccl.make_id(), 9, 3, CPU, seconds=0.3)

    def give_up() -> None:
        raise BrokenOff("cancelled")

    with pytest.raises(BrokenOff, match="cancelled"):
        Nccl(Nccl.make_id(), 9, 3, CPU, watch=give_up)
    assert time.monotonic() - began < 2
    # What forms later is not kept.
    wait_until(lambda: count_aborted(nccl) == 2)
    with pytest.raises(BrokenOff, match="ncclCommInitRank failed: other"):
        Nccl(Nccl.make_id(), 1, 7, CPU)


def test_the_death_of_a_rank_ends_a_broadcast(nccl: ctypes.CDLL) -> None:
    flat = torch.zeros(8, dtype=torch.uint8)
    formed = Group(Nccl(Nccl.make_id(), 0, 3, CPU), 5.0)
    set_number(nccl, "broken", 6)
    with pytest.raises(BrokenOff, match="NCCL failed: remote error"):
        formed.broadcast(flat)
    set_number(nccl, "deaf", 6)
    with pytest.raises(BrokenOff, match="ncclCommGetAsyncError failed: remote error"):
        formed.broadcast(flat)
    formed.close()


def test_a_rank_that_dies_in_the_first_step_is_waited_for_only_so_long(
    nccl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = SimpleNamespace(record=lambda _: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: never)
    with pytest.raises(BrokenOff, match=r"did not form within 0\.3 s"):
        Nccl(Nccl.make_id(), 1, 3, CPU, seconds=0.3)
    wait_until(lambda: count_aborted(nccl) == 1)


def test_what_was_aborted_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Nccl(Nccl.make_id(), 0, 3, CPU)
    formed = Group(backend, 5.0)

    def abort_and_query() -> bool:
        backend.abort()  # as another thread's `close` does, before the group forgets its work
        return True

    event = SimpleNamespace(record=lambda _: None, query=abort_and_query)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    with pytest.raises(BrokenOff, match="has left"):
        formed.broadcast(torch.zeros(8, dtype=torch.uint8))
    formed.close()


def test_an_abort_that_waits_for_a_lost_rank_does_not_keep_the_caller(
    nccl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_END_SECONDS", 0.2)
    formed = Group(Nccl(Nccl.make_id(), 0, 3, CPU), 0.1)
    never = SimpleNamespace(record=lambda _: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: never)
    flat = torch.zeros(8, dtype=torch.uint8)
    memory = weakref.ref(flat)
    with pytest.raises(BrokenOff, match="Nothing moved"):
        formed.broadcast(flat)
    del flat
    set_number(nccl, "stuck", 1)
    began = time.monotonic()
    formed.close()
    assert time.monotonic() - began < 2
    assert memory() is not None and not count_aborted(nccl)  # a kernel may still write to it
    set_number(nccl, "stuck", 0)
    wait_until(lambda: memory() is None)
    assert count_aborted(nccl) == 1


@pytest.mark.parametrize("step", ["broadcast", "is_completed", "wait"])
def test_a_group_that_another_thread_closes_is_a_plain_error(step: str) -> None:
    class Backend:
        """Closes the group in the midst of a step, as another thread might."""

        device = CPU

        def take_step(self, name: str) -> None:
            if name == step:
                formed.close()

        def broadcast(self, flat: torch.Tensor, seconds: float) -> Backend:
            self.take_step("broadcast")
            return self

        def is_completed(self) -> bool:
            self.take_step("is_completed")
            return True

        def wait(self) -> None:
            self.take_step("wait")

        def abort(self) -> None: ...

    line, trainer = socket.socketpair()
    line.setblocking(False)
    with trainer:
        formed = Group(cast(Any, Backend()), 5.0, line=line)
        with pytest.raises(BrokenOff, match="has left"):
            formed.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_the_library_that_vllm_is_told_to_use_is_used_here(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_NCCL", "libnccl.so.none")
    with pytest.raises(WeightsError, match=r"cannot be loaded: libnccl\.so\.none"):
        Nccl.make_id()
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(library))
    assert Nccl.make_id() == bytes([7]) * 128
