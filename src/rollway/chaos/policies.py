"""Sets of weights that differ clearly, and what each would answer: the judge of every token."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from rollway.demo.grpo import token_logprobs
from rollway.weights.checkpoint import publish_checkpoint

COUNT = 4
"""Versions take turns with these, so that neighbours always differ."""


class Policies:
    """The base checkpoint and some others of its shape; version v serves number v modulo COUNT."""

    def __init__(self, base: Path, directory: Path) -> None:
        self.paths = [base]
        self._models = [_load(base)]
        for seed in range(1, COUNT):
            path = directory / f"policy-{seed}"
            self.paths.append(publish_checkpoint(path, partial(_perturb, base, seed)))
            self._models.append(_load(path))

    def path(self, version: int) -> Path:
        return self.paths[version % COUNT]

    def logprobs(self, version: int, prompt: list[int], completion: list[int]) -> list[float]:
        """Of each token of the completion, by a plain float32 forward in torch."""
        with torch.no_grad():
            values = token_logprobs(self._models[version % COUNT], [prompt], [completion])[0]
        listed: list[float] = values.tolist()
        return listed


hf_logging.disable_progress_bar()


def _load(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def _perturb(base: Path, seed: int, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * 1.5)
    model.save_pretrained(directory)
    for extra in base.iterdir():  # tokenizer and the like, as a trainer would save them
        if extra.is_file() and not (directory / extra.name).exists():
            shutil.copy(extra, directory)
