"""A tiny mixture-of-experts checkpoint, with the tokenizer of the demo's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM


def build_moe(base: Path, directory: Path, *, kv_heads: int = 2) -> Path:
    dense = AutoConfig.from_pretrained(base)
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).float().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory)
    return directory
