"""Workers over real NIXL: a rank takes its part and no more, and gives on what it took whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from rollway.engine.nixl_receiver import NixlReceiver
from rollway.engine.slices import Slices, slices
from rollway.errors import UsageError, WeightsError
from rollway.orders import SECRET
from rollway.weights.catalog_http import CatalogServer, HttpCatalog
from rollway.weights.layout import Box, Piece
from rollway.weights.offer import Offer
from rollway.weights.planning.trainers import fsdp_sources
from rollway.weights.planning.transfers import Total
from rollway.weights.planning.vllm_layout import engine_ranks
from rollway.weights.sources import from_module
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.nixl_reader import NixlReader
from tests.unit.engine.sliced_models import DENSE, MOE, engine
from tests.unit.weights.megatron_plans import model_of
from tests.unit.weights.nixl_pieces import nixl, pieces_of, same
from tests.unit.weights.nixl_source import WORD, Tensors, Trainer, tensors_of
from tests.unit.weights.planned import held_by

pytestmark = nixl


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, WORD)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def worker(cleanup: ExitStack) -> NixlReceiver:
    made = NixlReceiver()
    cleanup.callback(made.close)
    return made


def taken(receiver: NixlReceiver, offer: Offer) -> Tensors:
    return {name: tensor.clone() for name, tensor in receiver.tensors(offer)}


def total(receiver: NixlReceiver) -> Total:
    assert receiver.total is not None
    return receiver.total


def tensors_like(config: dict[str, Any]) -> Tensors:
    return {name: torch.from_numpy(array) for name, array in model_of(config)[0].items()}


def parts(model: Tensors, mine: Slices) -> Tensors:
    found = {}
    for name, tensor in model.items():
        box = mine.boxes.get(name, Box.whole(tuple(tensor.shape)))
        if box is not None:
            ranges = zip(box.start, box.stop, strict=True)
            found[name] = tensor[tuple(slice(a, b) for a, b in ranges)]
    return found


@pytest.mark.parametrize(
    ("config", "tp", "ep"), [(DENSE, 2, 1), (DENSE, 4, 1), (MOE, 2, 1), (MOE, 2, 2)]
)
def test_ranks_take_their_parts_and_no_more(
    cleanup: ExitStack, config: dict[str, Any], tp: int, ep: int
) -> None:
    """Of tensors that were copied to publish them every part is one run of memory."""
    headers = model_of(config)[1]
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=4))
    workers = [worker(cleanup) for _ in range(tp)]
    for version in range(2):
        model = {name: one + version for name, one in tensors_like(config).items()}
        offer = publisher.publish(version, model.items())
        for place, (rank, one) in enumerate(
            zip(engine_ranks(config, tp, ep), workers, strict=True)
        ):
            assert one.headers(offer).keys() == model.keys()
            rank = engine_ranks(config, tp, ep)[place]
            wanted = slices(rank, headers, engine(config, headers, tp, ep, place))
            mine = one.narrow(offer, wanted)
            assert mine == wanted
            expected = parts(model, mine)
            assert same(taken(one, offer), expected)
            needed = sum(tensor.nbytes for tensor in expected.values())
            assert total(one).moved == total(one).needed == needed < 0.8 * offer.nbytes


def test_a_worker_of_one_rank_takes_divided_tensors_whole(cleanup: ExitStack) -> None:
    model = tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    offer = publisher.publish(0, model.items())
    one = worker(cleanup)
    assert one.narrow(offer, Slices()) == Slices()
    assert same(taken(one, offer), model)
    assert total(one).moved == total(one).needed == offer.nbytes


def test_parts_without_a_digest_are_taken_whole(cleanup: ExitStack) -> None:
    """Of a publisher that does not divide, or divides for fewer ranks."""
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    rank = engine_ranks(DENSE, 4)[1]
    for divided in (1, 2):
        publisher = cleanup.enter_context(NixlPublisher(engine_ranks=divided))
        offer = publisher.publish(0, model.items())
        one = worker(cleanup)
        mine = one.narrow(offer, slices(rank, headers, engine(DENSE, headers, 4, 1, 1)))
        assert "model.layers.0.self_attn.q_proj.weight" not in mine.boxes
        assert same(taken(one, offer), parts(model, mine))


def test_parts_of_tensors_that_were_adopted(cleanup: ExitStack) -> None:
    """They lie as they lie: what is cut across rows may be taken whole, and says so."""
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    publisher.adopt(model.items())
    offer = publisher.publish(0)
    one = worker(cleanup)
    wanted = slices(engine_ranks(DENSE, 2)[1], headers, engine(DENSE, headers, 2, 1, 1))
    mine = one.narrow(offer, wanted)
    assert mine == wanted
    assert same(taken(one, offer), parts(model, mine))
    assert total(one).needed < total(one).moved < offer.nbytes
    assert sum(total(one).reasons.values()) == total(one).moved - total(one).needed

    # A byte that changed is found by the rank whose part it is in, and by no other.
    model["lm_head.weight"][:1] += 1
    assert same(taken(one, offer), parts(model, mine))
    other = worker(cleanup)
    other.narrow(offer, slices(engine_ranks(DENSE, 2)[0], headers, engine(DENSE, headers, 2, 1, 0)))
    with pytest.raises(WeightsError, match=r"lm_head.weight is not what was published"):
        taken(other, offer)


def test_parts_of_what_several_ranks_of_a_trainer_hold(cleanup: ExitStack) -> None:
    """Cut among three by rows, and again where two ranks of an engine cut."""
    arrays, headers = model_of(DENSE)
    sources = fsdp_sources(headers, 3)
    catalog = cleanup.enter_context(CatalogServer())
    ranks = [
        cleanup.enter_context(NixlPublisher(catalog=catalog, rank=r, world=3, engine_ranks=2))
        for r in range(3)
    ]
    for publisher, source in zip(ranks, sources, strict=True):
        local = [(name, torch.from_numpy(one)) for name, one in held_by(source, arrays).items()]
        publisher.announce(0, local, pieces_of(source), headers)
    offer = ranks[0].offer(0)
    model = tensors_like(DENSE)
    for place, rank in enumerate(engine_ranks(DENSE, 2)):
        one = worker(cleanup)
        wanted = slices(rank, headers, engine(DENSE, headers, 2, 1, place))
        mine = one.narrow(offer, wanted)
        assert mine == wanted
        assert same(taken(one, offer), parts(model, mine))
        assert total(one).moved == total(one).needed


def test_a_module_is_divided_by_the_shapes_that_its_shards_tell(cleanup: ExitStack) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = torch.nn.Linear(8, 4)

    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2))
    offer = publisher.publish_held(0, from_module(Layer(), replica=(0, 1)))
    one = worker(cleanup)
    box = Box((0, 4), (4, 8))
    mine = Slices(
        {"o_proj.weight": box}, {"o_proj.weight": (4, 8)}, {"o_proj.weight": "o_proj.weight"}
    )
    assert one.narrow(offer, mine) == mine
    assert taken(one, offer)["o_proj.weight"].shape == (4, 4)


# --- fan-out -------------------------------------------------------------------------------------


def given_by_trainer(workers: list[NixlReceiver]) -> int:
    return sum(
        count
        for one in workers
        for source, count in total(one).sources.items()
        if source.startswith("trainer")
    )


@pytest.mark.parametrize("count", [3, 6])
def test_a_trainer_gives_a_version_to_one_worker_and_that_to_others(
    cleanup: ExitStack, count: int
) -> None:
    """All come at once, as in a refit; twice, so that pools and plans are used again."""
    trainer = cleanup.enter_context(Trainer(fanout=True))
    workers = [worker(cleanup) for _ in range(count)]
    pool = cleanup.enter_context(ThreadPoolExecutor(count))

    def take(one: NixlReceiver, offer: Offer) -> Tensors:
        assert one.headers(offer)
        one.narrow(offer, Slices())
        return taken(one, offer)

    for version in range(2):
        offer = trainer.publish(version)
        for found in pool.map(take, workers, [offer] * count):
            assert same(found, tensors_of(version))
        assert given_by_trainer(workers) == offer.nbytes
        for one in workers:
            assert total(one).moved == offer.nbytes


def test_without_fan_out_the_trainer_gives_to_all(cleanup: ExitStack) -> None:
    trainer = cleanup.enter_context(Trainer())
    workers = [worker(cleanup) for _ in range(3)]
    offer = trainer.publish(0)
    for one in workers:
        assert same(taken(one, offer), tensors_of(0))
    assert given_by_trainer(workers) == 3 * offer.nbytes


def test_workers_have_it_from_the_first_when_the_trainer_is_dead(cleanup: ExitStack) -> None:
    catalog = cleanup.enter_context(CatalogServer())
    trainer = cleanup.enter_context(Trainer(catalog=catalog.url, fanout=True))
    first, *others = workers = [worker(cleanup) for _ in range(3)]
    offer = trainer.publish(0)
    assert same(taken(first, offer), tensors_of(0))
    trainer.kill()
    for one in others:
        assert same(taken(one, offer), tensors_of(0))
    assert given_by_trainer(workers) == offer.nbytes


def test_one_that_died_in_its_turn_is_waited_for_a_while(cleanup: ExitStack) -> None:
    trainer = cleanup.enter_context(Trainer(fanout=True))
    offer = trainer.publish(0)
    catalog = HttpCatalog(str(offer.where["catalog"]))
    assert catalog.look_up(0, "one that dies", fanout=2)
    reader = cleanup.enter_context(NixlReader(serve=True, patience=0.5))
    began = time.monotonic()
    found = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
    assert time.monotonic() - began > 0.2  # it asks ever less often, and not beyond its end
    assert same(found, tensors_of(0))


def test_what_is_dropped_is_given_to_nobody(cleanup: ExitStack) -> None:
    catalog = cleanup.enter_context(CatalogServer())
    trainer = cleanup.enter_context(Trainer(catalog=catalog.url, fanout=True))
    one = worker(cleanup)
    offer = trainer.publish(0)
    taken(one, offer)
    assert len(catalog.look_up(0, "other")) == 1
    assert catalog.look_up(0, "other")[0].role == "receiver"
    one.let_go()
    assert catalog.look_up(0, "other")[0].role == "trainer"


def test_parts_come_from_a_worker_that_has_the_whole(cleanup: ExitStack) -> None:
    headers, model = model_of(DENSE)[1], tensors_like(DENSE)
    publisher = cleanup.enter_context(NixlPublisher(engine_ranks=2, fanout=True))
    offer = publisher.publish(0, model.items())
    whole, rank = worker(cleanup), worker(cleanup)
    assert same(taken(whole, offer), model)
    wanted = slices(engine_ranks(DENSE, 2)[1], headers, engine(DENSE, headers, 2, 1, 1))
    mine = rank.narrow(offer, wanted)
    assert mine == wanted
    assert same(taken(rank, offer), parts(model, mine))
    assert given_by_trainer([whole, rank]) == offer.nbytes


def test_wrong_use_is_told() -> None:
    with pytest.raises(UsageError, match="at least one rank, not 0"):
        NixlPublisher(engine_ranks=0)
    with NixlPublisher(engine_ranks=2) as publisher:
        stray = [Piece("o_proj.weight", Box((0, 0), (4, 4)), "elsewhere", (0, 0))]
        with pytest.raises(UsageError, match="lies in elsewhere, which is not given"):
            publisher.publish(0, [("a", torch.ones(2))], stray)
