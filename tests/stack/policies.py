"""Checkpoints with a torch forward to check the engine against."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollway.demo.grpo import token_logprobs


class Policy:
    """A checkpoint and what it should answer, by a plain float32 forward in torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        with torch.no_grad():
            return token_logprobs(self.model, [prompt], [completion])[0].tolist()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                logits = self.model(torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    def distance(self, prompt: list[int], completion: list[int], logprobs: list[float]) -> float:
        """How far an engine's log-probs are from this policy's, at the worst token."""
        mine = self.logprobs(prompt, completion)
        return max(abs(a - b) for a, b in zip(mine, logprobs, strict=True))


def perturbed(base: Path, directory: Path, seed: int) -> Path:
    """A copy of a checkpoint with clearly other weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * 1.5)
    model.save_pretrained(directory)
    return directory
