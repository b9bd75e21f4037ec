"""`rollway demo`: reinforcement learning on a real Dynamo stack, on one machine.

      ┌───────────── rollouts: token ids, log-probs, weight version ─────────────┐
      │                                                                          ▼
  Dynamo frontend ── KV-aware routing ──► vLLM workers            reward, advantage, GRPO step
      ▲                                        ▲                                 │
      └──────── next step ◄──── resume ◄── load, flush, verify ◄── pause ◄── save v(n+1)

On a GPU, the trainer and the workers share its memory: nothing is saved, workers read the trainer's
own parameters (`cuda_ipc`, in place).

The control (`--no-refit`) runs the same loop without the lower half: the trainer learns, the
workers do not, and the reward of what they sample stays where it was.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import rollway
from rollway.api import up
from rollway.demo.grpo import GrpoConfig, GrpoTrainer, RolloutBatch, StepStats, group_advantages
from rollway.demo.model import build_base
from rollway.demo.placement import (
    Device,
    DeviceChoice,
    choose_device,
    place_beside_trainer,
    read_gpu_memory,
)
from rollway.demo.report import HEADER, format_step, save_plot, summarize
from rollway.demo.task import CountingTask
from rollway.errors import RolloutError, RollwayError, UsageError
from rollway.fleet.report import RefitReport
from rollway.fleet.updates import Weights
from rollway.observe.report import write_report
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.stack import preset
from rollway.stack.machine_check import list_installed_versions
from rollway.stack.preset import cache_dir
from rollway.stack.progress import StackProgress
from rollway.weights.checkpoint import publish_checkpoint
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Publisher

DemoTransport = Literal["checkpoint", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line."""

    steps: int | None = None
    seed: int = 0
    workers: int = 2
    engine: str = "vllm"
    device: DeviceChoice = "auto"
    transport: DemoTransport | None = None
    """How weights reach the workers; None: in place by cuda_ipc on a GPU, else as checkpoints."""
    refit: bool = True
    name: str = "demo"
    directory: Path | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One row of the table and of the report."""

    step: int
    reward: float
    rollout_tokens: int
    rollout_seconds: float
    tokens_per_second: float
    train_seconds: float
    refit_seconds: float | None
    """The time of the refit, including saving the checkpoint."""
    pause_seconds: float | None
    """How long generation paused."""
    weights_by: str | None
    """How the weights reached the workers, as the publisher reports it."""
    prefix_hit_rate: float
    mismatch_kl: float | None
    weight_version: int | None
    loss: float | None
    workers_used: int


@dataclass(slots=True)
class _DemoRun:
    """The state of a demo run."""

    options: DemoOptions
    config: GrpoConfig
    directory: Path
    task: CountingTask
    trainer: GrpoTrainer
    device: Device
    model: dict[str, Any]
    """The model's part of the stack's spec."""
    transport: DemoTransport | None
    """How weights reach the workers; None if they never do."""
    rng: random.Random
    publisher: Publisher | None = None
    """Publishes the trainer's own memory; None: versions are saved as checkpoints."""
    steps: list[DemoStep] = field(default_factory=list)


def run_demo(options: DemoOptions) -> None:
    """Train, print the table and the result, write report.json, report.html and reward.png."""
    started = time.monotonic()
    run = _prepare(options)

    def note(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    where = torch.cuda.get_device_name(0) if run.device == "cuda" else "the CPU"
    note(f"base checkpoint {run.model['path']}; trainer and workers on {where}")
    fields = {"log_dir": str(run.directory / "logs"), "models": [run.model]}
    with ExitStack() as cleanup:
        began = time.monotonic()
        with StackProgress(quiet=options.quiet) as progress:
            stack = cleanup.enter_context(up({"name": options.name, **fields}, progress=progress))
        stack_seconds = time.monotonic() - began
        if run.transport == "cuda_ipc":
            run.publisher = cleanup.enter_context(stack.publisher("cuda_ipc", in_place=True))
        note(HEADER)
        for number in range(run.config.steps):
            with rollway.observe.step(number + 1) as parts:
                run.steps.append(_run_step(run, stack, number, parts))
            note(format_step(run.steps[-1]))
        served = {} if options.engine == "mocker" else stack.fleet.read_versions()
        record = stack.record_dir
    versions = {str(instance): version for instance, version in served.items()}
    report = _make_report(run, stack_seconds, time.monotonic() - started, versions)
    # First: a full disk must not lose the result.
    if options.quiet:
        print(json.dumps(report), flush=True)
    note(summarize(report))
    with _name_unwritten(run.directory / "report.json") as path:
        path.write_text(json.dumps(report, indent=2) + "\n")
    with _name_unwritten(run.directory / "reward.png") as path:
        save_plot(path, report)
    if record is not None and record.is_dir():
        with _name_unwritten(run.directory / "report.html") as path:
            write_report([record], path)


@contextmanager
def _name_unwritten(path: Path) -> Iterator[Path]:
    """Name what is being written if the disk is full: the system names no file then."""
    try:
        yield path
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RollwayError(f"{path} was not written: {cause}.", "Free some space there.") from error


def _prepare(options: DemoOptions) -> _DemoRun:
    config = GrpoConfig() if options.steps is None else GrpoConfig(steps=options.steps)
    if config.steps < 1 or options.workers < 1:
        raise UsageError("The demo needs at least one step and one worker.")
    device, model = place_model(options, config)  # first: it may refuse, and nothing is created yet
    directory = options.directory or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The directory {directory} cannot be created: {error.strerror}.",
            "Choose another with --out.",
        ) from error
    disable_progress_bar()  # transformers would draw over the table
    torch.manual_seed(options.seed)
    # The workers use the same cores, so a second thread mostly waits (0.6 s -> 3 s per step).
    torch.set_num_threads(1)
    with _name_unwritten(cache_dir() / "demo") as base:
        build_base(base)
    is_refitted = options.refit and options.engine != "mocker"
    default: DemoTransport = "cuda_ipc" if device == "cuda" else "checkpoint"
    return _DemoRun(
        options=options,
        config=config,
        directory=directory.resolve(),
        task=CountingTask(AutoTokenizer.from_pretrained(base)),
        trainer=GrpoTrainer.from_checkpoint(base, config, device),
        device=device,
        model={"path": str(base), **model},
        transport=(options.transport or default) if is_refitted else None,
        rng=random.Random(options.seed),
    )


def place_model(options: DemoOptions, config: GrpoConfig) -> tuple[Device, dict[str, Any]]:
    """Return the device of the trainer and the workers, and the model's part of the stack's spec.

    Raise UsageError if the machine lacks the device, or if its memory is not sufficient."""
    model: dict[str, Any] = {
        "name": "policy",
        "engine": options.engine,
        "replicas": options.workers,
        "seed": options.seed,
    }
    if options.engine != "vllm":
        if options.device == "cuda":
            raise UsageError(
                f"The engine `{options.engine}` uses no GPU.", "Leave --device, or --engine."
            )
        return "cpu", model
    # The base checkpoint is float32, and so are both sides: a mismatch is a bug and no rounding.
    model["args"] = {
        "max-model-len": 512,
        "max-num-seqs": config.groups_per_step * config.group_size,
        "kv-cache-memory-bytes": 128 * 2**20,
    }
    gpus = preset.list_gpus()
    device = choose_device(options.device, gpus)
    if device == "cuda":
        model = place_beside_trainer(model, gpus, read_gpu_memory())
    return device, model


def _run_step(
    run: _DemoRun, stack: rollway.Stack, number: int, parts: rollway.observe.Step
) -> DemoStep:
    prompts = run.task.prompts(run.config.groups_per_step, run.rng)
    per_step = run.config.groups_per_step * run.config.group_size
    sampling = Sampling(
        max_tokens=run.task.max_tokens,
        temperature=run.config.temperature,
        ignore_eos=True,
        seed=(run.options.seed * 100_003 + number) * per_step,
        logprobs=run.options.engine == "vllm",
    )
    began = time.monotonic()
    with parts.part("generate"):
        groups = stack.rollouts().generate_batch(
            [prompt.token_ids for prompt in prompts], sampling, run.config.group_size
        )
    rollout_seconds = time.monotonic() - began
    flat = [rollout for group in groups for rollout in group]
    versions = {rollout.weight_version for rollout in flat}
    if len(versions) != 1:
        raise RolloutError(f"One step was sampled from several weight versions: {versions}.")
    version = versions.pop()
    with parts.part("train"):
        rewards = [
            [run.task.reward(prompt, rollout.token_ids) for rollout in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        stats = _train(run, flat, rewards)
    tokens = sum(len(rollout.token_ids) for rollout in flat)
    if stats is not None:
        rollway.observe.note_mismatch(version, stats.mismatch_kl, tokens=tokens)
    with parts.part("publish"):
        refit_seconds, refit, weights_by = _refit(run, stack, number)
    return DemoStep(
        step=number + 1,
        reward=statistics.fmean(reward for group in rewards for reward in group),
        rollout_tokens=tokens,
        rollout_seconds=rollout_seconds,
        tokens_per_second=tokens / rollout_seconds,
        train_seconds=stats.seconds if stats else 0.0,
        refit_seconds=refit_seconds,
        pause_seconds=refit.paused_seconds if refit else None,
        weights_by=weights_by,
        prefix_hit_rate=sum(r.cached_tokens for r in flat) / sum(len(r.prompt_ids) for r in flat),
        mismatch_kl=stats.mismatch_kl if stats else None,
        weight_version=version,
        loss=stats.loss if stats else None,
        workers_used=len({rollout.worker_id for rollout in flat}),
    )


def _train(run: _DemoRun, flat: list[Rollout], rewards: list[list[float]]) -> StepStats | None:
    if run.options.engine == "mocker":
        return None  # its tokens are random: it tests the transport, not learning
    batch = RolloutBatch(
        prompt_ids=[rollout.prompt_ids for rollout in flat],
        completion_ids=[rollout.token_ids for rollout in flat],
        advantages=group_advantages(torch.tensor(rewards)).flatten().tolist(),
        engine_logprobs=[rollout.logprobs or [] for rollout in flat],
    )
    return run.trainer.train_step(batch)


def _refit(
    run: _DemoRun, stack: rollway.Stack, number: int
) -> tuple[float | None, RefitReport | None, str | None]:
    """Refit all workers to the trainer's new weights; return the seconds, the report, and how."""
    if run.transport is None:
        return None, None, None
    began = time.monotonic()
    version = number + 1  # the base is version 0
    weights = _publish(run, stack, version)
    report = stack.refit(version, weights)
    seconds = time.monotonic() - began
    if isinstance(weights, Path):
        # The one before this is kept: a worker that starts again may still load it.
        shutil.rmtree(weights.with_name(f"v{version - 2}"), ignore_errors=True)
    return seconds, report, describe_weights(weights)


def _publish(run: _DemoRun, stack: rollway.Stack, version: int) -> Weights:
    """Publish the trainer's weights; in place, they must not change until the refit has ended."""
    model = run.trainer.model
    if run.publisher is not None:
        return run.publisher.publish(version, list(model.named_parameters()))
    assert stack.run_dir is not None
    directory = stack.run_dir / "weights"  # removed with the stack, also if the demo is killed
    with _name_unwritten(directory / f"v{version}") as path:
        return publish_checkpoint(path, model.save_pretrained)


def describe_weights(weights: Weights) -> str:
    """Return how a version is read: `checkpoint`, or the transport and how much was copied."""
    if not isinstance(weights, Offer):
        return "checkpoint"
    copied = weights.where.get("copied_bytes", weights.nbytes)
    how = f"{copied} bytes copied" if copied else "in place"
    return f"{weights.transport}, {how}"


def _make_report(
    run: _DemoRun, stack_seconds: float, seconds: float, weight_versions: dict[str, int | None]
) -> dict[str, Any]:
    steps = run.steps
    return {
        "steps": [asdict(step) for step in steps],
        "reward_first": statistics.fmean(step.reward for step in steps[:3]),
        "reward_last": statistics.fmean(step.reward for step in steps[-5:]),
        "mismatch_kl_max": _summarise(max, [step.mismatch_kl for step in steps]),
        "refit_seconds_median": _summarise(statistics.median, [s.refit_seconds for s in steps]),
        "pause_seconds_median": _summarise(statistics.median, [s.pause_seconds for s in steps]),
        "tokens_per_second_median": statistics.median(s.tokens_per_second for s in steps),
        "device": run.device,
        "workers": run.options.workers,
        "weight_versions": weight_versions,
        "versions": list_installed_versions(),
        "stack_start_seconds": stack_seconds,
        "seconds": seconds,
        "engine": run.options.engine,
        "refit": run.options.refit,
        "seed": run.options.seed,
        "config": asdict(run.config),
        "machine": {"cores": preset.count_cores(), "gpus": len(preset.list_gpus())},
        "directory": str(run.directory),
    }


def _summarise(function: Any, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(function(known)) if known else None
