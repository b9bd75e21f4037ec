"""Checkpoints with a torch forward to check the engine against."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from chaos.traffic import perturb
from rollway.demo.grpo import token_logprobs


class Policy:
    """A checkpoint and what it should answer, by a plain forward in torch, in float32 on the CPU
    unless something else is asked for."""

    def __init__(self, path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.path = path
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.model = model.to(device)

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        with torch.no_grad():
            return token_logprobs(self.model, [prompt], [completion])[0].tolist()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                inputs = torch.tensor([ids], device=self.model.device)
                logits = self.model(inputs).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    def distance(self, prompt: list[int], completion: list[int], logprobs: list[float]) -> float:
        """How far an engine's log-probs are from this policy's, at the worst token."""
        mine = self.logprobs(prompt, completion)
        return max(abs(a - b) for a, b in zip(mine, logprobs, strict=True))


def perturbed(base: Path, directory: Path, seed: int) -> Path:
    """A copy of a checkpoint with clearly other weights."""
    perturb(base, seed, directory)
    return directory


RANK, ALPHA = 4, 8


def write_adapter(directory: Path, policy: Policy, seed: int) -> Policy:
    """A PEFT adapter on every q_proj, and the policy that it makes of another."""
    adapted = copy.copy(policy)
    adapted.model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with torch.no_grad():
        for index, layer in enumerate(adapted.model.model.layers):
            weight = layer.self_attn.q_proj.weight
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.3
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
            weight += (up @ down * (ALPHA / RANK)).to(weight)
            name = f"base_model.model.model.layers.{index}.self_attn.q_proj"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return adapted
