"""The parts of `bench gpu-engine` that need no engine; tests/stack runs the whole."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu_engine, round_floats
from benchmarks.gpu_colocated import fit_slope
from benchmarks.gpu_engine import GpuEngineBench, Options, Skip, describe_stack
from benchmarks.gpu_load import MemoryWatch, make_prompts, measure_limits
from benchmarks.real_model import (
    SHAPES,
    Reference,
    Weights,
    cache_model,
    change_all,
    change_some,
    draw_weights,
)
from rollway.errors import UsageError
from rollway.rollout.client import Rollout, Span

CPU = torch.device("cpu")


@pytest.fixture
def weights() -> Weights:
    return draw_weights(SHAPES["tiny"], CPU)


def test_the_checkpoint_is_what_transformers_reads(weights: Weights, tmp_path: Path) -> None:
    path = cache_model(tmp_path / "model", "tiny", weights)
    model = AutoModelForCausalLM.from_pretrained(path)
    served = model.state_dict()
    assert served.keys() == weights.keys()
    assert all(torch.equal(served[name], weights[name]) for name in weights)


def test_a_written_checkpoint_is_kept_and_a_half_one_is_not(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache_model(tmp_path / "model", "tiny", weights)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert cache_model(path, "tiny", weights) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    shutil.rmtree(path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.real_model.save_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache_model(path, "tiny", weights)
    assert list(tmp_path.iterdir()) == []


def test_changes_have_the_size_that_they_promise(weights: Weights) -> None:
    def share(change: Any) -> float:
        before = {name: tensor.clone() for name, tensor in weights.items()}
        change(weights, 3)
        pairs = [(before[name] != weights[name]) for name in weights if weights[name].dim() > 1]
        return float(torch.cat([pair.flatten() for pair in pairs]).float().mean())

    assert share(change_all) > 0.97
    assert share(change_some) == pytest.approx(0.01, abs=0.002)


def test_limits_of_the_same_bytes(weights: Weights) -> None:
    figures = measure_limits(weights.values(), CPU)
    size = sum(tensor.nbytes for tensor in weights.values())
    assert figures["gigabytes"] == size / 1e9
    for name in ("device_copy", "pinned_host_to_device", "device_to_pinned_host"):
        assert figures[f"{name}_seconds"] * figures[f"{name}_gb_per_s"] == pytest.approx(size / 1e9)


def test_memory_is_sampled_while_a_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for a GPU: before, then a peak, then less again.
    used = iter([1 << 30, 5 << 30])
    monkeypatch.setattr("benchmarks.gpu_load.read_used", lambda _: next(used, 2 << 30))
    with MemoryWatch(torch.device("cuda")) as watch:
        while len(watch._samples) < 3:
            pass
    expected = {"before_gib": 1.0, "peak_gib": 5.0, "after_gib": 2.0, "extra_gib": 4.0}
    assert watch.figures == expected
    with MemoryWatch(CPU) as nothing:
        pass
    assert nothing.figures is None


def test_tokens_of_other_weights_are_noticed(weights: Weights, tmp_path: Path) -> None:
    path = cache_model(tmp_path / "model", "tiny", weights)
    reference = Reference(path, weights, CPU)
    prompt = make_prompts(1, 1)[0]

    def sample() -> Rollout:
        """Sample as an engine would, with the weights of this moment."""
        model = AutoModelForCausalLM.from_pretrained(path)
        model.load_state_dict(weights)
        torch.manual_seed(0)
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=True)
        tokens = ids[0, len(prompt) :].tolist()
        with torch.no_grad():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        half = len(tokens) // 2
        spans = (Span(0, half, 1, 7), Span(half, len(tokens), 2, 7))
        return Rollout(prompt, tokens, logprobs, "length", spans, 0)

    rollout = sample()
    right = reference.compare([rollout], 2)
    assert right["is_of_version"] and right["tokens"] == len(rollout.token_ids) - 12
    change_all(weights, 1)  # the reference shares the memory of the weights
    assert reference.compare([rollout], 2)["is_of_version"] is False
    assert reference.compare([rollout], 9) == {
        "tokens": 0,
        "mismatch_kl": None,
        "is_of_version": None,
    }


def test_a_part_that_fails_or_is_late_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []
    bench = GpuEngineBench(Options(model="tiny"), lines.append)

    async def fail() -> dict[str, Any]:
        raise ValueError("no such thing")

    async def skip() -> dict[str, Any]:
        raise Skip("there is no GPU")

    async def work() -> dict[str, Any]:
        return {"paused_seconds": 1 / 3, "refits": [{"paused_seconds": 2 / 3}]}

    async def run() -> None:
        await bench._measure("shm", fail)
        await bench._measure("cuda_ipc", skip)
        await bench._measure("files", work)
        bench.options.seconds = 0.0
        await bench._measure("delta", work)

    asyncio.run(run())
    figures = bench.as_json()
    assert figures["failed"] == {"shm": "ValueError: no such thing"}
    assert figures["skipped"].keys() == {"cuda_ipc", "delta"}
    assert figures["files"]["refits"] == [{"paused_seconds": 0.66667}]
    assert "ValueError" in capsys.readouterr().err


def test_the_engine_gets_its_arguments_under_vllms_own_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = Options(rollouts=16, tokens=100, eager=True, overrides=("models.0.args.seed=3",))
    args = describe_stack(options, tmp_path, on_gpu=True).models[0].args
    assert args["gpu-memory-utilization"] == 0.4 and args["enforce-eager"] is True
    assert args["max-num-seqs"] == 17 and args["max-model-len"] > 264 and args["seed"] == 3
    assert "enforce-eager" not in describe_stack(options, tmp_path, on_gpu=False).models[0].args


def make_arguments(**values: Any) -> argparse.Namespace:
    defaults = {
        "model": "tiny", "only": [], "rollouts": 1, "tokens": 1, "repeat": 1, "eager": True,
        "set": [], "seconds": None, "steps": 1, "filler_gib": 0.0, "gpu_memory_utilization": 0.4,
        "refits_per_hour": 60.0,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **values})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def run(self: GpuEngineBench) -> None:
        self.figures["limits"] = {"gigabytes": 1.0}
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            self.figures["stopped"] = True  # as the stack is

    monkeypatch.setattr(GpuEngineBench, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    code, figures = gpu_engine.run(make_arguments())
    assert code == 130 and figures["is_interrupted"] and figures["limits"] == {"gigabytes": 1.0}
    assert figures["stopped"] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "wrong",
    [{"only": ["warp"]}, {"rollouts": 0}, {"repeat": 0}, {"steps": 0}, {"filler_gib": -1.0}],
)
def test_wrong_options_are_refused_before_anything_starts(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        gpu_engine.run(make_arguments(**wrong))


def test_lost_tokens_follow_from_pauses_and_the_rate() -> None:
    bench = GpuEngineBench(Options(refits_per_hour=10.0), lambda _: None)
    bench.figures = {
        "throughput": {"median_tokens_per_second": 1000.0},
        "shm": {"refits": [{"paused_seconds": 0.5}]},
        "stock": {"paused_seconds": 2.0},
    }
    lost = asyncio.run(bench._compute_lost())
    assert lost["tokens_per_hour"] == {"shm": 5000.0, "stock": 20000.0}


def test_floats_in_lists_are_rounded() -> None:
    assert round_floats({"a": [{"b": 0.123456}, 0.98765]}, ".2g") == {"a": [{"b": 0.12}, 0.99]}


def test_only_the_colocated_part_needs_an_engine_that_sleeps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for only, sleeps in ((("shm",), None), (("colocated",), True)):
        args = describe_stack(Options(only=only), tmp_path, on_gpu=True).models[0].args
        assert args.get("enable-sleep-mode") is sleeps
        on_cpu = describe_stack(Options(only=only), tmp_path, on_gpu=False).models[0].args
        assert "enable-sleep-mode" not in on_cpu  # vLLM refuses it there


def test_a_training_step_changes_the_weights_that_are_published(
    weights: Weights, tmp_path: Path
) -> None:
    path = cache_model(tmp_path / "model", "tiny", weights)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    reference = Reference(path, weights, CPU)
    assert reference.train(1) > 0
    reference.drop_training_state()
    assert sum(not torch.equal(before[name], weights[name]) for name in weights) > len(weights) / 2
    assert all(parameter.grad is None for parameter in reference._model.parameters())


@pytest.mark.parametrize(
    ("values", "slope"), [([], 0.0), ([5.0], 0.0), ([1.0, 3.0, 5.0], 2.0), ([4.0, 4.0, 4.0], 0.0)]
)
def test_the_slope_of_memory(values: list[float], slope: float) -> None:
    assert fit_slope(values) == pytest.approx(slope)
