"""One rank of a Megatron-Core model on CPU: loads a checkpoint by Rollway's layout, and computes.

Run by `test_live.py` as `rank.py JOB RANK`; JOB is a directory with a Hugging Face checkpoint and
`job.json`, where the ranks leave their layouts, shards and what the model answers. megatron-core
is made for GPUs; the patches here replace what it wants from CUDA, and nothing of its layout.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rollway.weights.megatron.geometry import ModelGeometry
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.megatron.tensors import read_rank
from tests.unit.weights.megatron_shards import rank_from_hf

TOKENS = 16


def main(job: Path, rank: int) -> None:
    torch.set_num_threads(1)
    asked = json.loads((job / "job.json").read_text())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=asked["world"]
    )
    without_cuda()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=asked["tp"],
        pipeline_model_parallel_size=asked["pp"],
        expert_model_parallel_size=asked["ep"],
        expert_tensor_parallel_size=asked["etp"],
    )
    config = json.loads((job / "config.json").read_text())
    model = Wrapper(Wrapper(build_model(asked, config)))  # as DDP and Float16Module do
    geometry = ModelGeometry.from_hf_config(config)
    layout, tensors = read_rank(model, NameMap.from_hf_config(config))
    layouts: list[Any] = [None] * asked["world"]
    torch.distributed.all_gather_object(layouts, layout)
    whole = MegatronModel(geometry, dict(enumerate(layouts)))
    (job / f"layouts{rank}.pickle").write_bytes(pickle.dumps(whole))
    shards = rank_from_hf(load_file(job / "model.safetensors"), whole, rank)
    for name, tensor in tensors.items():
        tensor.copy_(shards[name].view_as(tensor))
    save_file({n: t.contiguous() for n, t in tensors.items()}, job / f"rank{rank}.safetensors")
    if asked["pp"] == 1:
        save_file({"logits": _answer(model)}, job / f"logits{rank}.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Wrapper(nn.Module):
    """What DDP and Float16Module do to the names of a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def without_cuda() -> None:
    """Replace what megatron-core wants from CUDA."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # 0.16.1 uses the name even where it is not imported
    grouped_gemm_util.grouped_gemm = object()
    grouped_gemm_util.ops = SimpleNamespace(gmm=_gmm)


def _gmm(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """What the CUDA package grouped_gemm computes for the old GroupedMLP."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ w[e] for e, part in enumerate(parts)])


class _GroupedLinear(nn.Module):
    """Transformer Engine's grouped linear layer: its parameters' names and shapes, on CPU."""

    column: bool

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.count, self.config = num_gemms, config
        ranks = pg_collection.expt_tp.size()
        shape = (output_size, input_size // ranks)
        if self.column:
            shape = (output_size // ranks, input_size)
        for number in range(num_gemms):
            weight = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = 0 if self.column else 1  # type: ignore[attr-defined]
            weight.partition_stride = 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        parts = x.split([int(count) for count in counts])
        weights = [self.get_parameter(f"weight{number}") for number in range(self.count)]
        return torch.cat([part @ w.t() for part, w in zip(parts, weights, strict=True)]), None


class TEColumnParallelGroupedLinear(_GroupedLinear):
    column = True


class TERowParallelGroupedLinear(_GroupedLinear):
    column = False


def build_model(asked: dict[str, Any], hf: dict[str, Any]) -> nn.Module:
    """Build this rank's part of a model with the shapes of a Hugging Face config."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = hf.get("num_local_experts") or hf.get("num_experts")
    legacy = asked["experts"] == "legacy"
    qwen3 = hf["model_type"].startswith("qwen3")
    options: dict[str, Any] = {}
    if experts:
        options = {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "expert_model_parallel_size": asked["ep"],
            "expert_tensor_parallel_size": asked["etp"],
            "moe_grouped_gemm": legacy,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
        if legacy:
            options["moe_use_legacy_grouped_gemm"] = True
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=not qwen3,
        qk_layernorm=qwen3,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        use_cpu_initialization=True,
        tensor_model_parallel_size=asked["tp"],
        pipeline_model_parallel_size=asked["pp"],
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=legacy, qk_layernorm=qwen3, normalization="RMSNorm"
    )
    if asked["experts"] == "grouped":
        _use_grouped_experts(spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=asked["padded_vocab"],
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=asked["rotary_base"],
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        parallel_output=False,
    )
    config.bf16 = legacy  # the old GroupedMLP asks for it when it computes; its gemm here does not
    return model.eval()


def _use_grouped_experts(spec: Any) -> None:
    """Megatron's own TEGroupedMLP over the layers above."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    layers = MLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
    )
    spec.submodules.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=layers)


@torch.no_grad()
def _answer(model: nn.Module) -> torch.Tensor:
    ids = (torch.arange(TOKENS) * 7 % 100).view(1, TOKENS)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    logits: torch.Tensor = model(ids, torch.arange(TOKENS).view(1, TOKENS), mask)
    return logits.float().contiguous()


if __name__ == "__main__":
    start = time.monotonic()
    main(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"rank {sys.argv[2]}: {time.monotonic() - start:.1f} s")
