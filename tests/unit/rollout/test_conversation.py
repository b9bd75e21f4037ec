"""Conversations over a tokenizer that cannot give back its ids: the boundaries of turns, what is
refused, and templates that cannot be followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollway.errors import RolloutError, UsageError
from rollway.rollout import history
from rollway.rollout.conversation import Conversation
from rollway.rollout.trajectory import Span
from tests.awkward_tokenizer import PLAIN, TURN_END, TURN_START, make
from tests.unit.rollout.turns import (
    END,
    PAD,
    REASONER,
    TOKENIZER,
    TOOL,
    encode,
    reply,
    spelled,
    tool,
    turn,
    user,
)

# -- the boundary of a turn


def test_two_turns_with_tools() -> None:
    conversation = Conversation(TOKENIZER, tools=[TOOL])
    conversation.add({"role": "system", "content": "be"}, user("hi"))
    first = conversation.prompt()
    assert first == TOKENIZER.apply_chat_template(
        [{"role": "system", "content": "be"}, user("hi")],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    said = [*spelled("the"), END]
    assert encode("the") != spelled("the")
    reply(conversation, said)
    conversation.add(tool("42"))
    tail = encode(f"\n{TURN_START}tool\n42{TURN_END}\n{TURN_START}assistant\n")
    assert conversation.prompt() == [*first, *said, *tail]
    reply(conversation, [*spelled("no"), END], "stop", 3)
    (sequence,) = conversation.sequences()
    assert sequence.token_ids == [*first, *said, *tail, *spelled("no"), END]
    assert sequence.loss_mask == [0] * len(first) + [1] * 4 + [0] * len(tail) + [1] * 3
    assert sequence.logprobs[len(first) : len(first) + 5] == [-0.25, -0.5, -0.75, -1.0, 0.0]
    place = len(sequence.token_ids) - 3
    assert sequence.spans == (
        Span(len(first), len(first) + 4, 0, 7),
        Span(place, place + 3, 3, 7),
    )
    assert sequence.weight_version == 0 and sequence.forked_from is None


@pytest.mark.parametrize("ids", [spelled("the"), [*spelled("the"), PAD], []])
def test_an_end_of_turn_that_was_not_sampled_is_added_unsampled(ids: list[int]) -> None:
    """After max_tokens, after another stop token, and after nothing at all."""
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    first = conversation.prompt()
    reply(conversation, ids, "stop" if ids[-1:] == [PAD] else "length")
    conversation.add(user("go on"))
    assert conversation.prompt()[: len(first) + len(ids) + 1] == [*first, *ids, END]
    reply(conversation, [END])
    (sequence,) = conversation.sequences()
    assert sequence.loss_mask[len(first) + len(ids)] == 0 and sequence.loss_mask[-1] == 1
    assert sum(sequence.loss_mask) == len(ids) + 1


def test_what_follows_the_last_sampled_token_is_left_out() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    reply(conversation, [5, END])
    conversation.add(user("more"))
    reply(conversation, [])  # a stop string as the first text: nothing sampled is left
    (sequence,) = conversation.sequences()
    assert sequence.token_ids[-2:] == [5, END] and sequence.loss_mask[-2:] == [1, 1]


def test_prompt_can_be_asked_for_again_and_grows_with_what_is_added() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    before = conversation.prompt()
    before.append(1)  # the caller's own list
    assert conversation.prompt() == before[:-1]
    message = user("there")
    conversation.add(message)
    message["content"] = "changed later"
    assert "there" in TOKENIZER.decode(conversation.prompt())


# -- what is refused


def test_messages_that_are_refused() -> None:
    conversation = Conversation(TOKENIZER)
    with pytest.raises(UsageError, match="empty"):
        conversation.prompt()
    with pytest.raises(UsageError, match=r"add_rollout\(\)"):
        conversation.add(user("hi"), {"role": "assistant", "content": "x"})
    with pytest.raises(UsageError, match="role"):
        conversation.add({"content": "x"})
    conversation.add(user("hi"))
    with pytest.raises(UsageError, match="'user'"):
        reply(conversation, [5], message=user("x"))
    with pytest.raises(UsageError, match="history"):
        Conversation(TOKENIZER, history="text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tokenize"):
        Conversation(TOKENIZER, template_kwargs={"tokenize": False})


def test_rollouts_that_are_refused() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    prompt = conversation.prompt()
    with pytest.raises(RolloutError, match="aborted"):
        conversation.add_rollout(turn(prompt, [5], "aborted"))
    other = [*prompt[:3], END, *prompt[4:]]
    with pytest.raises(RolloutError, match=r"Position 3: expected .* got 258 \('<\|im_end\|>'\)"):
        conversation.add_rollout(turn(other, [5]))
    with pytest.raises(RolloutError, match=f"Position {len(prompt) - 1}: .*no more tokens"):
        conversation.add_rollout(turn(prompt[:-1], [5]))
    with pytest.raises(RolloutError, match="has 2 ids and 1 log-probs"):
        conversation.add_rollout(replace(turn(prompt, [5, 6]), logprobs=[-1.0]))
    assert conversation.sequences() == [] and conversation.prompt() == prompt


def test_turns_without_logprobs_can_be_taken_but_not_trained_on() -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    conversation.add_rollout(replace(turn(conversation.prompt(), [5, END]), logprobs=None))
    conversation.add(user("more"))
    assert conversation.prompt()
    with pytest.raises(RolloutError, match="logprobs=True"):
        conversation.sequences()


def test_an_end_of_turn_that_the_template_does_not_use_is_refused() -> None:
    conversation = Conversation(TOKENIZER, end_of_turn=PAD)
    conversation.add(user("hi"))
    with pytest.raises(UsageError, match=r"<\|endoftext\|>.*end_of_turn="):
        conversation.prompt()
    with_pad = make()
    with_pad.eos_token = "<|endoftext|>"
    chosen = Conversation(with_pad, end_of_turn=END)
    chosen.add(user("hi"))
    assert chosen.prompt()
    with_pad.eos_token = None
    with pytest.raises(UsageError, match="end_of_turn="):
        Conversation(with_pad)


def test_a_prompt_that_changes_earlier_tokens_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(TOKENIZER)
    conversation.add(user("hi"))
    reply(conversation, [5, 6, END])
    conversation.add(user("more"))
    monkeypatch.setattr(history, "splice", lambda verbatim, *_: [*verbatim[:-2], 9, END, 1])
    place = len(conversation._so_far) - 2
    with pytest.raises(RolloutError, match=rf"Position {place}: expected 6 \('5'\), got 9 \('8'\)"):
        conversation.prompt()


# -- templates


def call(arguments: Any) -> dict[str, Any]:
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
def test_tool_arguments_as_text_or_as_an_object(arguments: Any, shown: str) -> None:
    conversation = Conversation(TOKENIZER, history="template")
    conversation.add(user("hi"))
    reply(conversation, [5, END], message=call(arguments))
    conversation.add(tool("there"))
    assert shown in TOKENIZER.decode(conversation.prompt())


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = make(template=PLAIN + "{% if quiet %}{{ 'shh' }}{% endif %}")
    conversation = Conversation(tokenizer, template_kwargs={"quiet": True})
    conversation.add(user("hi"))
    assert tokenizer.decode(conversation.prompt()).endswith("shh")


THOUGHT = spelled("<think>\nhe is here\n</think>\n\nhello")


def test_dropped_reasoning_stays_when_verbatim() -> None:
    conversation = Conversation(REASONER)
    conversation.add(user("hi"))
    reply(conversation, [*THOUGHT, END])
    conversation.add(user("again"))
    assert "he is here" in REASONER.decode(conversation.prompt())
    reply(conversation, [*THOUGHT, END])
    (sequence,) = conversation.sequences()
    assert sum(sequence.loss_mask) == 2 * len(THOUGHT) + 2


def test_dropped_reasoning_forks_when_the_template_rules() -> None:
    conversation = Conversation(REASONER, history="template")
    conversation.add(user("hi"))
    first = conversation.prompt()
    reply(conversation, [*encode("<think>\nhe is here\n</think>\n\nhello", REASONER), END])
    conversation.add(tool("a result"))  # the reasoning is only dropped at the next user turn
    reply(conversation, [*encode("<think>\nso\n</think>\n\nyes", REASONER), END])
    conversation.add(user("again"))
    prompt = conversation.prompt()
    assert "he is here" not in REASONER.decode(prompt)
    reply(conversation, [5, END])
    before, after = conversation.sequences()
    assert before.forked_from is None and sum(before.loss_mask) > 20
    assert after.forked_from is not None and after.forked_from.sequence == 0
    assert after.forked_from.position == len(first)
    assert "Position" in after.forked_from.why
    assert after.token_ids == [*prompt, 5, END] and sum(after.loss_mask) == 2


def test_an_end_of_turn_inside_dropped_reasoning_loses_no_message() -> None:
    """It is counted in one rendering and not in the other."""
    conversation = Conversation(REASONER)
    conversation.add(user("hi"))
    inside = [*spelled("<think>\n"), END, *spelled("so\n</think>\n\nyes"), END]
    reply(conversation, inside)
    for question in ("one", "two"):
        conversation.add(user(question))
        assert question in REASONER.decode(conversation.prompt())
        reply(conversation, [*spelled("ok"), END])
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
def test_what_cannot_be_spliced_is_forked(template: str) -> None:
    """Templates that drop turns, or end one with another token: counting would lose or repeat a
    message without a word."""
    tokenizer = make(template=template)
    conversation = Conversation(tokenizer)
    conversation.add(user("question one"))
    reply(conversation, [*spelled("the"), END], message=call({}))
    conversation.add(tool("a result"))
    reply(conversation, [*spelled("the"), END])
    conversation.add(user("question two"))
    prompt = conversation.prompt()
    assert tokenizer.decode(prompt).count("question two") == 1
    reply(conversation, [5, END])
    sequences = conversation.sequences()
    assert len(sequences) > 1 and sum(sum(one.loss_mask) for one in sequences) == 10
    for index, sequence in enumerate(sequences[1:]):
        assert sequence.forked_from is not None and sequence.forked_from.sequence == index
    assert sequences[-1].token_ids == [*prompt, 5, END]


def test_a_sequence_in_which_nothing_was_sampled_is_no_sequence() -> None:
    tokenizer = make(template=LAST_TWO)
    conversation = Conversation(tokenizer)
    conversation.add(user("a"), user("b"))
    for ids in ([], [5], [], [6]):
        reply(conversation, ids)
        conversation.add(user("c"))
    first, second = conversation.sequences()
    assert first.forked_from is None and first.token_ids[-1] == 5
    assert second.forked_from is not None and second.forked_from.sequence == 0
    assert second.token_ids[-1] == 6
