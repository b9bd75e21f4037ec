"""Parameters that are published from their own memory: nothing is copied that need not be."""

from __future__ import annotations

import base64
import ctypes
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.checksums import word_sum
from rollway.weights.offer import Offer
from rollway.weights.transports import cuda_ipc, device_memory
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader
from rollway.weights.transports.device_memory import Handle, InPlace, Segment

State = dict[str, Tensor]
export_segment, open_handle = device_memory.export_segment, device_memory.open_handle
MIB = 1 << 20


class FakeGpu:
    """A stand-in for a GPU: CPU memory in segments, whose handles are their addresses.

    One process opens what it shares itself, which CUDA does not allow."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.segments: list[Segment] = []
        self.exported: list[int] = []
        self.opened: list[int] = []
        self.broken: set[int] = set()

    def add_segment(self, nbytes: int, *, is_expandable: bool = False) -> Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.memory.append(memory)
        self.segments.append(Segment(memory.data_ptr(), nbytes, is_expandable))
        return memory

    def export(self, tensor: Tensor, segment: Segment) -> Handle:
        if segment.is_expandable:
            return export_segment(tensor, segment)
        if segment.address in self.broken:
            raise WeightsError("its memory cannot be shared (invalid argument)")
        self.exported.append(segment.address)
        name = base64.b64encode(str(segment.address).encode()).decode()
        return Handle(segment.nbytes, memory=name)

    def open(self, handle: Handle, device: torch.device, directory: Path) -> Tensor:
        if handle.file:
            return open_handle(handle, device, directory)
        address = int(base64.b64decode(handle.memory))
        self.opened.append(address)
        return torch.frombuffer(
            (ctypes.c_uint8 * handle.nbytes).from_address(address), dtype=torch.uint8
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(device_memory, "list_segments", lambda device: fake.segments)
    monkeypatch.setattr(device_memory, "export_segment", fake.export)
    monkeypatch.setattr(device_memory, "find_device", lambda tensors: torch.device("cuda", 0))
    monkeypatch.setattr(cuda_ipc, "device_name", lambda device: "GPU-fake")
    monkeypatch.setattr(cuda_ipc, "local_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cuda_ipc, "open_handle", fake.open)
    return fake


def parameter(memory: Tensor, at: int, *shape: int) -> Parameter:
    size = 4 * torch.Size(shape).numel()
    values = memory[at : at + size].view(torch.float32).view(shape)
    values.copy_(torch.randn(shape))
    return Parameter(values)


def fill(parameters: dict[str, Any]) -> State:
    """Take an optimizer step; return copies of what the parameters hold now."""
    with torch.no_grad():
        for value in parameters.values():
            value += 1
    return {name: value.detach().clone() for name, value in parameters.items()}


def read(reader: CudaIpcReader, offer: Offer) -> State:
    return {name: tensor.clone() for name, tensor in reader.tensors(offer)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_parameters_share_the_handle_of_their_allocation(gpu: FakeGpu, tmp_path: Path) -> None:
    small, large = gpu.add_segment(2 * MIB), gpu.add_segment(4 * MIB)
    model = {
        "a": parameter(small, 512, 7, 5),
        "c": parameter(large, 0, 512, 512),
        "b": parameter(small, 8192, 64),
    }
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        places = [value.data_ptr() for value in model.values()]
        for version in (1, 2, 3):
            state = fill(model)
            offer = publisher.publish(version, model.items())
            assert same(read(reader, offer), state)
            assert (offer.where["copied_bytes"], offer.where["why_copied"]) == (0, "")
        assert places == [value.data_ptr() for value in model.values()]
        # One handle for each allocation, exported and opened once for all versions.
        assert gpu.exported == gpu.opened == [small.data_ptr(), large.data_ptr()]
        assert not list(next(tmp_path.iterdir()).glob("*.*.*"))  # no bucket


def test_views_are_the_trainers_memory(gpu: FakeGpu, tmp_path: Path) -> None:
    memory = gpu.add_segment(MIB)
    model = {"a": parameter(memory, 0, 16), "b": parameter(memory, 64, 3)}
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        offer = publisher.publish(1, model.items())
        assert reader.shares_device(offer)
        views = dict(reader.tensors(offer))
        assert [v.data_ptr() for v in views.values()] == [p.data_ptr() for p in model.values()]
        assert reader.sums(offer) == {name: word_sum(tensor) for name, tensor in model.items()}
        fill(model)  # a torn read: what a caller copies now has other sums
        assert {n: word_sum(view) for n, view in views.items()} != reader.sums(offer)
        with pytest.raises(WeightsError, match="a of version 1 changed while it was read"):
            list(reader.tensors(offer))
        assert len(list(reader.tensors(offer, summed=lambda name: True))) == 2


def test_only_what_cannot_be_shared_is_copied(
    gpu: FakeGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, expandable = gpu.add_segment(MIB), gpu.add_segment(MIB, is_expandable=True)
    foreign, mapped = torch.zeros(MIB, dtype=torch.uint8), gpu.add_segment(MIB)
    gpu.broken.add(mapped.data_ptr())
    turned = Parameter(parameter(plain, 4096, 6, 4).detach().t())
    model: dict[str, Tensor] = {
        "mine": parameter(plain, 0, 100),
        "turned": turned,
        "expandable": parameter(expandable, 0, 10),
        "foreign": parameter(foreign, 0, 20),
        "mapped": parameter(mapped, 0, 30),
        "mapped too": parameter(mapped, 1024, 30),
        "empty": Parameter(torch.empty(0, 3)),
        "buffer": torch.randn(11),
    }
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        for version in (1, 2):
            with caplog.at_level(logging.WARNING):
                state = fill(model)
                offer = publisher.publish(version, iter(model.items()))
            assert same(read(reader, offer), state)
            copied = sum(t.nbytes for name, t in model.items() if name != "mine")
            assert offer.where["copied_bytes"] == copied
            for reason in (
                "1 tensors: no parameters, from an iterator",
                "1 tensors: not contiguous",
                "1 tensors: in an expandable segment",
                "1 tensors: not in memory of torch's allocator",
                "2 tensors: its memory cannot be shared (invalid argument)",
                "1 tensors: empty",
            ):
                assert reason in offer.where["why_copied"]
        (warning,) = caplog.messages  # once, not at each version
        assert "cannot be published in place" in warning


def test_a_parameter_that_moves_is_found_again(gpu: FakeGpu, tmp_path: Path) -> None:
    first, second = gpu.add_segment(MIB), gpu.add_segment(MIB)
    model = {"a": parameter(first, 0, 16)}
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        read(reader, publisher.publish(1, model.items()))
        model["a"].data = parameter(second, 0, 16).data
        state = fill(model)
        assert same(read(reader, publisher.publish(2, model.items())), state)
        assert gpu.opened == [first.data_ptr(), second.data_ptr()]


def test_a_gathered_tensor_is_copied_before_the_next_is_requested(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """A trainer may gather all tensors into the same memory, with or without `in_place`."""
    memory = gpu.add_segment(MIB)

    def gather() -> Any:
        for number in range(3):
            memory[:64].view(torch.float32).fill_(number)
            yield f"w{number}", memory[:64].view(torch.float32)

    for in_place in (True, False):
        with CudaIpcPublisher(directory=tmp_path, in_place=in_place) as publisher:
            tensors = read(CudaIpcReader(tmp_path), publisher.publish(1, gather()))
        assert {name: float(t[0]) for name, t in tensors.items()} == {"w0": 0, "w1": 1, "w2": 2}


def test_a_collection_is_published_in_place(gpu: FakeGpu, tmp_path: Path) -> None:
    """`model.state_dict()` holds no parameters, but its tensors cannot share their memory."""
    memory = gpu.add_segment(MIB)
    state = {"a": parameter(memory, 0, 16).detach(), "b": parameter(memory, 64, 3).detach()}
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        offer = publisher.publish(1, state.items())
        assert offer.where["copied_bytes"] == 0
        assert same(read(CudaIpcReader(tmp_path), offer), state)


def test_memory_is_given_back_between_refits(gpu: FakeGpu, tmp_path: Path) -> None:
    """With `keep_open=False`, neither side holds on to the parameters after the refit."""
    memory = gpu.add_segment(MIB)
    model = {"a": parameter(memory, 0, 16)}
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True, keep_open=False) as publisher:
        for version in (1, 2):
            offer = publisher.publish(version, model.items())
            read(reader, offer)
            reader.finish(offer)
            publisher.wait(version)
            assert not reader._open
            gc.collect()
            assert publisher._placed == InPlace({})
        assert gpu.opened == [memory.data_ptr()] * 2
    kept = msgspec.structs.replace(offer, where={**offer.where, "keep_open": True})
    reader._open = {0: {}}
    reader.finish(kept)
    assert reader._open


def test_parameters_on_a_cpu_are_copied(tmp_path: Path) -> None:
    """Their memory cannot be shared; the shm transport moves them into memory that can."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        for version in (1, 2):
            fill(dict(module.named_parameters()))
            offer = publisher.publish(version, module.state_dict().items())
            assert same(read(reader, offer), dict(module.state_dict()))
            assert offer.where["copied_bytes"] == offer.nbytes
            assert offer.where["why_copied"].endswith("tensors: in CPU memory")
        with pytest.raises(UsageError, match="came twice"):
            publisher.publish(5, [*module.named_parameters(), *module.named_parameters()])
        with pytest.raises(UsageError, match="came twice"):
            publisher.publish(5, iter([*module.named_parameters(), ("0.weight", torch.ones(1))]))


def test_memory_that_begins_anywhere_is_read_in_place(gpu: FakeGpu, tmp_path: Path) -> None:
    """Also where words do not begin."""
    memory = gpu.add_segment(MIB)
    memory.copy_(torch.randint(0, 255, (MIB,), dtype=torch.uint8))
    odd = {"odd": Parameter(memory[8193 : 8193 + 51], requires_grad=False)}
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        offer = publisher.publish(1, odd.items())
        assert offer.where["copied_bytes"] == 0
        assert same(read(CudaIpcReader(tmp_path), offer), {"odd": odd["odd"].detach()})


def test_the_publisher_frees_what_it_does_not_publish_any_more(tmp_path: Path) -> None:
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        first = torch.nn.Linear(4, 4)
        publisher.publish(1, first.named_parameters())
        storage = weakref.ref(first.weight)
        publisher.publish(2, torch.nn.Linear(4, 4).named_parameters())
        del first
        gc.collect()
        assert storage() is None


class _Storage:
    def __init__(self, share: Callable[[], Any], address: int = 5000) -> None:
        self._share_cuda_ = share
        self._address = address

    def untyped_storage(self) -> _Storage:
        return self

    def data_ptr(self) -> int:
        return self._address


def test_a_segments_handle_covers_all_of_it() -> None:
    shared = (0, b"memory", 64, 1000, b"/counter", 3, b"event", True)
    tensor: Any = _Storage(lambda: shared)
    handle = device_memory.export_segment(tensor, Segment(4000, 9000))
    assert (handle.nbytes, handle.offset, handle.counter_offset) == (9000, 0, 3)
    assert base64.b64decode(handle.memory) == b"memory"
    with pytest.raises(WeightsError, match="not the one that torch's allocator names"):
        device_memory.export_segment(tensor, Segment(4096, 9000))
    with pytest.raises(WeightsError, match="expandable segment"):
        device_memory.export_segment(tensor, Segment(4000, 9000, is_expandable=True))

    def refuse() -> None:
        raise RuntimeError("CUDA error: invalid argument\nmore")

    refused: Any = _Storage(refuse)
    with pytest.raises(WeightsError, match=r"cannot be shared \(CUDA error: invalid argument\)$"):
        device_memory.export_segment(refused, Segment(4000, 9000))


def test_buckets_are_never_in_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", calls.append)
    with device_memory._without_expandable_segments():
        assert not calls
    text = "max_split_size_mb:64,expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    with pytest.raises(MemoryError), device_memory._without_expandable_segments():
        raise MemoryError
    assert calls == ["empty", "max_split_size_mb:64,expandable_segments:False", text]
