"""The policy of `policy.py` with Megatron-Core: two tensor-parallel ranks, on CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rollway.demo.grpo import GrpoConfig, completion_mask, pad_rows
from rollway.integrations.nemo_rl.workers import MegatronShardPublishing
from rollway.weights.megatron.geometry import ModelGeometry
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.megatron.tensors import read_rank
from tests.megatron.package import install_megatron
from tests.megatron.rank import Wrapper, build_model, without_cuda
from tests.nemo_rl.policy import Rank
from tests.unit.weights.megatron_shards import rank_from_hf


class MegatronScoring(nn.Module):
    """A Megatron model, with the log-probs of completions as its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, prompts: Any, completions: Any) -> Tensor:
        rows = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
        inputs, targets = pad_rows(rows).long(), pad_rows(completions).long()
        length = inputs.shape[1]
        positions = torch.arange(length).expand_as(inputs)
        hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        logits = self.module(inputs, positions, hidden).float()
        # The token at place t is predicted by the state before it.
        first = torch.tensor([len(prompt) - 1 for prompt in prompts])
        places = (first[:, None] + torch.arange(targets.shape[1])).clamp(max=length - 1)
        logits = logits.gather(1, places[:, :, None].expand(-1, -1, logits.shape[2]))
        logprobs = logits.log_softmax(dim=-1).gather(2, targets[:, :, None]).squeeze(2)
        return logprobs * completion_mask(completions)


class MegatronRank(MegatronShardPublishing, Rank):
    """One of the tensor-parallel ranks."""

    def __init__(self, rank: int, world: int, port: int, base: Path, config: GrpoConfig) -> None:
        sys.path.insert(0, str(install_megatron()))
        self.cfg = {"model_name": str(base)}  # as NeMo-RL's workers have it
        super().__init__(rank, world, port, base, config)

    def reset(self) -> None:
        """Begin again with the base weights, put into the ranks by Rollway's layout."""
        from megatron.core import parallel_state

        world = torch.distributed.get_world_size()
        if not parallel_state.model_parallel_is_initialized():
            without_cuda()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
        hf = json.loads((self._base / "config.json").read_text())
        sizes = {"tp": world, "pp": 1, "ep": 1, "etp": 1, "experts": ""}
        theta = hf["rope_parameters"]["rope_theta"]
        options = {**sizes, "padded_vocab": hf["vocab_size"], "rotary_base": theta}
        model = Wrapper(Wrapper(build_model(options, hf)))
        geometry = ModelGeometry.from_hf_config(hf)
        layout, tensors = read_rank(model, NameMap.from_hf_config(hf))
        layouts: list[Any] = [None] * world
        torch.distributed.all_gather_object(layouts, layout)
        whole = MegatronModel(geometry, dict(enumerate(layouts)))
        local = rank_from_hf(load_file(self._base / "model.safetensors"), whole, self.rank)
        for name, tensor in tensors.items():
            tensor.copy_(local[name].view_as(tensor))
        self.model = MegatronScoring(model)
        self._start_optimizer()

    def _clip_gradients(self) -> None:
        """Join what the ranks have of the gradients, as Megatron's `finalize_model_grads` does, and
        clip by the norm of all of them."""
        squares = torch.zeros(2)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                raise AssertionError(f"{name} has no gradient")
            if "q_layernorm" in name or "k_layernorm" in name:
                # Each rank has the gradient of its own heads.
                torch.distributed.all_reduce(parameter.grad)
            is_cut = bool(getattr(parameter, "tensor_model_parallel", False))
            squares[int(is_cut)] += parameter.grad.square().sum()
        torch.distributed.all_reduce(squares)
        norm = (squares[0] / torch.distributed.get_world_size() + squares[1]).sqrt().item()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, self._config.max_grad_norm / (norm + 1e-6)))
