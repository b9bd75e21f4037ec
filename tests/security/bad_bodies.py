"""Shared by the tests of security."""

from __future__ import annotations

from typing import Any

from tests.security.gateway_service import CHAT_BODY, USER

_DEEP = b"[" * 100_000 + b"]" * 100_000
_MEDIUM: Any = "x"
for _ in range(200):
    _MEDIUM = [_MEDIUM]


def _message(**fields: Any) -> dict[str, Any]:
    return {**CHAT_BODY, "messages": [USER, {"role": "assistant", "content": "", **fields}, USER]}


def _call(**function: Any) -> dict[str, Any]:
    return _message(tool_calls=[{"id": "1", "type": "function", "function": function}])


BAD_CHATS: dict[str, Any] = {
    "no JSON": b"{",
    "no object": b"[]",
    "deep nesting": b'{"messages": ' + _DEEP + b"}",
    "nesting that JSON parsers still accept": {**CHAT_BODY, "metadata": {"a": _MEDIUM}},
    "nested arguments": _call(name="f", arguments={"a": _MEDIUM}),
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
    "1e400": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e400}',
    "a number beyond 64 bits": {**CHAT_BODY, "seed": 2**70},
    "messages that are a text": {**CHAT_BODY, "messages": "hello"},
    "no messages": {**CHAT_BODY, "messages": []},
    "a message that is a text": {**CHAT_BODY, "messages": ["hello"]},
    "a role that is a list": {**CHAT_BODY, "messages": [{"role": ["user"], "content": "a"}]},
    "content that is a number": {**CHAT_BODY, "messages": [{"role": "user", "content": 5}]},
    "content that is an object": {**CHAT_BODY, "messages": [{"role": "user", "content": {}}]},
    "parts that are numbers": {**CHAT_BODY, "messages": [{"role": "user", "content": [1]}]},
    "a part without text": {
        **CHAT_BODY, "messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]
    },
    "tool_calls that are a text": _message(tool_calls="call"),
    "tool_calls that are a number": _message(tool_calls=5),
    "tool_calls of numbers": _message(tool_calls=[5]),
    "a function that is a text": _message(tool_calls=[{"function": "f"}]),
    "a function that is a list": _message(tool_calls=[{"function": ["f"]}]),
    "arguments that are a number": _call(name="f", arguments=5),
    "a name that is a number": _call(name=5, arguments="{}"),
    "ids beyond 2^63": _message(prompt_token_ids=[2**63], generation_token_ids=[1]),
    "ids that are flags": _message(prompt_token_ids=[True], generation_token_ids=[1]),
    "ids that are one number": _message(prompt_token_ids=5, generation_token_ids=[1]),
    "required ids beyond 2^63": {**_message(), "required_prefix_token_ids": [2**64]},
    "stream_options that are a text": {**CHAT_BODY, "stream": True, "stream_options": "usage"},
    "stream_options that are a list": {**CHAT_BODY, "stream": True, "stream_options": [1]},
    "stream that is a text": {**CHAT_BODY, "stream": "yes"},
    "max_tokens that is a flag": {**CHAT_BODY, "max_tokens": True},
    "max_tokens that is a float": {**CHAT_BODY, "max_tokens": 1.5},
    "max_tokens that is 0": {**CHAT_BODY, "max_tokens": 0},
    "n that is a text": {**CHAT_BODY, "n": "2"},
    "n that is a float": {**CHAT_BODY, "n": 1.0},
    "n that is a flag": {**CHAT_BODY, "n": True},
    "n that is 0": {**CHAT_BODY, "n": 0},
    "n below 0": {**CHAT_BODY, "n": -1},
    "n above the limit": {**CHAT_BODY, "n": 65},
    "tools that are an object": {**CHAT_BODY, "tools": {"a": 1}},
    "tools of numbers": {**CHAT_BODY, "tools": [1]},
    "a tool_choice that is a number": {**CHAT_BODY, "tool_choice": 1},
    "template settings that are a list": {**CHAT_BODY, "chat_template_kwargs": ["a"]},
    "template settings that are a text": {**CHAT_BODY, "chat_template_kwargs": "a"},
    "too many messages": {**CHAT_BODY, "messages": [USER] * 100_000},
    "too many tools": {**CHAT_BODY, "tools": [{}] * 200_001},
    "too many values": {**CHAT_BODY, "stop_token_ids": [1] * 300_000},
}  # fmt: skip


BAD_TEXTS: dict[str, Any] = {
    "no prompt": {},
    "a number": {"prompt": 5},
    "an empty text": {"prompt": ""},
    "an empty list": {"prompt": []},
    "flags": {"prompt": [True, False]},
    "ids below 0": {"prompt": [-1]},
    "ids beyond 2^63": {"prompt": [2**63]},
    "lists in lists in lists": {"prompt": [[[1]]]},
    "mixed": {"prompt": [1, "a"]},
    "too many prompts": {"prompt": ["a"] * 1000},
    "64 prompts times 64": {"prompt": ["a"] * 64, "n": 64},
}
