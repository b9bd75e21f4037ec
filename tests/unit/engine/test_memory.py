"""Free memory is what staging may really use, and buffers hold every tensor."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.engine import memory
from rollway.engine.fingerprint import fingerprint, read_fingerprints, start_fingerprint
from rollway.engine.incoming import BackgroundTask, use_own_stream
from rollway.engine.memory import StagedTensors
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Slices
from tests.waiting import wait_until

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def segment(size: int, used: int, pool: tuple[int, int] = (0, 0), **more: Any) -> dict[str, Any]:
    fields = {"device": 0, "total_size": size, "active_size": used, "segment_pool_id": pool}
    return fields | more


def test_only_memory_that_torch_can_reuse_counts() -> None:
    segments = [
        segment(100, 0),
        segment(50, 10),  # cannot be returned: a part of it is in use
        segment(40, 10, is_expandable=True),
        segment(1000, 0, (0, 1)),  # of CUDA graphs, or of vLLM's sleep mode
        segment(500, 0, device=1),
    ]
    assert memory.count_reusable(segments, 0) == 130


@pytest.mark.parametrize(
    ("total", "configured", "reserve"),
    [(10 << 30, "", 1 << 30), (140 << 30, "", (140 << 30) // 50), (140 << 30, "77", 77)],
)
def test_a_device_keeps_a_reserve(
    total: int, configured: str, reserve: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(memory.RESERVE, configured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 << 30, total))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment(100, 0)])
    assert memory.read_device_memory(GPU, 1).free == 5 << 30  # sufficient, so torch is not asked
    free = memory.read_device_memory(GPU, 5 << 30)
    assert (free.free, free.reserve) == ((5 << 30) + 100, reserve)
    assert free.holds(free.free - reserve) and not free.holds(free.free - reserve + 1)
    assert str(free).startswith("cuda:0 has 5.37 GB free, of which ")


def test_the_host_keeps_a_quarter_of_the_weights_free() -> None:
    free = memory.read_host_memory(400, kept=0)
    assert free.reserve == 100 and free.free > 0
    assert memory.read_device_memory(CPU, 400).where == "the host"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F32", "BF16", "U8", "I64"]),
            st.lists(st.integers(0, 7), max_size=3).map(tuple),
        ),
        max_size=12,
    ),
    st.sampled_from([64, 256, 1 << 30]),
)
@settings(max_examples=80)
def test_buffers_hold_every_tensor(kinds: list[tuple[str, Any]], buffer_bytes: int) -> None:
    shapes = {f"t{number}": kind for number, kind in enumerate(kinds)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_BUFFER_BYTES", buffer_bytes)
        staged = StagedTensors(CPU)
        staged.allocate(shapes)
        assert sum(b.nbytes for b in staged._buffers) == memory.count_bytes(shapes)
    tensors = {
        name: torch.randint(0, 100, shape).to(memory.DTYPES[dtype])
        for name, (dtype, shape) in shapes.items()
    }
    for name, tensor in tensors.items():
        staged.put(name, tensor)
    assert all(torch.equal(staged.views[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(RuntimeError, match="arrived as"):
        staged.views["t"] = torch.empty(3)
        staged.put("t", torch.empty(4))


def test_a_rank_needs_memory_only_for_its_parts() -> None:
    headers = {name: TensorHeader("F32", (8, 4), "") for name in "abc"}
    slices = Slices({"a": Box((0, 0), (2, 4)), "b": None}, {}, {})
    assert memory.list_received_shapes(headers, slices) == {
        "a": ("F32", (2, 4)),
        "c": ("F32", (8, 4)),
    }


def test_buffers_of_other_sizes_are_not_reused() -> None:
    host = [torch.empty(8, dtype=torch.uint8)]
    lives = weakref.ref(host[0])
    StagedTensors(CPU, host).allocate({"t": ("F32", (40,))})
    assert not host and lives() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(16, 8), (3, 5), (1,)])
def test_a_devices_fingerprint_is_that_of_the_cpu(dtype: torch.dtype, shape: Any) -> None:
    tensor = torch.randint(-100, 100, shape).to(dtype)
    for words in {False, tensor.shape[-1] * tensor.element_size() % 8 == 0}:
        # What a GPU computes, here on meta tensors: one number that nobody waits for.
        assert start_fingerprint(tensor.to("meta"), words=words).shape == ()
        started = [start_fingerprint(tensor, words=words), torch.tensor(5)]
        assert read_fingerprints(started) == [fingerprint(tensor, words=words), 5]


def test_an_error_keeps_no_memory() -> None:
    import weakref

    kept: list[Any] = []

    def fail() -> None:
        tensor = torch.empty(8)
        kept.append(weakref.ref(tensor))
        raise ValueError("no")

    task = BackgroundTask("a test", fail)
    assert str(task.exception(10)) == "no" and task.has_failed
    assert kept[0]() is None


def test_a_task_notifies_everybody_who_asked_also_late() -> None:
    may_end = threading.Event()
    task = BackgroundTask("a test", lambda: may_end.wait(30) or None)
    with socket.socket(socket.AF_UNIX) as server:
        name = f"rollway/test/{os.getpid()}"
        server.bind(f"\0{name}")
        server.listen()
        server.settimeout(30)
        for asks in (lambda: may_end.set(), lambda: task.exception(30)):
            task.notify_when_done(name)
            asks()
            server.accept()[0].close()
    task.notify_when_done("")
    task.notify_when_done(f"{name}/nobody")


def test_the_cpu_has_no_streams() -> None:
    with use_own_stream(CPU):
        pass


@pytest.mark.parametrize("wait", [True, False])
def test_released_buffers_are_returned_to_their_own_device(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is simulated. Torch would keep the memory for itself, and a trainer beside it waits."""
    emptied: list[torch.device] = []
    current: list[torch.device] = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(current[-1]))
    buffer = torch.empty(100, dtype=torch.uint8)
    lives = weakref.ref(buffer)
    staged = StagedTensors(torch.device("cuda", 1), _buffers=[buffer], views={"w": buffer[:8]})
    del buffer
    staged.release(wait=wait)
    wait_until(lambda: emptied, 30.0)
    assert emptied == [torch.device("cuda", 1)] and lives() is None and staged.views == {}
    staged.release(wait=True)  # nothing is left to return
    assert len(emptied) == 1
