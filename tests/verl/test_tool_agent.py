"""verl's own tool agent on Rollway: several turns, every token id as it was sampled.

The requests and answers of the engines are compared, id by id, with the trainer's samples. The
trainer also recomputes the log-probs of the whole conversation: if an id differed from the
engine's, the log-probs of all later tokens would differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl import recording
from tests.verl.recording import Call, Sample, assert_wire_matches_calls
from tests.verl.test_modes import STEPS, agrees, summary
from tests.verl.training import HERE, prepare, settings, train

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

ANSWER = 128
TOOL_ANSWER = "\nafter 9 comes 0:"


def test_the_turns_of_a_tool_agent_are_exact(tmp_path: Path, base_model: Path) -> None:
    prepare(tmp_path, base_model)
    turns = "actor_rollout_ref.rollout.multi_turn"
    overrides = {
        **settings(tmp_path, trainer_gpus=2, ray_gpus=2, ray_cpus=24),
        **recording.overrides(tmp_path, "Sync"),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "data.max_response_length": ANSWER,
        f"{turns}.enable": True,
        f"{turns}.format": "nines",
        f"{turns}.function_tool_path": HERE / "plugin" / "verl_nines.py",
        f"{turns}.max_assistant_turns": 4,
    }
    training = train(tmp_path, overrides, [recording.MODULE])
    assert training.returncode == 0, training.output[-6000:]
    assert len(training.steps) == STEPS
    assert all(agrees(step) for step in training.steps), summary(training)
    assert training.steps[0]["num_turns/mean"] > 2.5  # a prompt and an answer are two
    record = recording.read(tmp_path)
    assert_wire_matches_calls(record)
    trajectories = [record.trajectory_of(sample) for sample in record.samples]
    assert max(map(len, trajectories)) > 1
    tool = tool_tokens(tmp_path)
    for sample, calls in zip(record.samples, trajectories, strict=True):
        assert_sample_is_its_turns(sample, calls, tool)


def tool_tokens(directory: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokens: list[int] = tokenizer.encode(TOOL_ANSWER, add_special_tokens=False)
    return tokens


def assert_sample_is_its_turns(sample: Sample, turns: list[Call], tool: list[int]) -> None:
    """Assert that turns follow each other, with the tool's masked answer in between."""
    prompt = turns[0].prompt
    ids, mask, logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
    for turn in turns:
        if turn is not turns[0]:
            ids, mask, logprobs = ids + tool, mask + [0] * len(tool), logprobs + [0.0] * len(tool)
        assert turn.prompt == ids
        ids, mask = ids + turn.tokens, mask + [1] * len(turn.tokens)
        logprobs = logprobs + turn.logprobs
    answer = slice(len(prompt), len(prompt) + ANSWER)
    assert sample.prompt == prompt
    assert sample.response == ids[answer]
    assert sample.mask == mask[answer]
    assert sample.logprobs == pytest.approx(logprobs[answer], abs=1e-6)
