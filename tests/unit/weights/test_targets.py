"""What a rank of an engine needs of each tensor; test_vllm_layout.py compares with vLLM."""

from __future__ import annotations

import pytest

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.planning.targets import EngineRank, engine_ranks, part_of
from tests.unit.weights.megatron_plans import DENSE


def test_no_rank_needs_vocabulary_rows_of_padding() -> None:
    ranks = [EngineRank(heads=4, kv_heads=4, head_dim=2, tp_size=4, tp_rank=t) for t in range(4)]
    headers = {"lm_head.weight": TensorHeader("BF16", (70, 8))}
    parts = [part_of("lm_head.weight", headers, rank)[1] for rank in ranks]
    rows = [part and (part.box.start[0], part.box.stop[0], part.shape[0]) for part in parts]
    assert rows == [(0, 32, 32), (32, 64, 32), (64, 70, 32), None]


def test_kv_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    ranks = [EngineRank(heads=8, kv_heads=2, head_dim=4, tp_size=4, tp_rank=t) for t in range(4)]
    name = "model.layers.0.self_attn.v_proj.weight"
    headers = {name: TensorHeader("BF16", (8, 16))}
    parameters, parts = zip(*(part_of(name, headers, rank) for rank in ranks), strict=True)
    assert set(parameters) == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert [part.box.start[0] for part in parts] == [0, 0, 4, 4]
    assert {part.shape for part in parts} == {(16, 16)}


def test_uneven_experts_go_to_the_first_ranks() -> None:
    config = {**DENSE, "num_experts": 5}
    ranks = engine_ranks(config, tp=1, ep=3)
    assert [list(rank.owned) for rank in ranks] == [[0, 1], [2, 3], [4]]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    headers = {name: TensorHeader("BF16", (6, 4))}
    parameters, parts = zip(*(part_of(name, headers, rank) for rank in ranks), strict=True)
    assert set(parameters) == {"model.layers.0.mlp.experts.routed_experts.w13_weight"}
    assert [part and part.shape for part in parts] == [None, (2, 12, 4), None]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.strange.weight", (4, 4), "no rule"),
        ("model.layers.0.self_attn.q_proj.weight", (9, 4), "has 9 rows"),
        ("model.layers.0.mlp.down_proj.weight", (4, 5), "cannot be cut"),
        ("model.layers.0.mlp.experts.7.w1.weight", (4, 4), "beyond the model's 2"),
    ],
)
def test_tensors_that_vllm_would_not_load_are_refused(
    name: str, shape: tuple[int, int], words: str
) -> None:
    rank = EngineRank(heads=2, kv_heads=2, head_dim=2, experts=2, tp_size=2)
    with pytest.raises(UsageError, match=words):
        part_of(name, {name: TensorHeader("BF16", shape)}, rank)


def test_impossible_engines_are_refused() -> None:
    config = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 12}
    for tp, ep in ((4, 1), (2, 3), (0, 1)):
        with pytest.raises(UsageError):
            engine_ranks(config, tp, ep)
