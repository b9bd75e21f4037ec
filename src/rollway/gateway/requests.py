"""Read, bound and check the bodies of requests before they are used.

Anything wrong in a body is a `UsageError`, which the client receives as a 400. A body that passes
is safe to hash, render and forward: no value is nested too deeply, no number exceeds 64 bits, and
every field that the gateway reads has its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.gateway.messages import PREFIX, Message, make_context_error, read_token_ids
from rollway.gateway.replies import Refused
from rollway.rollout.sender import check_prompt

MAX_CHOICES = 64
MAX_GENERATIONS = 256
"""The limit for prompts times n in one request."""
_MAX_MESSAGES = 4096
_MAX_PARTS = 4096
_MAX_TOOLS = 1024
_MAX_DEPTH = 64
_MAX_VALUES = 200_000
"""The limit for one body, without token ids. Checking this many takes about 20 ms."""
_MAX_BRACKETS = 1_000_000
"""Each may become a Python object, which is 20 times as large as its text."""
_MAX_QUOTES = 2_000_000
"""Two for each text. The text "a" takes 60 bytes of memory and 4 in a body."""
_MAX_COMMAS = 8_000_000
"""One for each value. Decoding blocks all threads, for about 20 ns per token id."""
_BODY = (32 * 2**20, 128 * 2**20)
_BODY_PER_TOKEN = 1024

_SHORT_TEXT = 20_000
_SHORT_VALUES = 2_000
_SMALL_NUMBER = 1_000


def get_body_limit(context_length: int) -> int:
    """Return the largest size of a body. Each message may carry the token ids of its whole prompt,
    so this is many times the text of a full context."""
    smallest, largest = _BODY
    return min(max(smallest, _BODY_PER_TOKEN * context_length), largest)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a JSON value."""

    characters: int
    values: int
    largest: int
    """The largest whole number."""

    @property
    def is_short(self) -> bool:
        """Whether a template can be rendered with it in the event loop. Loops in templates run over
        messages, over characters, or up to a number: all of these are small."""
        return (
            self.characters <= _SHORT_TEXT
            and self.values <= _SHORT_VALUES
            and self.largest <= _SMALL_NUMBER
        )


class Budget:
    """Bounds the bytes of all bodies that are being read or answered."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, size: int) -> None:
        """Count received bytes; raise `Refused` if there are too many."""
        if size > self._left:
            raise Refused(
                503, "The gateway has too many long requests.", "Try again later.",
                kind="overloaded",
            )  # fmt: skip
        self._left -= size

    def give_back(self, size: int) -> None:
        """Count bytes that are no longer needed."""
        self._left += size


def parse(raw: bytes | bytearray) -> dict[str, Any]:
    """Decode a body and check the fields that all routes share."""
    _check_counts(raw)
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise UsageError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UsageError(f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise UsageError("The body must be a JSON object.")
    # Prompts and ids are checked separately; visiting every id here would take too long.
    measure({name: value for name, value in body.items() if name not in _CHECKED_APART})
    _check_fields(body)
    return body


def measure(root: Any) -> Size:
    """Measure a JSON value level by level; raise if it is too deep or too large."""
    characters = values = largest = 0
    level = [root]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                characters += len(value)
            elif kind is dict:
                characters += sum(map(len, value))
                below += value.values()
            elif kind is list:
                below += value
            elif kind is int:
                largest = max(largest, abs(value))
        values += len(below)
        if values > _MAX_VALUES:
            raise UsageError(f"The body has more than {_MAX_VALUES} values.")
        if not below:
            break
        level = below
    else:
        raise UsageError(f"The body is nested more than {_MAX_DEPTH} levels deep.")
    if largest >= 2**63:
        raise UsageError("The body has a number beyond 64 bits.")
    return Size(characters, values, largest)


def read_messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a chat after checking their types. Their depth and size are checked
    when they are rendered."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message.")
    if len(messages) > _MAX_MESSAGES:
        raise UsageError(f"messages has more than {_MAX_MESSAGES} messages.")
    for index, message in enumerate(messages):
        _check_message(index, message)
    return messages


def read_prompts(body: Mapping[str, Any], most: int) -> list[str | list[int]]:
    """Return the prompts of a text completion: texts, or lists of at most `most` token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int | float):
            return [_prompt_ids(prompt, most)]
        if len(prompt) > MAX_GENERATIONS:
            raise UsageError(f"prompt has more than {MAX_GENERATIONS} prompts.")
        if set(map(type, prompt)) <= {str, list} and all(prompt):
            return [part if isinstance(part, str) else _prompt_ids(part, most) for part in prompt]
    raise UsageError("prompt must be a text, a list of token ids, or a list of these.")


def read_choice_count(body: Mapping[str, Any], prompts: int = 1) -> int:
    """Return how many answers are requested for each prompt."""
    count = body.get("n")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise UsageError(f"n must be a number from 1 to {MAX_CHOICES}.")
    if count * prompts > MAX_GENERATIONS:
        raise UsageError(
            f"{prompts} prompts with n={count} are more than {MAX_GENERATIONS} answers.",
            "Send several requests.",
        )
    return count


def count_room(body: Mapping[str, Any], prompt_tokens: int, context_length: int) -> int:
    """Return how many tokens may be sampled: the requested number, or what the context holds."""
    left = context_length - prompt_tokens
    if left < 1:
        raise make_context_error(prompt_tokens, context_length)
    wanted = body.get("max_completion_tokens")
    if wanted is None:
        wanted = body.get("max_tokens")
    if wanted is None:
        return left
    if type(wanted) is not int or wanted < 1:
        raise UsageError("max_tokens must be a whole number above 0.")
    return min(wanted, left)


def read_ids(body: Mapping[str, Any], name: str, most: int) -> list[int]:
    """Return a field that is a list of at most `most` token ids."""
    return _prompt_ids(body.get(name) or [], most)


def read_text(body: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text."""
    text = body.get(name, "")
    if not isinstance(text, str):
        raise UsageError(f"{name} must be a text.")
    return text


_CHECKED_APART = ("messages", "prompt", "tokens", "token_ids", PREFIX)
_OBJECT, _LIST, _TEXT, _FLAG = "an object", "a list", "a text", "true or false"
_TYPES: dict[str, tuple[type, ...]] = {
    _OBJECT: (dict,), _LIST: (list,), _TEXT: (str,), _FLAG: (bool,)
}  # fmt: skip
_FIELDS = {
    "model": _TEXT, "stream": _FLAG, "stream_options": _OBJECT, "chat_template_kwargs": _OBJECT,
    "tools": _LIST, "reasoning_effort": _TEXT, "response_format": _OBJECT, "logit_bias": _OBJECT,
    "metadata": _OBJECT, "user": _TEXT, "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG, "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
}  # fmt: skip
_MESSAGE_FIELDS = {"tool_call_id": _TEXT, "reasoning_content": _TEXT, "name": _TEXT}


def _check_counts(raw: bytes | bytearray) -> None:
    """Raise for a body with too many values, before decoding; characters in texts count too."""
    if len(raw) <= _MAX_BRACKETS:
        return
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise UsageError(f"The body has more than {_MAX_BRACKETS} lists and objects.")
    if raw.count(b'"') > _MAX_QUOTES:
        raise UsageError(f"The body has more than {_MAX_QUOTES} quotation marks.", "Send less.")
    if raw.count(b",") > _MAX_COMMAS:
        raise UsageError(f"The body has more than {_MAX_COMMAS} values.", "Send several requests.")


def _check_fields(body: Mapping[str, Any]) -> None:
    if body.get("chat_template") is not None:
        raise UsageError(
            "chat_template is not accepted: the gateway renders with the model's own template."
        )
    for name, kind in _FIELDS.items():
        if name in body:
            _check_type(name, body[name], kind)
    tools = body.get("tools") or []
    if len(tools) > _MAX_TOOLS:
        raise UsageError(f"tools has more than {_MAX_TOOLS} tools.")
    for index, tool in enumerate(tools):
        _check_type(f"tools[{index}]", tool, _OBJECT, needed=True)
    if not isinstance(body.get("tool_choice"), str | dict | None):
        raise UsageError("tool_choice must be a text or an object.")
    if not isinstance(body.get("logprobs"), bool | int | None):
        raise UsageError("logprobs must be true, false or a whole number.")


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or not message.get("role"):
        raise UsageError("Every message must be an object with a role.")
    content = message.get("content")
    if type(content) is str and type(message["role"]) is str and len(message) == 2:
        return  # nearly all messages are like this
    place = f"messages[{index}]"
    _check_type(f"{place}.role", message["role"], _TEXT)
    for name, kind in _MESSAGE_FIELDS.items():
        if name in message:
            _check_type(f"{place}.{name}", message[name], kind)
    if isinstance(content, list):
        _check_parts(f"{place}.content", content)
    elif not isinstance(content, str | None):
        raise UsageError(f"{place}.content must be a text or a list of parts.")
    if message.get("tool_calls") is not None:
        _check_calls(f"{place}.tool_calls", message["tool_calls"])


def _check_parts(place: str, parts: Sequence[Any]) -> None:
    if len(parts) > _MAX_PARTS:
        raise UsageError(f"{place} has more than {_MAX_PARTS} parts.")
    for index, part in enumerate(parts):
        _check_type(f"{place}[{index}]", part, _OBJECT, needed=True)
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise UsageError(f"{place}[{index}].text must be a text.")


def _check_calls(place: str, calls: Any) -> None:
    _check_type(place, calls, _LIST)
    if len(calls) > _MAX_PARTS:
        raise UsageError(f"{place} has more than {_MAX_PARTS} calls.")
    for index, call in enumerate(calls):
        _check_type(f"{place}[{index}]", call, _OBJECT, needed=True)
        function = call.get("function")
        _check_type(f"{place}[{index}].function", function, _OBJECT)
        if function is None:
            continue
        _check_type(f"{place}[{index}].function.name", function.get("name"), _TEXT)
        if not isinstance(function.get("arguments"), str | dict | None):
            raise UsageError(f"{place}[{index}].function.arguments must be a text or an object.")


def _check_type(place: str, value: Any, kind: str, *, needed: bool = False) -> None:
    """Raise if a value has another type; null means that the field is absent."""
    if (value is None and not needed) or isinstance(value, _TYPES[kind]):
        return
    raise UsageError(f"{place} must be {kind}.")


def _prompt_ids(value: Any, most: int) -> list[int]:
    """Return token ids; whole floats are converted."""
    if isinstance(value, list) and len(value) > most:
        raise make_context_error(len(value), most)
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if float in kinds and kinds <= {int, float}:
        value = check_prompt(value)
    ids = read_token_ids(value, "A prompt", most)
    if not ids:
        raise UsageError("The prompt has no token.", "Send at least one token id.")
    return ids
