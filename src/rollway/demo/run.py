"""`rollway demo`: reinforcement learning on a real Dynamo stack, on one machine.

      ┌───────────── rollouts: token ids, log-probs, weight version ─────────────┐
      │                                                                          ▼
  Dynamo frontend ── KV-aware routing ──► vLLM workers            reward, advantage, GRPO step
      ▲                                        ▲                                 │
      └──────── next step ◄──── resume ◄── load, flush, verify ◄── pause ◄── save v(n+1)

The control (`--no-refit`) runs the same loop without the lower half: the trainer learns, the
workers do not, and the reward of what they sample stays where it was.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import rollway
from rollway.api import up
from rollway.demo.grpo import GrpoConfig, GrpoTrainer, RolloutBatch, StepStats, group_advantages
from rollway.demo.model import build_base
from rollway.demo.report import DemoDisplay, save_plot, write_json
from rollway.demo.task import CountingTask
from rollway.errors import RolloutError, UsageError
from rollway.fleet.fleet import RefitReport
from rollway.rollout.client import Rollout
from rollway.rollout.sampling import Sampling
from rollway.stack import preset
from rollway.stack.doctor import list_installed_versions
from rollway.stack.preset import cache_dir
from rollway.versions import BASE_VERSION
from rollway.weights.checkpoint import publish_checkpoint

KEEP_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line."""

    steps: int | None = None
    seed: int = 0
    workers: int = 2
    engine: str = "vllm"
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
    prefix_hit_rate: float
    mismatch_kl: float | None
    weight_version: int | None
    loss: float | None
    workers_used: int


@dataclass(slots=True)
class _Run:
    """The state of a demo run."""

    options: DemoOptions
    config: GrpoConfig
    directory: Path
    base: Path
    task: CountingTask
    trainer: GrpoTrainer
    rng: random.Random
    steps: list[DemoStep] = field(default_factory=list)


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Train, print the table, write report.json and reward.png, and return the report."""
    started = time.monotonic()
    run = _prepare(options)
    display = DemoDisplay(quiet=options.quiet)
    display.note(f"base checkpoint {run.base}")
    with ExitStack() as cleanup:
        began = time.monotonic()
        with display.show_start() as progress:
            stack = cleanup.enter_context(up(_stack_fields(run), progress=progress))
        stack_seconds = time.monotonic() - began
        with display.table():
            for number in range(run.config.steps):
                step = _step(run, stack, stack.rollouts(), number)
                run.steps.append(step)
                display.row(step)
        served = {} if options.engine == "mocker" else stack.fleet.read_versions()
    versions = {str(instance): version for instance, version in served.items()}
    report = _report(run, stack_seconds, time.monotonic() - started, versions)
    write_json(run.directory / "report.json", report)
    save_plot(run.directory / "reward.png", report)
    display.summary(report, run.directory)
    return report


def _prepare(options: DemoOptions) -> _Run:
    config = GrpoConfig() if options.steps is None else GrpoConfig(steps=options.steps)
    if config.steps < 1 or options.workers < 1:
        raise UsageError("The demo needs at least one step and one worker.")
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
    base = build_base(cache_dir() / "demo")
    return _Run(
        options=options,
        config=config,
        directory=directory.resolve(),
        base=base,
        task=CountingTask(AutoTokenizer.from_pretrained(base)),
        trainer=GrpoTrainer.from_checkpoint(base, config),
        rng=random.Random(options.seed),
    )


def _stack_fields(run: _Run) -> dict[str, Any]:
    model: dict[str, Any] = {
        "path": str(run.base),
        "name": "policy",
        "engine": run.options.engine,
        "replicas": run.options.workers,
        "seed": run.options.seed,
    }
    if run.options.engine == "vllm":
        # Use float32 on both sides, so that the mismatch shows bugs and not rounding.
        model["args"] = {
            "dtype": "float32",
            "max-model-len": 512,
            "max-num-seqs": run.config.groups_per_step * run.config.group_size,
            "kv-cache-memory-bytes": 128 * 2**20,
        }
    return {"name": run.options.name, "log_dir": str(run.directory / "logs"), "models": [model]}


def _step(run: _Run, stack: rollway.Stack, rollouts: rollway.Rollouts, number: int) -> DemoStep:
    prompts = run.task.prompts(run.config.groups_per_step, run.rng)
    began = time.monotonic()
    groups = rollouts.generate_batch(
        [prompt.token_ids for prompt in prompts], _sampling(run, number), run.config.group_size
    )
    rollout_seconds = time.monotonic() - began
    version = _check_one_version(groups)
    rewards = [
        [run.task.reward(prompt, rollout.token_ids) for rollout in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    stats = _train(run, groups, rewards)
    refit_seconds, refit = _refit(run, stack, number)
    flat = [rollout for group in groups for rollout in group]
    tokens = sum(len(rollout.token_ids) for rollout in flat)
    return DemoStep(
        step=number + 1,
        reward=statistics.fmean(reward for group in rewards for reward in group),
        rollout_tokens=tokens,
        rollout_seconds=rollout_seconds,
        tokens_per_second=tokens / rollout_seconds,
        train_seconds=stats.seconds if stats else 0.0,
        refit_seconds=refit_seconds,
        pause_seconds=refit.paused_seconds if refit else None,
        prefix_hit_rate=sum(r.cached_tokens for r in flat) / sum(len(r.prompt_ids) for r in flat),
        mismatch_kl=stats.mismatch_kl if stats else None,
        weight_version=version,
        loss=stats.loss if stats else None,
        workers_used=len({rollout.worker_id for rollout in flat}),
    )


def _sampling(run: _Run, number: int) -> Sampling:
    per_step = run.config.groups_per_step * run.config.group_size
    return Sampling(
        max_tokens=run.task.max_tokens,
        temperature=run.config.temperature,
        ignore_eos=True,
        seed=(run.options.seed * 100_003 + number) * per_step,
        logprobs=run.options.engine == "vllm",
    )


def _check_one_version(groups: list[list[Rollout]]) -> int | None:
    versions = {rollout.weight_version for group in groups for rollout in group}
    if len(versions) != 1:
        raise RolloutError(f"One step was sampled from several weight versions: {versions}.")
    return versions.pop()


def _train(run: _Run, groups: list[list[Rollout]], rewards: list[list[float]]) -> StepStats | None:
    if run.options.engine == "mocker":
        return None  # its tokens are random: it tests the transport, not learning
    flat = [rollout for group in groups for rollout in group]
    batch = RolloutBatch(
        prompt_ids=[rollout.prompt_ids for rollout in flat],
        completion_ids=[rollout.token_ids for rollout in flat],
        advantages=group_advantages(torch.tensor(rewards)).flatten().tolist(),
        engine_logprobs=[rollout.logprobs or [] for rollout in flat],
    )
    return run.trainer.train_step(batch)


def _refit(run: _Run, stack: rollway.Stack, number: int) -> tuple[float | None, RefitReport | None]:
    """Refit all workers to the trainer's new weights."""
    if not run.options.refit or run.options.engine == "mocker":
        return None, None
    began = time.monotonic()
    version = BASE_VERSION + number + 1
    assert stack.run_dir is not None
    weights = stack.run_dir / "weights"  # removed with the stack, also if the demo is killed
    path = publish_checkpoint(weights / f"v{version}", run.trainer.model.save_pretrained)
    report = stack.refit(version, path)
    seconds = time.monotonic() - began
    shutil.rmtree(weights / f"v{version - KEEP_CHECKPOINTS}", ignore_errors=True)
    return seconds, report


def _report(
    run: _Run, stack_seconds: float, seconds: float, weight_versions: dict[str, int | None]
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
