"""The policy of `megatron_policy.py` with a draft model that is trained with it (EAGLE-3).

Its module stands in for NeMo-RL's `EagleModel`, which needs modelopt: it has the same names and
tensor-parallel shapes. NeMo-RL's own code loads its checkpoint, and exports it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rollway.demo.grpo import GrpoConfig
from tests.nemo_rl import stand_ins
from tests.nemo_rl.environment import find_source
from tests.nemo_rl.megatron_policy import MegatronRank

WIDTH, HEADS, GROUPS, DEPTH, INNER, TOKENS = 32, 4, 2, 8, 48, 40
_LAYER = "midlayer"


def write_draft(file: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of the draft model, and return its tensors."""
    from safetensors.torch import save_file

    shapes = {
        "fc": (WIDTH, 3 * WIDTH),
        f"{_LAYER}.self_attn.q_proj": (HEADS * DEPTH, 2 * WIDTH),
        f"{_LAYER}.self_attn.k_proj": (GROUPS * DEPTH, 2 * WIDTH),
        f"{_LAYER}.self_attn.v_proj": (GROUPS * DEPTH, 2 * WIDTH),
        f"{_LAYER}.self_attn.o_proj": (WIDTH, HEADS * DEPTH),
        f"{_LAYER}.mlp.gate_proj": (INNER, WIDTH),
        f"{_LAYER}.mlp.up_proj": (INNER, WIDTH),
        f"{_LAYER}.mlp.down_proj": (WIDTH, INNER),
        f"{_LAYER}.hidden_norm": (WIDTH,),
        f"{_LAYER}.input_layernorm": (WIDTH,),
        f"{_LAYER}.post_attention_layernorm": (WIDTH,),
        "norm": (WIDTH,),
        "lm_head": (TOKENS, WIDTH),
    }
    torch.manual_seed(5)
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors["d2t"] = torch.arange(TOKENS)
    save_file(tensors, file)
    return tensors


def make_head(ranks: int) -> nn.Module:
    """Return a rank's part of the draft model, empty."""
    fused = (HEADS + 2 * GROUPS) * DEPTH
    shapes = {
        "fc": (WIDTH // ranks, 3 * WIDTH),
        "decoder.layers.0.self_attention.linear_qkv": (fused // ranks, 2 * WIDTH),
        "decoder.layers.0.self_attention.linear_proj": (WIDTH, HEADS * DEPTH // ranks),
        "decoder.layers.0.mlp.linear_fc1": (2 * INNER // ranks, WIDTH),
        "decoder.layers.0.mlp.linear_fc2": (WIDTH, INNER // ranks),
        "decoder.layers.0.hidden_norm": (WIDTH,),
        "decoder.layers.0.input_layernorm": (WIDTH,),
        "decoder.layers.0.pre_mlp_layernorm": (WIDTH,),
        "decoder.final_layernorm": (WIDTH,),
        "eagle_output_layer": (TOKENS // ranks, WIDTH),
    }
    head = nn.Module()
    for name, shape in shapes.items():
        module = head
        for part in f"eagle_module.{name}".split("."):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.weight = nn.Parameter(torch.zeros(shape))
    head.get_submodule("eagle_module").register_buffer("d2t", torch.zeros(TOKENS).long())
    config: Any = SimpleNamespace(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=DEPTH,
        ffn_hidden_size=INNER,
        draft_vocab_size=TOKENS,
        use_aux_hidden_state=True,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    head.config = config
    return head


class DraftRank(MegatronRank):
    """A tensor-parallel rank whose model has the draft model attached, as NeMo-RL attaches it."""

    def __init__(self, rank: int, world: int, port: int, base: Path, config: GrpoConfig) -> None:
        sys.path.insert(0, str(find_source()))
        super().__init__(rank, world, port, base, config)

    def reset(self) -> None:
        super().reset()
        stand_ins.install()
        from nemo_rl.models.megatron.draft import load_hf_weights_to_eagle

        model: Any = self.model
        while hasattr(model, "module"):
            model = model.module
        self.draft_model = model.draft_model = make_head(torch.distributed.get_world_size())

        self._load: Any = load_hf_weights_to_eagle

    def load_draft(self, file: str) -> None:
        """Load the draft model by NeMo-RL's code, which cuts it for this rank."""
        missing, unexpected = self._load(self.draft_model, file)
        assert not missing and not unexpected

    def change_draft(self) -> None:
        with torch.no_grad():
            for parameter in self.draft_model.parameters():
                parameter += 1
