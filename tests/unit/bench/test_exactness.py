"""`bench exactness` with a stand-in for the engine; tests/stack runs it with a real one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import exactness
from benchmarks.exactness import (
    ExactnessOptions,
    describe_exact_stack,
    run_bench,
)
from benchmarks.gpu_load import PROMPT_TOKENS
from benchmarks.real_model import SHAPES, Reference, draw_weights, pick_logprobs
from rollway.cli import main
from rollway.rollout.client import Rollout, Span
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores
from rollway.stack import preset

CPU = torch.device("cpu")
SMALL = ExactnessOptions(rollouts=6, tokens=8)


class FakeEngine:
    """A stand-in for a stack: samples and scores by torch, with errors as large as asked for.

    `stale` makes it sample from other weights than it scores with."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, noise: float, stale: bool) -> None:
        self.dtype, self.noise, self.stale = dtype, noise, stale
        self.checkpoint = checkpoint
        self.load(draw_weights(SHAPES["tiny"], CPU))
        self.generator = torch.Generator().manual_seed(0)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        weights = {name: tensor.to(self.dtype, copy=True) for name, tensor in weights.items()}
        self.reference = Reference(self.checkpoint, weights, CPU)

    def read_logits(self, ids: list[list[int]]) -> torch.Tensor:
        return self.reference.read_logits(torch.tensor(ids), 1)

    def blur(self, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs + self.noise * torch.randn(logprobs.shape, generator=self.generator)

    # --- as a stack ---------------------------------------------------------------------------

    def rollouts(self, **_: Any) -> Any:
        return self

    teacher = rollouts

    @contextlib.asynccontextmanager
    async def publisher(self) -> AsyncIterator[Any]:
        yield self

    async def publish(self, version: int, tensors: list[Any]) -> dict[str, torch.Tensor]:
        return dict(tensors)

    async def refit(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self.load(weights)

    async def generate_batch(
        self, prompts: list[list[int]], sampling: Sampling
    ) -> list[list[Rollout]]:
        ids = [list(prompt) for prompt in prompts]
        for _ in range(sampling.max_tokens):
            logits = self.read_logits([[*row, 0] for row in ids])[:, -1].float()
            warm = logits / (sampling.temperature or 1e-6)
            chosen = torch.multinomial(warm.softmax(-1), 1, generator=self.generator)
            ids = [[*row, int(token)] for row, token in zip(ids, chosen, strict=True)]
        logits = self.read_logits(ids).float() / (sampling.temperature or 1.0)
        logprobs = self.blur(pick_logprobs(logits, torch.tensor(ids), 1))[:, PROMPT_TOKENS - 1 :]
        if self.stale:
            logprobs = logprobs.roll(1, 0)
        spans = (Span(0, sampling.max_tokens, 0, 7),)
        return [
            [Rollout(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:], lps.tolist(), "length", spans, 0)]
            for row, lps in zip(ids, logprobs, strict=True)
        ]

    async def score(self, sequences: list[list[int]]) -> list[Scores]:
        logprobs = self.blur(pick_logprobs(self.read_logits(sequences), torch.tensor(sequences), 1))
        return [
            Scores(ids, [None, *row.tolist()], 0)
            for ids, row in zip(sequences, logprobs, strict=True)
        ]


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setattr(preset, "cache_dir", lambda: tmp_path)

    def run(
        options: ExactnessOptions, *, noise: float = 0.0, stale: bool = False
    ) -> tuple[int, dict[str, Any]]:
        @contextlib.asynccontextmanager
        async def up(spec: Any) -> AsyncIterator[Any]:
            dtype = getattr(torch, options.dtype)
            yield FakeEngine(Path(spec.models[0].path), dtype, noise, stale)

        monkeypatch.setattr(exactness, "up", up)
        return run_bench(options, lambda _: None)

    return run


def test_an_engine_that_computes_as_the_trainer_differs_nowhere(run_with: Any) -> None:
    code, figures = run_with(replace(SMALL, dtype="float32"))
    assert code == 0 and figures["cause"] == "rounding" and figures["is_bit_equal"]
    rows = figures["rows"]
    assert all(rows[name]["k3"] < 1e-9 for name in ("batching", "engine", "trainer", "total"))
    # The controls show that other weights, and a wrong trainer, would not have passed.
    assert rows["stale, other weights"]["k3"] > 0.1 and all(
        figures["told_apart_by_engine"].values()
    )
    assert rows["stale, small step"]["k3"] > 10 * rows["engine"]["k3"]
    assert rows["trainer: temperature 0.7, divided by it"]["k3"] < 1e-9
    assert rows["trainer: temperature 0.7, ignored"]["k3"] > 1e-3
    assert figures["greedy"]["tokens"] == 6 * 8 and figures["greedy"]["other_argmax"] == 0


def test_an_engine_with_noise_is_not_bit_equal(run_with: Any) -> None:
    code, figures = run_with(SMALL, noise=0.01)
    assert code == 0 and figures["cause"] == "rounding" and not figures["is_bit_equal"]
    engine = figures["rows"]["engine"]
    told = {"stale, small step": False, "stale, other weights": True}
    assert figures["told_apart_by_engine"] == told
    assert engine["equal"] < 1 and engine["p50"] == pytest.approx(0.0095, rel=0.5)
    assert figures["rows"]["trainer: softmax in bfloat16"]["max_abs"] > 0


def test_stale_tokens_fail_the_run(run_with: Any) -> None:
    code, figures = run_with(SMALL, stale=True)
    assert code == 1 and figures["cause"] == "stale tokens"


def test_batch_invariance_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preset, "list_gpus", list)
    monkeypatch.setattr("benchmarks.__main__.require", lambda *_: None)
    assert main(["bench", "exactness", "--batch-invariant"]) == 2
    message = capsys.readouterr().err
    assert "batch-invariant mode cannot run here" in message and "GPU" in message


def test_a_batch_invariant_engine_must_be_bit_equal(
    run_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "explain_no_batch_invariance", lambda: "")
    options = replace(SMALL, batch_invariant=True)
    assert run_with(options)[0] == 0
    assert run_with(options, noise=1e-4)[0] == 1


def test_what_would_run() -> None:
    options = ExactnessOptions(dtype="float32", head="float32", batch_invariant=True, eager=True)
    (model,) = describe_exact_stack(options, "org/model", on_gpu=True).models
    assert model.args["hf-overrides"] == {"head_dtype": "float32"}
    assert model.args["enforce-eager"] is True and model.args["gpu-memory-utilization"] == 0.4
    assert model.env["VLLM_BATCH_INVARIANT"] == "1" and model.env["TRITON_F32_DEFAULT"] == "ieee"
    (model,) = describe_exact_stack(ExactnessOptions(), "org/model", on_gpu=False).models
    assert model.env == {} and "hf-overrides" not in model.args
    assert "gpu-memory-utilization" not in model.args and model.args["dtype"] == "bfloat16"
