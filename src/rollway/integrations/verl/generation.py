"""Convert a request of verl to Rollway's sampling, and a rollout to verl's `TokenOutput`.

Token ids and log-probs are exactly those that the engine sampled. Anything else is an error: verl
would train on other tokens, and every metric would still look fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollway.errors import UsageError
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores
from rollway.rollout.trajectory import Rollout
from rollway.weights.adapter import version_of

_PASSED_ON = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "ignore_eos", "seed"),
}
_CONVERTED = {"max_tokens", "max_new_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "n"}
StepOf = Callable[[int | None], int | None]
"""Returns the trainer's step of a version."""


def make_sampling(
    params: Mapping[str, Any], prompt_tokens: int, rollout: Any, *, routed_experts: bool = False
) -> Sampling | None:
    """Convert verl's sampling parameters; return None if the prompt fills the context."""
    unknown = sorted(params.keys() - _PASSED_ON - _CONVERTED)
    if unknown:
        raise UsageError(
            f"rollout.name=dynamo does not support the sampling parameter `{unknown[0]}`.",
            "Remove it; docs/verl.md lists the supported ones.",
        )
    if params.get("n") not in (None, 1):
        raise UsageError("verl requests one answer at a time; n must be 1.")
    most = int(rollout.prompt_length + rollout.response_length) - prompt_tokens
    requested = params.get("max_tokens", params.get("max_new_tokens"))
    max_tokens = min(int(rollout.response_length if requested is None else requested), most)
    if max_tokens < 1:
        return None
    # verl's own servers treat True and 0 alike: log-probs of the sampled token.
    logprobs = params.get("logprobs")
    return Sampling(
        max_tokens=max_tokens,
        logprobs=logprobs is not None and logprobs is not False,
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        routed_experts=routed_experts,
        **{name: params[name] for name in _PASSED_ON & params.keys() if params[name] is not None},
    )


def refuse_media(**media: Any) -> None:
    for name, value in media.items():
        if value is not None and len(value):
            raise UsageError(
                f"A request has {name}, and rollout.name=dynamo accepts token ids alone.",
                "Train this model with rollout.name=vllm.",
            )


def make_output(rollout: Rollout, step_of: StepOf) -> dict[str, Any]:
    """Return the fields of a `TokenOutput`. `num_preempted` stays None, since engines do not report
    preemptions."""
    aborted = rollout.finish_reason == "aborted"
    if aborted and not rollout.token_ids:
        return make_empty_output("aborted")
    versions = [span.version for span in rollout.spans if span.end > span.start]
    if rollout.adapter is not None:  # one adapter sampled all tokens, even if its base changed
        versions = [version_of(rollout.adapter)] * len(versions)
    steps = [step_of(version) for version in versions]
    extra: dict[str, Any] = {"num_cached_tokens": rollout.cached_tokens}
    if steps:
        known = [step for step in steps if step is not None]
        extra["global_steps"] = steps[-1]
        extra["min_global_steps"] = min(known, default=None)
        extra["max_global_steps"] = max(known, default=None)
    experts = None
    if rollout.routed_experts is not None:
        # verl's client appends a row for each token of a continuation to the rows of an aborted
        # answer. Positions match only if both lack the row of their last token.
        rows = len(rollout.prompt_ids) + len(rollout.token_ids) - 1
        experts = rollout.routed_experts.ids[:rows]
    return {
        "token_ids": rollout.token_ids,
        "log_probs": rollout.logprobs,
        "routed_experts": experts,
        "stop_reason": "aborted" if aborted else "completed",
        "extra_fields": extra,
    }


def make_empty_output(stop_reason: str, step: int | None = None) -> dict[str, Any]:
    """Return an output without tokens. A completed one needs a step, since verl counts it with the
    others; an aborted one has none, since nothing was sampled."""
    extra = {} if step is None else {"global_steps": step}
    return {"token_ids": [], "log_probs": [], "stop_reason": stop_reason, "extra_fields": extra}


def make_scores_output(scores: Scores, step_of: StepOf) -> dict[str, Any]:
    """Return a teacher's output as verl's own servers do: a row for each prompt token but the
    first, then a row of zeros."""
    output = make_empty_output("completed")
    output["extra_fields"] = {
        "prompt_ids": [[token] for token in scores.token_ids[1:]] + [[0]],
        "prompt_logprobs": [[float(value or 0.0)] for value in scores.logprobs[1:]] + [[0.0]],
        "global_steps": step_of(scores.weight_version),
    }
    return output
