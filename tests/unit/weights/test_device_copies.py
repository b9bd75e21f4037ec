"""From a device to the host: the same bytes arrive, however they are divided into pieces.

Without a GPU, tensors in CPU memory go the same way through plain memory."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollway.weights import device_copies
from rollway.weights.device_copies import HostCopier, Pinning, copy_to_host
from rollway.weights.digest.checksums import (
    DTYPES,
    finish_word_sums,
    raw_bytes,
    start_word_sum,
    word_sum,
    word_sums,
)
from rollway.weights.transports.shm import ShmPublisher, ShmReader
from tests.waiting import wait_until

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
each_device = pytest.mark.parametrize("device", DEVICES)


def tensors(seed: int, device: str) -> list[Tensor]:
    draw = random.Random(seed)
    sizes = [0, 1, 3, 7, 8, 64, 1000, 4096, 4097, 50_000]
    drawn = []
    for _ in range(30):
        dtype = draw.choice(list(DTYPES.values()))
        count = draw.choice(sizes)
        raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
        drawn.append(raw.view(dtype).to(device))
    drawn.append(torch.randn(40, 70, device=device).t())
    return drawn


@each_device
@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_whatever_the_size_of_a_piece(
    device: str, seed: int, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tensors(seed, device)
    for piece_bytes in (1, 64, 4096, 1 << 20):
        monkeypatch.setattr(device_copies, "_PIECE_BYTES", piece_bytes)
        sources = [source for source in sources if source.nbytes < 2000 * piece_bytes]
        with HostCopier() as copier:
            for _ in range(2):
                targets = [torch.empty(s.shape, dtype=s.dtype) for s in sources]
                for target, source in zip(targets, sources, strict=True):
                    copier.copy(target, source)
                copier.finish()
                for target, source in zip(targets, sources, strict=True):
                    assert torch.equal(raw_bytes(target), raw_bytes(source).cpu())


@each_device
def test_a_source_may_be_refilled_at_once(device: str, in_pieces: None) -> None:
    memory = torch.empty(5000, device=device)
    targets = [torch.empty(5000) for _ in range(20)]
    with HostCopier() as copier:
        for number, target in enumerate(targets):
            memory.fill_(number)
            copier.copy(target, memory)
        copier.finish()
    assert all(bool((target == number).all()) for number, target in enumerate(targets))


def test_large_tensors_come_in_pieces(in_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_PIECE_BYTES", 1000)
    source, pieces = torch.arange(10_000, dtype=torch.int32), dict[int, bytes]()
    with HostCopier() as copier:
        copier.send(source, lambda at, data: pieces.update({at: data.tobytes()}))
        copier.finish()
    assert all(len(piece) <= 1000 for piece in pieces.values())
    assert b"".join(pieces[at] for at in sorted(pieces)) == source.numpy().tobytes()


def test_an_error_of_who_consumes_the_bytes_is_raised(
    in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "_MAX_PIECES", 2)

    def refuse(at: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    with HostCopier() as copier:
        copier.send(torch.ones(8), refuse)
        with pytest.raises(OSError, match="No space left"):
            copier.finish()
        target = torch.empty(50)
        copier.copy(target, torch.ones(50))  # it works on
        copier.finish()
        assert bool((target == 1).all())
        with pytest.raises(OSError, match="No space left"):
            for _ in range(8):
                copier.send(torch.ones(100), refuse)


@each_device
def test_copies_on_the_host_have_the_same_bytes(device: str) -> None:
    sources = tensors(9, device)
    copies = copy_to_host(sources)
    assert [c.device.type for c in copies] == ["cpu"] * len(sources)
    assert all(
        torch.equal(raw_bytes(c), raw_bytes(s).cpu()) for c, s in zip(copies, sources, strict=True)
    )


@each_device
@pytest.mark.parametrize("seed", range(3))
def test_word_sums_on_a_device_equal_those_of_the_host(device: str, seed: int) -> None:
    sources = tensors(seed, device)
    right = [word_sum(source.cpu()) for source in sources]
    assert word_sums(sources) == right
    assert finish_word_sums([start_word_sum(source) for source in sources]) == right
    assert finish_word_sums([]) == []


class FakeCudart:
    """Stands in for CUDA's runtime, which cannot be made to refuse."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.result == 0:
            self.pinned[address] = nbytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_memory_is_pinned_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cudart = torch.zeros(100, dtype=torch.uint8), FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pinning = Pinning(memory, torch.device("cpu"))
    assert pinning.is_pinned() and cudart.pinned == {memory.data_ptr(): 100}
    pinning.release()
    assert not cudart.pinned and not pinning.is_pinned()
    pinning.release()
    cudart.result = 2  # out of memory
    refused = Pinning(memory, torch.device("cpu"))
    assert not refused.is_pinned()
    refused.release()

    def missing() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "cudart", missing)
    assert not Pinning(memory, torch.device("cpu")).is_pinned()


def test_shared_memory_is_unpinned_before_it_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # the reader pins nothing
    publisher, reader = ShmPublisher(keep=1, directory=tmp_path), ShmReader(tmp_path)
    (slot,) = publisher._slots
    for version, size in enumerate((10, 10, 5000)):
        values = torch.randn(size)
        offer = publisher.publish(version, iter([("a", values)]))
        assert all(torch.equal(tensor, values) for _, tensor in reader.tensors(offer))
        slot.pin(torch.device("cpu"))
        assert slot.is_pinned() and list(cudart.pinned) == [slot.memory.data_ptr()]  # type: ignore[union-attr]
    publisher.close()
    assert not cudart.pinned and not list(tmp_path.iterdir())


def test_memory_that_nobody_uses_any_more_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pinning = Pinning(torch.zeros(100, dtype=torch.uint8), torch.device("cpu"))
    assert pinning.is_pinned()
    del pinning
    assert not cudart.pinned


def test_a_reader_beside_a_gpu_pins_what_it_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart()
    with ShmPublisher(keep=1, directory=tmp_path) as publisher:
        reader, offer = ShmReader(tmp_path), publisher.publish(1, [("a", torch.ones(10))])
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        for _ in range(2):  # the file stays mapped, and is pinned once
            ((_, tensor),) = reader.tensors(offer)
            wait_until(lambda: list(cudart.pinned) == [tensor.data_ptr()])  # noqa: B023
        reader.close()
        assert not cudart.pinned


def test_a_stream_of_unknown_size_leaves_no_spare_memory(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(300_000) for number in range(40)}
    with ShmPublisher(keep=1, directory=tmp_path) as publisher:
        for version, pairs in enumerate((iter(state.items()), state.items(), iter(state.items()))):
            offer = publisher.publish(version, pairs)
            received = {n: t.clone() for n, t in ShmReader(tmp_path).tensors(offer)}
            assert all(torch.equal(received[name], state[name]) for name in state)
            (size,) = (p.stat().st_size for p in tmp_path.iterdir() if not p.suffix)
            assert size < offer.nbytes + 256 * len(state)
        # A late reader of the old version may still look at its bytes: the file never shrinks.
        publisher.publish(5, [("w0", state["w0"])])
        assert size == next(p.stat().st_size for p in tmp_path.iterdir() if not p.suffix)
