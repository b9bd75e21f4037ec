"""Conversations over a tokenizer that does not encode its own text back to the same ids.

The tests cover the boundaries of turns, invalid input, and templates that cannot be spliced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollway.errors import RolloutError, UsageError
from rollway.rollout import template
from rollway.rollout.conversation import Conversation
from rollway.rollout.trajectory import Span
from tests.awkward_tokenizer import PLAIN, TURN_END, TURN_START, make
from tests.unit.rollout.turns import (
    END,
    PAD,
    REASONER,
    TOKENIZER,
    TOOL,
    add_reply,
    encode,
    make_rollout,
    spell,
    tool_returns,
    user_says,
)

# -- the boundary of a turn


def test_two_turns_with_tools_form_one_sequence() -> None:
    conversation = Conversation(TOKENIZER, tools=[TOOL])
    conversation.add({"role": "system", "content": "be"}, user_says("hi"))
    first = conversation.prompt()
    assert first == TOKENIZER.apply_chat_template(
        [{"role": "system", "content": "be"}, user_says("hi")],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    sampled = [*spell("the"), END]
    assert encode("the") != spell("the")
    add_reply(conversation, sampled)
    conversation.add(tool_returns("42"))
    tail = encode(f"\n{TURN_START}tool\n42{TURN_END}\n{TURN_START}assistant\n")
    assert conversation.prompt() == [*first, *sampled, *tail]
    add_reply(conversation, [*spell("no"), END], "stop", 3)
    (sequence,) = conversation.sequences()
    assert sequence.token_ids == [*first, *sampled, *tail, *spell("no"), END]
    assert sequence.loss_mask == [0] * len(first) + [1] * 4 + [0] * len(tail) + [1] * 3
    assert sequence.logprobs[len(first) : len(first) + 5] == [-0.25, -0.5, -0.75, -1.0, 0.0]
    place = len(sequence.token_ids) - 3
    assert sequence.spans == (
        Span(len(first), len(first) + 4, 0, 7),
        Span(place, place + 3, 3, 7),
    )
    assert sequence.weight_version == 0 and sequence.forked_from is None


@pytest.mark.parametrize("ids", [spell("the"), [*spell("the"), PAD], []])
def test_a_missing_end_of_turn_is_added_outside_the_loss(ids: list[int]) -> None:
    """A reply may end by max_tokens, by another stop token, or without any token."""
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    first = conversation.prompt()
    add_reply(conversation, ids, "stop" if ids[-1:] == [PAD] else "length")
    conversation.add(user_says("go on"))
    assert conversation.prompt()[: len(first) + len(ids) + 1] == [*first, *ids, END]
    add_reply(conversation, [END])
    (sequence,) = conversation.sequences()
    assert sequence.loss_mask[len(first) + len(ids)] == 0 and sequence.loss_mask[-1] == 1
    assert sum(sequence.loss_mask) == len(ids) + 1


def test_tokens_after_the_last_sampled_one_are_left_out() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    add_reply(conversation, [5, END])
    conversation.add(user_says("more"))
    add_reply(conversation, [])  # a stop string came first: no sampled token remains
    (sequence,) = conversation.sequences()
    assert sequence.token_ids[-2:] == [5, END] and sequence.loss_mask[-2:] == [1, 1]


def test_prompt_is_repeatable_and_grows_with_added_messages() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    before = conversation.prompt()
    before.append(1)  # the caller owns the list
    assert conversation.prompt() == before[:-1]
    message = user_says("there")
    conversation.add(message)
    message["content"] = "changed later"
    assert "there" in TOKENIZER.decode(conversation.prompt())


# -- invalid input


def test_invalid_messages_are_refused() -> None:
    conversation = Conversation(TOKENIZER)
    with pytest.raises(UsageError, match="empty"):
        conversation.prompt()
    with pytest.raises(UsageError, match=r"add_rollout\(\)"):
        conversation.add(user_says("hi"), {"role": "assistant", "content": "x"})
    with pytest.raises(UsageError, match="role"):
        conversation.add({"content": "x"})
    conversation.add(user_says("hi"))
    with pytest.raises(UsageError, match="'user'"):
        add_reply(conversation, [5], message=user_says("x"))
    with pytest.raises(UsageError, match="history"):
        Conversation(TOKENIZER, history="text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tokenize"):
        Conversation(TOKENIZER, template_kwargs={"tokenize": False})


def test_invalid_rollouts_are_refused() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    prompt = conversation.prompt()
    with pytest.raises(RolloutError, match="aborted"):
        conversation.add_rollout(make_rollout(prompt, [5], "aborted"))
    other = [*prompt[:3], END, *prompt[4:]]
    with pytest.raises(RolloutError, match=r"Position 3: expected .* got 258 \('<\|im_end\|>'\)"):
        conversation.add_rollout(make_rollout(other, [5]))
    with pytest.raises(RolloutError, match=f"Position {len(prompt) - 1}: .*no more tokens"):
        conversation.add_rollout(make_rollout(prompt[:-1], [5]))
    with pytest.raises(RolloutError, match="has 2 ids and 1 log-probs"):
        conversation.add_rollout(replace(make_rollout(prompt, [5, 6]), logprobs=[-1.0]))
    assert conversation.sequences() == [] and conversation.prompt() == prompt


def test_turns_without_logprobs_are_accepted_but_cannot_be_trained_on() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    conversation.add_rollout(replace(make_rollout(conversation.prompt(), [5, END]), logprobs=None))
    conversation.add(user_says("more"))
    assert conversation.prompt()
    with pytest.raises(RolloutError, match="logprobs=True"):
        conversation.sequences()


def test_an_end_of_turn_that_the_template_does_not_use_is_refused() -> None:
    conversation = Conversation(TOKENIZER, end_of_turn=PAD)
    conversation.add(user_says("hi"))
    with pytest.raises(UsageError, match=r"<\|endoftext\|>.*end_of_turn="):
        conversation.prompt()
    with_pad = make()
    with_pad.eos_token = "<|endoftext|>"
    chosen = Conversation(with_pad, end_of_turn=END)
    chosen.add(user_says("hi"))
    assert chosen.prompt()
    with_pad.eos_token = None
    with pytest.raises(UsageError, match="end_of_turn="):
        Conversation(with_pad)


def test_a_prompt_that_changes_earlier_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user_says("hi"))
    place = len(conversation.prompt()) + 1
    add_reply(conversation, [5, 6, END])
    conversation.add(user_says("more"))
    monkeypatch.setattr(template, "splice", lambda verbatim, *_: [*verbatim[:-2], 9, END, 1])
    with pytest.raises(RolloutError, match=rf"Position {place}: expected 6 \('5'\), got 9 \('8'\)"):
        conversation.prompt()


# -- templates


def make_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"at": 1}, "<parameter=at>1<"),
        ('{"at": 2}', "<parameter=at>2<"),
        ("{at", "<function=look><"),
    ],
)
def test_tool_arguments_may_be_text_or_an_object(arguments: Any, shown: str) -> None:
    conversation = Conversation(TOKENIZER, history="template")
    conversation.add(user_says("hi"))
    add_reply(conversation, [5, END], message=make_call(arguments))
    conversation.add(tool_returns("there"))
    assert shown in TOKENIZER.decode(conversation.prompt())


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = make(template=PLAIN + "{% if quiet %}{{ 'shh' }}{% endif %}")
    conversation = Conversation(tokenizer, template_kwargs={"quiet": True})
    conversation.add(user_says("hi"))
    assert tokenizer.decode(conversation.prompt()).endswith("shh")


THOUGHT = spell("<think>\nhe is here\n</think>\n\nhello")


def test_verbatim_history_keeps_reasoning_that_the_template_drops() -> None:
    conversation = Conversation(REASONER)
    conversation.add(user_says("hi"))
    add_reply(conversation, [*THOUGHT, END])
    conversation.add(user_says("again"))
    assert "he is here" in REASONER.decode(conversation.prompt())
    add_reply(conversation, [*THOUGHT, END])
    (sequence,) = conversation.sequences()
    assert sum(sequence.loss_mask) == 2 * len(THOUGHT) + 2


def test_template_history_forks_where_the_template_drops_reasoning() -> None:
    conversation = Conversation(REASONER, history="template")
    conversation.add(user_says("hi"))
    first = conversation.prompt()
    add_reply(conversation, [*encode("<think>\nhe is here\n</think>\n\nhello", REASONER), END])
    # The template drops the reasoning only at the next user turn, not here.
    conversation.add(tool_returns("a result"))
    add_reply(conversation, [*encode("<think>\nso\n</think>\n\nyes", REASONER), END])
    conversation.add(user_says("again"))
    prompt = conversation.prompt()
    assert "he is here" not in REASONER.decode(prompt)
    add_reply(conversation, [5, END])
    before, after = conversation.sequences()
    assert before.forked_from is None and sum(before.loss_mask) > 20
    assert after.forked_from is not None and after.forked_from.sequence == 0
    assert after.forked_from.position == len(first)
    assert "Position" in after.forked_from.why
    assert after.token_ids == [*prompt, 5, END] and sum(after.loss_mask) == 2


def test_an_end_of_turn_inside_dropped_reasoning_loses_no_message() -> None:
    """The splice counts it in one rendering and not in the other."""
    conversation = Conversation(REASONER)
    conversation.add(user_says("hi"))
    inside = [*spell("<think>\n"), END, *spell("so\n</think>\n\nyes"), END]
    add_reply(conversation, inside)
    for question in ("one", "two"):
        conversation.add(user_says(question))
        assert question in REASONER.decode(conversation.prompt())
        add_reply(conversation, [*spell("ok"), END])
    (sequence,) = conversation.sequences()
    text = REASONER.decode(sequence.token_ids)
    assert text.count(f"{TURN_START}user") == 3


LAST_TWO = PLAIN.replace("for message in messages", "for message in messages[-2:]")
NO_TOOLS_BEFORE_USER = PLAIN.replace(
    "for message in messages",
    "for message in messages if message.role != 'tool' or messages[-1].role != 'user'",
)
OTHER_END = PLAIN.replace(
    "'<|im_end|>\\n'", "('<|endoftext|>' if message.tool_calls else '<|im_end|>') + '\\n'", 2
).replace("('<|endoftext|>' if message.tool_calls else '<|im_end|>')", "'<|im_end|>'", 1)


@pytest.mark.parametrize("template", [LAST_TWO, NO_TOOLS_BEFORE_USER, OTHER_END])
def test_templates_that_cannot_be_spliced_fork_the_sequence(template: str) -> None:
    """Some templates drop turns or end a turn with another token.

    Counting ends of turns would silently lose or repeat a message.
    """
    tokenizer = make(template=template)
    conversation = Conversation(tokenizer)
    conversation.add(user_says("question one"))
    add_reply(conversation, [*spell("the"), END], message=make_call({}))
    conversation.add(tool_returns("a result"))
    add_reply(conversation, [*spell("the"), END])
    conversation.add(user_says("question two"))
    prompt = conversation.prompt()
    assert tokenizer.decode(prompt).count("question two") == 1
    add_reply(conversation, [5, END])
    sequences = conversation.sequences()
    assert len(sequences) > 1 and sum(sum(sequence.loss_mask) for sequence in sequences) == 10
    for index, sequence in enumerate(sequences[1:]):
        assert sequence.forked_from is not None and sequence.forked_from.sequence == index
    assert sequences[-1].token_ids == [*prompt, 5, END]


def test_a_sequence_without_sampled_tokens_is_not_returned() -> None:
    tokenizer = make(template=LAST_TWO)
    conversation = Conversation(tokenizer)
    conversation.add(user_says("a"), user_says("b"))
    for ids in ([], [5], [], [6]):
        add_reply(conversation, ids)
        conversation.add(user_says("c"))
    first, second = conversation.sequences()
    assert first.forked_from is None and first.token_ids[-1] == 5
    assert second.forked_from is not None and second.forked_from.sequence == 0
    assert second.token_ids[-1] == 6
