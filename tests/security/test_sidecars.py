"""Hostile sidecars whose numbers would use all memory or endless time are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.weights import sidecar
from rollway.weights.layout import Box, check_covered
from tests.security.limits import limit_memory
from tests.unit.weights.megatron_models import (
    QKV,
    describe_small_moe,
)

MODEL = describe_small_moe()
ROOM = 1 << 30


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limit memory to one more gigabyte, so that a successful attack fails the test alone."""
    with limit_memory(ROOM):
        yield


def plain() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(sidecar.dump(MODEL, 4))
    return fields


def test_the_sidecar_is_valid_before_it_is_changed() -> None:
    assert sidecar.load(json.dumps(plain())) == MODEL


COUNTS = [10**9, 2**53, 2**64, 10**30, -1, 0]
PLACES = [
    ("world",),
    *(("geometry", name) for name in (
        "layers", "hidden", "heads", "query_groups", "head_dim", "vocab", "experts")),
    *(("ranks", "0", "position", name) for name in (
        "tp", "tp_size", "pp_size", "ep_size", "etp_size", "dp_size", "edp_size", "first_layer")),
]  # fmt: skip
MAY_BE_ZERO = ("experts", "tp", "first_layer")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("place", "count"),
    [(at, n) for at in PLACES for n in COUNTS if n or at[-1] not in MAY_BE_ZERO],
    ids=lambda value: value[-1] if isinstance(value, tuple) else str(value),
)
def test_huge_counts_are_refused_without_using_memory(place: tuple[str, ...], count: int) -> None:
    fields = plain()
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = count
    try:
        loaded = sidecar.load(json.dumps(fields))
    except UsageError as error:
        assert str(error).isprintable()
    else:  # numbers that are not used as a size, or do not have to fit another
        assert place[-1] in ("pp_size", "dp_size", "edp_size", "first_layer", "hidden")
        assert len(loaded.ranks) == 4


@pytest.mark.timeout(60)
def test_a_billion_ranks_and_layers_are_refused() -> None:
    for change in ({"world": 10**9}, {"geometry": plain()["geometry"] | {"layers": 10**9}}):
        with pytest.raises(UsageError, match=r"sidecar is wrong at world|too large"):
            sidecar.load(json.dumps(plain() | change))


@pytest.mark.timeout(60)
def test_too_many_parts_are_refused() -> None:
    """Each of 600 short entries stands for 16,384 parts: 10 million in all."""
    heads, fields = 1 << 12, plain()
    fields["geometry"] |= {
        "heads": heads, "query_groups": heads, "head_dim": 1, "attention_output_gate": True,
    }  # fmt: skip
    rows = 4 * heads
    fields["world"] = 1
    position = {
        name: 1 if name.endswith("_size") else 0 for name in fields["ranks"]["0"]["position"]
    } | {"first_layer": 0}
    tensor = {"role": "qkv_column", "dtype": "F32", "start": [0, 0]}
    numbers = range(600)
    fields["ranks"] = {"0": {
        "position": position,
        "names": {f"layers.{n}.qkv": [f"q{n}", f"k{n}", f"v{n}"] for n in numbers},
        "tensors": {
            f"layers.{n}.qkv": tensor | {"shape": [rows, n + 1], "local": [rows, n + 1]}
            for n in numbers
        },
    }}  # fmt: skip
    with pytest.raises(UsageError, match="cut into more than"):
        sidecar.load(json.dumps(fields))


@pytest.mark.timeout(60)
def test_a_matrix_of_many_columns_is_checked_quickly() -> None:
    """Every column was compared with every other: 20,000 took minutes."""
    columns = [Box((0, n), (2, n + 1)) for n in range(20_000)]
    check_covered("w", (2, 20_000), columns)
    with pytest.raises(UsageError, match="claimed twice"):
        check_covered("w", (2, 20_000), [*columns, Box((1, 7), (2, 9))])
    with pytest.raises(UsageError, match="not whole"):
        check_covered("w", (2, 20_000), columns[1:])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [2**53, 2**53]), ("shape", [1] * 9), ("shape", []), ("local", []),
        ("shape", [2**70]), ("shape", [-1]), ("dtype", "F32" * 100), ("dtype", ["F32"]),
        ("start", [2**53, 2**53]), ("role", "x" * 10_000), ("role", 7),
    ],
)  # fmt: skip
def test_a_tensor_with_invalid_fields_is_refused(key: str, value: Any) -> None:
    fields = plain()
    fields["ranks"]["0"]["tensors"][QKV][key] = value
    with pytest.raises(UsageError):
        sidecar.load(json.dumps(fields))


@pytest.mark.parametrize("role", ["qkv_column", "expert_column", "column", "vocab_parallel"])
def test_a_sharded_tensor_without_dimensions_is_refused(role: str) -> None:
    fields = plain()
    fields["ranks"]["0"]["tensors"][QKV] |= {"role": role, "shape": [], "start": [], "local": []}
    with pytest.raises(UsageError, match="cannot be cut by its role"):
        sidecar.load(json.dumps(fields))


def test_grouped_experts_with_one_dimension_are_refused() -> None:
    fields, name = plain(), "decoder.layers.0.mlp.experts.weight2"
    rank = fields["ranks"]["0"]
    rank["names"][name] = ["x"]
    rank["tensors"][name] = {
        "role": "expert_row", "dtype": "F32", "shape": [4], "start": [0], "local": [4],
    }  # fmt: skip
    with pytest.raises(UsageError, match="two dimensions"):
        sidecar.load(json.dumps(fields))


@pytest.mark.parametrize("rank", ["9" * 5000, "-1", "٣", "1_0", " 1", "", "x", "0\n", "4"])
def test_a_rank_without_a_number_is_refused(rank: str) -> None:
    fields = plain()
    fields["ranks"][rank] = fields["ranks"].pop("3")
    with pytest.raises(UsageError):
        sidecar.load(json.dumps(fields))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"version":1,"ranks":' + "[" * 100_000, '{"version":' + "9" * 5000 + "}",
     '{"version":1,"version":1}', '{"version":"' + "x" * 100_000 + '"}', "\ud800",
     '{"version":1,"\\ud800":1}', " " * ((64 << 20) + 1)],
    ids=range(8),
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        sidecar.load(text)
    assert len(str(caught.value)) < 1000


def test_names_of_a_megabyte_are_refused() -> None:
    fields = plain()
    fields["ranks"]["0"]["names"][QKV][0] = "x" * (1 << 20)
    with pytest.raises(UsageError, match="4096") as caught:
        sidecar.load(json.dumps(fields))
    assert len(str(caught.value)) < 1000
