"""Shards of many trainer ranks, read as Hugging Face tensors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rollway.errors import UsageError, WeightsError
from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.megatron.geometry import Topology
from rollway.weights.offer import Offer
from rollway.weights.sources import HeldTensor, from_module
from rollway.weights.transports.shm import ShmPublisher, ShmReader, join_offers
from tests.unit.weights.megatron_shards import held_by_ranks

DATA = Path(__file__).parents[2] / "data" / "megatron"


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("dense", Topology(tp=2, pp=2)),
        ("dense", Topology(tp=8)),  # fewer query groups than ranks
        ("moe", Topology(tp=2, ep=2, etp=2)),
        ("moe", Topology(ep=4, pp=2)),
    ],
)
def test_a_megatron_model_is_read_from_its_ranks(
    tmp_path: Path, kind: str, topology: Topology
) -> None:
    model = DATA / f"hf_{kind}"
    truth = load_file(model / "model.safetensors")
    with ExitStack() as cleanup:
        offers = []
        for held in held_by_ranks(model, truth, topology):
            publisher = cleanup.enter_context(ShmPublisher(directory=tmp_path))
            offers.append(publisher.publish(3, held))
        offer = join_offers(offers)
        # A tensor that several ranks hold is published once.
        assert offer.nbytes == sum(tensor.nbytes for tensor in truth.values())
        reader = ShmReader(tmp_path)
        assert {n: h.shape for n, h in reader.headers(offer).items()} == {
            name: tuple(tensor.shape) for name, tensor in truth.items()
        }
        assert reader.sums(offer) == {}
        received = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
    assert received.keys() == truth.keys()
    assert all(torch.equal(received[name], truth[name]) for name in truth)


def test_ranks_that_hold_whole_tensors_are_joined_with_those_that_hold_parts(
    tmp_path: Path,
) -> None:
    whole = from_module(torch.nn.Linear(4, 3))
    rows = torch.arange(32.0).view(8, 4)
    with ExitStack() as cleanup:
        offer = _publish(tmp_path, cleanup, _rows(0, 4, rows[:4]), _rows(4, 8, rows[4:]), *whole)
        received = {name: tensor.clone() for name, tensor in ShmReader(tmp_path).tensors(offer)}
    assert received.keys() == {"w", "weight", "bias"}
    assert torch.equal(received["w"], rows)
    assert all(torch.equal(received[held.shard.name], held.tensor) for held in whole)


def test_an_empty_tensor_among_shards(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.empty = torch.nn.Parameter(torch.empty(0, 4))
    with ExitStack() as cleanup:
        shards = _rows(0, 8, torch.ones(8, 4)), *from_module(module)
        received = dict(ShmReader(tmp_path).tensors(_publish(tmp_path, cleanup, *shards)))
    assert received.keys() == {"w", "empty"} and received["empty"].shape == (0, 4)


def test_a_single_rank_publishes_a_plain_version(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3)
    with ShmPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, from_module(module))
        assert len(offer.where["ranks"]) == 1
        received = dict(ShmReader(tmp_path).tensors(offer))
        assert torch.equal(received["weight"], module.weight)


def _rows(start: int, stop: int, tensor: torch.Tensor) -> HeldTensor:
    box = Box((start, 0), (stop, 4))
    return HeldTensor(
        Shard("w", "F32", (8, 4), box), tensor, [Piece("w", (8, 4), box, (0, 0))], True
    )


def _publish(tmp_path: Path, cleanup: ExitStack, *held: HeldTensor) -> Offer:
    return join_offers(
        [
            cleanup.enter_context(ShmPublisher(directory=tmp_path)).publish(1, [shard])
            for shard in held
        ]
    )


def test_a_missing_or_repeated_rank_is_noticed(tmp_path: Path) -> None:
    first, last = _rows(0, 4, torch.ones(4, 4)), _rows(4, 8, torch.ones(4, 4))
    with ExitStack() as cleanup:
        for ranks, message in (((last,), "is not whole"), ((first, last, first), "claimed twice")):
            with pytest.raises(WeightsError, match=message):
                ShmReader(tmp_path).headers(_publish(tmp_path, cleanup, *ranks))


def test_a_shard_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        halves = _rows(0, 4, torch.ones(4, 4)), _rows(4, 8, torch.ones(4, 4))
        offer = _publish(tmp_path, cleanup, *halves)
        reading = ShmReader(tmp_path).tensors(offer)
        next(reading)
        slot = tmp_path / offer.where["ranks"][1]["slot"]
        with slot.open("r+b") as file:
            file.write(b"\x01")
        with pytest.raises(WeightsError, match="changed while it was read"):
            list(reading)


def test_offers_of_ranks_must_fit_together(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        offer = _publish(tmp_path, cleanup, _rows(0, 8, torch.ones(8, 4)))
        with pytest.raises(UsageError, match="different versions"):
            join_offers([offer, msgspec.structs.replace(offer, version=2)])
        outside = HeldTensor(
            Shard("w", "F32", (8, 4), Box.whole((8, 4))),
            torch.ones(8, 4),
            [Piece("w", (8, 4), Box.whole((8, 4)), (1, 0))],
            True,
        )
        with pytest.raises(WeightsError, match="w is outside of w"):
            ShmReader(tmp_path).headers(_publish(tmp_path, cleanup, outside))
