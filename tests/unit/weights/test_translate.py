"""Translation refuses shapes that do not fit, and writes to the tensors it was given."""

from __future__ import annotations

import pytest
import torch

from rollway.errors import UsageError
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.model import describe
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.tensors import Translation, from_hf, to_hf
from tests.unit.weights.megatron_models import headers, hf_shapes, numbered

GEOMETRY = ModelGeometry(
    layers=1, hidden=4, heads=4, query_groups=2, head_dim=2, vocab=7, padded_vocab=8, ffn=4
)
SHAPES = hf_shapes(GEOMETRY)
MODEL = describe(headers(SHAPES), NameMap("qwen3", GEOMETRY), Topology(tp=2, world=4))
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def test_tensors_are_written_to_the_given_buffers() -> None:
    truth = numbered(SHAPES)
    buffers = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    result = dict(to_hf(MODEL, from_hf(truth, MODEL), out=buffers))
    assert all(result[name] is buffers[name] for name in truth)
    assert all(torch.equal(result[name], truth[name]) for name in truth)


def test_a_translation_runs_for_every_step() -> None:
    truth = numbered(SHAPES)
    local = from_hf(truth, MODEL)
    buffers = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    translation = Translation(MODEL, local, buffers)
    for step in range(1, 3):
        for ranks in local.values():
            for tensor in ranks.values():
                tensor += step
        translation.run()
        result = dict(to_hf(MODEL, local))
        assert all(torch.equal(buffers[name], result[name]) for name in truth)
    with pytest.raises(UsageError, match=r"no tensor that model\.norm\.weight could"):
        Translation(MODEL, local, {n: t for n, t in buffers.items() if n != "model.norm.weight"})


def test_a_tensor_in_one_shard_is_not_copied() -> None:
    local = from_hf(numbered(SHAPES), MODEL)
    norms = [ranks["decoder.final_layernorm.weight"] for ranks in local.values()]
    result = dict(to_hf(MODEL, local))["model.norm.weight"]
    assert result.data_ptr() in {norm.data_ptr() for norm in norms}


def test_padding_is_zero() -> None:
    last = from_hf(numbered(SHAPES), MODEL)[1]["embedding.word_embeddings.weight"]
    assert last.shape == (4, 4) and not last[3].any() and last[:3].all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    truth = numbered(SHAPES)
    local, dtypes = from_hf(truth, MODEL), (torch.int32, torch.float32)
    without = {rank: {n: ts[n] for n in ts if n != QKV} for rank, ts in local.items()}
    with pytest.raises(UsageError, match=r"Rank \d lacks decoder\.layers\.0\.self_attention"):
        list(to_hf(MODEL, without))
    wrong = {rank: {**ts, QKV: ts[QKV][:1]} for rank, ts in local.items()}
    with pytest.raises(UsageError, match=r"has the shape \[1, 4\] instead of \[8, 4\]"):
        list(to_hf(MODEL, wrong))
    wrong = {rank: {**local[rank], QKV: local[rank][QKV].to(dtypes[rank % 2])} for rank in local}
    with pytest.raises(UsageError, match=r"has torch\.\w+; model\.layers\.0\.self_attn\."):
        list(to_hf(MODEL, wrong))
    with pytest.raises(UsageError, match=r"no model\.norm\.weight, which decoder\.final"):
        from_hf({n: t for n, t in truth.items() if n != "model.norm.weight"}, MODEL)
    with pytest.raises(UsageError, match=r"model\.norm\.weight has the shape \[3\]"):
        from_hf({**truth, "model.norm.weight": torch.zeros(3)}, MODEL)
