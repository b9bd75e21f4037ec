"""Extends sampled ids with the new messages of a conversation, as the chat template renders them.

Counting end-of-turn tokens finds where the new messages begin, if the template keeps every turn and
ends each with that token. If it does not, a message would silently be lost or repeated, so
`History` checks for this and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollway.rollout.splice import SpliceError, splice, turn_end
from rollway.rollout.template import ChatTemplate, Message


@dataclass(slots=True)
class History:
    """Messages; the first `known` of them end with an assistant turn whose ids were sampled."""

    template: ChatTemplate
    end_of_turn: int
    messages: Sequence[Message]
    known: int
    generate: bool = True
    turns: int = field(init=False)
    """The number of end-of-turn tokens in the rendering of all messages."""
    plain: bool = field(init=False)
    """Whether no assistant message contains an end-of-turn token in its text."""
    _prefix: list[int] = field(init=False)
    _full: list[int] = field(init=False)

    def __post_init__(self) -> None:
        text = self.template.tokenizer.decode([self.end_of_turn])
        messages = [_remove_end_of_turn(message, text) for message in self.messages]
        self.plain = messages == list(self.messages)
        self._prefix = self.template.render(messages[: self.known], generate=False)
        self._full = self.template.render(messages, generate=self.generate)
        self.turns = self._full.count(self.end_of_turn)

    def extend(self, so_far: Sequence[int], turns_before: int) -> list[int]:
        """Return `so_far`, followed by what the template renders after the last assistant turn.
        `turns_before` is the number of end-of-turn tokens in the prompt of that turn."""
        ids = splice(so_far, self._prefix, self._full, self.end_of_turn)
        self._check_cut(turns_before)
        return ids

    def _check_cut(self, turns_before: int) -> None:
        """Raise unless counting finds the end of the last turn: the template must end it with the
        end-of-turn token, and must keep every turn."""
        prefix, full = self._prefix, self._full
        if prefix.count(self.end_of_turn) <= turns_before:
            raise SpliceError(
                "The chat template does not end the last assistant turn with the end-of-turn token."
            )
        cut = turn_end(prefix, full, self.end_of_turn)
        if full[:cut] == prefix[:cut]:
            return
        head, tail = (
            self.template.tokenizer.decode(full[:cut]),
            self.template.tokenizer.decode(full[cut:]),
        )
        # Text in neither part was dropped by the template itself, which is its decision.
        if any(text in head and text not in tail for text in self._added_texts()):
            raise SpliceError("The chat template moves messages to before the last assistant turn.")

    def _added_texts(self) -> list[str]:
        """Return the texts of the new messages, stripped because templates may trim them."""
        added = self.messages[self.known :]
        texts = [text.strip() for message in added for text in _texts(message.get("content"))]
        return [text for text in texts if text]


def _remove_end_of_turn(message: Message, text: str) -> Message:
    """Return the message without end-of-turn tokens in its text. If the template later drops that
    part, the count would be wrong; the ids of assistant turns are known anyway."""
    if message["role"] != "assistant" or not text:
        return message
    return {key: _without(value, text) for key, value in message.items()}


def _without(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(text, " ")  # "" could join its neighbours into another such token
    if isinstance(value, Mapping):
        return {key: _without(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, text) for item in value]
    return value


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping):
                yield from _texts(part.get("text"))
