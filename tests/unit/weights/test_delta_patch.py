"""A delta changes the held tensors in place, or they are read from a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

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


def test_held_tensors_stay_where_they_are(tmp_path: Path) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path)), DeltaReader()
    assert same(read(reader, publisher, 1), state(1))
    places = {name: tensor.data_ptr() for name, tensor in reader._state.items()}
    for step in (2, 3, 4):
        assert same(read(reader, publisher, step), state(step))
    publisher.publish(5, state(5).items())  # a version that this reader never saw
    assert same(read(reader, publisher, 6), state(6))
    assert places == {name: tensor.data_ptr() for name, tensor in reader._state.items()}


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


def test_a_reader_whose_tensors_are_wrong_reads_a_snapshot(tmp_path: Path) -> None:
    publisher, reader = DeltaPublisher(Store(tmp_path), snapshot_every=2), DeltaReader()
    read(reader, publisher, 1)
    reader._state["w3"][7, 7] += 1
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
