"""Pack and unpack the changes of a tensor: every dtype, every pattern, and damaged bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollway.errors import RollwayError, WeightsError
from rollway.weights.digest.checksums import DTYPES, integers, raw_bytes, word_sum
from rollway.weights.transports.delta import packing
from rollway.weights.transports.delta.publisher import Compression
from rollway.weights.transports.delta.reader import _rebuild
from rollway.weights.transports.delta.versions import DELTA, SNAPSHOT, Change, open_stored
from tests.tensors import equal_bits, noise
from tests.unit.weights.deltas import Pair

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (3, 0), (1,), (7,), (64, 33)]),
    st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
)


def changed(old: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Return a copy in which about that share of the elements has other bits."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(old.numel(), generator=generator) < share
    new = old.clone()
    size = old.element_size()
    other = raw_bytes(noise(tuple(old.shape), old.dtype, seed + 1)).view(-1, size)
    raw_bytes(new).view(-1, size)[chosen] = other[chosen]
    return new


def get_change(pair: Pair) -> Change:
    change = pair.manifest.tensors["w"].change
    assert change is not None
    return change


@pytest.mark.parametrize("compression", get_args(Compression))
@given(st.sampled_from(sorted(DTYPES)), SHAPES, st.floats(0, 1), st.integers(0, 99), st.booleans())
@settings(max_examples=100)
def test_an_applied_change_gives_exactly_the_new_tensor(
    compression: Compression,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    shape: tuple[int, ...],
    share: float,
    seed: int,
    is_near: bool,
) -> None:
    old = noise(shape, DTYPES[dtype], seed)
    new = changed(old, share, seed + 7)
    if is_near:  # only the lower bytes differ
        bits = 1 if dtype == "BOOL" else 5
        new = torch.where(integers(new) == integers(old), integers(old), integers(old) ^ bits)
        new = new.view(old.dtype).view(old.shape)
    pair = Pair(tmp_path_factory.mktemp("pair"), old, new, compression)
    assert pair.manifest.tensors["w"].sum == word_sum(new)
    assert equal_bits(pair.patch(), new)
    assert equal_bits(pair.read(), new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64])
def test_large_tensors_with_any_share_of_changes(
    device: str, share: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    old = noise((1_200_001,), dtype, 1)
    new = changed(old, share, 2)
    pair = Pair(tmp_path, old.to(device), new.to(device), "none")
    assert equal_bits(pair.patch().cpu(), new)
    assert equal_bits(pair.read(), new)
    change = pair.manifest.tensors["w"].change
    assert change is None if share == 0.0 else get_change(pair).nbytes <= 1.01 * new.nbytes


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation returns."""

    nbytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_a_tensor_that_changed_everywhere_is_read_without_positions(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """They would take eight bytes for each element."""
    old = noise((40_000,), dtype, 1)
    pair = Pair(tmp_path, old, (integers(old) ^ 1).view(dtype))
    entries = [pair.versions.read_manifest(version).tensors["w"] for version in (1, 2)]
    with (
        open_stored(tmp_path / "v1" / SNAPSHOT) as snapshot,
        open_stored(tmp_path / "v2" / DELTA) as delta,
        LargestTensor() as largest,
    ):
        assert torch.equal(integers(_rebuild("w", entries, snapshot, [delta])), integers(old) ^ 1)
    assert largest.nbytes <= old.nbytes


def test_a_tensor_is_sent_whole_where_its_changes_would_hardly_be_shorter(tmp_path: Path) -> None:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    for number, (share, is_whole) in enumerate([(0.01, False), (0.1, False), (0.4, True)]):
        pair = Pair(tmp_path / str(number), old, changed(old, share, 1))
        assert get_change(pair).is_whole == is_whole
    assert Pair(tmp_path / "same", old, old).manifest.tensors["w"].change is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_percent_of_the_elements_is_less_than_two_percent_of_the_bytes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(1_000_000, generator=generator) * 0.02).to(dtype)
    new = old.clone()
    some = torch.randperm(old.numel(), generator=generator)[: old.numel() // 100]
    new[some] = (torch.randn(some.numel(), generator=generator) * 0.02).to(dtype)
    assert get_change(Pair(tmp_path / "new", old, new)).nbytes < 0.02 * old.nbytes
    # A small optimizer step moves a value to its neighbour, which compresses even better.
    step = old.clone()
    step.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[some] += 1
    assert get_change(Pair(tmp_path / "step", old, step)).nbytes < 0.009 * old.nbytes


def test_small_steps_are_sent_without_their_upper_bytes(tmp_path: Path) -> None:
    old = noise((100_000,), torch.bfloat16, 1)
    new = old.clone()
    new.view(torch.int16)[::100] += 1
    pair = Pair(tmp_path, old, new, "none")
    change = get_change(pair)
    assert (change.planes, change.count, change.nbytes) == (1, 1000, 2000)
    assert (tmp_path / "v2" / DELTA).read_bytes() == bytes([0, *[99] * 999]) + bytes([2] * 1000)


def test_bits_are_compared_and_not_values(tmp_path: Path) -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    assert Pair(tmp_path / "same", old, old.clone()).manifest.tensors["w"].change is None
    minus = torch.tensor([-0.0, float("nan"), 1.0])
    assert torch.signbit(Pair(tmp_path / "minus", old, minus).patch()[0])


def test_views_and_transposed_tensors_are_packed(tmp_path: Path) -> None:
    buffer = noise((41, 30), torch.bfloat16, 3)
    views = (lambda t: t.t(), lambda t: t[1:, ::3], lambda t: t.view(-1)[1:])
    for number, pick in enumerate(views):
        old = pick(buffer.clone())
        new = changed(old.contiguous(), 0.2, 4)
        pair = Pair(tmp_path / str(number), old, new)
        assert equal_bits(pair.patch(), new) and equal_bits(pair.read(), new)


def test_parameters_that_require_gradients(tmp_path: Path) -> None:
    old, new = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.ones(10))
    assert equal_bits(Pair(tmp_path, old, new).patch(), new.detach())


OLD = noise((500,), torch.bfloat16, 11)


@pytest.mark.parametrize("compression", get_args(Compression))
@given(st.data())
@settings(max_examples=100)
def test_a_damaged_byte_is_an_error(
    compression: Compression, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A step at a wrong position would leave the sum of the tensor as it is."""
    share = data.draw(st.sampled_from([0.01, 0.05, 1.0]))
    new = changed(OLD, share, 5)
    pair = Pair(tmp_path_factory.mktemp("damaged"), OLD, new, compression)
    path = pair.versions.path(2) / DELTA
    packed = get_change(pair).nbytes
    bad = bytearray(path.read_bytes())
    bad[data.draw(st.integers(0, packed - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bad)
    for read in (pair.patch, pair.read):
        with pytest.raises(WeightsError, match="What changed in w is damaged"):
            read()
    path.write_bytes(bad[: data.draw(st.integers(0, packed - 1))])
    for read in (pair.patch, pair.read):
        with pytest.raises(WeightsError, match="cut short"):
            read()


@given(st.data())
@settings(max_examples=100)
def test_false_manifests_are_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every field of a change may be false, also the sum of its bytes."""
    new = changed(OLD, 0.05, 5)
    pair = Pair(
        tmp_path_factory.mktemp("false"), OLD, new, data.draw(st.sampled_from(["zstd", "none"]))
    )
    count = st.one_of(st.integers(1, 1000), st.sampled_from([1 << 40, 1 << 53]))
    fields = st.fixed_dictionaries(
        {},
        optional={
            "offset": count, "nbytes": count, "plain_bytes": count, "count": count,
            "planes": st.integers(0, 8), "sum": count,
        },
    )  # fmt: skip
    change = msgspec.structs.replace(get_change(pair), **data.draw(fields))
    raw = (pair.versions.path(2) / DELTA).read_bytes()[change.offset :][: change.nbytes]
    if data.draw(st.booleans()):
        change = msgspec.structs.replace(change, sum=word_sum(_as_tensor(raw)))
    entry = msgspec.structs.replace(pair.manifest.tensors["w"], change=change)
    pair.rewrite(msgspec.structs.replace(pair.manifest, tensors={"w": entry}))
    with contextlib.suppress(RollwayError):
        assert pair.patch().shape == new.shape
    with contextlib.suppress(RollwayError):
        assert equal_bits(pair.read(), new)


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)


def replace_stream(pair: Pair, raw: bytes, **fields: Any) -> None:
    """Write other bytes, with their sum, where the change was."""
    (pair.versions.path(2) / DELTA).write_bytes(raw)
    change = msgspec.structs.replace(
        get_change(pair), nbytes=len(raw), sum=word_sum(_as_tensor(raw)), **fields
    )
    entry = msgspec.structs.replace(pair.manifest.tensors["w"], change=change)
    pair.rewrite(msgspec.structs.replace(pair.manifest, tensors={"w": entry}))


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    """A stream is refused by its size, before it is decompressed; no size makes a bomb of it."""
    pair = Pair(tmp_path, OLD, changed(OLD, 0.05, 5))
    plain = get_change(pair).plain_bytes
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    replace_stream(pair, bomb, plain_bytes=100_000_000)
    with pytest.raises(WeightsError, match="cannot have changed"):
        pair.patch()
    replace_stream(pair, zstandard.ZstdCompressor().compress(bytes(plain + 1)), plain_bytes=plain)
    with pytest.raises(WeightsError, match="cannot be decompressed"):
        pair.patch()


def test_streams_of_another_size_are_refused(tmp_path: Path) -> None:
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[::10] = 1
    pair = Pair(tmp_path, old, new, "none")
    good = (tmp_path / "v2" / DELTA).read_bytes()[:200]
    for raw in (good + b"1", good[:-1], good[:50]):
        replace_stream(pair, raw, plain_bytes=len(raw))
        with pytest.raises(WeightsError, match=r"cannot have changed|positions"):
            pair.patch()


@pytest.mark.parametrize("fault", ["count", "elements"])
def test_positions_that_are_wrong_are_refused(fault: str, tmp_path: Path) -> None:
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[5::10] = 1
    pair = Pair(tmp_path, old, new, "none")
    good = (tmp_path / "v2" / DELTA).read_bytes()[:200]
    gaps = b"\xff" + good[1:100] if fault == "count" else b"\x0f" + good[1:100]
    replace_stream(pair, gaps + good[100:])
    for read in (pair.patch, pair.read):
        with pytest.raises(WeightsError, match=r"positions in a change of w"):
            read()


def test_small_batches_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bytes are compared and unpacked together."""
    old, new = noise((70_001,), torch.int16, 1), noise((70_001,), torch.int16, 1)
    new[::7] += 1
    expected = Pair(tmp_path / "large", old, new)
    monkeypatch.setattr(packing, "_SLAB", 3)
    pair = Pair(tmp_path / "small", old, new)
    assert pair.manifest.tensors == expected.manifest.tensors
    assert equal_bits(pair.patch(), new)
