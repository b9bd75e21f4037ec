"""Real vLLM model classes of a few kilobytes, in this process and without an engine.

They are as vLLM creates and loads them, before it packs layers for CPU: the form in which a GPU
serves them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import dtype_name

_SMALL = {
    "vocab_size": 250,  # vLLM pads it to 256
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=8, tie_word_embeddings=False),
    "qwen3-tied": lambda: Qwen3Config(**_SMALL, head_dim=8, tie_word_embeddings=True),
    "qwen2-bias": lambda: Qwen2Config(**_SMALL, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**_SMALL, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SMALL,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    ),
}
Tensors = dict[str, torch.Tensor]


def write_model(kind: str, directory: Path, seed: int = 0) -> Tensors:
    """Write the config of a tiny model, and return the tensors of its checkpoint."""
    config = CONFIGS[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def headers_of(tensors: Tensors) -> dict[str, TensorHeader]:
    return {n: TensorHeader(dtype_name(t), tuple(t.shape), "") for n, t in tensors.items()}


@contextlib.contextmanager
def use_ranks(tp: int = 1, rank: int = 0) -> Iterator[None]:
    """Let vLLM believe that this process is one rank of several; none of them communicate."""
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "rendezvous"
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    if parallel_state._TP is None:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            parallel_state.initialize_model_parallel(1, 1)
    group: Any = parallel_state._TP
    with mock.patch.multiple(group, world_size=tp, rank_in_group=rank):
        yield


def create_model(directory: Path, cache_dtype: Any = "auto") -> tuple[Any, Any]:
    """Return an empty vLLM model with random parameters, and its config."""
    from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = ModelConfig(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )
    cache = CacheConfig(cache_dtype=cache_dtype)
    config = VllmConfig(model_config=model_config, cache_config=cache)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(vllm_config=config, model_config=model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model, config


def create_worker(directory: Path, cache_dtype: str = "auto") -> Any:
    """Return as much of a vLLM worker as staging uses."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model, config = create_model(directory, cache_dtype)

    def reload_weights(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's worker does it."""
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            model.load_weights(weights_iterator)
            finalize_layerwise_reload(model, config.model_config)  # type: ignore[no-untyped-call]

    runner = SimpleNamespace(
        get_model=lambda: model, reset_encoder_cache=lambda: None, reset_mm_cache=lambda: None
    )
    return SimpleNamespace(
        model_runner=runner,
        model_config=config.model_config,
        vllm_config=config,
        reload_weights=reload_weights,
    )


def pack(worker: Any) -> None:
    """Pack the layers of a worker's model, as vLLM does on CPU after it loaded them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        process_weights_after_loading(model, worker.model_config, torch.device("cpu"))


def change(tensors: Tensors, seed: int, share: float = 0.03) -> Tensors:
    """Return tensors of which a share of the elements changed: some little, some to anything."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        chosen = torch.rand(tensor.shape, generator=generator) < share
        if (number + seed) % 3 == 0:
            new = torch.randn(tensor.shape, generator=generator)
        else:
            new = tensor * (1 + 1e-7)
        changed[name] = torch.where(chosen, new.to(tensor.dtype), tensor)
    return changed
