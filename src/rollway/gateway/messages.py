"""Find the recorded turn that a list of chat messages continues.

A client of the OpenAI API sends the whole history with every request, as text. It changes what it
received: it drops fields, adds nulls, re-formats the arguments of tool calls. So messages are
compared by content, and a history by a chain of digests. If a history differs from what was
sampled, it matches no turn and starts a new trajectory.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError
from rollway.rollout.template import Tokenizer, find_first_difference

Message = Mapping[str, Any]

PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
PREFIX = "required_prefix_token_ids"
EXPERTS = "routed_experts"
BUNDLE = (PROMPT, GENERATION, LOGPROBS, EXPERTS)
"""The fields with which trainers give the tokens of an assistant message."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Token ids that a prompt must begin with, and the number of messages that they represent."""

    token_ids: list[int]
    messages: int


def chain(messages: Sequence[Message]) -> list[str]:
    """Return a digest for each prefix of the history: the n-th is of the first n messages."""
    digests: list[str] = []
    for message in messages:
        digests.append(link(digests[-1] if digests else "", message))
    return digests


def link(so_far: str, message: Message) -> str:
    """Return the digest of a history with one more message."""
    try:
        content = json.dumps(_content(message), sort_keys=True, separators=(",", ":"))
    except RecursionError:  # the arguments of a tool call are JSON inside a text
        raise UsageError("A message is nested too deeply.") from None
    return hashlib.sha256(f"{so_far}\n{content}".encode()).hexdigest()


def find_sent_prefix(
    body: Mapping[str, Any], messages: Sequence[Message], most: int
) -> Prefix | None:
    """Return the prefix that the client itself sent: on the last assistant message with ids, or as
    `required_prefix_token_ids`, which ends with the last assistant message. `most` is the context
    length."""
    assistant = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    required = body.get(PREFIX)
    if required is not None:
        if not assistant:
            raise UsageError(f"{PREFIX} needs an assistant message.")
        return Prefix(read_token_ids(required, PREFIX, most), assistant[-1] + 1)
    for index in reversed(assistant):
        message = messages[index]
        has = [name for name in (PROMPT, GENERATION) if message.get(name) is not None]
        if len(has) == 1:
            raise UsageError(
                f"messages[{index}] has only {has[0]}.", "Send both fields, or neither."
            )
        if has:
            prompt, sampled = (read_token_ids(message[name], name, most) for name in has)
            return Prefix(prompt + sampled, index + 1)
    return None


def check_contiguous(messages: Sequence[Message], tokenizer: Tokenizer) -> None:
    """Raise unless every assistant message with token ids continues the one before it: the prompt
    of a turn begins with the prompt and the completion of the turn before."""
    seen: list[int] = []
    last = 0
    for index, message in enumerate(messages):
        prompt, sampled = message.get(PROMPT), message.get(GENERATION)
        if not isinstance(prompt, list) or not isinstance(sampled, list):
            continue
        if prompt[: len(seen)] != seen:
            raise UsageError(
                f"The token ids of messages[{index}] do not continue those of messages[{last}]. "
                f"{find_first_difference(tokenizer, seen, prompt[: len(seen)])}",
                "Send the history with the ids as they were answered; a history that was cut or "
                "rewritten is a new conversation, without ids.",
            )
        seen, last = prompt + sampled, index


def remove_bundle(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages without token ids, for the chat template."""
    return [{k: v for k, v in message.items() if k not in BUNDLE} for message in messages]


def _content(message: Message) -> list[Any]:
    calls = [
        [(call.get("function") or {}).get("name"), _arguments(call)]
        for call in message.get("tool_calls") or []
    ]
    return [message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id")]


def _text(content: Any) -> Any:
    """Join a text that has parts. No text and an empty text are the same."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = (call.get("function") or {}).get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def make_context_error(tokens: int, context_length: int, at_least: bool = False) -> UsageError:
    """Return the error of a prompt that is too long, with the phrase that clients search for."""
    counted = f"at least {tokens}" if at_least else f"{tokens}"
    return UsageError(
        f"This model's maximum context length is {context_length} tokens, and the prompt has "
        f"{counted}."
    )


def read_token_ids(value: Any, name: str, most: int) -> list[int]:
    """Return a list of token ids, each of at most 32 bits, as the engine needs. The length is
    checked first, because checking millions of ids takes long."""
    if isinstance(value, list) and len(value) > most:
        raise make_context_error(len(value), most)
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        try:
            return array("I", value).tolist()
        except OverflowError:
            pass
    raise UsageError(f"{name} must be a list of token ids.")
