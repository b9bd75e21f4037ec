"""Dynamo's completions route, token in and token out: the request body and its exact reading.

Prompts travel as `nvext.token_data`: no tokenizer touches them, and the worker then ignores the
checkpoint's generation_config. (`prompt` must be a non-empty string all the same.) Every answer is
checked here: ids present, one log-prob for each id, counts that agree with `usage`. An answer that
does not add up is an error; it is never padded, re-encoded or guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.sampling import Sampling

FinishReason = Literal["stop", "length", "aborted"]

# "stop" also stands for a request that was cancelled; the detailed reason tells them apart.
_EXTRA_FIELDS = ["completion_token_ids", "worker_id", "detailed_finish_reason"]
_ROUNDING = 1e-5  # of a token that is certain; float32 may end above 0
_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "length": "length",
    "cancelled": "aborted",
    "abort": "aborted",
    "aborted": "aborted",
}


def completion_request(
    model: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    cache_salt: str | None = None,
    required_taint: str | None = None,
    pin: int | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """The body of POST /v1/completions."""
    nvext: dict[str, Any] = {"token_data": list(prompt_ids), "extra_fields": _EXTRA_FIELDS}
    if cache_salt is not None:
        nvext["cache_salt"] = cache_salt
    if required_taint is not None:
        nvext["routing_constraints"] = {"required_taints": [required_taint]}
    if pin is not None:
        nvext["backend_instance_id"] = pin
    body: dict[str, Any] = {
        "model": model,
        "prompt": "-",
        "stream": stream,
        "nvext": nvext,
        **sampling.on_wire(),
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _WorkerIds(msgspec.Struct):
    decode_worker_id: int | None = None


class _Nvext(msgspec.Struct):
    completion_token_ids: list[int] | None = None
    worker_id: _WorkerIds | None = None
    detailed_finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    nvext: _Nvext | None = None
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One checked answer of the engine."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    worker_id: int | None
    """None for an answer that moved between workers: Dynamo names the one that died."""
    cached_tokens: int


@dataclass(slots=True)
class Assembly:
    """Puts an answer together from one body or from many streamed chunks, then checks it."""

    sampling: Sampling
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float | None] = field(default_factory=list)
    _finish: str | None = None
    _detailed: str | None = None
    _worker_id: int | None = None
    _usage: _Usage | None = None
    _has_ids: bool = False

    def add(self, raw: Any) -> list[int]:
        """Take in one decoded JSON body or chunk; returns the token ids it brought."""
        try:
            answer = msgspec.convert(raw, _Answer)
        except msgspec.ValidationError as error:
            raise RolloutError(f"The server's answer has the wrong shape: {error}.") from error
        if len(answer.choices) > 1:
            raise RolloutError(f"The server sent {len(answer.choices)} choices for one rollout.")
        for choice in answer.choices:
            self._finish = choice.finish_reason or self._finish
            if choice.logprobs is not None:
                self._logprobs += choice.logprobs.token_logprobs
        self._usage = answer.usage or self._usage
        return self._add_nvext(answer.nvext)

    def _add_nvext(self, nvext: _Nvext | None) -> list[int]:
        if nvext is None:
            return []
        self._detailed = nvext.detailed_finish_reason or self._detailed
        if nvext.worker_id is not None and nvext.worker_id.decode_worker_id is not None:
            self._worker_id = nvext.worker_id.decode_worker_id
        if nvext.completion_token_ids is None:
            return []
        self._has_ids = True
        self.token_ids += nvext.completion_token_ids
        return nvext.completion_token_ids

    def finish(self) -> Completion:
        reason = self._finish_reason()
        if not self._has_ids and reason != "aborted":
            raise RolloutError(
                "The server returned no token ids.",
                "It must be a Dynamo frontend that honours nvext.extra_fields (1.4 or newer).",
            )
        self._check_counts(reason)
        details = self._usage.prompt_tokens_details if self._usage else None
        return Completion(
            token_ids=self.token_ids,
            logprobs=self._checked_logprobs(),
            finish_reason=reason,
            worker_id=None if self._migrated else self._worker_id,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        )

    def _finish_reason(self) -> FinishReason:
        said = self._detailed or self._finish
        if said is None:
            raise RolloutError("The answer ended without a finish reason; it was cut off.")
        reason = _FINISH.get(said.lower())
        if reason is None:
            raise RolloutError(f"The engine ended a rollout with `{said}`.")
        return reason

    def _check_counts(self, reason: FinishReason) -> None:
        ids, usage = len(self.token_ids), self._usage
        if usage is not None:
            if usage.prompt_tokens != self.prompt_length and not self._migrated:
                raise RolloutError(
                    f"The engine saw {usage.prompt_tokens} prompt tokens of {self.prompt_length}."
                )
            if reason != "aborted" and usage.completion_tokens != ids:
                raise RolloutError(
                    f"The engine counted {usage.completion_tokens} tokens and sent {ids} ids."
                )
        if ids > self.sampling.max_tokens:
            raise RolloutError(f"{ids} tokens came, {self.sampling.max_tokens} were asked for.")
        if reason == "length" and ids == 0:
            # Fewer than max_tokens is legal (the model's context may be full), none is not.
            raise RolloutError("The rollout ended by length without a single token.")

    @property
    def _migrated(self) -> bool:
        """Whether another worker went on after the first had died: what that one had sampled then
        counts as prompt as well. It is the only sign of it."""
        usage = self._usage
        if usage is None:
            return False
        more = usage.prompt_tokens - self.prompt_length
        return 0 < more <= len(self.token_ids)

    def _checked_logprobs(self) -> list[float] | None:
        if not self.sampling.logprobs:
            return None
        if len(self._logprobs) != len(self.token_ids):
            raise RolloutError(
                f"{len(self.token_ids)} token ids came with {len(self._logprobs)} log-probs.",
                "The mocker engine has none: use Sampling(logprobs=False) with it."
                if not self._logprobs
                else "",
            )
        checked = [
            lp for lp in self._logprobs if lp is not None and math.isfinite(lp) and lp <= _ROUNDING
        ]
        if len(checked) != len(self._logprobs):
            raise RolloutError("A log-prob is missing, not finite, or above 0.")
        return checked
