"""Dynamo's answers in the form that clients of the OpenAI API read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollway.gateway.messages import EXPERTS, GENERATION, LOGPROBS, PROMPT
from rollway.gateway.upstream import Answered
from rollway.rollout.completion import Completion


def choice(raw: Mapping[str, Any], index: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The only choice of an answer, without what the client did not ask for."""
    made = {**raw["choices"][0], "index": index}
    if asked.get("logprobs") in (None, False):
        made["logprobs"] = None
    return made


def add_bundle(
    message: MutableMapping[str, Any], prompt_ids: Sequence[int], completion: Completion
) -> None:
    """The tokens of a message: all fields, or none."""
    if completion.logprobs is None:
        return
    message[PROMPT] = list(prompt_ids)
    message[GENERATION] = list(completion.token_ids)
    message[LOGPROBS] = list(completion.logprobs)
    if completion.routed_experts is not None:
        message[EXPERTS] = completion.routed_experts


def whole(
    answers: Sequence[Answered],
    choices: Sequence[Mapping[str, Any]],
    model: str,
    session: str,
    recorded: bool = True,
) -> dict[str, Any]:
    """One answer with the choices of several. It says so when it was not recorded."""
    first = answers[0].raw
    used = [answer.raw.get("usage") or {} for answer in answers]
    prompt = int(used[0].get("prompt_tokens", 0))
    sampled = sum(int(usage.get("completion_tokens", 0)) for usage in used)
    return {
        "id": first.get("id") or f"rollway-{uuid.uuid4().hex}",
        "object": first.get("object", "chat.completion"),
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": {
            **used[0],
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
        "session": session,
        "weight_version": answers[0].ticket.version,
        **({} if recorded else {"recorded": False}),
    }


def chunk(raw: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """A streamed chunk as the client wants it; None for one that is only for us."""
    made = {key: value for key, value in raw.items() if key != "nvext"}
    choices = made.get("choices") or []
    if not choices and not (asked.get("stream_options") or {}).get("include_usage"):
        return None
    if asked.get("logprobs") in (None, False):
        made["choices"] = [{**one, "logprobs": None} for one in choices]
    return made


def ends(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk says that the answer is over."""
    return any(choice.get("finish_reason") for choice in chunk.get("choices") or [])


@dataclass(slots=True)
class Spoken:
    """The message that a stream adds up to, as the client will send it back."""

    _content: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add(self, raw: Mapping[str, Any]) -> None:
        for one in raw.get("choices") or []:
            delta = one.get("delta") or {}
            self._content.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or []:
                made = self._calls.setdefault(
                    int(call.get("index") or 0), {"name": "", "arguments": ""}
                )
                function = call.get("function") or {}
                made["name"] += function.get("name") or ""
                made["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        calls = [{"function": self._calls[index]} for index in sorted(self._calls)]
        return {"role": "assistant", "content": "".join(self._content), "tool_calls": calls}


def error(message: str, kind: str, status: int = 500) -> dict[str, Any]:
    code = "context_length_exceeded" if "context length" in message else status
    return {"message": message, "type": kind, "code": code, "param": None}
