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
from rollway.weights.sources import Held
from rollway.weights.transports.shards import ShardReader, joined, publish_shards
from rollway.weights.transports.shm import ShmPublisher, ShmReader
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
            offers.append(publish_shards(publisher, 3, held))
        offer = joined(offers)
        # What several ranks hold is published by one.
        assert offer.nbytes == sum(tensor.nbytes for tensor in truth.values())
        reader = ShardReader(ShmReader(tmp_path), offer)
        assert {n: h.shape for n, h in reader.headers().items()} == {
            name: tuple(tensor.shape) for name, tensor in truth.items()
        }
        found = {name: tensor.clone() for name, tensor in reader.tensors()}
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def _rows(start: int, stop: int, tensor: torch.Tensor) -> Held:
    box = Box((start, 0), (stop, 4))
    return Held(Shard("w", "F32", (8, 4), box), tensor, [Piece("w", box, "w", (0, 0))], True)


def _published(tmp_path: Path, cleanup: ExitStack, *held: Held) -> Offer:
    return joined(
        [
            publish_shards(cleanup.enter_context(ShmPublisher(directory=tmp_path)), 1, [one])
            for one in held
        ]
    )


def test_a_rank_that_is_missing_or_there_twice_is_noticed(tmp_path: Path) -> None:
    first, last = _rows(0, 4, torch.ones(4, 4)), _rows(4, 8, torch.ones(4, 4))
    with ExitStack() as cleanup:
        for wrong, words in (((last,), "is not whole"), ((first, last, first), "claimed twice")):
            with pytest.raises(WeightsError, match=words):
                ShardReader(ShmReader(tmp_path), _published(tmp_path, cleanup, *wrong))


def test_a_shard_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        halves = _rows(0, 4, torch.ones(4, 4)), _rows(4, 8, torch.ones(4, 4))
        offer = _published(tmp_path, cleanup, *halves)
        reading = ShardReader(ShmReader(tmp_path), offer).tensors()
        next(reading)
        slot = tmp_path / offer.where["ranks"][1]["slot"]
        with slot.open("r+b") as file:
            file.write(b"\x01")
        with pytest.raises(WeightsError, match="changed while it was read"):
            list(reading)


def test_what_ranks_offer_must_fit_together(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        offer = _published(tmp_path, cleanup, _rows(0, 8, torch.ones(8, 4)))
        one = Offer("shm", 1, "a" * 32, 8, {"slot": offer.where["ranks"][0]["slot"]})
        with pytest.raises(UsageError, match="different versions"):
            joined([one, msgspec.structs.replace(one, version=2)])
        outside = Held(
            Shard("w", "F32", (8, 4), Box.whole((8, 4))),
            torch.ones(8, 4),
            [Piece("w", Box.whole((8, 4)), "w", (1, 0))],
            True,
        )
        with pytest.raises(WeightsError, match="lie outside of w"):
            ShardReader(ShmReader(tmp_path), _published(tmp_path, cleanup, outside))
