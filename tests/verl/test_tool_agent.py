"""verl's own tool agent on Rollway: several turns, every token id as it was sampled.

The trainer computes the log-probs of the whole conversation again. Had an id of any turn been lost,
doubled or encoded anew, those of all tokens after it would be others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.test_modes import STEPS, agrees, summary
from tests.verl.training import HERE, prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_turns_of_a_tool_agent_are_exact(tmp_path: Path, base_model: Path) -> None:
    prepare(tmp_path, base_model)
    turns = "actor_rollout_ref.rollout.multi_turn"
    overrides = {
        **settings(tmp_path, trainer_gpus=2, ray_gpus=2, ray_cpus=24),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "data.max_response_length": 128,
        f"{turns}.enable": True,
        f"{turns}.format": "nines",
        f"{turns}.function_tool_path": HERE / "plugin" / "verl_nines.py",
        f"{turns}.max_assistant_turns": 4,
    }
    training = train(tmp_path, overrides)
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS
    assert all(agrees(step) for step in training.steps), summary(training)
    assert training.steps[0]["num_turns/mean"] > 2.5  # a prompt and an answer are two
