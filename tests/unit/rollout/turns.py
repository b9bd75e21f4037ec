"""Messages and rollouts for the tests of conversations, over the awkward tokenizer."""

from __future__ import annotations

from typing import Any

from rollway.rollout.conversation import Conversation
from rollway.rollout.trajectory import Rollout, Span
from tests.awkward_tokenizer import REASONING, make

TOKENIZER = make()
REASONER = make(template=REASONING)
END = TOKENIZER.eos_token_id
PAD = TOKENIZER.pad_token_id
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def user_says(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool_returns(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def make_rollout(
    prompt: list[int], ids: list[int], reason: Any = "stop", version: int = 0
) -> Rollout:
    logprobs = [-0.25 * (1 + place) for place in range(len(ids))]
    spans = (Span(0, len(ids), version, 7),)
    return Rollout(prompt, ids, logprobs, reason, spans, 0)


def encode(text: str, tokenizer: Any = TOKENIZER) -> list[int]:
    return list(tokenizer.encode(text))


def spell(text: str) -> list[int]:
    """Encode one token per character, unlike the tokenizer."""
    return [TOKENIZER.convert_tokens_to_ids(character) for character in text]


def add_reply(conversation: Conversation, ids: list[int], *rest: Any, **more: Any) -> None:
    conversation.add_rollout(make_rollout(conversation.prompt(), ids, *rest), **more)
