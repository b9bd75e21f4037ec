"""Token sequences, first differences, and the tokenizer of these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import RolloutError
from rollway.rollout.conversation import Conversation
from rollway.rollout.sequence import Fork, TokenSequence
from rollway.rollout.template import find_first_difference
from rollway.rollout.trajectory import Span
from tests.awkward_tokenizer import LARGEST, REASONING, TURN_END, build
from tests.unit.rollout.turns import END, TOKENIZER, encode, spell, user_says


def test_the_first_difference_is_described() -> None:
    assert find_first_difference(TOKENIZER, [1, 2], [1, 2]) is None
    difference = find_first_difference(TOKENIZER, [*spell("the"), END], [*encode("the"), END])
    assert difference is not None and difference.position == 0
    for part in ("expected", "('t')", "('th')", "'the<|im_end|>'"):
        assert part in str(difference)
    shorter = find_first_difference(TOKENIZER, [1, 2, 3], [1, 2])
    assert shorter is not None and shorter.position == 2 and "no more tokens" in str(shorter)


GOOD: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0.0, -1.5, -0.5],
    "spans": (Span(1, 2, 4, 2**63 + 1), Span(2, 3, 5, None)),
    "forked_from": Fork(0, 1, "because"),
}


def test_a_sequence_survives_json() -> None:
    sequence = TokenSequence(**GOOD)
    raw = json.loads(json.dumps(sequence.as_json()))
    assert raw["spans"][0]["worker_id"] == str(2**63 + 1)
    assert TokenSequence.from_json(raw) == sequence and sequence.weight_version == 4
    with pytest.raises(RolloutError, match="not a token sequence"):
        TokenSequence.from_json({"token_ids": [1]})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss_mask": [0, 1]}, "2 mask values"),
        ({"token_ids": [5, 6.0, 7]}, r"6.0 \(position 1\) is not a token id"),
        ({"token_ids": [5, True, 7]}, "not a token id"),
        ({"loss_mask": [0, 2, 1]}, "not a value of a loss mask"),
        ({"logprobs": [0.0, float("nan"), -1.0]}, "not a log-prob"),
        ({"logprobs": [-1.0, -1.0, -1.0]}, "not sampled has a log-prob"),
        ({"spans": (Span(0, 2, 1, 1),)}, "tokens that were not sampled"),
        ({"spans": (Span(1, 4, 1, 1),)}, "outside"),
        ({"spans": (Span(1, 3, 1, 1), Span(2, 3, 1, 1))}, "overlaps"),
        ({"spans": (Span(2, 2, 1, 1),)}, "empty"),
    ],
)
def test_inconsistent_sequences_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        TokenSequence(**{**GOOD, **change})


@pytest.mark.parametrize("size", [160, LARGEST])
def test_the_test_tokenizer_loads_and_is_deterministic(tmp_path: Path, size: int) -> None:
    from transformers import AutoTokenizer

    first, second = (
        build(tmp_path / name, size=size, template=REASONING) for name in ("first", "second")
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert "chat_template" in json.loads((first / "tokenizer_config.json").read_text())
    loaded = AutoTokenizer.from_pretrained(first)
    assert len(loaded) == size and loaded.eos_token == TURN_END
    conversation = Conversation(loaded)
    conversation.add(user_says("hi"))
    assert conversation.prompt() == loaded.apply_chat_template(
        [user_says("hi")], add_generation_prompt=True, return_dict=False
    )
