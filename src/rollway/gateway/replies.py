"""Convert Dynamo's answers, and all errors, to the form that OpenAI clients expect."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rollway.errors import RequestFailed, RolloutError, RollwayError, Unreachable, UsageError
from rollway.gateway.messages import EXPERTS, GENERATION, LOGPROBS, PROMPT
from rollway.gateway.store import StoreFull
from rollway.gateway.upstream import ChatReply
from rollway.http import read_error_message

log = logging.getLogger(__name__)

_ADDRESS = re.compile(
    r"\w+://[^\s'\"`<>]+|\[[0-9a-fA-F:.]+\]:\d+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?|\blocalhost:\d+"
)


SESSION, RECORDED = "x-rollway-session", "x-rollway-recorded"
_WRITE_SECONDS = 60.0
"""The time limit for one event of a stream: a client that does not read would block a worker."""


class Refused(RollwayError):
    """An error with a status of its own."""

    def __init__(
        self, status: int, message: str, hint: str = "", *, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.kind = kind


def convert_choice(raw: Mapping[str, Any], index: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only choice of an answer; drop log-probs that the client's body did not
    request."""
    converted = {**raw["choices"][0], "index": index}
    if body.get("logprobs") in (None, False):
        converted["logprobs"] = None
    return converted


def add_bundle(message: MutableMapping[str, Any], reply: ChatReply, expert_strings: bool) -> None:
    """Add the tokens to a message: all fields, or none. `expert_strings` are NeMo's form."""
    prompt_ids, completion = reply.request.prompt_ids, reply.completion
    if completion.logprobs is None:
        return
    message[PROMPT] = list(prompt_ids)
    message[GENERATION] = list(completion.token_ids)
    message[LOGPROBS] = list(completion.logprobs)
    if completion.routed_experts is None:
        return
    message[EXPERTS] = completion.routed_experts
    if expert_strings:
        from rollway.rollout.experts import decode  # needs numpy

        tokens = len(prompt_ids) + len(completion.token_ids)
        message[EXPERTS] = decode(completion.routed_experts).as_envelope(tokens)


def join_choices(
    answers: Sequence[ChatReply],
    choices: Sequence[Mapping[str, Any]],
    model: str,
    session: str,
    recorded: bool = True,
) -> dict[str, Any]:
    """Return one answer with the choices of several; say so if it was not recorded."""
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


def convert_chunk(raw: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chunk as the client's body requested it; None if the client needs nothing of it."""
    converted = {key: value for key, value in raw.items() if key != "nvext"}
    choices = converted.get("choices") or []
    if not choices and not (body.get("stream_options") or {}).get("include_usage"):
        return None
    if body.get("logprobs") in (None, False):
        converted["choices"] = [{**choice, "logprobs": None} for choice in choices]
    return converted


def ends_answer(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk ends the answer."""
    return any(choice.get("finish_reason") for choice in chunk.get("choices") or [])


@dataclass(slots=True)
class StreamedMessage:
    """Joins the chunks of a stream to the message that the client will send back."""

    _content: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add(self, raw: Mapping[str, Any]) -> None:
        """Add a chunk."""
        for choice in raw.get("choices") or []:
            delta = choice.get("delta") or {}
            self._content.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or []:
                joined = self._calls.setdefault(
                    int(call.get("index") or 0), {"name": "", "arguments": ""}
                )
                function = call.get("function") or {}
                joined["name"] += function.get("name") or ""
                joined["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """Return the message so far."""
        calls = [{"function": self._calls[index]} for index in sorted(self._calls)]
        return {"role": "assistant", "content": "".join(self._content), "tool_calls": calls}


def make_error(message: str, kind: str, status: int = 500) -> dict[str, Any]:
    """Return an error in OpenAI's form, without addresses inside the stack."""
    code = "context_length_exceeded" if "context length" in message else status
    shown = _ADDRESS.sub("(an address)", message)
    return {"message": shown, "type": kind, "code": code, "param": None}


def make_refusal(failure: Exception, explained: tuple[int, str, str]) -> web.Response:
    """Return the response to a failed request: the status, kind and message of `explain`."""
    status, kind, message = explained
    body = msgspec.json.encode({"error": make_error(message, kind, status)})
    headers = None
    if isinstance(failure, web.HTTPMethodNotAllowed):
        headers = {"allow": failure.headers["allow"]}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def explain(failure: Exception) -> tuple[int, str, str]:
    """Return the status, kind and message of a failure that a client may see."""
    if isinstance(failure, RolloutError) and isinstance(failure.__cause__, RequestFailed):
        failure = failure.__cause__  # what the frontend refuses stays a 4xx: clients repeat a 5xx
    if isinstance(failure, Refused):
        return failure.status, failure.kind, str(failure)
    if isinstance(failure, UsageError):
        return 400, "invalid_request_error", str(failure)
    if isinstance(failure, RequestFailed):
        if 400 <= failure.status < 500:
            return failure.status, "invalid_request_error", read_error_message(failure.body)
        log.warning("the frontend failed: %s", failure)
        return 502, "upstream", read_error_message(failure.body)
    if isinstance(failure, web.HTTPException):
        return failure.status, "invalid_request_error", _http_message(failure)
    if isinstance(failure, web.RequestPayloadError):
        return 400, "invalid_request_error", "The body does not match its headers."
    if isinstance(failure, Unreachable):
        log.warning("the frontend did not answer: %s", failure)
        return 503, "upstream", "The model's frontend cannot be reached or took too long."
    if isinstance(failure, StoreFull):
        return failure.http_status, "journal_full", str(failure)
    if isinstance(failure, RollwayError):
        log.warning("a request failed: %s", failure)
        return 502, "rollout_error", failure.message
    number = uuid.uuid4().hex[:12]
    log.error("request failed, error %s", number, exc_info=failure)
    return 500, "internal_error", f"The gateway failed. Its log has the cause: error {number}."


def _http_message(failure: web.HTTPException) -> str:
    if isinstance(failure, web.HTTPRequestEntityTooLarge):
        return "The body is too large."
    if failure.status == 404:
        return "There is no such route."
    return f"{failure.reason}."


def json_response(body: Mapping[str, Any]) -> web.Response:
    """Return a body as a response; headers repeat its session, and that it was not recorded."""
    headers = {SESSION: body["session"]} if body.get("session") else {}
    if body.get("recorded") is False:
        headers[RECORDED] = "false"
    raw = msgspec.json.encode(body)
    return web.Response(body=raw, content_type="application/json", headers=headers)


async def send_event(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await send_data(response, msgspec.json.encode(event))


async def send_data(response: web.StreamResponse, data: bytes) -> None:
    """Send one event of a stream; raise if the client does not read it."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await response.write(b"data: " + data + b"\n\n")
    except TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None
