"""A sidecar is complete and consistent, or the error says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.weights import sidecar
from rollway.weights.megatron.model import MegatronModel
from tests.unit.weights.megatron_models import (
    QKV,
    SMALL_MOE,
    describe_small_moe,
)

MODEL = describe_small_moe()
Raw = dict[str, Any]


def _set(*path: str, value: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


def _drop(*path: str) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return change


def _both(*changes: Callable[[Raw], None]) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        for change in changes:
            change(raw)

    return change


def _of(rank: int) -> MegatronModel:
    return MegatronModel(SMALL_MOE, {rank: MODEL.ranks[rank]})


def test_a_dumped_model_is_loaded() -> None:
    assert sidecar.load(sidecar.dump(MODEL, 4)) == MODEL


def test_the_sidecars_of_all_ranks_are_joined() -> None:
    texts = [sidecar.dump(_of(rank), 4) for rank in (2, 0, 3, 1)]
    assert sidecar.join(texts) == MODEL
    with pytest.raises(UsageError, match="lacks 1 of 4 ranks, the first is 1"):
        sidecar.join(texts[:3])
    with pytest.raises(UsageError, match="Two sidecars describe rank 2"):
        sidecar.join([*texts, texts[0]])
    with pytest.raises(UsageError, match="different trainers"):
        sidecar.join([*texts[:3], sidecar.dump(_of(1), 8)])
    with pytest.raises(UsageError, match="no sidecar"):
        sidecar.join([])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_set("version", value=0), "has version 0; this Rollway reads version 1"),
        (_drop("version"), "has version None"),
        (_drop("geometry", "heads"), "wrong at geometry.heads: Field required"),
        (_set("geometry", "heads", value="4"), "wrong at geometry.heads"),
        (_set("geometry", "colour", value=1), "wrong at geometry.colour: Extra inputs"),
        (_set("geometry", "query_groups", value=3), "4 heads cannot be shared out to 3"),
        (_drop("ranks", "3"), "lacks 1 of 4 ranks, the first is 3"),
        (_set("ranks", "0", "tensors", QKV, "role", value="diagonal"), "role"),
        (_drop("ranks", "0", "tensors", QKV, "dtype"), "dtype: Field required"),
        (_set("ranks", "0", "tensors", QKV, "dtype", value="F99"), "unknown dtype 'F99'"),
        (_drop("ranks", "0", "tensors", QKV), f"{QKV} only among its names"),
        (_drop("ranks", "0", "names", QKV), f"{QKV} only among its tensors"),
        (
            _both(_drop("ranks", "0", "tensors", QKV), _drop("ranks", "0", "names", QKV)),
            r"layers.0.self_attn.q_proj.weight is not whole",
        ),
        (_set("ranks", "0", "tensors", QKV, "start", value=[9, 0]), "is outside"),
        (_set("ranks", "0", "tensors", QKV, "start", value=[0]), "is outside"),
        (_set("ranks", "0", "tensors", QKV, "start", value=[8, 0]), "by its role"),
        (_set("ranks", "0", "tensors", QKV, "start", value=[-1, 0]), "greater than or equal"),
        (_set("ranks", "0", "tensors", QKV, "role", value="row"), "by its role"),
        (_set("ranks", "0", "names", QKV, value=["q", "k"]), "3 parts, but 2 names"),
        (_set("ranks", "0", "names", QKV, value=["q", "k", "v"]), "is not whole"),
        (_set("ranks", "1", "position", "tp", value=0), "by its role|same position"),
        (_set("ranks", "1", "position", "tp", value=7), "no tp rank 7"),
        (_set("geometry", "vocab", value=9), "less than vocab|vocabulary has 9 rows"),
        (_set("geometry", "layers", value=3), "No rank holds layer 2"),
    ],
)
def test_inconsistent_sidecars_are_refused(change: Callable[[Raw], None], cause: str) -> None:
    raw = json.loads(sidecar.dump(MODEL, 4))
    change(raw)
    with pytest.raises(UsageError, match=cause):
        sidecar.load(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", '{"version": 1}', b"\xff"])
def test_other_texts_are_refused(text: str | bytes) -> None:
    with pytest.raises(UsageError):
        sidecar.load(text)


def test_two_tensors_for_one_name_are_refused() -> None:
    raw = json.loads(sidecar.dump(MODEL, 4))
    for rank in ("0", "1"):
        names = raw["ranks"][rank]["names"]
        names["decoder.layers.0.self_attention.k_layernorm.weight"] = names[
            "decoder.layers.0.self_attention.q_layernorm.weight"
        ]
    with pytest.raises(UsageError, match=r"q_norm.weight is claimed twice"):
        sidecar.load(json.dumps(raw))
