"""Prompts only grow, and every sampled token is in one sequence, with its version.

A control test shows that encoding the text again breaks both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.rollout.conversation import Conversation, TokenSequence
from tests.awkward_tokenizer import LARGEST, TURN_END, TURN_START
from tests.unit.rollout.turns import (
    END,
    PAD,
    REASONER,
    TOKENIZER,
    TOOL,
    encode,
    make_rollout,
    spell,
    tool_returns,
    user_says,
)


@dataclass(frozen=True)
class Turn:
    added: tuple[dict[str, Any], ...]
    ids: list[int]
    stop: str  # "end", "length" or "other"

    @property
    def sampled(self) -> list[int]:
        return [*self.ids, *{"end": [END], "length": [], "other": [PAD]}[self.stop]]

    @property
    def reason(self) -> str:
        return "length" if self.stop == "length" else "stop"


texts = st.one_of(
    st.text("etaoins <|>/\n\u00e9", min_size=1, max_size=12),
    st.just(f"no{TURN_END}\n{TURN_START}assistant\nyes"),
)
added = st.lists(
    st.one_of(st.builds(user_says, texts), st.builds(tool_returns, texts)), min_size=1, max_size=3
)
any_ids = st.lists(st.integers(0, LARGEST - 1), min_size=1, max_size=12)
thoughts = st.builds(
    lambda thought, reply: [*spell("<think>\n"), *thought, *spell("\n</think>\n\n"), *reply],
    any_ids,
    any_ids,
)
stops = st.sampled_from(["end", "end", "length", "other"])
turns = st.builds(Turn, added.map(tuple), st.one_of(any_ids, thoughts), stops)
conversations = st.lists(turns, min_size=1, max_size=5)


def play(conversation: Conversation, turns: list[Turn]) -> list[list[int]]:
    """Play the turns and return the prompts."""
    prompts = []
    for version, turn in enumerate(turns):
        conversation.add(*turn.added)
        prompts.append(conversation.prompt())
        conversation.add_rollout(make_rollout(prompts[-1], turn.sampled, turn.reason, version))
    return prompts


def encode_added(tokenizer: Any, added: tuple[dict[str, Any], ...]) -> list[int]:
    """Return the tokens that these messages add after the end of an assistant's turn."""
    start = [user_says("-"), {"role": "assistant", "content": "-"}]
    text = tokenizer.apply_chat_template(
        [*start, *added], add_generation_prompt=True, tokenize=False
    )
    return encode(text.partition(f"assistant\n-{TURN_END}")[2])


def check_sampled(sequences: list[TokenSequence], turns: list[Turn]) -> None:
    """Check that every sampled token occurs once, in order, in a span of its version."""
    sampled, versions = [], []
    for sequence in sequences:
        spans = {
            place: span.version for span in sequence.spans for place in range(span.start, span.end)
        }
        for place, bit in enumerate(sequence.loss_mask):
            if bit:
                sampled.append(sequence.token_ids[place])
                versions.append(spans.pop(place))
        assert not spans and sequence.loss_mask[-1] == 1
    assert sampled == [token for turn in turns for token in turn.sampled]
    assert versions == [version for version, turn in enumerate(turns) for _ in turn.sampled]


@given(conversations, st.sampled_from([TOKENIZER, REASONER]))
@settings(max_examples=60)
def test_verbatim_prompts_only_grow(turns: list[Turn], tokenizer: Any) -> None:
    conversation = Conversation(tokenizer, tools=[TOOL])
    prompts = play(conversation, turns)
    for before, turn, following, after in zip(prompts, turns, turns[1:], prompts[1:], strict=False):
        seen = [*before, *turn.sampled]
        end = [] if seen[-1] == END else [END]
        assert after == [*seen, *end, *encode_added(tokenizer, following.added)]
    (sequence,) = conversation.sequences()
    assert sequence.token_ids == [*prompts[-1], *turns[-1].sampled]
    check_sampled([sequence], turns)
    assert TokenSequence.from_json(json.loads(json.dumps(sequence.as_json()))) == sequence


@given(conversations, st.sampled_from([TOKENIZER, REASONER]))
@settings(max_examples=60)
def test_template_history_forks_and_loses_no_sampled_token(
    turns: list[Turn], tokenizer: Any
) -> None:
    conversation = Conversation(tokenizer, history="template")
    play(conversation, turns)
    sequences = conversation.sequences()
    check_sampled(sequences, turns)
    assert sequences[0].forked_from is None
    for index, sequence in enumerate(sequences[1:]):
        fork, before = sequence.forked_from, sequences[index]
        assert fork is not None and fork.sequence == index
        assert sequence.token_ids[: fork.position] == before.token_ids[: fork.position]
        assert sequence.token_ids[fork.position] != before.token_ids[fork.position]


def test_encoding_the_text_again_changes_earlier_tokens() -> None:
    """Control: with the same turns, prompts encoded from text often change earlier tokens."""
    random, broken, rounds = Random(0), 0, 60
    for _ in range(rounds):
        ids = [[random.randrange(LARGEST - 4) for _ in range(8)] for _ in range(2)]
        turns = [Turn((user_says("and then"),), token_ids, "end") for token_ids in ids]
        exact = Conversation(TOKENIZER)
        first, second = play(exact, turns)
        seen = [*first, *turns[0].sampled]
        assert second[: len(seen)] == seen and len(exact.sequences()) == 1
        encoded_again = encode(TOKENIZER.decode(second))
        broken += encoded_again[: len(seen)] != seen
    assert 0.5 * rounds < broken < rounds
