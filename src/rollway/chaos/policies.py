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
_BATCH = 32


class Policies:
    """The base checkpoint and some others of its shape; version v serves number v modulo COUNT."""

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
        """Of each token of each completion, by a plain float32 forward in torch."""
        found: list[list[float]] = []
        for start in range(0, len(prompts), _BATCH):
            some = slice(start, start + _BATCH)
            with torch.no_grad():
                model = self._models[version % COUNT]
                rows = token_logprobs(model, prompts[some], completions[some]).tolist()
            found += [row[: len(ids)] for row, ids in zip(rows, completions[some], strict=True)]
        return found


hf_logging.disable_progress_bar()


def _load(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def perturb(base: Path, seed: int, directory: Path) -> None:
    """Write a checkpoint of the same shape with clearly other weights."""
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
