"""Tiny EAGLE draft models: one that guesses at random, and one that has learnt a policy's words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.stack.policies import Policy

Tensors = dict[str, torch.Tensor]


def random_draft(policy: Policy, seed: int = 0) -> Tensors:
    """Embeddings and head are not in it: an EAGLE head shares the policy's."""
    config = policy.model.config
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes = {
        "fc": (width, 2 * width),
        "layers.0.self_attn.q_proj": (queries, width),
        "layers.0.self_attn.k_proj": (keys, width),
        "layers.0.self_attn.v_proj": (keys, width),
        "layers.0.self_attn.o_proj": (width, queries),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    return {**tensors, "layers.0.post_attention_layernorm.weight": torch.ones(width)}


def learnt_draft(policy: Policy, prompt: list[int], count: int) -> Tensors:
    """Guesses what follows each token in the policy's greedy answer: a linear map from the token's
    embedding to the head's row of the next; attention and MLP add nothing."""
    tensors = random_draft(policy)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] = torch.zeros_like(tensors[f"layers.0.{name}.weight"])
    ids = [prompt[-1], *policy.greedy(prompt, count)]
    follows = dict(itertools.pairwise(ids))
    embeddings = policy.model.model.embed_tokens.weight.detach().cpu()[list(follows)]
    rows = policy.model.lm_head.weight.detach().cpu()[list(follows.values())]
    learnt = torch.linalg.lstsq(embeddings, rows).solution.T
    tensors["fc.weight"] = torch.cat([learnt, torch.zeros_like(learnt)], dim=1).contiguous()
    return tensors


def write_draft(directory: Path, policy: Policy, tensors: Tensors) -> Path:
    """A checkpoint for vLLM's `speculative-config`."""
    directory.mkdir()
    theirs = policy.model.config.to_dict()
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    config = {name: theirs[name] for name in same} | {"dtype": "float32", "eos_token_id": 256}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": 1, "rope_parameters": theirs["rope_parameters"]}
    config |= {"tie_word_embeddings": False, "bos_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def random_eagle3(policy: Policy, seed: int = 0) -> Tensors:
    """An EAGLE-3 head under the names that NeMo-RL exports: with a head and a vocabulary of its
    own, every second token of the policy's."""
    config = policy.model.config
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    count = config.vocab_size // 2
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "midlayer.hidden_norm": (width,),
        "midlayer.input_layernorm": (width,),
        "midlayer.post_attention_layernorm": (width,),
        "norm": (width,),
        "lm_head": (count, width),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    # What must be added to a token of the draft model to get the policy's.
    return {**tensors, "d2t": torch.arange(count)}


def write_eagle3(directory: Path, policy: Policy, tensors: Tensors) -> Path:
    """A checkpoint of an EAGLE-3 head, as they are published: with the inverse table, too."""
    write_draft(directory, policy, tensors)
    vocabulary = policy.model.config.vocab_size
    inverse = torch.zeros(vocabulary, dtype=torch.bool)
    inverse[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    save_file({**tensors, "t2d": inverse}, directory / "model.safetensors")
    file = directory / "config.json"
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(tensors["d2t"])}
    # By default vLLM takes the states of layers that so small a policy does not have.
    own["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    return directory
