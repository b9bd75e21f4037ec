"""A reader returns what changed since the served version, in the same way on every device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollway.weights.digest.checksums import map_in_threads, word_sum
from rollway.weights.transports.delta import (
    DeltaPublisher,
    DeltaReader,
    packing,
    unpacking,
    versions,
)
from rollway.weights.transports.delta.publisher import Compression
from tests.tensors import receive, same
from tests.unit.weights.deltas import apply

State = dict[str, Tensor]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8]


def make_state(seed: int, sizes: list[int]) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i}": (100 * torch.randn(size, generator=generator)).to(DTYPES[i % len(DTYPES)])
        for i, size in enumerate(sizes)
    }


def change(state: State, seed: int, share: float) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < share, tensor + 1, tensor
        ).to(tensor.dtype)
        for name, tensor in state.items()
    }


def serve(
    root: Path, state: State, compression: Compression = "zstd"
) -> tuple[DeltaPublisher, DeltaReader, str]:
    publisher = DeltaPublisher(root, snapshot_every=100, compression=compression)
    reader = DeltaReader()
    offer = publisher.publish(1, state.items())
    for _ in reader.tensors(offer):
        pass
    reader.finish(offer)
    return publisher, reader, offer.identity


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.001, 0.01, 0.2, 1.0]), min_size=1, max_size=3),
    st.sampled_from([8, 64, 1 << 24]),
    st.sampled_from(get_args(Compression)),
    st.sampled_from([10, 5000, 1 << 28]),
)
@settings(max_examples=40, deadline=None)
def test_changes_lead_to_the_offered_version(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    shares: list[float],
    batch: int,
    compression: Compression,
    chunk: int,
) -> None:
    first = make_state(len(sizes), sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "BATCH", batch)
        patch.setitem(packing.CHUNK_BYTES, "cpu", chunk)
        patch.setattr(versions, "_PIECE_BYTES", 1000)
        publisher, reader, served = serve(tmp_path_factory.mktemp("deltas"), first, compression)
        last = first
        for step, share in enumerate(shares):
            last = change(last, step, share)
            offer = publisher.publish(2 + step, last.items())
        changes = reader.changes(offer, served, 1 << 60)
        assert same(apply(first, changes), last)
        assert sum(item.count for item in changes) >= sum(
            int((first[name] != last[name]).sum()) for name in first
        )
        assert same(receive(reader, offer), last)
    assert reader.sums(offer) == {name: word_sum(tensor) for name, tensor in last.items()}


def test_changes_need_the_version_that_is_served(tmp_path: Path) -> None:
    state = make_state(0, [5000] * 4)
    publisher, reader, served = serve(tmp_path / "a", state)
    offer = publisher.publish(2, change(state, 1, 0.01).items())
    assert "did not come from the same deltas" in reader.changes(offer, "0" * 32, 1 << 60).refusal
    assert reader.changes(offer, served, 3).refusal == "more than 3 elements changed"
    assert "did not come" in DeltaReader().changes(offer, served, 1 << 60).refusal
    assert reader.changes(offer, served, 1 << 60).refusal == ""
    reader.close()
    assert "did not come" in reader.changes(offer, served, 1 << 60).refusal


def test_a_version_that_is_only_offered_is_no_base(tmp_path: Path) -> None:
    state = make_state(0, [5000] * 4)
    publisher, reader, served = serve(tmp_path, state)
    second = publisher.publish(2, change(state, 1, 0.01).items())
    reader.headers(second)
    third = publisher.publish(3, change(state, 2, 0.01).items())
    assert "did not come" in reader.changes(third, second.identity, 1 << 60).refusal
    assert len(reader.changes(third, served, 1 << 60).steps) == 2


def test_another_version_with_the_same_number_is_read_whole(tmp_path: Path) -> None:
    state = make_state(0, [5000] * 4)
    publisher, reader, served = serve(tmp_path, state)
    publisher.close()
    shutil.rmtree(tmp_path)
    other = change(state, 1, 0.01)
    offer = DeltaPublisher(tmp_path).publish(1, other.items())
    assert (
        "No deltas lead from there to version 1" in reader.changes(offer, served, 1 << 60).refusal
    )
    assert same(receive(reader, offer), other)


def test_no_thread_works_on_after_an_error() -> None:
    done = []

    def work(name: str) -> None:
        if name == "3":
            raise MemoryError
        done.append(name)

    with pytest.raises(MemoryError):
        map_in_threads(work, [str(i) for i in range(1000)], threads=4)
    count = len(done)
    assert map_in_threads(str.upper, ["a", "b"], threads=4) == ["A", "B"] and len(done) == count
