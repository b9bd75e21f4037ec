"""Workers over real NIXL: a rank receives only its part, and serves peers what it has whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from rollway.engine.incoming import find_slices
from rollway.errors import WeightsError
from rollway.signed_calls import SECRET
from rollway.weights.layout import Box, Slices
from rollway.weights.offer import Offer
from rollway.weights.planning.targets import engine_ranks
from rollway.weights.sources import from_module
from rollway.weights.transports.nixl import NixlPublisher, NixlReader
from rollway.weights.transports.nixl import reader as nixl_reader
from rollway.weights.transports.nixl.catalog import Catalog, CatalogServer
from tests.tensors import receive, same
from tests.unit.engine.sliced_models import DENSE, MOE, engine
from tests.unit.weights.megatron_plans import model_of
from tests.unit.weights.nixl_pieces import hold_rows, nixl
from tests.unit.weights.nixl_source import WORD, Tensors, Trainer, tensors_of

pytestmark = nixl


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, WORD)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_reader(cleanup: ExitStack) -> NixlReader:
    return cleanup.enter_context(closing(NixlReader()))


def tensors_like(config: dict[str, Any]) -> Tensors:
    return {name: torch.from_numpy(array) for name, array in model_of(config)[0].items()}


def parts(model: Tensors, mine: Slices) -> Tensors:
    sliced = {}
    for name, tensor in model.items():
        box = mine.boxes.get(name, Box.whole(tuple(tensor.shape)))
        if box is not None:
            ranges = zip(box.start, box.stop, strict=True)
            sliced[name] = tensor[tuple(slice(a, b) for a, b in ranges)]
    return sliced


@pytest.mark.parametrize(
    ("config", "tp", "ep"), [(DENSE, 2, 1), (DENSE, 4, 1), (MOE, 2, 1), (MOE, 2, 2)]
)
def test_ranks_receive_only_their_parts(
    cleanup: ExitStack, config: dict[str, Any], tp: int, ep: int
) -> None:
    """Every part of a tensor that was copied to publish it is one run of memory."""
    headers = model_of(config)[1]
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=4))
    readers = [open_reader(cleanup) for _ in range(tp)]
    for version in range(2):
        model = {name: tensor + version for name, tensor in tensors_like(config).items()}
        offer = publisher.publish(version, model.items())
        ranks = zip(engine_ranks(config, tp, ep), readers, strict=True)
        for place, (rank, reader) in enumerate(ranks):
            assert reader.headers(offer).keys() == model.keys()
            wanted = find_slices(rank, headers, engine(config, headers, tp, ep, place))
            mine = reader.restrict(offer, wanted)
            assert mine == wanted
            expected = parts(model, mine)
            assert same(receive(reader, offer), expected)
            needed = sum(tensor.nbytes for tensor in expected.values())
            assert reader.moved.total() == needed < 0.8 * offer.nbytes


def test_a_worker_of_one_rank_receives_split_tensors_whole(cleanup: ExitStack) -> None:
    model = tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    offer = publisher.publish(0, model.items())
    reader = open_reader(cleanup)
    assert reader.restrict(offer, Slices()) == Slices()
    assert same(receive(reader, offer), model)
    assert reader.moved.total() == offer.nbytes


def test_parts_without_a_digest_are_received_whole(cleanup: ExitStack) -> None:
    """The publisher does not split tensors, or splits them for fewer ranks."""
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    rank = engine_ranks(DENSE, 4)[1]
    for engine_size in (1, 2):
        publisher = cleanup.enter_context(NixlPublisher(engine_ranks=engine_size))
        offer = publisher.publish(0, model.items())
        reader = open_reader(cleanup)
        mine = reader.restrict(offer, find_slices(rank, headers, engine(DENSE, headers, 4, 1, 1)))
        assert "model.layers.0.self_attn.q_proj.weight" not in mine.boxes
        assert same(receive(reader, offer), parts(model, mine))


def test_parts_of_adopted_tensors(cleanup: ExitStack) -> None:
    """Adopted tensors are not rearranged: those cut across rows are received whole."""
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    publisher.adopt(model.items())
    offer = publisher.publish(0)
    reader = open_reader(cleanup)
    wanted = find_slices(engine_ranks(DENSE, 2)[1], headers, engine(DENSE, headers, 2, 1, 1))
    mine = reader.restrict(offer, wanted)
    whole = wanted.boxes.keys() - mine.boxes.keys()
    assert whole == {name for name in wanted.boxes if "o_proj" in name or "down_proj" in name}
    received = receive(reader, offer)
    assert same(received, parts(model, mine))
    needed = sum(tensor.nbytes for tensor in received.values())
    assert reader.moved.total() == needed < offer.nbytes

    # Only the rank whose part contains a changed byte detects it.
    model["lm_head.weight"][:1] += 1
    assert same(receive(reader, offer), parts(model, mine))
    other = open_reader(cleanup)
    other.restrict(
        offer, find_slices(engine_ranks(DENSE, 2)[0], headers, engine(DENSE, headers, 2, 1, 0))
    )
    with pytest.raises(WeightsError, match=r"lm_head.weight is not what was published"):
        receive(other, offer)


def test_parts_of_tensors_that_several_trainer_ranks_hold(cleanup: ExitStack) -> None:
    """Three trainer ranks cut rows, and two engine ranks cut again."""
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    catalog = cleanup.enter_context(CatalogServer())
    ranks = [
        cleanup.enter_context(NixlPublisher(catalog=catalog.url, rank=r, world=3, engine_ranks=2))
        for r in range(3)
    ]
    for publisher, held in zip(ranks, hold_rows(model, 3), strict=True):
        publisher.announce(0, held)
    offer = ranks[0].offer(0)
    for place, rank in enumerate(engine_ranks(DENSE, 2)):
        reader = open_reader(cleanup)
        wanted = find_slices(rank, headers, engine(DENSE, headers, 2, 1, place))
        mine = reader.restrict(offer, wanted)
        assert mine == wanted
        assert same(receive(reader, offer), parts(model, mine))
        assert reader.moved.total() == sum(part.nbytes for part in parts(model, mine).values())


def test_a_module_is_split_by_the_shapes_of_its_shards(cleanup: ExitStack) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = torch.nn.Linear(8, 4)

    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    offer = publisher.publish(0, from_module(Layer(), replica=(0, 1)))
    reader = open_reader(cleanup)
    box = Box((0, 4), (4, 8))
    mine = Slices(
        {"o_proj.weight": box}, {"o_proj.weight": (4, 8)}, {"o_proj.weight": "o_proj.weight"}
    )
    assert reader.restrict(offer, mine) == mine
    assert receive(reader, offer)["o_proj.weight"].shape == (4, 4)


# --- fan-out -------------------------------------------------------------------------------------


def trainer_bytes(readers: list[NixlReader]) -> int:
    return sum(
        count
        for reader in readers
        for source, count in reader.moved.items()
        if source.startswith("trainer")
    )


@pytest.mark.parametrize("count", [3, 6])
def test_a_trainer_serves_one_worker_and_workers_serve_the_others(
    cleanup: ExitStack, count: int
) -> None:
    """All arrive at once, as in a refit; twice, so that pools and plans are reused."""
    trainer = cleanup.enter_context(Trainer(fanout=True))
    readers = [open_reader(cleanup) for _ in range(count)]
    pool = cleanup.enter_context(ThreadPoolExecutor(count))

    def receive_whole(reader: NixlReader, offer: Offer) -> Tensors:
        assert reader.headers(offer)
        reader.restrict(offer, Slices())
        return receive(reader, offer)

    for version in range(2):
        offer = trainer.publish(version)
        for tensors in pool.map(receive_whole, readers, [offer] * count):
            assert same(tensors, tensors_of(version))
        assert trainer_bytes(readers) == offer.nbytes
        for reader in readers:
            assert reader.moved.total() == offer.nbytes


def test_without_fan_out_the_trainer_serves_all(cleanup: ExitStack) -> None:
    trainer = cleanup.enter_context(Trainer())
    readers = [open_reader(cleanup) for _ in range(3)]
    offer = trainer.publish(0)
    for reader in readers:
        assert same(receive(reader, offer), tensors_of(0))
    assert trainer_bytes(readers) == 3 * offer.nbytes


def test_workers_receive_from_the_first_one_when_the_trainer_is_dead(cleanup: ExitStack) -> None:
    catalog = cleanup.enter_context(CatalogServer())
    trainer = cleanup.enter_context(Trainer(catalog=catalog.url, fanout=True))
    first, *others = readers = [open_reader(cleanup) for _ in range(3)]
    offer = trainer.publish(0)
    assert same(receive(first, offer), tensors_of(0))
    trainer.kill()
    for reader in others:
        assert same(receive(reader, offer), tensors_of(0))
    assert trainer_bytes(readers) == offer.nbytes


def test_a_receiver_that_died_delays_others_briefly(
    cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reader, "WAIT_SECONDS", 0.5)
    trainer = cleanup.enter_context(Trainer(fanout=True))
    offer = trainer.publish(0)
    assert Catalog(str(offer.where["catalog"])).look_up(0, receiver="dead")
    reader = open_reader(cleanup)
    began = time.monotonic()
    tensors = receive(reader, offer)
    assert time.monotonic() - began > 0.2  # pauses grow, and the last ends before the time does
    assert same(tensors, tensors_of(0))


def test_a_released_version_is_not_served(cleanup: ExitStack) -> None:
    catalog = Catalog(cleanup.enter_context(CatalogServer()).url)
    trainer = cleanup.enter_context(Trainer(catalog=catalog.url, fanout=True))
    reader = open_reader(cleanup)
    offer = trainer.publish(0)
    receive(reader, offer)
    assert [listing.role for listing in catalog.look_up(0)] == ["receiver"]
    reader.release()
    assert [listing.role for listing in catalog.look_up(0)] == ["trainer"]
    receive(reader, offer)
    receive(reader, trainer.publish(1))  # into the memory of the version before
    assert [listing.role for listing in catalog.look_up(0)] == ["trainer"]


def test_parts_come_from_a_worker_that_has_the_whole(cleanup: ExitStack) -> None:
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2, fanout=True))
    offer = publisher.publish(0, model.items())
    whole, rank = open_reader(cleanup), open_reader(cleanup)
    assert same(receive(whole, offer), model)
    wanted = find_slices(engine_ranks(DENSE, 2)[1], headers, engine(DENSE, headers, 2, 1, 1))
    mine = rank.restrict(offer, wanted)
    assert mine == wanted
    assert same(receive(rank, offer), parts(model, mine))
    assert trainer_bytes([whole, rank]) == offer.nbytes
