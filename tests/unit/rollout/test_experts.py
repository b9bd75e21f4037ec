"""Routed experts: every valid form is read exactly; all other input raises a typed error."""

from __future__ import annotations

import base64
import io
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from rollway.errors import RolloutError, UsageError  # noqa: E402
from rollway.rollout.experts import (  # noqa: E402
    RoutedExperts,
    decode,
    dtype_for,
    join,
)


def make_routing(
    rows: int = 4, layers: int = 2, top_k: int = 2, experts: int = 8, seed: int = 0
) -> Any:
    """Make a plausible record, with distinct ids in every row."""
    draw = np.random.default_rng(seed).random((rows, layers, experts))
    return np.argsort(draw, axis=-1)[..., :top_k]


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encode_npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return encode_base64(file.getvalue())


def make_wire(ids: Any, dtype: str = "uint8", **changes: Any) -> dict[str, Any]:
    data = encode_base64(ids.astype(dtype).tobytes())
    return {"data": data, "shape": list(ids.shape), "start": 0, "dtype": dtype, **changes}


SHAPES = st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 3))


@given(SHAPES, st.sampled_from([8, 256, 257, 65536, 65537]), st.integers(0, 99))
def test_every_form_decodes_to_the_same_ids(
    shape: tuple[int, int, int], experts: int, start: int
) -> None:
    ids = np.random.default_rng(1).integers(0, experts, shape)
    dtype = dtype_for(experts).name
    forms: list[Any] = [
        make_wire(ids, dtype, start=start),
        encode_npy(ids.astype(dtype)),
        encode_npy(np.asfortranarray(ids.astype(dtype))),
    ]
    for form in forms:
        routed = decode(form).cast(experts)
        assert routed.start == (start if isinstance(form, dict) else 0)
        assert routed.ids.dtype == dtype_for(experts)
        assert np.array_equal(routed.ids, ids)
        again = decode(routed.as_json())
        assert np.array_equal(again.ids, ids) and again.start == routed.start


def test_missing_fields_have_defaults() -> None:
    routed = decode({"data": encode_base64(bytes([1, 2, 3, 4])), "shape": [2, 1, 2]})
    assert routed.ids.tolist() == [[[1, 2]], [[3, 4]]]
    assert (routed.start, routed.ids.dtype.name) == (0, "uint8")


def test_all_records_of_a_model_have_one_dtype() -> None:
    small, large = make_routing(experts=8), make_routing(experts=512)
    for ids in (small, large):
        assert decode(make_wire(ids, "uint16")).cast(512).as_json()["dtype"] == "uint16"
        assert RoutedExperts(ids).cast(512).as_json()["dtype"] == "uint16"
    for wide in ("int16", "int32", "int64"):
        assert decode(make_wire(small, wide)).cast(8).ids.dtype == np.uint8
    assert [dtype_for(n).name for n in (1, 256, 257, 65536, 65537)] == [
        "uint8", "uint8", "uint16", "uint16", "int32",
    ]  # fmt: skip
    with pytest.raises(UsageError):
        dtype_for(0)


def _make_npy_claiming(shape: str) -> str:
    """Make a file whose header claims more data than the file has."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return encode_base64(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "cannot be read"),
        (7, "cannot be read"),
        ({}, "cannot be read"),
        (make_wire(make_routing(), shape=[4, 2]), "cannot be read"),
        (make_wire(make_routing(), shape=[4, 2, True]), "cannot be read"),
        (make_wire(make_routing(), shape=[-4, -2, 2]), "cannot be read"),
        (make_wire(make_routing(), shape=[4, 0, 2]), "cannot be read"),
        (make_wire(make_routing(), shape=[4, 2, 3]), "cannot be read"),
        (make_wire(make_routing(), shape=[2**62, 2**62, 2**62]), "cannot be read"),
        (make_wire(make_routing(), dtype="float32"), "cannot be read"),
        (make_wire(make_routing(), start=-1), "position -1"),
        (make_wire(make_routing(), start="x"), "cannot be read"),
        (make_wire(make_routing(), data="not base64!"), "cannot be read"),
        (make_wire(make_routing(), data="é"), "cannot be read"),
        (make_wire(make_routing(), data="x" * 1_000_001), "cannot be read"),
        ("", "no .npy file"),
        ("A" * 1_000_000, "no .npy file"),
        (encode_npy(np.zeros((2, 2))), "rows, layers, top_k"),
        (encode_npy(np.zeros((2, 2, 2))), "rows, layers, top_k"),
        (encode_npy(np.array(["x"])), "rows, layers, top_k"),
        (_make_npy_claiming("(1000000000000, 2, 2)"), "no .npy file"),
        (_make_npy_claiming("(" * 5000), "no .npy file"),
        ([[[1, 2]]], "cannot be read"),
    ],
)
def test_inconsistent_records_are_refused(raw: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        decode(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(
    JSON
    | st.binary(max_size=64).map(encode_base64)
    | st.binary(max_size=64).map(lambda tail: encode_base64(b"\x93NUMPY" + tail))
    | st.fixed_dictionaries(
        {
            "data": JSON | st.binary(max_size=16).map(encode_base64),
            "shape": st.lists(st.integers()) | JSON,
        },
        optional={"start": JSON, "dtype": JSON | st.sampled_from(["uint8", "int32"])},
    )
)
def test_arbitrary_input_is_read_or_refused(raw: Any) -> None:
    try:
        routed = decode(raw).cast(8)
    except RolloutError:
        return
    assert routed.ids.shape[1:] == (routed.layers, routed.top_k)
    assert routed.rows == 0 or routed.ids.max() < 8


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_damaged_file_is_read_or_refused(noise: bytes, position: int) -> None:
    whole = base64.b64decode(encode_npy(make_routing().astype("uint8")))
    damaged = whole[:position] + noise + whole[position + len(noise) :]
    try:
        decode(encode_base64(damaged))
    except RolloutError:
        return


@given(st.integers(1, 8), st.lists(st.integers(0, 8), max_size=3))
def test_joined_parts_equal_the_whole(rows: int, cuts: list[int]) -> None:
    whole = RoutedExperts(make_routing(rows), start=5)
    ends = sorted({min(cut, rows) for cut in cuts} | {0, rows})
    parts = [RoutedExperts(whole.ids[begin:end], 5 + begin) for begin, end in pairwise(ends)]
    again = join(*parts)
    assert again.start == 5
    assert np.array_equal(again.ids, whole.ids)


def test_a_later_leg_adds_only_its_new_rows() -> None:
    whole = RoutedExperts(make_routing(8))
    first = RoutedExperts(whole.ids[:5])
    assert np.array_equal(join(first, whole.since(first.end)).ids, whole.ids)
    with pytest.raises(UsageError, match="do not reach 9"):
        whole.since(9)


def test_parts_of_two_dtypes_join_in_the_wider_dtype() -> None:
    parts = (
        RoutedExperts(make_routing().astype("uint8")),
        RoutedExperts(make_routing().astype("uint16"), 4),
    )
    assert join(*parts).ids.dtype == np.uint16


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RoutedExperts(make_routing(), 5), "end at position 4 and continue at 5"),
        (RoutedExperts(make_routing(), 3), "end at position 4 and continue at 3"),
        (RoutedExperts(make_routing(layers=3), 4), "2 layers and top-2 .* 3 layers and top-2"),
        (RoutedExperts(make_routing(top_k=3), 4), "top-3"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(other: RoutedExperts, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        join(RoutedExperts(make_routing()), other)


def test_joining_no_parts_is_refused() -> None:
    with pytest.raises(UsageError):
        join()


def test_the_last_token_needs_no_row() -> None:
    routed = RoutedExperts(make_routing(4), start=2)
    routed.check(6, 8)
    routed.check(7, 8)
    for tokens in (5, 8):
        with pytest.raises(RolloutError, match="end at position 6"):
            routed.check(tokens, 8)


def test_ids_beyond_the_experts_of_the_model_are_refused() -> None:
    routed = RoutedExperts(np.array([[[0, 7]]]))
    routed.check(1, 8)
    for wrong in (routed, RoutedExperts(np.array([[[-1, 2]]]))):
        with pytest.raises(RolloutError, match="the model has 7 experts"):
            wrong.check(1, 7)
        with pytest.raises(RolloutError, match="the model has 7 experts"):
            wrong.cast(7)


def test_records_of_a_bypassed_capture_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"all 0.*moe-backend: triton"):
        RoutedExperts(np.zeros((4, 2, 2), dtype=np.uint8)).check(4, 8)
    partly = make_routing(4)
    partly[2, 1] = 0
    with pytest.raises(
        RolloutError,
        match=r"1 of 4 rows .* \[0, 0\] at position 12, sparse layer 1.*moe-backend: triton",
    ):
        RoutedExperts(partly, 10).check(14, 8)


def test_zeros_are_accepted_where_they_are_plausible() -> None:
    RoutedExperts(np.zeros((9, 2, 1), dtype=np.uint8)).check(9, 1)  # a model with one expert
    RoutedExperts(np.zeros((1, 2, 1), dtype=np.uint8)).check(1, 8)  # two choices of top-1
    RoutedExperts(np.zeros((0, 2, 2), dtype=np.uint8), 5).check(6, 8)
    with pytest.raises(RolloutError, match="all 0"):
        RoutedExperts(np.zeros((9, 2, 1), dtype=np.uint8)).check(9, 8)


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 2), int), np.zeros((2, 2, 2)), np.zeros((2, 0, 2), int)]
)
def test_a_record_must_have_three_dimensions_of_integers(wrong: Any) -> None:
    with pytest.raises(RolloutError, match="rows, layers, top_k"):
        RoutedExperts(wrong)
