"""`TokenSequence`: a conversation as a trainer takes it.

One row of ids in which the sampled tokens are marked, each with its log-prob and the weight version
it came from. Prompts, tool results and what the template adds are there as well, with mask 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rollway.errors import RolloutError
from rollway.rollout.trajectory import Rollout, Span

if TYPE_CHECKING:
    from rollway.rollout.experts import RoutedExperts


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a sequence does not go on where another one ended."""

    sequence: int
    """Index of the sequence that it was forked from."""
    position: int
    """Of the first token that differs from that sequence."""
    why: str


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids with what a trainer needs to learn from them. It ends with a sampled token."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 where the token was sampled, 0 elsewhere."""
    logprobs: list[float]
    """Of each sampled token under the policy that sampled it; 0.0 elsewhere."""
    spans: tuple[Span, ...]
    """Which sampled tokens came from which version; places are those in `token_ids`."""
    routed_experts: RoutedExperts | None = None
    forked_from: Fork | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_values()
        self._check_spans()

    @property
    def weight_version(self) -> int | None:
        """The oldest version that any token came from; None when nobody ever declared one."""
        known = [span.version for span in self.spans if span.version is not None]
        return min(known, default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values. Worker ids are strings: they are beyond what a double can hold."""
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
        """What `as_json` wrote; checked like any other sequence."""
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
                f"This is no token sequence: {error!r}.", "Read what TokenSequence.as_json() wrote."
            ) from error

    def _check_lengths(self) -> None:
        counts = len(self.token_ids), len(self.loss_mask), len(self.logprobs)
        if len(set(counts)) > 1:
            ids, mask, logprobs = counts
            raise RolloutError(
                f"{ids} token ids came with {mask} mask values and {logprobs} log-probs."
            )

    def _check_values(self) -> None:
        if wrong := _first_wrong(self.token_ids, lambda token: type(token) is int and token >= 0):
            raise RolloutError(f"{wrong} is no token id.")
        if wrong := _first_wrong(self.loss_mask, lambda bit: type(bit) is int and bit in (0, 1)):
            raise RolloutError(f"{wrong} is no value of a loss mask.", "It is 0 or 1.")
        if wrong := _first_wrong(self.logprobs, _is_finite):
            raise RolloutError(f"{wrong} is no log-prob.")
        marked = zip(self.loss_mask, self.logprobs, strict=True)
        if any(not bit and logprob for bit, logprob in marked):
            raise RolloutError("A token that was not sampled has a log-prob.")

    def _check_spans(self) -> None:
        end = 0
        for span in self.spans:
            if type(span.start) is not int or type(span.end) is not int:
                raise RolloutError(f"The span {span.start!r} to {span.end!r} has no places.")
            if not end <= span.start < span.end <= len(self.token_ids):
                raise RolloutError(
                    f"The span {span.start} to {span.end} is empty, overlaps the one before it or "
                    f"is outside of {len(self.token_ids)} tokens."
                )
            if not all(self.loss_mask[span.start : span.end]):
                raise RolloutError(
                    f"The span {span.start} to {span.end} has tokens that were not sampled."
                )
            end = span.end


def _first_wrong(values: Iterable[Any], is_right: Any) -> str:
    """The first wrong value with its place, as text; empty when all are right."""
    for place, value in enumerate(values):
        if not is_right(value):
            return f"{value!r} (position {place})"
    return ""


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _experts_from_json(raw: Any) -> RoutedExperts | None:
    if raw is None:
        return None
    from rollway.rollout.experts import decode

    return decode(raw)


def _span_as_json(span: Span) -> dict[str, Any]:
    worker = None if span.worker_id is None else str(span.worker_id)
    return {"start": span.start, "end": span.end, "version": span.version, "worker_id": worker}


def _span_from_json(raw: Mapping[str, Any]) -> Span:
    worker = raw["worker_id"]
    return Span(raw["start"], raw["end"], raw["version"], None if worker is None else int(worker))


@dataclass(slots=True)
class SequenceBuilder:
    """A token sequence in the making: turn after turn, each prompt an extension of all before."""

    forked_from: Fork | None = None
    token_ids: list[int] = field(default_factory=list)
    _mask: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _has_logprobs: bool = True
    _experts: list[RoutedExperts] = field(default_factory=list)

    def begin(self, ids: list[int], experts: Sequence[RoutedExperts] = ()) -> None:
        """With tokens that are trained on elsewhere, or nowhere."""
        self._add_unsampled(ids)
        self._experts += experts

    def add(self, rollout: Rollout) -> None:
        """Take in a turn: what its prompt has beyond the tokens so far, then what was sampled."""
        self._add_unsampled(rollout.prompt_ids[len(self.token_ids) :])
        start, count = len(self.token_ids), len(rollout.token_ids)
        self.token_ids += rollout.token_ids
        self._mask += [1] * count
        self._logprobs += [0.0] * count if rollout.logprobs is None else rollout.logprobs
        self._has_logprobs = self._has_logprobs and rollout.logprobs is not None
        if rollout.routed_experts is not None:
            # Each turn's record is of its whole prompt; what was sampled earlier keeps its own.
            done = self._experts[-1].end if self._experts else 0
            self._experts.append(rollout.routed_experts.since(done))
        self._spans += [
            Span(start + span.start, start + span.end, span.version, span.worker_id)
            for span in rollout.spans
            if span.start < span.end
        ]

    def _add_unsampled(self, ids: list[int]) -> None:
        self.token_ids += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    @property
    def sampled(self) -> bool:
        """Whether there is anything to train on."""
        return 1 in self._mask

    def sequence(self) -> TokenSequence:
        """All up to the last sampled token."""
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
            routed_experts=self._routed_experts(),
            forked_from=self.forked_from,
        )

    def _routed_experts(self) -> RoutedExperts | None:
        if not self._experts:
            return None
        from rollway.rollout.experts import joined  # numpy, which only users of this have

        return joined(*self._experts)
