"""Runs verl's trainer in one of its modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.verl.training import Step, Training, prepare, settings, tie_embeddings, train

CORRELATION = "training/rollout_actor_probs_pearson_corr"
KL = "rollout_corr/k3_kl"
STEPS = 3


def run(
    directory: Path,
    base_model: Path,
    mode: str,
    modules: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    *,
    tied: bool = False,
) -> Training:
    overrides = mode_settings(directory, base_model, mode)
    if tied:
        tie_embeddings(directory)
    return train(directory, {**overrides, **(more or {})}, modules)


def mode_settings(directory: Path, base_model: Path, mode: str) -> dict[str, Any]:
    """Write a run's files, and return its overrides."""
    prepare(directory, base_model)
    separate = mode == "separate_async"
    overrides = settings(
        directory,
        trainer_gpus=1 if separate else 2,
        ray_gpus=3 if separate else 2,
        ray_cpus=40 if separate else 24,
    )
    overrides["trainer.v1.trainer_mode"] = mode
    if mode != "sync":
        overrides[f"trainer.v1.{mode}.num_warmup_batches"] = 0
    if separate:
        overrides |= separate_engines()
    return overrides


def separate_engines() -> dict[str, Any]:
    """Return overrides for two engines on other GPUs, besides the one on the trainer's."""
    rollout = "actor_rollout_ref.rollout"
    return {
        f"{rollout}.nnodes": 1,
        f"{rollout}.n_gpus_per_node": 2,
        f"{rollout}.checkpoint_engine.backend": "rollway",
        f"+{rollout}.checkpoint_engine.engine_kwargs.rollway.weights": "shm",
        "trainer.v1.separate_async.parameter_sync_step": 1,
    }


def agrees(step: Step) -> bool:
    return step[CORRELATION] > 0.99 and step[KL] < 1e-3


def summary(training: Training) -> str:
    rows = [f"{step[CORRELATION]:.6f} {step[KL]:.2e}" for step in training.steps]
    return "\n".join([*rows, training.output[-6000:]])
