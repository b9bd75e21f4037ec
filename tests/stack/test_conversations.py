"""Many turns with tools on a real stack whose tokenizer does not give back the ids it decoded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import rollway
from rollway.rollout.conversation import Conversation, TokenSequence
from rollway.rollout.sampling import Sampling
from tests.stack.policies import Policy

pytestmark = pytest.mark.stack

TURNS = 3


def _tool_turn(rng: random.Random, last: bool) -> list[dict[str, Any]]:
    if last:
        return []
    kinds = [
        [{"role": "tool", "content": str(rng.randrange(100))}],
        [{"role": "user", "content": f"add {rng.randrange(5)} {rng.randrange(5)}"}],
        [{"role": "tool", "content": "it is the stone"}, {"role": "user", "content": "the rest"}],
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.soak)])
def test_no_turn_of_many_conversations_loses_a_token(
    tool_stack: rollway.Stack, tool_model: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    rng = random.Random(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tool_model)
    rollouts = tool_stack.rollouts()
    talks = [Conversation(tokenizer) for _ in range(count)]
    broken = 0
    for talk in talks:
        talk.add({"role": "user", "content": f"add {rng.randrange(5)} {rng.randrange(5)}"})
    # Hot enough that the ids are seldom those that the text would be encoded to, and short enough
    # that many turns are cut before their end.
    sampling = Sampling(max_tokens=24, temperature=2.0)
    before: list[list[int]] = [[] for _ in talks]
    for turn in range(TURNS):
        prompts = [talk.prompt() for talk in talks]
        for prompt, ids in zip(prompts, before, strict=True):
            assert prompt[: len(ids)] == ids
        answers = [group[0] for group in rollouts.generate_batch(prompts, sampling)]
        for index, (talk, rollout) in enumerate(zip(talks, answers, strict=True)):
            talk.add_rollout(rollout)
            before[index] = rollout.prompt_ids + rollout.token_ids
            again = tokenizer.encode(tokenizer.decode(before[index]))
            broken += again != before[index]
            talk.add(*_tool_turn(rng, turn == TURNS - 1))
    sequences: list[TokenSequence] = []
    for talk, ids in zip(talks, before, strict=True):
        (sequence,) = talk.sequences()
        assert sequence.token_ids == ids and len(sequence.spans) == TURNS
        sequences.append(sequence)
    # The control: the same conversations, sent as text.
    share = broken / (count * TURNS)
    with capsys.disabled():
        print(f"\nre-tokenising breaks {share:.0%} of {count * TURNS} turns; here none is")
    assert share > 0.2
    policy = Policy(tool_model)
    for sequence in sequences[:: count // 20]:
        expected = [0.0, *policy.logprobs(sequence.token_ids[:1], sequence.token_ids[1:])]
        hot = zip(sequence.loss_mask, sequence.logprobs, expected, strict=True)
        assert all(bit or not logprob for bit, logprob, _ in hot)


def test_a_teacher_scores_as_torch_does(tool_stack: rollway.Stack, tool_model: Path) -> None:
    policy, rng = Policy(tool_model), random.Random(1)
    sequences = [[rng.randrange(250) for _ in range(rng.randrange(2, 200))] for _ in range(16)]
    for scores, ids in zip(tool_stack.teacher().score(sequences), sequences, strict=True):
        expected = policy.logprobs(ids[:1], ids[1:])
        assert scores.token_ids == ids and scores.logprobs[0] is None
        scored = [logprob for logprob in scores.logprobs[1:] if logprob is not None]
        assert max(abs(a - b) for a, b in zip(scored, expected, strict=True)) < 1e-4


def test_rollouts_are_those_of_the_model(tool_stack: rollway.Stack, tool_model: Path) -> None:
    policy, prompt = Policy(tool_model), list(range(40))
    sampling = Sampling(max_tokens=32, ignore_eos=True)
    for rollout in tool_stack.rollouts().generate(prompt, sampling, n=4):
        assert rollout.weight_version == 0 and rollout.finish_reason == "length"
        assert policy.distance(prompt, rollout.token_ids, rollout.logprobs or []) < 1e-4
