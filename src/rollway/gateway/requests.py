"""Read, bound and check the bodies of requests before they are used.

Anything wrong in a body is a `UsageError`, which the client receives as a 400. A body that passes
is safe to hash, render and forward: no value is nested too deeply, no number exceeds 64 bits, and
every field that the gateway reads has its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rollway.errors import UsageError
from rollway.gateway.messages import PREFIX, Message, make_context_error, read_token_ids
from rollway.gateway.replies import Refused

MAX_CHOICES = 64
MAX_GENERATIONS = 256
"""The limit for prompts times n in one request."""
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
    _check(body, _Body, "The body")
    return body


def measure(root: Any) -> bool:
    """Measure a JSON value level by level; raise if it is too deep or too large.

    Return whether a template can be rendered with it in the event loop. Loops in templates run over
    messages, over characters, or up to a number: all of these must be small."""
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
    is_short = characters <= _SHORT_TEXT and values <= _SHORT_VALUES
    return is_short and largest <= _SMALL_NUMBER


def read_messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a chat after checking their types. Their depth and size are checked
    when they are rendered."""
    messages: list[Message] = body.get("messages") or []
    if not messages:
        raise UsageError("messages must be a list of at least one message.")
    _check(messages, list[_Message], "messages")
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


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _ContentPart(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    name: str | None = None


class _Body(msgspec.Struct):
    """The fields that the gateway reads itself; the frontend checks the others."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    chat_template: None = None
    """The gateway renders with the model's own template."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | int | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


def _check(value: Any, kind: Any, place: str) -> None:
    """Raise if a value does not have a type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{place}: {error}.") from None


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


def _prompt_ids(value: Any, most: int) -> list[int]:
    """Return token ids; whole floats are converted."""
    if isinstance(value, list) and len(value) > most:
        raise make_context_error(len(value), most)
    if isinstance(value, list):
        value = [int(v) if isinstance(v, float) and v.is_integer() else v for v in value]
    ids = read_token_ids(value, "A prompt", most)
    if not ids:
        raise UsageError("The prompt has no token.", "Send at least one token id.")
    return ids
