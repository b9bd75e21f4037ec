"""A rollout assembled from legs: the tokens before a cut, and the tokens after it.

A refit may cut a rollout short, or a worker may die. Rollway keeps the sampled tokens with their
version, and samples the rest as a continuation of prompt and tokens so far. Each leg becomes a
span, so the trainer knows the version of every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollway.errors import RolloutError, require
from rollway.rollout.completion import Completion, FinishReason
from rollway.rollout.sampling import Sampling

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts

# Each leg of a seeded rollout has its own seed; with the same one it would repeat the draws.
_LEG_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a rollout, sampled by one worker from one version."""

    start: int
    end: int
    version: int | None
    worker_id: int | None
    prefill_worker_id: int | None = None
    """With prefill and decode apart, the worker that computed the prompt of these tokens."""


def list_versions(spans: Iterable[Span]) -> list[int]:
    """Return the version of each span that has a known one."""
    return [span.version for span in spans if span.version is not None]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, with everything a trainer needs to use it or to refuse it.

    Example:
        (rollout,) = stack.rollouts().generate(prompt_ids)
        rollout.token_ids, rollout.logprobs, rollout.weight_version
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """The log-prob of each token under the policy that sampled it; None if not requested."""
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    """Which tokens came from which version. There is one span unless a refit cut the rollout."""
    cached_tokens: int
    """How many prompt tokens came from the worker's prefix cache; with prefill and decode apart,
    the prefill worker's."""
    routed_experts: RoutedExperts | None = None
    """Experts of prompt and completion, if requested; the last token has none."""
    adapter: str | None = None
    """The LoRA adapter of the whole rollout, as `name@version`. `weight_version` is the version of
    the policy below it."""
    sampling_mask: list[list[int]] | None = None
    """The ids from which each token was sampled, if the engine reports them."""

    @property
    def weight_version(self) -> int | None:
        """The oldest version among the spans. None if no version was ever declared (an attached
        stack before its first refit)."""
        return min(list_versions(self.spans), default=None)

    @property
    def worker_id(self) -> int | None:
        """The worker of the last tokens, as Dynamo names it. If a worker died, Dynamo still names
        it, although another worker of the same version continued."""
        return self.spans[-1].worker_id if self.spans else None

    @property
    def prefill_worker_id(self) -> int | None:
        """With prefill and decode apart, the worker that computed the prompt of the last tokens."""
        return self.spans[-1].prefill_worker_id if self.spans else None


@dataclass(slots=True)
class Trajectory:
    """A rollout that is being sampled."""

    prompt: list[int]
    sampling: Sampling
    adapter: str | None = None
    salt: str = ""
    """The caller's own cache salt."""
    token_ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _legs: int = 0
    _cached: int | None = None
    _experts: list[RoutedExperts] = field(default_factory=list)
    _mask: list[list[int]] = field(default_factory=list)

    def next_leg(self) -> tuple[Sequence[int], Sampling]:
        """Return the prompt and the sampling parameters of the next leg."""
        done = len(self.token_ids)
        if not done:
            return self.prompt, self.sampling
        rest = replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - done,
            min_tokens=max(0, self.sampling.min_tokens - done),
        )
        return self.prompt + self.token_ids, rest.offset_seed(_LEG_SEED * self._legs)

    def add(self, completion: Completion, version: int | None) -> None:
        """Append a leg, whether complete or cut."""
        if self._cached is None:
            self._cached = completion.cached_tokens
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        self._logprobs += completion.logprobs or []
        self._mask += completion.sampling_mask or []
        self._legs += 1
        if self.sampling.routed_experts and completion.token_ids:
            self._add_experts(completion.routed_experts)
        changes: Sequence[tuple[int, int | None]] = completion.versions or [(0, version)]
        ends = [start + first for first, _ in changes[1:]] + [len(self.token_ids)]
        for (first, sampled_by), end in zip(changes, ends, strict=True):
            # A request may have been frozen before its first token, or after its last one.
            begin, end = start + first, min(end, len(self.token_ids))
            if begin < end:
                workers = completion.worker_id, completion.prefill_worker_id
                self.spans.append(Span(begin, end, sampled_by, *workers))

    def _add_experts(self, raw: Any) -> None:
        """Append the experts of a leg. Each leg reports its whole prompt, so rows of earlier legs
        are skipped: those tokens were sampled with the experts recorded first."""
        require("cpu", "numpy")
        from rollway.rollout.experts import read_capture

        part = read_capture(raw)
        self._experts.append(part.since(self._experts[-1].end) if self._experts else part)

    def cut(self) -> None:
        """Drop tokens that cannot be continued exactly, after a leg was cut.

        Penalties count sampled tokens, but a continuation would count them as prompt."""
        if self.sampling.has_penalties:
            self.token_ids, self._logprobs, self.spans, self._experts = [], [], [], []
            self._mask = []

    @property
    def legs(self) -> int:
        """How many legs it has so far."""
        return self._legs

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self.sampling.max_tokens

    def rollout(self, finish_reason: FinishReason, version: int | None) -> Rollout:
        """Return the finished rollout."""
        logprobs = self._logprobs if self.sampling.logprobs else None
        if logprobs is not None and len(logprobs) != len(self.token_ids):
            raise RolloutError(
                f"The legs have {len(self.token_ids)} token ids and {len(logprobs)} log-probs."
            )
        spans = tuple(self.spans) or (Span(0, 0, version, None),)
        return Rollout(
            self.prompt,
            self.token_ids,
            logprobs,
            finish_reason,
            spans,
            self._cached or 0,
            self._join_experts(),
            self.adapter,
            # A leg without one would shift the others to wrong tokens.
            self._mask if self._mask and len(self._mask) == len(self.token_ids) else None,
        )

    def _join_experts(self) -> RoutedExperts | None:
        if not self._experts:
            return None
        from rollway.rollout.experts import join_whole

        return join_whole(self._experts, len(self.prompt) + len(self.token_ids))
