"""A delta changes the held tensors in place: only where something changed, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.transports.delta import (
    DeltaPublisher,
    DeltaReader,
    DeltaVersions,
    Store,
)
from rollway.weights.transports.delta.reader import patch, patch_all

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


def test_a_delta_that_is_wrong_in_the_end_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, versions = DeltaPublisher(Store(tmp_path)), DeltaVersions(Store(tmp_path))
    held = {name: tensor.clone() for name, tensor in state(1).items()}
    for step in (1, 2, 3):
        publisher.publish(step, state(step).items())
    steps = versions.find_chain(1, 3)
    assert [step.kind for step in steps] == ["delta", "delta"]
    held["same"] += 1  # the last that is looked at
    with pytest.raises(WeightsError, match="same does not match its checksum in version 3"):
        patch_all(versions, held, steps)
    held["same"] -= 1
    assert same(held, state(1))
    calls = []

    def fail_later(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 9:
            raise MemoryError
        return patch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("rollway.weights.transports.delta.reader.patch", fail_later)
    with pytest.raises(MemoryError):
        patch_all(versions, held, steps)
    assert same(held, state(1))
    patch_all(versions, held, steps)
    assert same(held, state(3))


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
