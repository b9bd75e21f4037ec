"""Chats whose prompt is token ids, `nvext.token_data`: the transport of prime-rl of June 2026.

Its clients call it `dynamo`, `dynamo_chat` or `dynamo_chat_nvext`, and score teachers by it. The
messages are a placeholder, in some versions an empty list. The answer has ids and log-probs in
`nvext`, in the places where those clients look for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rollway.errors import UsageError
from rollway.integrations.prime_rl.generate import GenerateRequest

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "stop", "n"),
    *("prompt_logprobs", "routed_experts_prompt_start"),
)


def has_token_data(body: Mapping[str, Any]) -> bool:
    """Return whether the prompt of a chat is token ids."""
    nvext = body.get("nvext")
    return isinstance(nvext, dict) and nvext.get("token_data") is not None


def read_token_chat(
    body: Mapping[str, Any], context_length: int, *, routed_experts: bool = False
) -> GenerateRequest:
    """Return the generate request that a chat with token ids stands for."""
    nvext = body["nvext"]
    if body.get("stream"):
        raise UsageError("A chat with token_data cannot be streamed.", "Leave `stream`.")
    params = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            params.setdefault("max_tokens", body[name])
    if body.get("logprobs"):
        params["logprobs"] = 1
    # Later versions send the start here; their frontends refuse it at the top.
    if nvext.get("routed_experts_prompt_start") is not None:
        params["routed_experts_prompt_start"] = nvext["routed_experts_prompt_start"]
    request = {
        "model": body.get("model"),
        "token_ids": nvext["token_data"],
        "sampling_params": params,
        "cache_salt": nvext.get("cache_salt") or body.get("cache_salt"),
    }
    return GenerateRequest.read(request, context_length, routed_experts=routed_experts)


def make_chat_reply(
    body: Mapping[str, Any], request: GenerateRequest, reply: Mapping[str, Any], text: str
) -> dict[str, Any]:
    """Return a generate reply as a chat completion with the requested fields of `nvext`."""
    (choice,) = reply["choices"]
    fields: dict[str, Any] = {"completion_token_ids": choice["token_ids"]}
    if choice["logprobs"] is not None:
        fields["completion_logprobs"] = [e["logprob"] for e in choice["logprobs"]["content"]]
    for name, value in (
        ("prompt_logprobs", reply["prompt_logprobs"]),
        ("routed_experts", choice.get("routed_experts")),
    ):
        if value is not None:
            fields[name] = value
    requested = body["nvext"].get("extra_fields") or []
    nvext = {name: fields[name] for name in requested if name in fields}
    if "engine_data" in requested:
        # What was asked for by itself is not sent twice: routed experts are large.
        left = {name: value for name, value in fields.items() if name not in nvext}
        nvext["engine_data"] = {"prompt_token_ids": request.prompt, "finished": True, **left}
    return {
        "id": reply["request_id"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": choice["logprobs"],
                "finish_reason": choice["finish_reason"],
                "token_ids": choice["token_ids"],
            }
        ],
        "usage": reply["usage"],
        "weight_version": reply["weight_version"],
        "nvext": nvext,
    }
