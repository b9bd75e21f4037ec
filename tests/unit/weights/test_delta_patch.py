"""A delta changes the held tensors in place, or they are read from a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollway.weights.digest.checksums import digest
from rollway.weights.transports.delta import (
    DeltaPublisher,
    DeltaReader,
    Store,
)

State = dict[str, Tensor]


def state(step: int) -> State:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{n}": torch.randn(50, 40, generator=generator).bfloat16() for n in range(5)}
    for number, tensor in enumerate(tensors.values()):
        tensor.view(-1)[number : number + step] += 1
    tensors["same"] = torch.ones(3)
    tensors["all"] = torch.full((9,), float(step))
    return tensors


def read(reader: DeltaReader, publisher: DeltaPublisher, step: int) -> State:
    offer = publisher.publish(step, state(step).items())
    return {name: tensor.clone() for name, tensor in reader.tensors(offer)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def get_held(reader: DeltaReader) -> State:
    assert reader._held is not None
    return reader._held[2]


def list_places(reader: DeltaReader) -> list[int]:
    return [tensor.data_ptr() for tensor in get_held(reader).values()]


def test_held_tensors_stay_where_they_are(tmp_path: Path) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    assert same(read(reader, publisher, 1), state(1))
    places = list_places(reader)
    for step in (2, 3, 4):
        assert same(read(reader, publisher, step), state(step))
    publisher.publish(5, state(5).items())  # a version that this reader never saw
    assert same(read(reader, publisher, 6), state(6))
    assert places == list_places(reader)


def test_a_reader_that_was_interrupted_reads_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are of two versions then."""
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    read(reader, publisher, 1)
    with monkeypatch.context() as patch:
        patch.setattr("rollway.weights.transports.delta.reader.digest", fail)
        with pytest.raises(MemoryError):
            read(reader, publisher, 2)
    assert same(read(reader, publisher, 3), state(3))


def fail(_: Tensor) -> str:
    raise MemoryError


def test_a_reading_that_still_runs_keeps_its_tensors_and_blocks_no_other(tmp_path: Path) -> None:
    """The staging of a discarded version, which stops at its next tensor or never."""
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    earlier = reader.tensors(publisher.publish(1, state(1).items()))
    received = dict([next(earlier)])
    assert same(read(reader, publisher, 2), state(2))
    received.update(earlier)
    assert same(received, state(1))
    assert same(read(reader, publisher, 3), state(3))


def test_a_reading_that_begins_while_another_verifies_has_tensors_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    read(reader, publisher, 1)
    offer = publisher.publish(2, state(2).items())
    later: State = {}

    def read_after_the_last(tensor: Tensor) -> str:
        result = digest(tensor)
        if tensor.shape == state(2)["all"].shape and not later:
            monkeypatch.setattr("rollway.weights.transports.delta.reader.digest", digest)
            later.update(read(reader, publisher, 3))
        return result

    monkeypatch.setattr("rollway.weights.transports.delta.reader.digest", read_after_the_last)
    received = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
    assert same(later, state(3))
    assert same(received, state(2))


def test_a_reader_that_was_left_half_way_still_follows_deltas(tmp_path: Path) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    read(reader, publisher, 1)
    places = list_places(reader)
    half = reader.tensors(publisher.publish(2, state(2).items()))
    next(half)
    half.close()  # type: ignore[attr-defined]
    assert same(read(reader, publisher, 3), state(3))
    assert list_places(reader) == places


def test_a_reader_whose_tensors_are_wrong_reads_a_snapshot(tmp_path: Path) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path), snapshot_every=2), DeltaReader()
    read(reader, publisher, 1)
    get_held(reader)["w3"][7, 7] += 1
    read(reader, publisher, 2)
    assert same(read(reader, publisher, 3), state(3))


def test_torch_has_its_threads_again(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        publisher = DeltaPublisher(Store(tmp_path))
        for step in (1, 2):
            publisher.publish(step, state(step).items())
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
