"""Chat templates as Rollway needs them: messages in, token ids out; and where two ids differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollway.errors import UsageError

Message = dict[str, Any]
"""In the form of the OpenAI chat API: `role`, `content`, `tool_calls`, …"""

_OURS = frozenset({"tools", "add_generation_prompt", "tokenize", "return_dict"})
_NEEDS_MAPPING = "Can only get item pairs from a mapping."  # what Jinja's `items` says
_AROUND = 6  # tokens on either side of a difference


class Tokenizer(Protocol):
    """What is used of a tokenizer; those of transformers have it."""

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
        if taken := sorted(_OURS & self.kwargs.keys()):
            raise UsageError(
                f"template_kwargs sets {', '.join(taken)}.",
                "Give tools as tools=; the others are set by Rollway.",
            )

    def render(self, messages: Sequence[Message], *, generate: bool) -> list[int]:
        """The ids of the messages, with the opening of the next assistant turn if `generate`."""
        try:
            return self._apply(messages, generate)
        except TypeError as error:
            if _NEEDS_MAPPING not in str(error):
                raise
        # OpenAI's form of tool arguments is a JSON string; some templates want an object.
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
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _as_object(function["arguments"])}}


def _as_object(text: str) -> dict[str, Any]:
    """Models write arguments that are no JSON; the template then shows none."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two lists of ids differ."""

    position: int
    text: str

    def __str__(self) -> str:
        return self.text


def first_difference(
    tokenizer: Tokenizer, expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    """Where `got` departs from `expected`, in words with the text of the tokens; None if equal."""
    if list(expected) == list(got):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    shorter = min(len(expected), len(got))
    place = next((index for index, (one, other) in pairs if one != other), shorter)
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
