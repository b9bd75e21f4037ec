"""Encode and apply changes of a tensor: every dtype, every pattern, and damaged bytes."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.weights.digest import changes, checksums
from rollway.weights.digest.checksums import DTYPES, digest, integers, raw_bytes
from rollway.weights.transports.delta import reader, unpacking
from rollway.weights.transports.delta.format import Encoded, decode, encode
from rollway.weights.transports.delta.packing import Compression
from rollway.weights.transports.delta.reader import apply
from tests.tensors import equal_bits, noise

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
    staged = torch.empty_like(old)
    kept = old.clone()
    written = apply(decode(data), old, staged)
    assert equal_bits(staged, new)
    assert equal_bits(old, kept)
    if written is not None:
        differ = (raw_bytes(old) != raw_bytes(new)).view(-1, old.element_size())
        assert written.tolist() == differ.any(1).nonzero().view(-1).tolist()
    apply(decode(data), old)
    assert equal_bits(old, new)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64])
def test_large_tensors_in_every_encoding_of_positions(share: float, dtype: torch.dtype) -> None:
    old = noise((1_200_001,), dtype, 1)
    new = changed(old, share, 2)
    encoded = encode("w", old, new)
    apply(decode(encoded.to_bytes()), old)
    assert equal_bits(old, new)
    assert len(encoded.to_bytes()) <= new.nbytes + 300


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


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_a_tensor_that_did_not_change_stays_as_it_is(
    as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = noise((64, 33), torch.float32, seed=1)
    change = encode("t", tensor, tensor.clone(), version=2, base=1)
    if as_on_gpu:
        monkeypatch.setattr(unpacking, "uses_numpy", lambda _: False)
    room = torch.empty_like(tensor)
    apply(change, tensor, room)
    assert equal_bits(room, tensor)


def test_bits_are_compared_and_not_values() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    assert encode("w", old, old.clone()).header.places == "none"
    minus = torch.tensor([-0.0, float("nan"), 1.0])
    encoded = encode("w", old, minus)
    apply(encoded, old)
    assert torch.signbit(old[0])


def test_views_and_transposed_tensors_are_encoded_and_applied() -> None:
    buffer = noise((41, 30), torch.bfloat16, 3)
    for pick in (lambda t: t.t(), lambda t: t[1:, ::3], lambda t: t.view(-1)[1:]):
        old = pick(buffer.clone())
        new = changed(old.contiguous(), 0.2, 4)
        encoded = encode("w", old, new)
        assert digest(old) == digest(old.contiguous())
        apply(encoded, old)
        assert equal_bits(old, new)


def test_parameters_that_require_gradients() -> None:
    old = torch.nn.Parameter(torch.zeros(10))
    new = torch.nn.Parameter(torch.ones(10))
    apply(encode("w", old, new), old)
    assert equal_bits(old, new)


def test_a_wrong_base_is_reported_and_nothing_is_written() -> None:
    old = noise((1000,), torch.bfloat16, 1)
    encoded = encode("w", old, changed(old, 0.1, 2), version=8, base=7)
    other = changed(old, 0.5, 3)
    kept = other.clone()
    with pytest.raises(WeightsError, match="is not of version 7"):
        apply(encoded, other)
    assert equal_bits(other, kept)


def test_other_shapes_and_dtypes_are_refused() -> None:
    old = torch.zeros(8)
    encoded = encode("w", old, torch.ones(8))
    with pytest.raises(WeightsError, match=r"is for F32\[8\], the tensor is F32\[4\]"):
        apply(encoded, torch.zeros(4))
    with pytest.raises(WeightsError, match="BF16"):
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
    right = torch.empty_like(OLD)
    apply(decode(good), OLD, right)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        bad = bad[: data.draw(st.integers(0, len(bad)))]
    tensor = OLD.clone()
    try:
        apply(decode(bytes(bad)), tensor)
    except WeightsError:
        assert equal_bits(tensor, OLD)
    else:
        assert equal_bits(tensor, right)


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
    tensor = OLD.clone()
    try:
        apply(decode(Encoded(header, good.places, good.values).to_bytes()), tensor)
    except RollwayError:
        assert equal_bits(tensor, OLD)
    else:
        assert digest(tensor) == header.digest


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
    apply(decode(data + bytes(encoded.places) + bytes(encoded.values)), old)
    assert equal_bits(old, new)


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
        assert not old.any()


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


def test_an_interrupted_check_reverts_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    old = noise((100,), torch.float32, 1)
    encoded = encode("w", old, changed(old, 0.5, 2))
    tensor = old.clone()

    def broken(tensor: torch.Tensor) -> str:
        raise MemoryError

    monkeypatch.setattr(reader, "digest", broken)
    with pytest.raises(MemoryError):
        apply(encoded, tensor)
    assert equal_bits(tensor, old)
