"""Which recorded turn a list of chat messages goes on from.

A client of the OpenAI API sends the whole history with every request, as text. What it got from us
it sends back in its own words: fields dropped, nulls added, arguments of a tool call re-formatted.
So messages are compared by what they say, and a history by a chain of such digests; a history that
says something else than what was sampled finds no turn, and is a new one.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError

Message = Mapping[str, Any]

PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
PREFIX = "required_prefix_token_ids"
EXPERTS = "routed_experts"
BUNDLE = (PROMPT, GENERATION, LOGPROBS, EXPERTS)
"""What trainers put on an assistant message to say which tokens it was."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Token ids that a prompt must begin with, and the message that they end with."""

    token_ids: list[int]
    messages: int
    """How many messages they stand for."""


def chain(messages: Sequence[Message]) -> list[str]:
    """A digest of each beginning of the history: the n-th stands for the first n messages."""
    digests: list[str] = []
    for message in messages:
        digests.append(link(digests[-1] if digests else "", message))
    return digests


def link(so_far: str, message: Message) -> str:
    """The digest of a history with one more message."""
    try:
        said = json.dumps(_says(message), sort_keys=True, separators=(",", ":"))
    except RecursionError:  # arguments of a tool call are JSON of their own in a text
        raise UsageError("A message is nested too deeply.") from None
    return hashlib.sha256(f"{so_far}\n{said}".encode()).hexdigest()


def sent_prefix(body: Mapping[str, Any], messages: Sequence[Message], most: int) -> Prefix | None:
    """The prefix that the client itself demands: on the last assistant message that carries its
    ids, or as `required_prefix_token_ids`, which ends with the last assistant message.
    `most` is the context length."""
    spoken = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    required = body.get(PREFIX)
    if required is not None:
        if not spoken:
            raise UsageError(f"{PREFIX} came without an assistant message.")
        return Prefix(token_ids(required, PREFIX, most), spoken[-1] + 1)
    for index in reversed(spoken):
        message = messages[index]
        has = [name for name in (PROMPT, GENERATION) if message.get(name) is not None]
        if len(has) == 1:
            raise UsageError(f"messages[{index}] has {has[0]} alone.", "Send both, or none.")
        if has:
            asked, sampled = (token_ids(message[name], name, most) for name in has)
            return Prefix(asked + sampled, index + 1)
    return None


def without_bundle(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For the chat template, which knows no token ids."""
    return [{k: v for k, v in message.items() if k not in BUNDLE} for message in messages]


def _says(message: Message) -> list[Any]:
    calls = [
        [(call.get("function") or {}).get("name"), _arguments(call)]
        for call in message.get("tool_calls") or []
    ]
    return [message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id")]


def _text(content: Any) -> Any:
    """Text may come in parts; nothing and an empty text are the same."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _arguments(call: Mapping[str, Any]) -> Any:
    said = (call.get("function") or {}).get("arguments")
    try:
        return json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        return said


def context_exceeded(tokens: int, context_length: int, at_least: bool = False) -> UsageError:
    """Return the error of a prompt that the model cannot take, in words that clients look for."""
    counted = f"at least {tokens}" if at_least else f"{tokens}"
    return UsageError(
        f"This model's maximum context length is {context_length} tokens, and the prompt has "
        f"{counted}."
    )


def token_ids(value: Any, name: str, most: int) -> list[int]:
    """Return a list of token ids; each fits the 32 bits that the engine has for one. The length
    comes first: to look at millions of ids takes long."""
    if isinstance(value, list) and len(value) > most:
        raise context_exceeded(len(value), most)
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        try:
            return array("I", value).tolist()
        except OverflowError:
            pass
    raise UsageError(f"{name} must be a list of token ids.")
