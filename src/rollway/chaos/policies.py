"""Sets of clearly different weights, and the log-probs that each gives: the reference for
tokens."""

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
"""The number of sets. Versions cycle through them, so that neighbours always differ."""
_BATCH = 32


class Policies:
    """The base checkpoint and others of its shape; version v serves number v modulo COUNT."""

    def __init__(self, base: Path, directory: Path) -> None:
        self.paths = [base]
        self._models = [_load(base)]
        for seed in range(1, COUNT):
            path = directory / f"policy-{seed}"
            self.paths.append(publish_checkpoint(path, partial(perturb, base, seed)))
            self._models.append(_load(path))

    def path(self, version: int) -> Path:
        return self.paths[version % COUNT]

    def logprobs(
        self, version: int, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float]]:
        """Return the log-prob of each token, by a plain float32 forward pass in torch."""
        logprobs: list[list[float]] = []
        for start in range(0, len(prompts), _BATCH):
            batch = slice(start, start + _BATCH)
            with torch.no_grad():
                model = self._models[version % COUNT]
                rows = token_logprobs(model, prompts[batch], completions[batch]).tolist()
            pairs = zip(rows, completions[batch], strict=True)
            logprobs += [row[: len(ids)] for row, ids in pairs]
        return logprobs


hf_logging.disable_progress_bar()


def _load(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def perturb(base: Path, seed: int, directory: Path) -> None:
    """Write a checkpoint of the same shape with clearly different weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * 1.5)
    model.save_pretrained(directory)
    for extra in base.iterdir():  # the tokenizer and other files, as a trainer saves them
        if extra.is_file() and not (directory / extra.name).exists():
            shutil.copy(extra, directory)
