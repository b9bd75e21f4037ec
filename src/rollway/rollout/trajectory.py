"""A rollout that is put together from legs: what was sampled before a cut, and what after.

A refit may cut a rollout short, a worker may die. What had been sampled stays, with the version it
came from, and the rest is sampled as the continuation of prompt and tokens so far. Each leg is a
span: the trainer knows the version of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollway.errors import RolloutError
from rollway.rollout.completion import Completion, FinishReason
from rollway.rollout.sampling import Sampling

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts

# Legs of one seeded rollout draw from streams of their own; with one they would repeat.
_LEG_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` (not included) of a rollout came from one worker on one version."""

    start: int
    end: int
    version: int | None
    worker_id: int | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, with what a trainer needs to use it or to refuse it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """Of each sampled token under the policy that sampled it; None when not asked for."""
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    """Which tokens came from which version: one span, unless the rollout outlived a refit."""
    cached_tokens: int
    """Prompt tokens that came from the worker's prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Of prompt and completion, where they were asked for; the last token has none."""
    adapter: str | None = None
    """The LoRA adapter that all of it was sampled with, as `name@version`; `weight_version` is that
    of the policy below it."""

    @property
    def weight_version(self) -> int | None:
        """The oldest version that any token came from. None when nobody ever declared one (an
        attached stack before its first refit)."""
        known = [span.version for span in self.spans if span.version is not None]
        return min(known, default=None)

    @property
    def worker_id(self) -> int | None:
        """The worker of the last tokens, as Dynamo names it. After the death of a worker Dynamo
        still names the dead one, although another of the same version went on."""
        return self.spans[-1].worker_id if self.spans else None


@dataclass(slots=True)
class Trajectory:
    """A rollout in the making."""

    prompt: list[int]
    sampling: Sampling
    adapter: str | None = None
    token_ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _legs: int = 0
    _cached: int | None = None
    _experts: list[RoutedExperts] = field(default_factory=list)

    def next_leg(self) -> tuple[Sequence[int], Sampling]:
        """The prompt and the sampling of what is still to come."""
        done = len(self.token_ids)
        if not done:
            return self.prompt, self.sampling
        rest = replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - done,
            min_tokens=max(0, self.sampling.min_tokens - done),
        )
        return self.prompt + self.token_ids, rest.shifted(_LEG_SEED * self._legs)

    def add(self, completion: Completion, version: int | None) -> None:
        """Keep a leg, cut or whole."""
        if self._cached is None:
            self._cached = completion.cached_tokens
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        self._logprobs += completion.logprobs or []
        self._legs += 1
        if self.sampling.routed_experts and completion.token_ids:
            self._add_experts(completion.routed_experts)
        if completion.token_ids:
            end = len(self.token_ids)
            self.spans.append(Span(start, end, version, completion.worker_id))

    def _add_experts(self, raw: Any) -> None:
        """The engine tells of the whole prompt each time; what an earlier leg was sampled with
        stays."""
        from rollway.rollout.experts import captured  # numpy, which only users of this have

        part = captured(raw)
        self._experts.append(part.since(self._experts[-1].end) if self._experts else part)

    def cut(self) -> None:
        """After a leg that was cut short: drop what cannot be continued exactly. Penalties count
        the tokens sampled so far, which a continuation would take for prompt."""
        if self.sampling.penalised:
            self.token_ids, self._logprobs, self.spans, self._experts = [], [], [], []

    @property
    def full(self) -> bool:
        return len(self.token_ids) >= self.sampling.max_tokens

    def rollout(self, finish_reason: FinishReason, version: int | None) -> Rollout:
        logprobs = self._logprobs if self.sampling.logprobs else None
        if logprobs is not None and len(logprobs) != len(self.token_ids):
            raise RolloutError(
                f"{len(self.token_ids)} token ids were put together with {len(logprobs)} log-probs."
            )
        spans = tuple(self.spans) or (Span(0, 0, version, None),)
        return Rollout(
            self.prompt,
            self.token_ids,
            logprobs,
            finish_reason,
            spans,
            self._cached or 0,
            self._routed_experts(),
            self.adapter,
        )

    def _routed_experts(self) -> RoutedExperts | None:
        if not self._experts:
            return None
        from rollway.rollout.experts import whole

        return whole(self._experts, len(self.prompt) + len(self.token_ids))
