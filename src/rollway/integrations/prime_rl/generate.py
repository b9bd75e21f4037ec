"""`POST /inference/v1/generate` as prime-rl's clients send and read it: ids in, ids out.

A request goes out over Dynamo's completions, which respect the taint of a weight version; Dynamo's
own generate route respects none. The client, `renderers`, ends an episode when a reply has a
log-prob too few, one that is not finite, or the floor that engines write for "unknown", so such an
answer is never passed on: it is a 502, after which prime-rl's clients ask again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollway.errors import RolloutError, UsageError
from rollway.gateway.messages import make_context_error
from rollway.gateway.requests import read_ids
from rollway.rollout.client import Rollouts
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Teacher
from rollway.rollout.trajectory import Rollout

FLOOR = -9999.0
"""What vLLM and Dynamo write for a log-prob that is unknown or too small."""
_MAX_SALT = 256
# Fields that change no sampling: ids are returned anyway, and nothing is detokenized.
_WITHOUT_EFFECT = {
    *("return_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    *("logprobs", "prompt_logprobs", "routed_experts_prompt_start", "output_kind", "cache_salt"),
}
_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "max_tokens"),
}
_NUMBERS = _SAMPLING - {"ignore_eos", "stop_token_ids"}
_WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "prompt_logprobs", "logprobs")
_BODY = {
    *("model", "token_ids", "sampling_params", "cache_salt", "request_id", "stream"),
    *("priority", "return_token_ids", "features", "content_parts", "stream_options"),
}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request."""

    request_id: str
    model: str
    prompt: list[int]
    sampling: Sampling
    salt: str = ""
    wants_prompt_logprobs: bool = False
    experts_start: int = 0

    @classmethod
    def read(
        cls, body: Mapping[str, Any], context_length: int, *, routed_experts: bool = False
    ) -> GenerateRequest:
        """Check a body; anything wrong is a `UsageError` with the field's name."""
        _refuse_unknown(body, _BODY, "The body")
        for name in ("stream", "features", "content_parts"):
            if body.get(name):
                raise UsageError(f"`{name}` is not supported.", "Leave it out.")
        prompt = read_ids(body, "token_ids", context_length)
        raw = body.get("sampling_params") or {}
        if not isinstance(raw, dict):
            raise UsageError("sampling_params must be an object.")
        params = {name: value for name, value in raw.items() if value is not None}
        room = context_length - len(prompt)
        if room < 1:
            raise make_context_error(len(prompt), context_length)
        return cls(
            request_id=_read_text(body, "request_id") or uuid.uuid4().hex,
            model=_read_text(body, "model"),
            prompt=prompt,
            sampling=_read_sampling(params, room, routed_experts),
            # verifiers of August 2026 leaves it among the sampling parameters.
            salt=_read_text(body, "cache_salt") or _read_text(params, "cache_salt"),
            # 0 asks too, for the prompt's own tokens alone.
            wants_prompt_logprobs=params.get("prompt_logprobs", -1) >= 0,
            experts_start=_read_start(params.get("routed_experts_prompt_start", 0), len(prompt)),
        )


@dataclass(slots=True)
class Generator:
    """Answers generate requests of one served model or adapter."""

    rollouts: Rollouts
    teacher: Teacher
    experts: int | None = None
    """The number of experts, if replies carry those of each token."""

    async def answer(self, request: GenerateRequest, session: str) -> dict[str, Any]:
        """Return the reply; raise `RolloutError` for one without all log-probs."""
        prompt_logprobs = None
        if request.wants_prompt_logprobs:
            rollout, prompt_logprobs = await self.teacher.sample(
                request.prompt, request.sampling, session=session, salt=request.salt
            )
        else:
            (rollout,) = await self.rollouts.generate(
                request.prompt, request.sampling, group=session, salt=request.salt
            )
        if any(logprob <= FLOOR for logprob in rollout.logprobs or []):
            raise RolloutError(
                "The engine had no log-prob for a token that it sampled.",
                "Sample without cuts of the distribution (top_p = 1, top_k = -1, min_p = 0).",
            )
        return make_reply(request, rollout, prompt_logprobs, self.experts)


def make_reply(
    request: GenerateRequest,
    rollout: Rollout,
    prompt_logprobs: Sequence[float | None] | None = None,
    experts: int | None = None,
) -> dict[str, Any]:
    """Return the reply that `renderers` reads."""
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": rollout.token_ids,
        "logprobs": None,
        # vLLM's word; renderers has no other.
        "finish_reason": "abort" if rollout.finish_reason == "aborted" else rollout.finish_reason,
    }
    if rollout.logprobs is not None:
        pairs = zip(rollout.token_ids, rollout.logprobs, strict=True)
        entries = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        choice["logprobs"] = {"content": entries}
    if rollout.sampling_mask is not None:
        choice["sampling_mask"] = rollout.sampling_mask
    if experts is not None:
        choice["routed_experts"] = _read_experts(request, rollout, experts)
    prompt, sampled = len(rollout.prompt_ids), len(rollout.token_ids)
    details = {"cached_tokens": rollout.cached_tokens}
    return {
        "request_id": request.request_id,
        "choices": [choice],
        "prompt_logprobs": make_prompt_logprobs(rollout.prompt_ids, prompt_logprobs),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": details,
        },
        "weight_version": rollout.weight_version,
        "spans": [[span.start, span.end, span.version] for span in rollout.spans],
    }


def make_prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[float | None] | None
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's form, with the entry of the prompt's own token alone: prime-rl takes the first
    entry of a position, whichever it is."""
    if logprobs is None:
        return None
    pairs = zip(prompt, logprobs, strict=True)
    return [None if lp is None else {str(token): {"logprob": lp}} for token, lp in pairs]


def _read_experts(request: GenerateRequest, rollout: Rollout, experts: int) -> dict[str, Any]:
    routed = rollout.routed_experts
    if routed is None:
        raise RolloutError("The engine sent no routed experts.")
    routed.check(len(rollout.prompt_ids) + len(rollout.token_ids), experts)
    # The dtype follows from the model, never from the sample: a trainer joins many of them.
    return routed.cast(experts).since(request.experts_start).as_json()


def _read_sampling(params: Mapping[str, Any], room: int, routed_experts: bool) -> Sampling:
    _refuse_unknown(params, _SAMPLING | _WITHOUT_EFFECT | {"n", "stop"}, "sampling_params")
    if params.get("n", 1) != 1:
        raise UsageError(f"n is {params['n']}.", "Ask for one completion in each request.")
    if params.get("stop"):
        raise UsageError("`stop` is not supported.", "Use stop_token_ids: ids are exact.")
    for name in (*_NUMBERS, *_WHOLE):
        value = params.get(name, 0)
        kinds = int if name in _WHOLE else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"sampling_params.{name} must be a number.")
    stops = params.get("stop_token_ids", [])
    if not isinstance(stops, list) or not all(type(stop) is int for stop in stops):
        raise UsageError("sampling_params.stop_token_ids must be a list of token ids.")
    fields = {name: params[name] for name in _SAMPLING if name in params}
    fields["stop_token_ids"] = tuple(dict.fromkeys(stops))
    fields["max_tokens"] = min(params.get("max_tokens", room), room)
    wants_logprobs = params.get("logprobs", -1) >= 0
    return Sampling(**fields, logprobs=wants_logprobs, routed_experts=routed_experts)


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(name for name in fields if name not in known and fields[name] is not None)
    if unknown:
        raise UsageError(
            f"{what} has `{unknown[0]}`, which would have no effect here.",
            f"Leave it out; known are {', '.join(sorted(known))}.",
        )


def _read_text(body: Mapping[str, Any], name: str) -> str:
    text = body.get(name)
    if text is None:
        return ""
    if not isinstance(text, str) or len(text) > _MAX_SALT or not text.isprintable():
        raise UsageError(f"{name} must be a text of at most {_MAX_SALT} printable characters.")
    return text


def _read_start(start: Any, prompt_length: int) -> int:
    if type(start) is not int or not 0 <= start <= prompt_length:
        raise UsageError(
            f"routed_experts_prompt_start is {start}; the prompt has {prompt_length} tokens."
        )
    return start
