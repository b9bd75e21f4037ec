"""How to sample, said in full.

A request that leaves a parameter out may get it from the checkpoint's generation_config.json: on
two of Dynamo's three routes `temperature=1` alone is still cut to that file's top_k and top_p, and
the log-probs are renormalised. So every parameter is sent, and the defaults here mean "the model's
own distribution".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollway.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request. The defaults sample the policy itself."""

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
    seed: int | None = None
    """Rollout i of a group uses seed + i; with one seed for all they would be equal."""
    logprobs: bool = True
    routed_experts: bool = False
    """Which experts a mixture-of-experts model used, per token (--enable-return-routed-experts)."""

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
                "Dynamo then ignores the stop token ids as well; give one of the two.",
            )
        if len(self.stop_token_ids) > 32:
            raise UsageError(
                f"{len(self.stop_token_ids)} stop token ids.", "Dynamo takes at most 32."
            )

    def shifted(self, offset: int) -> Sampling:
        """The same with the seed moved on; without a seed, the same."""
        return self if self.seed is None else replace(self, seed=self.seed + offset)

    @property
    def penalised(self) -> bool:
        """Whether the probability of a token depends on which were sampled before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def on_wire(self) -> dict[str, Any]:
        """The request fields."""
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
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.logprobs:
            fields["logprobs"] = 0  # the sampled token's own: 14 bytes a token
        return fields
