"""Renders chat templates to token ids, and describes where two lists of ids differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollway.errors import UsageError

Message = dict[str, Any]
"""A message in the form of the OpenAI chat API: `role`, `content`, `tool_calls`, …"""

_OURS = frozenset({"tools", "add_generation_prompt", "tokenize", "return_dict"})
_NEEDS_MAPPING = "Can only get item pairs from a mapping."  # the error of Jinja's `items`
_AROUND = 6  # tokens on either side of a difference


class Tokenizer(Protocol):
    """The methods that Rollway uses; the tokenizers of transformers have them."""

    @property
    def eos_token_id(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, /, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, /, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template with the tools and the settings of one conversation."""

    tokenizer: Tokenizer
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reserved := sorted(_OURS & self.kwargs.keys()):
            raise UsageError(
                f"template_kwargs sets {', '.join(reserved)}.",
                "Pass tools as tools=; Rollway sets the others.",
            )

    def render(self, messages: Sequence[Message], *, generate: bool) -> list[int]:
        """Return the ids of the messages; with `generate`, add the opening of the next turn."""
        try:
            return self._apply(messages, generate)
        except TypeError as error:
            if _NEEDS_MAPPING not in str(error):
                raise
        # OpenAI sends tool arguments as a JSON string; some templates need an object.
        return self._apply([_with_parsed_arguments(message) for message in messages], generate)

    def _apply(self, messages: Sequence[Message], generate: bool) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            list(messages),
            tools=None if self.tools is None else list(self.tools),
            add_generation_prompt=generate,
            tokenize=True,
            return_dict=False,
            **self.kwargs,
        )
        ids = rendered["input_ids"] if hasattr(rendered, "keys") else rendered
        return [int(token) for token in ids]


def _with_parsed_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _as_object(function["arguments"])}}


def _as_object(text: str) -> dict[str, Any]:
    """Return the JSON object, or {} for invalid JSON: models do write such arguments."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two lists of ids differ."""

    position: int
    text: str

    def __str__(self) -> str:
        return self.text


def first_difference(
    tokenizer: Tokenizer, expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    """Describe the first difference with the text of its tokens; return None if equal."""
    if list(expected) == list(got):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    shorter = min(len(expected), len(got))
    place = next((index for index, (left, right) in pairs if left != right), shorter)
    return Difference(
        place,
        f"Position {place}: expected {_token(tokenizer, expected, place)}, "
        f"got {_token(tokenizer, got, place)}; "
        f"expected text {_around(tokenizer, expected, place)}, "
        f"got {_around(tokenizer, got, place)}.",
    )


def _token(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> str:
    if place >= len(ids):
        return "no more tokens"
    return f"{ids[place]} ({tokenizer.decode([ids[place]])!r})"


def _around(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> str:
    return repr(tokenizer.decode(list(ids[max(0, place - _AROUND) : place + _AROUND + 1])))
