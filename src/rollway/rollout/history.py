"""The history of a conversation as a template renders it, extended from the ids that were sampled.

Counting end-of-turn tokens finds where the new messages begin, but only where the template keeps
every turn and ends each with that token. Where it does not, a message would be lost or repeated
without a word, so that is looked at, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollway.rollout.splice import SpliceError, splice, turn_end
from rollway.rollout.template import ChatTemplate, Message


@dataclass(slots=True)
class History:
    """Messages of which the first `taken` end with an assistant turn whose ids are known."""

    template: ChatTemplate
    end_of_turn: int
    messages: Sequence[Message]
    taken: int
    generate: bool = True
    turns: int = field(init=False)
    """End-of-turn tokens in the rendering of all messages."""
    plain: bool = field(init=False)
    """Whether no message has an end-of-turn token of its own."""
    _prefix: list[int] = field(init=False)
    _full: list[int] = field(init=False)

    def __post_init__(self) -> None:
        text = self.template.tokenizer.decode([self.end_of_turn])
        messages = [_countable(message, text) for message in self.messages]
        self.plain = messages == list(self.messages)
        self._prefix = self.template.render(messages[: self.taken], generate=False)
        self._full = self.template.render(messages, generate=self.generate)
        self.turns = self._full.count(self.end_of_turn)

    def extend(self, so_far: Sequence[int], turns_before: int) -> list[int]:
        """`so_far`, then what the template puts after the last assistant turn. `turns_before` is
        how many end-of-turn tokens the prompt of that turn had."""
        ids = splice(so_far, self._prefix, self._full, self.end_of_turn)
        self._check_cut(turns_before)
        return ids

    def _check_cut(self, turns_before: int) -> None:
        """Counting finds the end of the last turn if the template ends it with the end-of-turn
        token and keeps every turn. Neither can be taken for granted."""
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
        # What is in neither was left out by the template, and not by the cut.
        if any(text in head and text not in tail for text in self._added_texts()):
            raise SpliceError("The chat template moves messages to before the last assistant turn.")

    def _added_texts(self) -> list[str]:
        """Texts of the messages since the last assistant turn; templates may trim them."""
        added = self.messages[self.taken :]
        texts = [text.strip() for message in added for text in _texts(message.get("content"))]
        return [text for text in texts if text]


def _countable(message: Message, text: str) -> Message:
    """Return the message without end-of-turn tokens of its own. One in a part that the template
    drops later would spoil the count; the ids of assistant turns are known anyway."""
    if message["role"] != "assistant" or not text:
        return message
    return {key: _without(value, text) for key, value in message.items()}


def _without(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(text, " ")  # "" could join what is around it to another one
    if isinstance(value, Mapping):
        return {key: _without(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, text) for item in value]
    return value


def _texts(content: Any) -> Iterator[str]:
    """The texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping):
                yield from _texts(part.get("text"))
