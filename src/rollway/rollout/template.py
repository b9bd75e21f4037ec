"""Render chat templates to token ids, and join sampled ids with what a template renders.

Rendering a conversation again does not give back the sampled ids: text can be tokenised in many
ways, and templates drop the reasoning of earlier turns. So Rollway keeps the ids up to the last
model turn, and uses only what the template renders after that turn. It finds the end of that turn
by counting end-of-turn tokens. Their positions cannot be used: a template that drops reasoning
moves them, and a whole turn would silently be lost. Counting works if the template keeps every turn
and ends each with that token; `History` checks for this and refuses other templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollway.errors import RolloutError, UsageError

Message = dict[str, Any]
"""A message in the form of the OpenAI chat API: `role`, `content`, `tool_calls`, …"""

_RESERVED = frozenset({"tools", "add_generation_prompt", "tokenize", "return_dict"})
_NEEDS_MAPPING = "Can only get item pairs from a mapping."  # the error of Jinja's `items`
_CONTEXT = 6  # tokens on either side of a difference


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
        if reserved := sorted(_RESERVED & self.kwargs.keys()):
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
        return self._apply([_parse_arguments(message) for message in messages], generate)

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


def _parse_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _parse_object(function["arguments"])}}


def _parse_object(text: str) -> dict[str, Any]:
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


def find_first_difference(
    tokenizer: Tokenizer, expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    """Describe the first difference with the text of its tokens; return None if equal."""
    if list(expected) == list(got):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    shorter = min(len(expected), len(got))
    position = next((index for index, (left, right) in pairs if left != right), shorter)
    return Difference(
        position,
        f"Position {position}: expected {_describe_token(tokenizer, expected, position)}, "
        f"got {_describe_token(tokenizer, got, position)}; "
        f"expected text {_decode_around(tokenizer, expected, position)}, "
        f"got {_decode_around(tokenizer, got, position)}.",
    )


def _describe_token(tokenizer: Tokenizer, ids: Sequence[int], position: int) -> str:
    if position >= len(ids):
        return "no more tokens"
    return f"{ids[position]} ({tokenizer.decode([ids[position]])!r})"


def _decode_around(tokenizer: Tokenizer, ids: Sequence[int], position: int) -> str:
    return repr(tokenizer.decode(list(ids[max(0, position - _CONTEXT) : position + _CONTEXT + 1])))


# --- sampled ids and the messages after them -----------------------------------------------------


class SpliceError(RolloutError):
    """The end of the last model turn cannot be found in what the template renders."""


def splice(
    verbatim: Sequence[int],
    template_prefix: Sequence[int],
    template_full: Sequence[int],
    end_of_turn: int,
) -> list[int]:
    """Return `verbatim`, followed by what `template_full` has after the last model turn.

    `verbatim` is the prompt and completion of that turn, `template_prefix` the rendering of the
    messages up to and including it, `template_full` the rendering of all messages."""
    if not verbatim:
        return list(template_full)
    cut = find_turn_end(template_prefix, template_full, end_of_turn)
    # The template adds its own end-of-turn token, so a sampled one would appear twice.
    head = verbatim[:-1] if verbatim[-1] == end_of_turn else verbatim
    return [*head, *template_full[cut:]]


def find_turn_end(
    template_prefix: Sequence[int], template_full: Sequence[int], end_of_turn: int
) -> int:
    """Return the index in `template_full` of the end-of-turn token that ends `template_prefix`."""
    turns = list(template_prefix).count(end_of_turn)
    if turns == 0:
        raise SpliceError(
            f"The chat template puts no end-of-turn token ({end_of_turn}) after the assistant's "
            "turn.",
            "Pass the token with which this template ends a turn.",
        )
    ends = [position for position, token in enumerate(template_full) if token == end_of_turn]
    if len(ends) < turns:
        raise SpliceError(
            f"The messages up to the last model turn have {turns} end-of-turn tokens, all messages "
            f"together have {len(ends)}.",
            "The chat template drops earlier turns; their exact ids cannot be kept with it.",
        )
    return ends[turns - 1]


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
        cut = find_turn_end(prefix, full, self.end_of_turn)
        if full[:cut] == prefix[:cut]:
            return
        head, tail = (
            self.template.tokenizer.decode(full[:cut]),
            self.template.tokenizer.decode(full[cut:]),
        )
        # Text in neither part was dropped by the template itself, which is its decision.
        if any(text in head and text not in tail for text in self._list_added_texts()):
            raise SpliceError("The chat template moves messages to before the last assistant turn.")

    def _list_added_texts(self) -> list[str]:
        """Return the texts of the new messages, stripped because templates may trim them."""
        added = self.messages[self.known :]
        texts = [
            text.strip() for message in added for text in _iterate_texts(message.get("content"))
        ]
        return [text for text in texts if text]


def _remove_end_of_turn(message: Message, text: str) -> Message:
    """Return the message without end-of-turn tokens in its text. If the template later drops that
    part, the count would be wrong; the ids of assistant turns are known anyway."""
    if message["role"] != "assistant" or not text:
        return message
    return {key: _replace_text(value, text) for key, value in message.items()}


def _replace_text(value: Any, text: str) -> Any:
    """Return the value with a space for `text`, in all texts that it contains."""
    if isinstance(value, str):
        return value.replace(text, " ")  # "" could join its neighbours into another such token
    if isinstance(value, Mapping):
        return {key: _replace_text(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_text(item, text) for item in value]
    return value


def _iterate_texts(content: Any) -> Iterator[str]:
    """Yield the texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping):
                yield from _iterate_texts(part.get("text"))
