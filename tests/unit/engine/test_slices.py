"""A rank of an engine receives only its part where that is known and can be verified."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine.incoming import find_slices, zero_pad
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box, Slices
from rollway.weights.planning.targets import cells, engine_ranks
from tests.unit.engine.sliced_models import DENSE, MOE, engine
from tests.unit.weights.megatron_plans import model_of


@pytest.mark.parametrize("config", [DENSE, MOE])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 4)])
def test_every_part_is_made_of_cells(config: dict[str, Any], tp: int, ep: int) -> None:
    """The cells of eight ranks also serve engines with two and four."""
    _, headers = model_of(config)
    pieces = {name: list(cells(name, headers, 8)) for name in headers}
    for place, rank in enumerate(engine_ranks(config, tp, ep)):
        mine = find_slices(rank, headers, engine(config, headers, tp, ep, place))
        assert mine.keep_whole_pieces(pieces).boxes == mine.boxes
        assert "model.norm.weight" not in mine.boxes
        assert "model.embed_tokens.weight" in mine.boxes
        assert mine.boxes["model.layers.0.self_attn.q_proj.weight"] is not None
        if config is MOE and ep > 1:
            experts = [name for name in headers if ".experts." in name]
            owned = [name for name in experts if mine.boxes[name] is not None]
            assert len(owned) == len(experts) // ep


def test_a_rank_with_only_padding_receives_the_whole_tensor() -> None:
    config = {**DENSE, "vocab_size": 30}  # 64 with padding, 16 for each of four
    _, headers = model_of(config)
    for place, rank in enumerate(engine_ranks(config, 4)):
        named = dict(engine(config, headers, 4, 1, place).named_parameters())
        named.setdefault("lm_head.weight", torch.empty(16, headers["lm_head.weight"].shape[1]))
        modules = dict.fromkeys((n.rpartition(".")[0] for n in named), torch.nn.Module())
        model = SimpleNamespace(named_parameters=named.items, named_modules=modules.items)
        mine = find_slices(rank, headers, model)  # type: ignore[arg-type]
        assert ("lm_head.weight" in mine.boxes) == (16 * place < 30)


def test_unknown_tensors_are_received_whole() -> None:
    _, headers = model_of(DENSE)
    headers["model.layers.0.mystery.weight"] = TensorHeader("F32", (8, 8))
    rank = engine_ranks(DENSE, 2)[0]
    model = engine(DENSE, model_of(DENSE)[1], 2, 1, 0)
    assert "model.layers.0.mystery.weight" not in find_slices(rank, headers, model).boxes
    # The shape differs from our rules, so this engine splits the parameter in another way.
    named = dict(model.named_parameters())
    name = "model.layers.0.self_attn.qkv_proj"
    named[f"{name}.weight"] = torch.empty(9, 9)
    del named["model.embed_tokens.weight"]
    unlike = SimpleNamespace(named_parameters=named.items, named_modules=model.named_modules)
    other = find_slices(rank, headers, unlike)  # type: ignore[arg-type]
    left_out = find_slices(rank, headers, model).boxes.keys() - other.boxes.keys()
    assert left_out == {
        *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
        "model.embed_tokens.weight",
    }
    assert find_slices(None, headers, model) == Slices()


def test_unverifiable_parts_and_their_fused_partners_are_received_whole() -> None:
    _, headers = model_of(DENSE)
    mine = find_slices(engine_ranks(DENSE, 2)[1], headers, engine(DENSE, headers, 2, 1, 1))
    pieces = {name: list(cells(name, headers, 2)) for name in headers}
    cut_elsewhere = "model.layers.1.self_attn.k_proj.weight"
    pieces[cut_elsewhere] = [Box.whole(headers[cut_elsewhere].shape)]
    left_out = mine.boxes.keys() - mine.keep_whole_pieces(pieces).boxes.keys()
    assert left_out == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"}
    assert mine.keep_whole_pieces({}).boxes == mine.boxes  # no part crosses a boundary


def test_a_zero_padded_tensor_uses_memory_only_for_its_part() -> None:
    before = _read_resident_bytes()
    part = torch.ones(16, 1 << 14)
    padded = zero_pad(part, Box((100, 0), (116, 1 << 14)), (1 << 14, 1 << 14))  # 1 GiB
    assert padded.shape == (1 << 14, 1 << 14) and padded.dtype == torch.float32
    assert torch.equal(padded[100:116], part)
    assert padded[99].sum() == padded[116].sum() == 0
    assert _read_resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_zero_padded_tensor_keeps_its_dtype(dtype: torch.dtype) -> None:
    part = torch.ones(2, 3).to(dtype)
    padded = zero_pad(part, Box((1, 2), (3, 5)), (4, 6))
    assert padded.dtype == dtype
    assert padded.float().sum() == 6 and torch.equal(padded[1:3, 2:5].float(), part.float())


def _read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
