"""A reader returns what changed since the served version, in the same way on every device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.digest.checksums import integers, word_sum
from rollway.weights.transports.base import Changes
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader, Store, unpacking, versions
from rollway.weights.transports.delta.packing import Compression
from rollway.weights.transports.delta.unpacking import StepStreams, Streams
from rollway.weights.transports.delta.versions import map_in_order

CPU = torch.device("cpu")
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
    publisher = DeltaPublisher(Store(root), snapshot_every=100, compression=compression)
    reader = DeltaReader()
    offer = publisher.publish(1, state.items())
    for _ in reader.tensors(offer):
        pass
    reader.finish(offer)
    return publisher, reader, offer.identity


def apply_to(state: State, changes: Changes) -> State:
    """Apply changes one by one, as a plain loop would."""
    result = {name: tensor.clone() for name, tensor in state.items()}
    for step in changes.steps:
        for name, (positions, bits, relative) in step.move(CPU):
            target = integers(result[name])
            target[positions] = target[positions] + bits if relative else bits
    return result


def assert_same(left: State, right: State) -> None:
    for name, tensor in left.items():
        assert torch.equal(integers(tensor), integers(right[name])), name


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
    run: int,
) -> None:
    first = make_state(len(sizes), sizes)
    publisher, reader, served = serve(tmp_path_factory.mktemp("deltas"), first, compression)
    last = first
    for step, share in enumerate(shares):
        last = change(last, step, share)
        offer = publisher.publish(2 + step, last.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "BATCH", batch)
        patch.setattr(versions, "_RUN_BYTES", run)
        patch.setattr(versions, "_PIECE_BYTES", 1000)
        changes = reader.changes(offer, served, 1 << 60)
        if changes.refusal:
            assert "a snapshot is shorter" in changes.refusal
        else:
            assert_same(apply_to(first, changes), last)
    assert reader.sums(offer) == {name: word_sum(tensor) for name, tensor in last.items()}
    assert_same(dict(reader.tensors(offer)), last)  # its own tensors were not touched


def test_changes_need_the_version_that_is_served(tmp_path: Path) -> None:
    state = make_state(0, [5000] * 4)
    publisher, reader, served = serve(tmp_path / "a", state)
    offer = publisher.publish(2, change(state, 1, 0.01).items())
    assert "did not come from the same deltas" in reader.changes(offer, "0" * 32, 1 << 60).refusal
    assert reader.changes(offer, served, 3).refusal == "More than 3 elements changed."
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
    offer = DeltaPublisher(Store(tmp_path)).publish(1, other.items())
    assert "with the number of the served one" in reader.changes(offer, served, 1 << 60).refusal
    assert_same(dict(reader.tensors(offer)), other)


@pytest.mark.parametrize("fault", ["count", "elements"])
def test_positions_that_are_wrong_are_refused(fault: str, tmp_path: Path) -> None:
    state = make_state(0, [5000] * 8)
    publisher, reader, served = serve(tmp_path, state)
    offer = publisher.publish(2, change(state, 1, 0.01).items())
    (step,) = reader.changes(offer, served, 1 << 60).steps
    wrong = []
    for streams in step.changes:
        assert isinstance(streams, Streams) and streams.header.places == "gaps"
        header, places = streams.header, streams.places
        if fault == "count":
            places = places[:-1]
        else:
            header = msgspec.structs.replace(header, shape=(50,))
        wrong.append(Streams(header, places, streams.values))
    for change_of_one in wrong:
        with pytest.raises(WeightsError, match=r"positions in a change of t\d"):
            list(StepStreams([*step.changes, change_of_one]).move(CPU))


def test_no_thread_works_on_after_an_error() -> None:
    done = []

    def work(name: str) -> None:
        if name == "3":
            raise MemoryError
        done.append(name)

    with pytest.raises(MemoryError):
        map_in_order(work, [str(i) for i in range(1000)], threads=4)
    count = len(done)
    assert map_in_order(str.upper, ["a", "b"], threads=4) == ["A", "B"] and len(done) == count
