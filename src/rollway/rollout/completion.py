"""One answer of an engine, put together from what its wire brings, and checked.

Ids present, one log-prob for each id, counts that agree with `usage`. An answer that does not add
up is an error; it is never padded, re-encoded or guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from rollway.errors import RolloutError
from rollway.rollout.sampling import Sampling

S = TypeVar("S")

FinishReason = Literal["stop", "length", "aborted"]

_ROUNDING = 1e-5  # of a token that is certain; float32 may end above 0
_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cancelled": "aborted",
    "abort": "aborted",
    "aborted": "aborted",
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One checked answer of the engine."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    worker_id: int | None
    """None where the wire does not tell, and for an answer that moved between workers: Dynamo
    names the one that died."""
    cached_tokens: int
    routed_experts: Any = None
    """As the engine sent them; see `rollway.rollout.experts`."""


@dataclass(slots=True)
class Assembly:
    """Puts an answer together from one body or from many streamed chunks, then checks it. Each
    wire has its own `add`."""

    sampling: Sampling
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float | None] = field(default_factory=list)
    _finish: str | None = None
    _worker_id: int | None = None
    _prompt_tokens: int | None = None
    _completion_tokens: int | None = None
    _cached: int = 0
    _experts: Any = None
    _has_ids: bool = False

    def add(self, raw: Any) -> list[int]:
        """Take in one decoded JSON body or chunk; returns the token ids it brought."""
        raise NotImplementedError

    def finish(self) -> Completion:
        reason = self._finish_reason()
        if not self._has_ids and reason != "aborted":
            raise RolloutError(
                "The server returned no token ids.",
                "It must be a Dynamo frontend that honours nvext.extra_fields (1.4 or newer), or "
                "a vLLM server that honours return_token_ids.",
            )
        self._check_counts(reason)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self._checked_logprobs(),
            finish_reason=reason,
            worker_id=None if self._migrated else self._worker_id,
            cached_tokens=self._cached,
            routed_experts=self._experts,
        )

    def _took(self, token_ids: list[int] | None) -> list[int]:
        if token_ids is None:
            return []
        self._has_ids = True
        self.token_ids += token_ids
        return token_ids

    def _extended(self, nvext: Nvext) -> list[int]:
        """Take in what Dynamo adds; returns the token ids."""
        # A plain finish reason never takes the place of a detailed one.
        self._finish = nvext.detailed_finish_reason or self._finish
        self._worker_id = self._worker_id if nvext.worker is None else nvext.worker
        self._experts = nvext.routed_experts or self._experts
        return self._took(nvext.completion_token_ids)

    def _counted(self, usage: Usage | None) -> None:
        if usage is None:
            return
        self._prompt_tokens, self._completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self._cached = usage.prompt_tokens_details.cached_tokens or 0

    def _finish_reason(self) -> FinishReason:
        if self._finish is None:
            raise RolloutError("The answer ended without a finish reason; it was cut off.")
        reason = _FINISH.get(self._finish.lower())
        if reason is None:
            raise RolloutError(f"The engine ended a rollout with `{self._finish}`.")
        return reason

    def _check_counts(self, reason: FinishReason) -> None:
        ids, saw, sent = len(self.token_ids), self._prompt_tokens, self._completion_tokens
        if saw is not None and saw != self.prompt_length and not self._migrated:
            raise RolloutError(f"The engine saw {saw} prompt tokens of {self.prompt_length}.")
        if sent is not None and sent != ids and reason != "aborted":
            raise RolloutError(f"The engine counted {sent} tokens and sent {ids} ids.")
        if ids > self.sampling.max_tokens:
            raise RolloutError(f"{ids} tokens came, {self.sampling.max_tokens} were asked for.")
        if reason == "length" and ids == 0:
            # Fewer than max_tokens is legal (the model's context may be full), none is not.
            raise RolloutError("The rollout ended by length without a single token.")

    @property
    def _migrated(self) -> bool:
        """Whether another worker went on after the first had died: what that one had sampled then
        counts as prompt as well. It is the only sign of it."""
        more = 0 if self._prompt_tokens is None else self._prompt_tokens - self.prompt_length
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
        return checked_logprobs(self._logprobs)


def checked_logprobs(values: list[float | None]) -> list[float]:
    """The same, if each is one."""
    checked = [lp for lp in values if lp is not None and math.isfinite(lp) and lp <= _ROUNDING]
    if len(checked) != len(values):
        raise RolloutError("A log-prob is missing, not finite, or above 0.")
    return checked


# --- shapes that several wires have -------------------------------------------------------------


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class WorkerIds(msgspec.Struct):
    decode_worker_id: int | None = None


class Nvext(msgspec.Struct):
    """What Dynamo adds to an answer, as far as it was asked for."""

    completion_token_ids: list[int] | None = None
    worker_id: WorkerIds | None = None
    detailed_finish_reason: str | None = None
    routed_experts: Any = None
    prompt_logprobs: Any = None

    @property
    def worker(self) -> int | None:
        return None if self.worker_id is None else self.worker_id.decode_worker_id


def parsed(raw: Any, shape: type[S]) -> S:
    """A decoded JSON value as a struct; anything else is an error that says where."""
    try:
        return msgspec.convert(raw, shape)
    except msgspec.ValidationError as error:
        raise RolloutError(f"The server's answer has the wrong shape: {error}.") from error


def only_choice(choices: list[S]) -> S | None:
    """Streams end with a chunk that has none."""
    if len(choices) > 1:
        raise RolloutError(f"The server sent {len(choices)} choices for one rollout.")
    return choices[0] if choices else None
