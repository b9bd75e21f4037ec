"""Sampling parameters, all of them.

If a request leaves a parameter out, the checkpoint's generation_config.json may fill it in: on two
of Dynamo's three routes `temperature=1` alone is still restricted by that file's top_k and top_p,
and the log-probs are renormalised. So Rollway sends every parameter, and the defaults here mean
"the model's own distribution".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollway.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults sample the policy itself, without any cut of its distribution.

    Raises:
        UsageError: a value out of its range.

    Example:
        rollway.Sampling(max_tokens=64, temperature=0.8, seed=0)
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end a rollout; the tokens that complete one are part of it. A string that begins
    before a cut and ends after it is not seen."""
    seed: int | None = None
    """Rollout i of a group uses seed + i; with the same seed all rollouts would be equal."""
    logprobs: bool = True
    routed_experts: bool = False
    """Return the experts that an MoE model used for each token (--enable-return-routed-experts)."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}.", "Ask for at least one token.")
        if self.temperature < 0:
            raise UsageError(f"temperature is {self.temperature}.", "Use 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}.", "Use a value above 0 and at most 1.")
        if self.ignore_eos and self.stop_token_ids:
            raise UsageError(
                "ignore_eos and stop_token_ids are given together.",
                "Dynamo then ignores the stop token ids too; set only one of them.",
            )
        for name, stops in (("token ids", self.stop_token_ids), ("strings", self.stop)):
            if len(stops) > 32:
                raise UsageError(
                    f"There are {len(stops)} stop {name}.", "Dynamo accepts at most 32."
                )
        if "" in self.stop:
            raise UsageError("A stop string is empty.", "Leave it out: every text ends with it.")

    def offset_seed(self, offset: int) -> Sampling:
        """Return a copy with `offset` added to the seed, or self if there is no seed."""
        return self if self.seed is None else replace(self, seed=self.seed + offset)

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on the tokens sampled before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def to_fields(self) -> dict[str, Any]:
        """Return the request fields."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos,
        }
        if self.min_tokens:
            fields["min_tokens"] = self.min_tokens
        if self.stop_token_ids:
            fields["stop_token_ids"] = list(self.stop_token_ids)
        if self.stop:
            # Otherwise the engine would drop tokens that it sampled.
            fields |= {"stop": list(self.stop), "include_stop_str_in_output": True}
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.logprobs:
            fields["logprobs"] = 0  # only the sampled token's: 14 bytes per token
        return fields
