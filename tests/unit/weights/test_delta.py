"""Encode and apply changes of a tensor: every dtype, every pattern, and damaged bytes."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.weights.digest import changes, checksums
from rollway.weights.digest.checksums import DTYPES, digest, integers, raw_bytes
from rollway.weights.transports.delta.format import Encoded, decode, encode
from rollway.weights.transports.delta.packing import Compression
from rollway.weights.transports.delta.reader import write_changes
from rollway.weights.transports.delta.unpacking import decompress_all
from tests.tensors import equal_bits, noise
from tests.unit.weights.deltas import apply

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


@pytest.mark.parametrize("compression", get_args(Compression))
@given(st.sampled_from(sorted(DTYPES)), SHAPES, st.floats(0, 1), st.integers(0, 99), st.booleans())
@settings(max_examples=200)
def test_an_applied_change_gives_exactly_the_new_tensor(
    compression: Compression,
    dtype: str,
    shape: tuple[int, ...],
    share: float,
    seed: int,
    is_near: bool,
) -> None:
    old = noise(shape, DTYPES[dtype], seed)
    new = changed(old, share, seed + 7)
    if is_near:  # only the lower bytes differ
        new = torch.where(integers(new) == integers(old), integers(old), integers(old) ^ 5)
        new = new.view(old.dtype).view(old.shape)
    data = encode("w", old, new, version=5, base=4, compression=compression).to_bytes()
    assert equal_bits(apply(decode(data), old), new)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64])
def test_large_tensors_in_every_encoding_of_positions(share: float, dtype: torch.dtype) -> None:
    old = noise((1_200_001,), dtype, 1)
    new = changed(old, share, 2)
    encoded = encode("w", old, new)
    assert equal_bits(apply(decode(encoded.to_bytes()), old), new)
    assert len(encoded.to_bytes()) <= new.nbytes + 300


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


@pytest.mark.parametrize("values", ["steps", "new"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_a_tensor_that_changed_everywhere_is_written_without_positions(
    dtype: torch.dtype, values: str
) -> None:
    """They would take eight bytes for each element."""
    old = (integers(noise((40_000,), dtype, 1)) | 1).view(dtype)
    new = (integers(old) ^ 1 if values == "steps" else integers(torch.zeros_like(old))).view(dtype)
    change = encode("w", old, new)
    assert (change.header.places, change.header.values) == ("all", values)
    state = {"w": old.clone()}
    with LargestTensor() as largest:
        write_changes(decompress_all([change]), state)
    assert equal_bits(state["w"], new)
    assert largest.nbytes <= new.nbytes


def test_the_shortest_encoding_of_positions_is_chosen() -> None:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    assert encode("w", old, old).header.places == "none"
    assert encode("w", old, changed(old, 0.01, 1)).header.places == "gaps"
    assert encode("w", old, changed(old, 0.4, 1)).header.places == "bitmap"
    assert encode("w", old, torch.ones_like(old)).header.places == "all"
    assert encode("w", None, old).header.places == "whole"
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-128, 128, (100_000,), dtype=torch.int8, generator=generator)
    assert encode("w", ~random, random.flip(0)).header.places == "whole"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_percent_of_the_elements_is_less_than_two_percent_of_the_bytes(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(1_000_000, generator=generator) * 0.02).to(dtype)
    new = old.clone()
    some = torch.randperm(old.numel(), generator=generator)[: old.numel() // 100]
    new[some] = (torch.randn(some.numel(), generator=generator) * 0.02).to(dtype)
    assert len(encode("w", old, new).to_bytes()) < 0.02 * old.nbytes
    # A small optimizer step moves a value to its neighbour, which compresses even better.
    step = old.clone()
    step.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[some] += 1
    assert len(encode("w", old, step).to_bytes()) < 0.009 * old.nbytes


def test_a_tensor_that_did_not_change_stays_as_it_is() -> None:
    tensor = noise((64, 33), torch.float32, seed=1)
    change = encode("t", tensor, tensor.clone(), version=2, base=1)
    assert equal_bits(apply(change, tensor), tensor)


def test_bits_are_compared_and_not_values() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    assert encode("w", old, old.clone()).header.places == "none"
    minus = torch.tensor([-0.0, float("nan"), 1.0])
    encoded = encode("w", old, minus)
    assert torch.signbit(apply(encoded, old)[0])


def test_views_and_transposed_tensors_are_encoded_and_applied() -> None:
    buffer = noise((41, 30), torch.bfloat16, 3)
    for pick in (lambda t: t.t(), lambda t: t[1:, ::3], lambda t: t.view(-1)[1:]):
        old = pick(buffer.clone())
        new = changed(old.contiguous(), 0.2, 4)
        encoded = encode("w", old, new)
        assert digest(old) == digest(old.contiguous())
        assert equal_bits(apply(encoded, old), new)


def test_parameters_that_require_gradients() -> None:
    old = torch.nn.Parameter(torch.zeros(10))
    new = torch.nn.Parameter(torch.ones(10))
    assert equal_bits(apply(encode("w", old, new), old), new)


def test_a_wrong_base_is_reported() -> None:
    old = noise((1000,), torch.bfloat16, 1)
    encoded = encode("w", old, changed(old, 0.1, 2), version=8, base=7)
    with pytest.raises(WeightsError, match="does not match its checksum"):
        apply(encoded, changed(old, 0.5, 3))


def test_other_shapes_and_dtypes_are_refused() -> None:
    old = torch.zeros(8)
    encoded = encode("w", old, torch.ones(8))
    with pytest.raises(WeightsError, match="no w that the change applies to"):
        apply(encoded, torch.zeros(4))
    with pytest.raises(WeightsError, match="no w that the change applies to"):
        apply(encoded, torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="only values may change"):
        encode("w", old, torch.zeros(9))
    with pytest.raises(UsageError, match="complex64"):
        encode("w", None, torch.zeros(9, dtype=torch.complex64))


OLD = noise((500,), torch.bfloat16, 11)
GOOD = {
    share: encode("layer.weight", OLD, changed(OLD, share, 5)).to_bytes()
    for share in (0.0, 0.05, 0.5, 1.0)
}
WHOLE = encode("layer.weight", None, OLD).to_bytes()


@given(st.data())
@settings(max_examples=500)
def test_damaged_bytes_are_an_error_or_harmless(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from([*GOOD.values(), WHOLE]))
    right = apply(decode(good), OLD)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        bad = bad[: data.draw(st.integers(0, len(bad)))]
    with contextlib.suppress(WeightsError):
        assert equal_bits(apply(decode(bytes(bad)), OLD), right)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        decode(data)
    with pytest.raises(WeightsError):
        decode(b"RWD1" + len(data).to_bytes(4, "little") + data)


@given(st.data())
@settings(max_examples=300)
def test_false_headers_leave_the_tensor_as_it_was(data: st.DataObject) -> None:
    """Every field of a header may be false."""
    good = decode(GOOD[0.05])
    count = st.one_of(st.integers(0, 1000), st.sampled_from([1 << 40, 1 << 53]))
    false_fields = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "places": st.sampled_from(["none", "gaps", "bitmap", "all", "whole"]),
                "values": st.sampled_from(["new", "steps"]),
                "count": count,
                "places_bytes": count,
                "values_bytes": count,
                "shape": st.lists(count, max_size=3).map(tuple),
                "dtype": st.sampled_from([*DTYPES, "F4"]),
                "base": st.one_of(st.none(), count),
                "before": st.sampled_from([None, "0" * 32]),
                "planes": st.one_of(st.none(), count),
                "compression": st.sampled_from(get_args(Compression)),
            },
        )
    )
    header = msgspec.structs.replace(good.header, **false_fields)
    with contextlib.suppress(RollwayError):
        apply(decode(Encoded(header, good.places, good.values).to_bytes()), OLD)


def test_a_decompression_bomb_is_refused() -> None:
    """A stream is refused by the size that it claims, before it is decompressed."""
    import zstandard

    good = decode(GOOD[0.05])
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    header = msgspec.structs.replace(good.header, places_bytes=len(bomb))
    with pytest.raises(WeightsError, match="wrong size inside"):
        apply(decode(Encoded(header, bomb, good.values).to_bytes()), OLD.clone())


def test_changes_of_older_publishers_are_read() -> None:
    """They have all bytes of each value, and do not say how they are compressed."""
    old, new = torch.arange(1000, dtype=torch.int16), torch.arange(1000, dtype=torch.int16)
    new[::50] = 30_000
    encoded = encode("w", old, new)
    assert (encoded.header.planes, encoded.header.compression) == (2, "zstd")
    fields = msgspec.to_builtins(encoded.header)
    del fields["planes"], fields["compression"]
    header = msgspec.msgpack.encode(fields)
    data = b"RWD1" + len(header).to_bytes(4, "little") + header
    change = decode(data + bytes(encoded.places) + bytes(encoded.values))
    assert equal_bits(apply(change, old), new)


def test_small_steps_are_sent_without_their_upper_bytes() -> None:
    old = noise((100_000,), torch.bfloat16, 1)
    new = old.clone()
    new.view(torch.int16)[::100] += 1
    encoded = encode("w", old, new, compression="none")
    header = encoded.header
    assert (header.values, header.planes, header.values_bytes) == ("steps", 1, 1000)
    assert bytes(encoded.places) == bytes([0, *[99] * 999])


def test_a_stream_of_another_size_is_refused() -> None:
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[::10] = 1
    good = encode("w", old, new, compression="none")
    for places, values in (
        (bytes(good.places) + b"1" * 1000, good.values),
        (bytes(good.places)[:-1], good.values),
        (good.places, bytes(good.values)[:-1]),
        (good.places, bytes(good.values) + b"1"),
    ):
        sizes = {"places_bytes": len(places), "values_bytes": len(values)}
        header = msgspec.structs.replace(good.header, **sizes)
        with pytest.raises(WeightsError, match=r"wrong size|missing|positions"):
            apply(decode(Encoded(header, places, values).to_bytes()), old)


def test_a_stream_that_ends_early_is_refused() -> None:
    good = decode(GOOD[0.05])
    values = bytes(good.values)[:-5]
    header = msgspec.structs.replace(good.header, values_bytes=len(values))
    tensor = OLD.clone()
    with pytest.raises(WeightsError, match="cannot be decompressed"):
        apply(decode(Encoded(header, good.places, values).to_bytes()), tensor)
    assert equal_bits(tensor, OLD)


@given(st.sampled_from([torch.bfloat16, torch.float32, torch.int8]), st.data())
def test_a_digest_detects_every_change(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = noise((777,), dtype, 1)
    raw = raw_bytes(tensor)
    before = digest(tensor)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))
    assert digest(tensor) != before


def test_a_digest_detects_what_simple_sums_miss() -> None:
    tensor = noise((1 << 18,), torch.float32, 1)
    before = digest(tensor)
    signs = tensor.clone()
    signs[1] *= -1
    signs[3] *= -1  # both at the top of their words
    assert digest(signs) != before
    assert digest(tensor.flip(0)) != before
    assert digest(tensor[:-1]) != before
    assert digest(torch.zeros(8)) != digest(torch.zeros(9)) != digest(torch.zeros(0))
    swapped = tensor.view(2, -1).flip(0).contiguous()
    assert digest(swapped) != before


def test_a_digest_is_the_same_everywhere() -> None:
    """Publishers and readers may be of different releases: the value is part of the format."""
    assert digest(torch.arange(300_000, dtype=torch.int32)) == "afeb5fd0b46dd43369cceb3df9fb4758"


def test_the_number_of_blocks_per_step_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU processes many blocks at a time, and must encode the same bytes."""
    old = noise((1_700_003,), torch.float32, 1)
    new = changed(old, 0.01, 2)
    one_by_one = encode("w", old, new).to_bytes()
    for module in (checksums, changes):
        monkeypatch.setattr(module, "blocks_at_once", lambda device: 5)
    assert encode("w", old, new).to_bytes() == one_by_one
