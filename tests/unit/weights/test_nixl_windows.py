"""Run windows of reads on plain bytes: every layout gives the model, and nothing overlaps."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Piece
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.offer import Entry, list_boxes
from rollway.weights.planning.plan import Costs, Source, plan
from rollway.weights.planning.scenario import fsdp_sources, megatron_sources
from rollway.weights.planning.targets import Targets, engine_ranks, engine_targets, hf_targets
from rollway.weights.transports.entries import align
from rollway.weights.transports.nixl.listing import count_bytes, read_layout
from rollway.weights.transports.nixl.windows import (
    ALIGNED,
    Windows,
    make_windows,
    resolve_reads,
)
from tests.unit.weights.megatron_models import Experts, describe_as
from tests.unit.weights.megatron_plans import MOE, model_of
from tests.unit.weights.planned import DTYPE, Model, expected, held_by, slices

Bytes = NDArray[np.uint8]


def tensors_of(source: Source) -> dict[str, Entry]:
    """List a source's tensors one behind the other, as a pool has them."""
    entries, at = {}, 0
    for name, resident in source.tensors.items():
        tensor = TensorHeader(resident.dtype, resident.shape)
        entries[name] = Entry(name, tensor.dtype, tensor.shape, at, count_bytes(tensor))
        at += align(entries[name].nbytes, ALIGNED)
    return entries


def memory_of(source: Source, model: Model) -> Bytes:
    """Return a source's tensors in one run of bytes."""
    held = held_by(source, model)
    parts = [
        held[n].tobytes().ljust(align(e.nbytes, ALIGNED), b"\0")
        for n, e in tensors_of(source).items()
    ]
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def run_windows(windows: Windows, sources: list[Source], model: Model) -> Model:
    memory = {source.name: memory_of(source, model) for source in sources}
    end = max(window.offset + window.nbytes for window in windows.windows)
    buffer = np.zeros(end, dtype=np.uint8)
    result: Model = {}

    def view(tensor: Entry) -> NDArray[np.int32]:
        raw = buffer[tensor.offset : tensor.offset + tensor.nbytes]
        return raw.view(np.int32).reshape(tensor.shape)

    moved = 0
    for window in windows.windows:
        for source, reads in window.reads.items():
            raw = memory[source]
            remote, local, sizes = resolve_reads(reads, 0, 0)
            assert (np.diff(remote) > 0).all()
            for there, here, size in zip(remote, local, sizes, strict=True):
                assert window.offset <= here and here + size <= window.offset + window.nbytes
                buffer[here : here + size] = raw[there : there + size]
                moved += int(size)
        for whole, transfer in window.cuts:
            for name, cut in transfer.copies:
                values = view(whole)[slices(cut.box)]
                values = values.swapaxes(-1, -2) if cut.transposed else values
                target = next(t for t in window.targets if t.name == name)
                place = tuple(slice(a, a + n) for a, n in zip(cut.at, cut.extent, strict=True))
                view(target)[place] = values.reshape(cut.extent)
        for target in window.targets:
            result[target.name] = view(target).copy()
    assert moved == windows.total.moved
    return result


def windows_of(
    sources: list[Source], wanted: Targets, costs: Costs, size: int, keep: bool
) -> Windows:
    transfers = list(plan(sources, [("r", wanted)], costs))
    pieces = {
        (resident.names[held.tensor], held.box): None
        for source in sources
        for resident in source.tensors.values()
        for held in resident.held
    }
    tensors = {source.name: tensors_of(source) for source in sources}
    return make_windows(transfers, wanted, tensors, pieces, window_bytes=size, keep=keep)


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from(
        [Topology(), Topology(tp=2), Topology(tp=4, etp=4), Topology(tp=2, pp=2, ep=4, world=8)]
    ),
    experts=st.sampled_from(Experts),
    block=st.sampled_from([0.0, 2.6e-6, 1.0]),
    size=st.sampled_from([1, 700, 1 << 20]),
    keep=st.booleans(),
)
def test_windows_give_the_model_from_any_megatron_layout(
    topology: Topology, experts: Experts, block: float, size: int, keep: bool
) -> None:
    """Blocks may be free (all reads are strided) or expensive (tensors are read whole)."""
    model, headers = model_of(MOE)
    names = NameMap.from_hf_config(MOE)
    sources = megatron_sources(
        describe_as(headers, names, topology, padded_vocab=32, experts=experts)
    )
    costs = Costs(pack_gb_per_s=0, read_seconds=block)
    windows = windows_of(sources, hf_targets(headers), costs, size, keep)
    arrays = run_windows(windows, sources, model)
    assert arrays.keys() == model.keys()
    assert all(np.array_equal(arrays[name], model[name]) for name in model)
    verified = {piece for checks in windows.checks.values() for _, piece in checks}
    for name in model:
        boxes = [box for piece, box in verified if piece == name]
        assert sum(box.elements for box in boxes) == model[name].size
    if keep:
        ends = sorted((o.offset, o.offset + o.nbytes) for w in windows.windows for o in w.targets)
        assert all(a[1] <= b[0] for a, b in pairwise(ends))


def test_whole_experts_land_in_the_parameter_of_their_rank() -> None:
    """With expert parallelism, whole pieces go into fused parameters and can be verified."""
    model, headers = model_of(MOE)
    experts = {name: header for name, header in headers.items() if ".experts." in name}
    ranks = engine_ranks(MOE, tp=1, ep=2)
    wanted = engine_targets(ranks[1], experts)
    sources = fsdp_sources(experts, 1)
    windows = windows_of(sources, wanted, Costs(pack_gb_per_s=0), 1 << 20, keep=False)
    held = {name: array for name, array in model.items() if name in experts}
    arrays = run_windows(windows, sources, held)
    correct = expected(held, wanted)
    assert all(np.array_equal(arrays[name], correct[name]) for name in correct)
    for target, checks in windows.checks.items():
        for place, (name, box) in checks:
            part = arrays[target][slices(place)].reshape(box.shape)
            assert np.array_equal(part, held[name][slices(box)])
    assert sum(map(len, windows.checks.values())) == len(experts) // 2


def test_a_part_of_a_piece_cannot_be_verified() -> None:
    _, headers = model_of(MOE)
    rank = engine_ranks(MOE, tp=2)[0]
    sources = fsdp_sources(headers, 1)
    with pytest.raises(UsageError, match="cannot be verified"):
        windows_of(sources, engine_targets(rank, headers), Costs(pack_gb_per_s=0), 1, keep=False)


def test_neighbouring_reads_are_merged() -> None:
    rows = np.array([[256, 256, 64], [0, 0, 256], [1000, 400, 8]], dtype=np.int64)
    remote, local, sizes = resolve_reads([rows], 1000, 10)
    assert (remote.tolist(), local.tolist(), sizes.tolist()) == (
        [1000, 2000],
        [10, 410],
        [320, 8],
    )


# --- layouts on the wire -------------------------------------------------------------------------

QKV = Entry(
    "qkv", DTYPE, (6, 4), 0, 96, boxes=list_boxes([
        Piece("q", Box((0, 0), (2, 4)), "qkv", (0, 0)),
        Piece("k", Box((0, 0), (4, 4)), "qkv", (2, 0)),
    ])
)  # fmt: skip
LAYOUT = msgspec.msgpack.encode([QKV])


def test_a_layout_can_be_read() -> None:
    layout = read_layout(LAYOUT)
    assert layout.tensors == {"qkv": QKV}
    assert [piece.name for piece in layout.pieces] == ["q", "k"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused_as_a_layout(raw: bytes) -> None:
    try:
        layout = read_layout(raw)
    except WeightsError:
        return
    assert not layout.tensors  # an empty list is a layout: a rank may own nothing


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(LAYOUT) - 1), st.integers(1, 255))
def test_a_damaged_layout_is_refused_or_differs(at: int, by: int) -> None:
    """Listings are signed in transit; this only checks that the error is a WeightsError."""
    damaged = bytearray(LAYOUT)
    damaged[at] ^= by
    try:
        layout = read_layout(bytes(damaged))
    except WeightsError:
        return
    assert layout != read_layout(LAYOUT)
