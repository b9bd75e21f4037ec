"""Pull from the ranks of any trainer, in windows of any size, without NIXL: its agent is replaced
by one that copies within this process. Every layout gives the model, and nothing overlaps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import WeightsError
from rollway.signed_calls import SECRET
from rollway.weights.layout import Box, Slices
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.offer import Offer
from rollway.weights.planning.scenario import divide, plan, publish_rows, publish_shards
from rollway.weights.planning.targets import cells, engine_ranks, part_of
from rollway.weights.sources import HeldTensor
from rollway.weights.transports.nixl import publisher, reader
from rollway.weights.transports.nixl.agent import Read
from rollway.weights.transports.nixl.catalog import ListedVersions
from rollway.weights.transports.nixl.listing import Listing
from tests.tensors import receive, same
from tests.unit.weights.megatron_models import Experts, describe_as
from tests.unit.weights.megatron_plans import MOE, model_of
from tests.unit.weights.nixl_pieces import hold_rows, hold_shards

ARRAYS, HEADERS = model_of(MOE)
MODEL = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
Layout = int | tuple[Topology, Experts]
LAYOUTS = st.one_of(
    st.tuples(
        st.sampled_from(
            [Topology(), Topology(tp=2), Topology(tp=4, etp=4), Topology(tp=2, pp=2, ep=4, world=8)]
        ),
        st.sampled_from(Experts),
    ),
    st.integers(1, 5),
)
"""A Megatron trainer, or the number of FSDP's ranks."""


class LocalAgent:
    """Reads memory of this process; what is written twice is an error."""

    def __init__(self, name: str, error_handling: Any = "none", net_devices: Any = ()) -> None:
        self.name, self.error_handling = name, error_handling

    def register(self, *_: Any) -> None: ...

    def deregister(self, _: Any) -> None: ...

    def close(self) -> None: ...

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def read(self, reads: Sequence[Read], timeout: float) -> None:
        written = []
        for read in reads:
            assert read.remote[0] == read.local[0] == "DRAM"
            for (there, size, _), (here, same_size, _) in zip(
                read.remote[1], read.local[1], strict=True
            ):
                assert size == same_size > 0
                ctypes.memmove(here, there, size)
                written.append((here, here + size))
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(written)))


class LocalCatalog(ListedVersions):
    """A catalog of this process."""

    def wait_for(self, version: int, *_: Any) -> list[Listing]:
        return self.look_up(version)

    def look_up(self, version: int, without: Sequence[str] = (), _: str = "") -> list[Listing]:
        return super().look_up(version, without, "")


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    catalog = LocalCatalog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "a secret")
        for module in (publisher, reader):
            patch.setattr(module, "Agent", LocalAgent)
            patch.setattr(module, "open_catalog", lambda *_, **__: catalog)
        yield


def hold(layout: Layout) -> list[list[HeldTensor]]:
    """Return what each rank of a trainer holds."""
    if isinstance(layout, int):
        return hold_rows(MODEL, layout)
    return hold_shards(MODEL, describe(layout))


def describe(layout: tuple[Topology, Experts]) -> MegatronModel:
    names = NameMap.from_hf_config(MOE)
    return describe_as(HEADERS, names, layout[0], padded_vocab=32, experts=layout[1])


def publish(layout: Layout, version: int, **options: Any) -> tuple[Offer, list[Any]]:
    """Return the offer, and the publishers, whose memory must live."""
    shards = hold(layout)
    ranks = [
        publisher.NixlPublisher(
            catalog="http://127.0.0.1:1", rank=rank, world=len(shards), **options
        )
        for rank in range(len(shards))
    ]
    for rank, held in zip(ranks, shards, strict=True):
        rank.announce(version, held)
    return ranks[-1].offer(version), ranks


@settings(max_examples=40, deadline=None)
@given(
    layout=LAYOUTS,
    engine_size=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1, 700, 1 << 20]),
    fanout=st.booleans(),
)
def test_windows_give_the_model_from_any_layout(
    layout: Layout, engine_size: int, size: int, fanout: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "WINDOW_BYTES", size)
        offer, ranks = publish(layout, 0, engine_ranks=engine_size, fanout=fanout)
        first, second = reader.NixlReader(), reader.NixlReader()
        assert same(receive(first, offer), MODEL)
        assert first.moved.total() == offer.nbytes
        if fanout:
            assert same(receive(second, offer), MODEL)
            assert second.moved == {first.name: offer.nbytes}
        for end in (first, second, *ranks):
            end.close()


@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, engine_size=st.sampled_from([1, 2, 4]), tp=st.sampled_from([2, 4]))
def test_a_rank_receives_what_consists_of_whole_pieces(
    layout: Layout, engine_size: int, tp: int
) -> None:
    """And the plan of a refit says from whom, to the byte."""
    offer, publishers = publish(layout, 0, engine_ranks=engine_size)
    published = (
        publish_rows(HEADERS, layout)
        if isinstance(layout, int)
        else publish_shards(describe(layout))
    )
    for rank in engine_ranks(MOE, tp):
        places = {name: part_of(name, HEADERS, rank) for name in HEADERS}
        boxes = {name: part.box if part else None for name, (_, part) in places.items()}
        wanted = Slices(
            boxes,
            {name: header.shape for name, header in HEADERS.items()},
            {name: parameter for name, (parameter, _) in places.items()},
        )
        receiver = reader.NixlReader()
        mine = receiver.restrict(offer, wanted)
        total = plan(divide(published, HEADERS, engine_size), HEADERS, rank)
        if engine_size >= tp:
            assert mine == wanted
            assert total.moved == total.needed
        expected = {
            name: tensor[box.slices]
            for name, tensor in MODEL.items()
            if (box := mine.boxes.get(name, Box.whole(tuple(tensor.shape)))) is not None
        }
        assert same(receive(receiver, offer), expected)
        assert receiver.moved.total() == sum(tensor.nbytes for tensor in expected.values())
        names = {rank.name: f"trainer{number}" for number, rank in enumerate(publishers)}
        moved = {names[source]: count for source, count in receiver.moved.items()}
        assert moved == total.sources
    for end in publishers:
        end.close()


def test_a_part_of_a_piece_cannot_be_verified() -> None:
    offer, publishers = publish(1, 0)
    name = "model.layers.0.self_attn.q_proj.weight"
    receiver = reader.NixlReader()
    receiver._slices = Slices({name: cells(name, HEADERS, 2)[0]}, {}, {name: name})
    with pytest.raises(WeightsError, match="cannot be verified"):
        receive(receiver, offer)
    publishers[0].close()
