"""Training end to end on two vLLM workers: the released clients, a trainer, broadcasts.

`orchestrate.py` plays the orchestrator with `verifiers` and `renderers`; two environments feed each
batch, one of them with tool calls over two turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rollway
from tests.conftest import Cli
from tests.prime_rl.environment import HERE
from tests.prime_rl.training import (
    ANSWER,
    MISMATCH,
    RENDERER,
    RISE,
    STEPS,
    Broadcast,
    Trainer,
    counting_env,
    read_metrics,
    report,
    run_steps,
    send_adapters,
    send_by_group,
    send_files,
    send_first_adapter_only,
    send_first_weights_only,
)
from tests.stack.prime_rl import PrimeServer
from tests.steps import check_steps

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def start_orchestrator(
    python: Path, server: PrimeServer, model: Path, steps: int, **more: Any
) -> subprocess.Popen[bytes]:
    settings = {
        "url": f"{server.url}/v1", "admin_url": server.admin_url, "model": str(model),
         "renderer": RENDERER, "output_dir": str(server.output_dir),
        "steps": steps, "groups": 5, "group_size": 8, "max_tokens": ANSWER,
        "envs": {"counting": counting_env(1), "counting_by_tool": counting_env(2)}, **more,
    }  # fmt: skip
    file = server.output_dir / "settings.json"
    file.write_text(json.dumps(settings))
    env = {**os.environ, "PYTHONPATH": str(HERE / "plugin"), "HF_HUB_OFFLINE": "1"}
    env["VLLM_API_KEY"] = server.token
    return subprocess.Popen([str(python), str(HERE / "orchestrate.py"), str(file)], env=env)


@dataclass(frozen=True)
class Outcome:
    """What a training showed."""

    rise: float
    """Of the reward, from the first two steps to the last two."""
    worst: float
    """The largest mismatch of a step."""
    turns: float


def train(
    python: Path, server: PrimeServer, trainer: Trainer, send: Broadcast, model: Path, **more: Any
) -> Outcome:
    orchestrator = start_orchestrator(python, server, model, STEPS, **more)
    try:
        steps = run_steps(trainer, server.output_dir, STEPS, send, orchestrator)
    finally:
        orchestrator.kill()
        orchestrator.wait()
    metrics = read_metrics(server.output_dir)
    rise, worst = report(steps, metrics)
    return Outcome(rise, worst, metrics[0]["turns"])


def test_the_reward_rises_with_broadcasts_as_files(
    python: Path,
    vllm_server: PrimeServer,
    vllm_stack: rollway.Stack,
    base_model: Path,
    cli: Cli,
) -> None:
    began, trainer = time.time(), Trainer(base_model)
    send = send_files(trainer, vllm_server.output_dir)
    outcome = train(python, vllm_server, trainer, send, base_model)
    assert outcome.turns == 1.5  # half of the episodes use the tool
    assert outcome.rise > RISE and outcome.worst < MISMATCH
    assert vllm_server.metrics()["rollway_policy_step"] == STEPS
    assert vllm_stack.record_dir is not None
    check_steps(vllm_stack.record_dir, range(1, STEPS + 1), cli, since=began)


@pytest.mark.slow
@pytest.mark.parametrize("vllm_server", ["nccl"], indirect=True)
def test_the_same_with_broadcasts_to_a_group(
    python: Path, vllm_server: PrimeServer, base_model: Path
) -> None:
    trainer = Trainer(base_model)
    with send_by_group(trainer, vllm_server.output_dir) as (send, join):
        outcome = train(python, vllm_server, trainer, send, base_model, broadcaster=join)
    assert outcome.rise > RISE and outcome.worst < MISMATCH


@pytest.mark.slow
def test_without_broadcasts_neither_holds(
    python: Path, vllm_server: PrimeServer, base_model: Path
) -> None:
    trainer = Trainer(base_model)
    send = send_first_weights_only(trainer, vllm_server.output_dir)
    outcome = train(python, vllm_server, trainer, send, base_model)
    assert outcome.rise < RISE and outcome.worst > MISMATCH


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False], ids=["broadcast", "control"])
def test_the_same_with_adapters(
    arrives: bool, python: Path, lora_server: PrimeServer, base_model: Path
) -> None:
    trainer = Trainer(base_model, lora=True)
    make = send_adapters if arrives else send_first_adapter_only
    send = make(trainer, lora_server.output_dir)
    outcome = train(python, lora_server, trainer, send, base_model, lora="run")
    assert (outcome.rise > RISE) == arrives
    assert (outcome.worst < MISMATCH) == arrives
