"""`TokenSequence`: a conversation in the form that a trainer needs.

It is one row of ids in which the sampled tokens are marked, each with its log-prob and weight
version. Prompts, tool results and tokens of the chat template are in it too, with mask 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollway.errors import RolloutError
from rollway.rollout.trajectory import Rollout, Span, list_versions

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts


@dataclass(frozen=True, slots=True)
class Fork:
    """The reason why a sequence does not continue another one."""

    sequence: int
    """The index of the sequence it was forked from."""
    position: int
    """The position of the first token that differs from that sequence."""
    why: str


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids with everything a trainer needs to learn from them. It ends with a sampled token.

    Raises:
        RolloutError: lengths or values that do not fit together.

    Example:
        for sequence in conversation.sequences():
            train(sequence.token_ids, sequence.loss_mask, sequence.logprobs)
    """

    token_ids: list[int]
    loss_mask: list[int]
    """1 for sampled tokens, 0 for others."""
    logprobs: list[float]
    """The log-prob of each sampled token under the policy that sampled it; 0.0 for others."""
    spans: tuple[Span, ...]
    """Which sampled tokens came from which version; positions refer to `token_ids`."""
    routed_experts: RoutedExperts | None = None
    forked_from: Fork | None = None

    def __post_init__(self) -> None:
        if problem := self._find_problem():
            raise RolloutError(problem)

    @property
    def weight_version(self) -> int | None:
        """The oldest version among the spans; None if no version was ever declared."""
        return min(list_versions(self.spans), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values. Worker ids become strings, because they exceed a double's
        precision."""
        return {
            "token_ids": list(self.token_ids),
            "loss_mask": list(self.loss_mask),
            "logprobs": [float(logprob) for logprob in self.logprobs],
            "spans": [_span_as_json(span) for span in self.spans],
            "routed_experts": self.routed_experts and self.routed_experts.as_json(),
            "forked_from": asdict(self.forked_from) if self.forked_from else None,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TokenSequence:
        """Return the sequence that `as_json` wrote, checked like any other.

        Args:
            raw: the parsed JSON.

        Raises:
            RolloutError: it is not a sequence.
        """
        try:
            fork = raw.get("forked_from")
            return cls(
                token_ids=list(raw["token_ids"]),
                loss_mask=list(raw["loss_mask"]),
                logprobs=list(raw["logprobs"]),
                spans=tuple(_span_from_json(span) for span in raw["spans"]),
                routed_experts=_experts_from_json(raw.get("routed_experts")),
                forked_from=Fork(**fork) if fork else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"This is not a token sequence: {error!r}.",
                "Pass what TokenSequence.as_json() returned.",
            ) from error

    def _find_problem(self) -> str:
        """Return the first thing that does not fit together; empty if there is none."""
        ids, mask, logprobs = self.token_ids, self.loss_mask, self.logprobs
        if not len(ids) == len(mask) == len(logprobs):
            return (
                f"There are {len(ids)} token ids, {len(mask)} mask values and {len(logprobs)} "
                "log-probs."
            )
        checks: tuple[tuple[Sequence[Any], Callable[[Any], bool], str], ...] = (
            (ids, lambda token: type(token) is int and token >= 0, "a token id"),
            (mask, lambda bit: type(bit) is int and bit in (0, 1), "a value of a loss mask"),
            (logprobs, lambda lp: type(lp) in (int, float) and math.isfinite(lp), "a log-prob"),
        )
        for values, is_right, what in checks:
            for place, value in enumerate(values):
                if not is_right(value):
                    return f"{value!r} (position {place}) is not {what}."
        if any(not bit and logprob for bit, logprob in zip(mask, logprobs, strict=True)):
            return "A token that was not sampled has a log-prob."
        end = 0
        for span in self.spans:
            if type(span.start) is not int or type(span.end) is not int:
                return f"The span {span.start!r} to {span.end!r} has no valid positions."
            where = f"The span {span.start} to {span.end}"
            if not end <= span.start < span.end <= len(ids):
                return (
                    f"{where} is empty, overlaps the one before it or is outside of {len(ids)} "
                    "tokens."
                )
            if not all(mask[span.start : span.end]):
                return f"{where} has tokens that were not sampled."
            end = span.end
        return ""


def _experts_from_json(raw: Any) -> RoutedExperts | None:
    if raw is None:
        return None
    from rollway.rollout.experts import decode

    return decode(raw)


def _span_as_json(span: Span) -> dict[str, Any]:
    worker = None if span.worker_id is None else str(span.worker_id)
    fields = {"start": span.start, "end": span.end, "version": span.version, "worker_id": worker}
    if span.prefill_worker_id is not None:
        fields["prefill_worker_id"] = str(span.prefill_worker_id)
    return fields


def _span_from_json(raw: Mapping[str, Any]) -> Span:
    workers = (raw["worker_id"], raw.get("prefill_worker_id"))
    ids = (None if worker is None else int(worker) for worker in workers)
    return Span(raw["start"], raw["end"], raw["version"], *ids)


@dataclass(slots=True)
class SequenceBuilder:
    """Builds a token sequence turn by turn; each prompt extends everything before it."""

    forked_from: Fork | None = None
    token_ids: list[int] = field(default_factory=list)
    _mask: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _has_logprobs: bool = True
    _experts: list[RoutedExperts] = field(default_factory=list)

    def begin(self, ids: list[int], experts: Sequence[RoutedExperts] = ()) -> None:
        """Start with tokens that are trained on in another sequence, or not at all."""
        self._add_unsampled(ids)
        self._experts += experts

    def add(self, rollout: Rollout) -> None:
        """Add a turn: the new part of its prompt, then its sampled tokens."""
        self._add_unsampled(rollout.prompt_ids[len(self.token_ids) :])
        start, count = len(self.token_ids), len(rollout.token_ids)
        self.token_ids += rollout.token_ids
        self._mask += [1] * count
        self._logprobs += [0.0] * count if rollout.logprobs is None else rollout.logprobs
        self._has_logprobs = self._has_logprobs and rollout.logprobs is not None
        if rollout.routed_experts is not None:
            # Each turn reports experts of its whole prompt; earlier tokens keep the first record.
            done = self._experts[-1].end if self._experts else 0
            self._experts.append(rollout.routed_experts.since(done))
        self._spans += [
            replace(span, start=start + span.start, end=start + span.end)
            for span in rollout.spans
            if span.start < span.end
        ]

    def _add_unsampled(self, ids: list[int]) -> None:
        self.token_ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    @property
    def has_samples(self) -> bool:
        """Whether there is anything to train on."""
        return 1 in self._mask

    def sequence(self) -> TokenSequence:
        """Return everything up to the last sampled token."""
        if not self._has_logprobs:
            raise RolloutError(
                "A turn has no log-probs, so there is nothing to train on.",
                "Sample with Sampling(logprobs=True).",
            )
        end = max((place + 1 for place, bit in enumerate(self._mask) if bit), default=0)
        return TokenSequence(
            token_ids=self.token_ids[:end],
            loss_mask=self._mask[:end],
            logprobs=self._logprobs[:end],
            spans=tuple(self._spans),
            routed_experts=self._join_experts(),
            forked_from=self.forked_from,
        )

    def _join_experts(self) -> RoutedExperts | None:
        if not self._experts:
            return None
        from rollway.rollout.experts import join  # needs numpy

        return join(*self._experts)
