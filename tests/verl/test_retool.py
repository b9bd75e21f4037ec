"""The ReTool recipe as a user starts it: its datasets, its score and its sandboxed code tool.

The demo's policy writes digits: a 9 stands for a call of the tool. The programs' output enters the
conversation, which the trainer's log-probs verify.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.demo.task import INSTRUCTION
from tests.conftest import Footprint
from tests.verl.modes import STEPS, agrees, summary
from tests.verl.training import prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

RETOOL = "examples.retool.train"
RECIPES = (
    "algorithm.adv_estimator",
    "reward.custom_reward_function.path",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.calculate_log_probs",
)
"""Overrides that the recipe sets itself."""


def write_rows(directory: Path) -> tuple[Path, Path]:
    """Write rows as DAPO-Math and AIME 2025 have them on the hub."""
    dapo, aime = directory / "dapo-math-17k.jsonl", directory / "aime_2025.jsonl"
    problems = [f"{INSTRUCTION}{number % 10}" for number in range(40)]
    rows: list[dict[str, Any]] = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": problem}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(number)},
        }
        for number, problem in enumerate(problems)
    ]
    dapo.write_text("\n".join(map(json.dumps, rows)))
    rows = [{"id": str(n), "problem": text, "answer": "34"} for n, text in enumerate(problems[:4])]
    aime.write_text("\n".join(map(json.dumps, rows)))
    return dapo, aime


def test_the_policys_programs_run_between_its_turns(
    tmp_path: Path, base_model: Path, footprint: Footprint
) -> None:
    prepare(tmp_path, base_model)
    dapo, aime = write_rows(tmp_path)
    common = settings(tmp_path, trainer_gpus=2, ray_gpus=2, ray_cpus=24)
    overrides = {
        **{name: value for name, value in common.items() if name not in RECIPES},
        "data.train_files": dapo,
        "data.val_files": aime,
        "data.max_prompt_length": 320,
        "data.max_response_length": 128,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.rollout.multi_turn.format": "programs",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 4,
        "actor_rollout_ref.rollout.val_kwargs.n": 1,
    }
    training = train(tmp_path, overrides, ["verl_programs"], module=RETOOL)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS, training.output[-6000:]
    assert all(agrees(step) for step in training.steps), summary(training)
    first = training.steps[0]
    assert first["num_turns/mean"] > 2.5  # a prompt and an answer are two
    assert -1.0 <= first["critic/score/min"] <= first["critic/score/max"] <= -0.6
    assert first["critic/score/max"] > -1.0  # a call of the tool raises a wrong answer's score
    assert footprint.settle() == {}
