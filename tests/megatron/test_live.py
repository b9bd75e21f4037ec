"""Real megatron-core, live on CPU: its results verify where its weights are.

A checkpoint is put into the ranks of a Megatron model by Rollway's layout. Megatron then answers
as transformers does, so the layout is Megatron's own; and the shards give the checkpoint back byte
for byte. It needs megatron-core from PyPI (3 MB, in the cache directory), so it is asked for:
ROLLWAY_TEST_MEGATRON=1 pytest tests/megatron
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollway.weights.layout import Role
from tests.megatron import rank as rank_script
from tests.megatron.package import SECONDS, install_megatron
from tests.unit.weights.megatron_shards import to_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("ROLLWAY_TEST_MEGATRON") != "1",
        reason="installs megatron-core into the cache; ROLLWAY_TEST_MEGATRON=1 runs it",
    ),
]

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}


def _model(kind: str) -> torch.nn.Module:
    if kind == "dense":
        config = Qwen3Config(**BASE, head_dim=16)
        model: torch.nn.Module = Qwen3ForCausalLM(config)
    elif kind == "awkward":  # biases, tied, fewer query groups than ranks, a padded vocabulary
        changed = {**BASE, "num_key_value_heads": 1, "vocab_size": 125}
        model = Qwen2ForCausalLM(Qwen2Config(**{**changed, "tie_word_embeddings": True}))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**BASE, **MOE, head_dim=16, norm_topk_prob=True))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():  # all different, also norms and biases
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.dim() == 1 else 0.08 * noise)
    return model.float().eval()


@pytest.fixture(scope="session")
def megatron() -> Path:
    return install_megatron()


def _run(job: Path, world: int, megatron: Path) -> None:
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), str(megatron), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, rank_script.__file__, str(job)]
    logs = [job / f"rank{rank}.log" for rank in range(world)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            running.append(
                subprocess.Popen([*command, str(rank)], env=env, stdout=file, stderr=file)
            )
    try:
        codes = [process.wait(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "ep", "etp", "experts"),
    [
        ("dense", 2, 1, 1, 1, ""),
        ("dense", 1, 2, 1, 1, ""),
        ("awkward", 2, 1, 1, 1, ""),
        ("moe", 1, 1, 2, 1, "grouped"),
        ("moe", 2, 1, 1, 2, "grouped"),
        ("moe", 2, 1, 2, 1, "sequential"),
        ("moe", 1, 1, 2, 1, "legacy"),
        ("moe", 2, 1, 1, 2, "legacy"),
    ],
    ids=lambda value: str(value),
)
def test_megatron_computes_with_our_layout_what_transformers_does(
    kind: str, tp: int, pp: int, ep: int, etp: int, experts: str, tmp_path: Path, megatron: Path
) -> None:
    model = _model(kind)
    model.save_pretrained(tmp_path)
    job = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "world": 2, "experts": experts}
    (tmp_path / "job.json").write_text(
        json.dumps({**job, "padded_vocab": 128, "rotary_base": 10000})
    )
    _run(tmp_path, 2, megatron)

    whole = pickle.loads((tmp_path / "layouts0.pickle").read_bytes())
    roles = {shard.role for layout in whole.ranks.values() for shard in layout.shards.values()}
    if experts:
        assert {Role.EXPERT_COLUMN, Role.EXPERT_ROW} <= roles
    shards = {rank: load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)}
    truth = load_file(tmp_path / "model.safetensors")
    converted = dict(to_hf(whole, shards))
    assert converted.keys() == truth.keys()
    assert all(torch.equal(converted[name], truth[name]) for name in truth)
    if pp == 1:
        ids = (torch.arange(rank_script.TOKENS) * 7 % 100).view(1, -1)
        with torch.no_grad():
            expected = model(ids).logits
        for rank in range(2):
            logits = load_file(tmp_path / f"logits{rank}.safetensors")["logits"]
            assert (logits[..., : expected.shape[-1]] - expected).abs().max() < 1e-5
