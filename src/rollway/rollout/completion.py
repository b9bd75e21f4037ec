"""An engine's answer, assembled from a wire's chunks and checked.

The answer must have token ids, one log-prob for each id, and counts that agree with `usage`.
Anything else is an error: nothing is padded, re-encoded or guessed.
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

_ROUNDING = 1e-5  # float32 may round the log-prob of a certain token to slightly above 0
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
    """A checked answer of the engine."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    worker_id: int | None
    """None if the wire does not name the worker, and for an answer that migrated between workers:
    Dynamo then names the worker that died. With prefill and decode apart, the decode worker."""
    cached_tokens: int
    routed_experts: Any = None
    """As the engine sent them; see `rollway.rollout.experts`."""
    versions: list[tuple[int, int]] | None = None
    """From which token on which version sampled, as the worker itself says; None if it does not."""
    prefill_worker_id: int | None = None
    """With prefill and decode apart, the worker that computed the prompt. `cached_tokens` are its
    prefix hits."""
    sampling_mask: list[list[int]] | None = None
    """For each token, the ids that top-k, top-p and min-p had left; None if the engine does not say
    (vLLM's `return-sampling-mask`)."""
    prompt_logprobs: Any = None
    """As the engine sent them; see `rollway.rollout.teacher`."""

    @property
    def is_mixed(self) -> bool:
        """Whether a refit kept the request running, so that its tokens are of several versions."""
        return self.versions is not None and len(self.versions) > 1


@dataclass(slots=True)
class Assembly:
    """Collects an answer from one body or from many streamed chunks, then checks it. Each wire has
    its own `add`."""

    sampling: Sampling
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float | None] = field(default_factory=list)
    _finish: str | None = None
    _worker_id: int | None = None
    _prefill_worker_id: int | None = None
    _prompt_tokens: int | None = None
    _completion_tokens: int | None = None
    _cached: int = 0
    _experts: Any = None
    _versions: list[tuple[int, int]] | None = None
    _mask: list[list[int]] = field(default_factory=list)
    _prompt_logprobs: Any = None
    _has_ids: bool = False

    def add(self, raw: Any) -> list[int]:
        """Add a decoded JSON body or chunk; return its token ids."""
        raise NotImplementedError

    def finish(self) -> Completion:
        """Check the collected answer and return it."""
        reason = self._finish_reason()
        if not self._has_ids and reason != "aborted":
            raise RolloutError(
                "The server returned no token ids.",
                "Use a Dynamo frontend that supports nvext.extra_fields (1.4 or newer), or a vLLM "
                "server that supports return_token_ids.",
            )
        self._check_counts(reason)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self._check_logprobs(),
            finish_reason=reason,
            worker_id=None if self._has_migrated else self._worker_id,
            cached_tokens=self._cached,
            routed_experts=self._experts,
            # A worker knows only its own part of an answer that migrated.
            versions=None if self._has_migrated else self._versions,
            prefill_worker_id=None if self._has_migrated else self._prefill_worker_id,
            sampling_mask=self._mask if len(self._mask) == len(self.token_ids) else None,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _add_ids(self, token_ids: list[int] | None) -> list[int]:
        if token_ids is None:
            return []
        self._has_ids = True
        self.token_ids += token_ids
        return token_ids

    def _add_nvext(self, nvext: Nvext) -> list[int]:
        """Add the fields that Dynamo adds to an answer; return the token ids."""
        # The detailed reason wins: the plain one says "stop" for cancelled requests too.
        self._finish = nvext.detailed_finish_reason or self._finish
        self._worker_id = self._worker_id if nvext.worker is None else nvext.worker
        self._prefill_worker_id = nvext.prefill_worker or self._prefill_worker_id
        self._experts = nvext.routed_experts or self._experts
        self._prompt_logprobs = nvext.prompt_logprobs or self._prompt_logprobs
        if nvext.engine_data is not None:
            self._versions = nvext.engine_data.rollway_versions or self._versions
            self._mask += nvext.engine_data.sampling_mask or []
        return self._add_ids(nvext.completion_token_ids)

    def _add_usage(self, usage: Usage | None) -> None:
        if usage is None:
            return
        self._prompt_tokens, self._completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self._cached = usage.prompt_tokens_details.cached_tokens or 0

    def _finish_reason(self) -> FinishReason:
        if self._finish is None:
            raise RolloutError("The answer ended without a finish reason: the connection was cut.")
        reason = _FINISH.get(self._finish.lower())
        if reason is None:
            raise RolloutError(f"The engine ended a rollout with `{self._finish}`.")
        return reason

    def _check_counts(self, reason: FinishReason) -> None:
        ids, saw, sent = len(self.token_ids), self._prompt_tokens, self._completion_tokens
        if saw is not None and saw != self.prompt_length and not self._has_migrated:
            raise RolloutError(f"The engine counted {saw} prompt tokens, not {self.prompt_length}.")
        if sent is not None and sent != ids and reason != "aborted":
            raise RolloutError(f"The engine counted {sent} tokens and sent {ids} ids.")
        if ids > self.sampling.max_tokens:
            raise RolloutError(
                f"The engine sent {ids} tokens; max_tokens is {self.sampling.max_tokens}."
            )
        if reason == "length" and ids == 0:
            # Fewer tokens than max_tokens are legal, because the context may be full; none are not.
            raise RolloutError("The rollout ended by length without a single token.")

    @property
    def _has_migrated(self) -> bool:
        """Whether another worker continued after the first one died.

        Dynamo does not report a migration. Its only sign is that the tokens of the dead worker are
        counted as prompt tokens."""
        more = 0 if self._prompt_tokens is None else self._prompt_tokens - self.prompt_length
        return 0 < more <= len(self.token_ids)

    def _check_logprobs(self) -> list[float] | None:
        if not self.sampling.logprobs:
            return None
        if len(self._logprobs) != len(self.token_ids):
            raise RolloutError(
                f"{len(self.token_ids)} token ids came with {len(self._logprobs)} log-probs.",
                "The mocker engine has none: use Sampling(logprobs=False) with it."
                if not self._logprobs
                else "",
            )
        return check_logprobs(self._logprobs)


def check_logprobs(values: list[float | None]) -> list[float]:
    """Return the values; raise unless each is a log-prob."""
    checked = [lp for lp in values if lp is not None and math.isfinite(lp) and lp <= _ROUNDING]
    if len(checked) != len(values):
        raise RolloutError("A log-prob is missing, not finite, or above 0.")
    return checked


# --- shapes that several wires share -------------------------------------------------------------


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class WorkerIds(msgspec.Struct):
    decode_worker_id: int | None = None
    prefill_worker_id: int | None = None


class EngineData(msgspec.Struct):
    rollway_versions: list[tuple[int, int]] | None = None
    sampling_mask: list[list[int]] | None = None


class Nvext(msgspec.Struct):
    """The requested fields that Dynamo adds to an answer."""

    completion_token_ids: list[int] | None = None
    worker_id: WorkerIds | None = None
    detailed_finish_reason: str | None = None
    routed_experts: Any = None
    prompt_logprobs: Any = None
    engine_data: EngineData | None = None

    @property
    def worker(self) -> int | None:
        return None if self.worker_id is None else self.worker_id.decode_worker_id

    @property
    def prefill_worker(self) -> int | None:
        """The worker that computed the prompt, if it is another than the one that decodes."""
        prefill = None if self.worker_id is None else self.worker_id.prefill_worker_id
        return None if prefill == self.worker else prefill


def parse(raw: Any, shape: type[S]) -> S:
    """Convert a decoded JSON value to a struct; the error says where it does not fit."""
    try:
        return msgspec.convert(raw, shape)
    except msgspec.ValidationError as error:
        raise RolloutError(f"The server's answer has the wrong shape: {error}.") from error


def only_choice(choices: list[S]) -> S | None:
    """Return the only choice, or None: streams end with a chunk that has no choice."""
    if len(choices) > 1:
        raise RolloutError(f"The server sent {len(choices)} choices for one rollout.")
    return choices[0] if choices else None
